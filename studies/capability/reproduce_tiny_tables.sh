#!/usr/bin/env bash
# FarSkip's Table 1 and Figure 3 on the bundled teacher and data. The table: the teacher, its untrained farskip
# conversion, and the students that the quickstart heals by KL and by SFT, on all eleven benchmarks under both suites,
# paper and strict. The figure: untrained conversions of the first and the last N layers. Beside it, layers chosen by
# measured sensitivity against the first, the last and random ones, on text the search did not see.
# Usage: studies/capability/reproduce_tiny_tables.sh QUICKSTART OUT
#   QUICKSTART is what scripts/quickstart.sh wrote; it is run first if there is no such directory.
#   OUT gets paper/ and strict/ (table.md, bars.png, a JSON file a model), sweep/ and choice/. A killed run resumes.
# FCSD_VENV=DIR uses another environment than .venv. Two CPU cores and no network will do.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 2 ] || { sed -n '6,8s/^# *//p' "$0" >&2; exit 2; }
quick="$1" out="$2" held_out=assets/corpus/held_out.jsonl
[ -e "$quick" ] || scripts/quickstart.sh "$quick"
source scripts/venv.sh
export HF_HUB_OFFLINE=1

for suite in paper strict; do
  # Nine tasks are the same in both suites: what was answered for one is not asked again for the other.
  [ -e "$out/$suite" ] || [ "$suite" = paper ] || { mkdir "$out/strict" && cp -r "$out/paper/answers" "$out/strict"; }
  fcsd eval "$quick/untrained" "$quick/kl" "$quick/sft" --baseline assets/teacher --untrained "$quick/untrained" \
    --suite "$suite" --data-mirror assets/mirror --out "$out/$suite" --gpus "$(($(env -u OMP_NUM_THREADS nproc) > 1 ? 2 : 1))"
done

python -m studies.capability.first_and_last assets/teacher --tasks arc_easy,piqa,hellaswag --limit 100 --data-mirror assets/mirror \
  --held-out "$held_out" --out "$out/sweep"

echo "tables   $out/paper/table.md $out/strict/table.md $out/sweep/sweep.md"
echo "pictures $out/paper/bars.png $out/strict/bars.png $out/sweep/sweep.png"
