#!/usr/bin/env bash
# FarSkip's Table 1 on the bundled teacher and data: the teacher, its untrained farskip conversion, and the students
# that the quickstart heals by KL and by SFT, on all eleven benchmarks under both suites, paper and strict.
# Usage: scripts/reproduce_tiny_tables.sh QUICKSTART OUT
#   QUICKSTART is what scripts/quickstart.sh wrote; it is run first if there is no such directory.
#   OUT gets paper/ and strict/, each with table.md, bars.png and one JSON file a model. A killed run resumes.
# FCSD_VENV=DIR uses another environment than .venv. Two CPU cores and no network will do.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 2 ] || { sed -n '4,6s/^# *//p' "$0" >&2; exit 2; }
quick="$1" out="$2"
[ -e "$quick" ] || scripts/quickstart.sh "$quick"
source scripts/venv.sh
export HF_HUB_OFFLINE=1

for suite in paper strict; do
  # Nine tasks are the same in both suites: what was answered for one is not asked again for the other.
  [ "$suite" = paper ] || { mkdir -p "$out/strict" && cp -r "$out/paper/answers" "$out/strict"; }
  fcsd eval "$quick/untrained" "$quick/kl" "$quick/sft" --baseline assets/teacher --untrained "$quick/untrained" \
    --suite "$suite" --data-mirror assets/mirror --out "$out/$suite" --gpus "$(($(nproc) > 1 ? 2 : 1))"
done
echo "tables   $out/paper/table.md $out/strict/table.md"
echo "pictures $out/paper/bars.png $out/strict/bars.png"
