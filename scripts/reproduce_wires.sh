#!/usr/bin/env bash
# FlashCommunication V2's tables of quality on the bundled teacher: what each format of the wire costs in dispatch, in
# dispatch and combine, and in the all-reduce of four tensor-parallel ranks. All of it is simulated in one process.
# Usage: scripts/reproduce_wires.sh OUT
#   OUT gets wires.json, tables.md and pareto.png; docs/WIRES_QUALITY.md holds those of the stored run. A killed study
#   resumes. About a quarter of an hour of one CPU core, without a network.
# FCSD_VENV=DIR uses another environment than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 1 ] || { sed -n '4,7s/^# *//p' "$0" >&2; exit 2; }
source scripts/venv.sh
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

fcsd bench wires assets/teacher --text assets/corpus/held_out.jsonl --every 12 --limit 20 --data-mirror assets/mirror \
  --device cpu --out "$1"
