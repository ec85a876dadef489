#!/usr/bin/env bash
# The whole pipeline on the bundled teacher, on two CPU cores: convert, distil (KL and SFT), evaluate, export.
# Usage: scripts/quickstart.sh [OUT]     OUT is ./quickstart unless given, and must not exist yet.
# Installs first what is missing, as scripts/test.sh does; after that it needs no network.
# FCSD_VENV=DIR uses another environment than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-quickstart}"
if [ -e "$out" ]; then
  echo "$out exists; remove it or name another directory: scripts/quickstart.sh OUT" >&2
  exit 2
fi
extras=train,eval
source scripts/venv.sh
export HF_HUB_OFFLINE=1
export OMP_NUM_THREADS=1 # two processes of one thread are faster than one of two
processes=$(($(env -u OMP_NUM_THREADS nproc) > 1 ? 2 : 1))
started=$SECONDS
step() { printf '\n==== %s (%s s)\n' "$1" "$((SECONDS - started))"; }

step "convert: rewire every layer, prove that off is off"
fcsd convert assets/teacher "$out/untrained" --wiring farskip --layers all

# Trains and exports one student. The recipes' 350 steps would take most of the time; 120 already win most of the lost
# loss back, which is measured at the end for all four models.
student() { # RECIPE NAME
  fcsd distill --recipe "$1" --gpus 1 \
    --set model="$out/untrained" --set data.held_out=null --set train.steps=120 --output-dir "$out/runs/$2"
  fcsd export "$out/runs/$2" "$out/$2"
}
step "distil and export: KL to the teacher; beside it cross-entropy on the same text, the control"
(student tiny-sft sft) >"$out/sft.log" 2>&1 &
control=$!
trap 'kill "$control" 2>/dev/null || true' EXIT
student tiny kl
step "the control"
wait "$control" || { cat "$out/sft.log" >&2 && exit 1; }
trap - EXIT

step "evaluate: teacher, untrained conversion and both students"
fcsd eval "$out/untrained" "$out/kl" "$out/sft" --baseline assets/teacher --untrained "$out/untrained" \
  --suite quickstart --limit 50 --gpus "$processes" \
  --data-mirror assets/mirror --held-out assets/corpus/held_out.jsonl --out "$out/eval"

step "done"
python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

from fcsd.eval.statistics import paired_difference

out = Path(sys.argv[1])
rows = {name: json.loads((out / f"eval/{name}.json").read_text()) for name in ("untrained", "kl")}
items = {name: next(row["items"] for row in found if row["task"] == "held_out") for name, found in rows.items()}
gain, stderr = paired_difference(items["untrained"], items["kl"])
print(f"held-out loss: KL is {gain:.3f} ± {stderr:.3f} nats per token below the untrained conversion")
print(f"table    {out}/eval/table.md\npicture  {out}/eval/bars.png\ncurves   {out}/runs/kl/curves.png\nmodel    {out}/kl")
if gain <= 10 * stderr:
    sys.exit("the distilled student is not better than the untrained conversion by 10 standard errors")
PYTHON
