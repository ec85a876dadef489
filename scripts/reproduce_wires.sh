#!/usr/bin/env bash
# What quantised wires cost the bundled model: FlashCommunication V2's tables of quality, and training through the wire.
# Usage: scripts/reproduce_wires.sh quality OUT    the tables: OUT/wires.json, tables.md and pareto.png
#        scripts/reproduce_wires.sh training OUT   27 models: OUT/wire_study.json
#        scripts/reproduce_wires.sh page           docs/WIRES_QUALITY.md from docs/results/wires_quality.json and
#                                                  wire_study.json, which are copies of the two files
# Both studies work in pieces: the same command with the same OUT continues them. They use a GPU if there is one, several
# processes at a time, and no network. Without a GPU, the tables read every twelfth document (a quarter of an hour of
# one core), and a model trains for 350 steps of 2048 tokens (about ten minutes of one core, 27 times).
# Environment: MINUTES=9 (of a piece)  PROCESSES=14, or the number of cores if there are fewer  PYTHON=python3
set -euo pipefail
cd "$(dirname "$0")/.."
usage() { sed -n '3,6s/^# *//p' "$0" >&2; exit 2; }
[ $# -gt 0 ] || usage
python="${PYTHON:-python3}" minutes="${MINUTES:-9}" cores="$(env -u OMP_NUM_THREADS nproc)"
processes="${PROCESSES:-$((cores < 14 ? cores : 14))}"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpu() { "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }
share_gpu() { # by NVIDIA's MPS, where it is installed, the processes compute at the same time; otherwise they take turns
  command -v nvidia-cuda-mps-control > /dev/null || return 0
  export CUDA_MPS_PIPE_DIRECTORY="$1/mps" CUDA_MPS_LOG_DIRECTORY="$1/mps"
  mkdir -p "$1/mps"
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
}

case "$1" in
quality)
  [ $# -eq 2 ] || usage
  size=(--every 12 --limit 20)
  if gpu; then size=(--batch-size 32); share_gpu "$2"; fi
  # At the end of the time, formats that are being measured are lost, and all others are kept.
  timeout --signal INT "${minutes}m" "$python" -m fcsd bench wires assets/teacher \
    --text assets/corpus/held_out.jsonl --data-mirror assets/mirror --dtype float32 "${size[@]}" \
    --processes "$processes" --out "$2"
  ;;
training)
  [ $# -eq 2 ] || usage
  sets=(train.sample_tokens=0)
  # On a GPU, small batches would take as long as large ones. 120 steps read 3.9 M tokens.
  if gpu; then
    sets+=(train.batch_tokens=32768 train.micro_batch_size=128 train.steps=120 train.dtype=bf16 optim.lr=2e-3)
    share_gpu "$2"
  fi
  # A run that has begun takes about a minute. It is not cut off by a piece that starts none in its last two minutes.
  "$python" scripts/wire_study.py "$2" --processes "$processes" --minutes "$(awk "BEGIN { print $minutes - 2 }")" \
    --set "${sets[@]}"
  ;;
page) exec "$python" scripts/wires_page.py ;;
*) usage ;;
esac
