#!/usr/bin/env bash
# What quantised wires cost the bundled model: FlashCommunication V2's tables of quality, and training through the wire.
# Usage: studies/formats/reproduce.sh quality OUT    the tables: OUT/wires.json, tables.md and pareto.png
#        studies/formats/reproduce.sh training OUT   27 models: OUT/wire_study.json
#        studies/formats/reproduce.sh both OUT       the two at once, on a GPU with at least 16 cores beside it
#        studies/formats/reproduce.sh page           studies/formats/FORMATS_QUALITY.md from benchmarks/results/wires_quality.json and
#                                                  wire_study.json, which are copies of the two files
# Both studies work in pieces: the same command with the same OUT continues them. They use a GPU if there is one, several
# processes at a time, and no network. Without a GPU, the tables read every twelfth document (a quarter of an hour of
# one core), and a model trains for 350 steps of 2048 tokens (about ten minutes of one core, 27 times).
# Environment: MINUTES=9 (of a piece)  PROCESSES=14, or the number of cores if there are fewer  PYTHON=python3
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() { sed -n '3,7s/^# *//p' "$0" >&2; exit 2; }
[ "$*" = page ] || [ $# -eq 2 ] || usage
python="${PYTHON:-python3}" minutes="${MINUTES:-9}" cores="$(env -u OMP_NUM_THREADS nproc)"
processes="${PROCESSES:-$((cores < 14 ? cores : 14))}"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpu() { "$python" -c 'import torch; torch.ones(1).cuda()' 2> /dev/null; }

share_gpu() { # by NVIDIA's MPS, where it works, the processes compute at the same time; otherwise they take turns
  local pipes before="${CUDA_VISIBLE_DEVICES-unset}"
  pipes="$(mktemp -d)"
  export CUDA_MPS_PIPE_DIRECTORY="$pipes" CUDA_MPS_LOG_DIRECTORY="$pipes"
  if nvidia-cuda-mps-control -d; then
    # The daemon numbers the GPUs that it sees from 0, and the numbers in CUDA_VISIBLE_DEVICES are its own from now on.
    [ "$before" = unset ] || export CUDA_VISIBLE_DEVICES=0
    trap 'echo quit | CUDA_MPS_PIPE_DIRECTORY='"$pipes"' nvidia-cuda-mps-control' EXIT
    ! gpu || return 0
    [ "$before" = unset ] || export CUDA_VISIBLE_DEVICES="$before"
  fi
  echo "MPS does not work here; the processes take turns on the GPU" >&2
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

quality() { # OUT PROCESSES; at the end of the time, formats that are being measured are lost, and all others are kept
  timeout --signal INT --kill-after 10 "${minutes}m" "$python" -m studies.formats assets/teacher \
    --text assets/corpus/held_out.jsonl --data-mirror assets/mirror --dtype float32 "${size[@]}" \
    --processes "$2" --out "$1"
}

training() { # OUT PROCESSES; a run takes about a minute, and none starts in the last minute of a piece
  "$python" studies/formats/training.py "$1" --processes "$2" --minutes "$(awk "BEGIN { print $minutes - 1 }")" \
    --set "${sets[@]}"
}

if [ "$1" = page ]; then exec "$python" studies/formats/page.py; fi
size=(--every 12 --limit 20) sets=(train.sample_tokens=0)
if gpu; then
  size=(--batch-size 32)
  # On a GPU, small batches would take as long as large ones. 120 steps read 3.9 M tokens.
  sets+=(train.batch_tokens=32768 train.micro_batch_size=128 train.steps=120 train.dtype=bf16 optim.lr=2e-3)
  share_gpu
fi
case "$1" in
quality | training) "$1" "$2" "$processes" ;;
both)
  mkdir -p "$2"
  quality "$2" $((processes / 3 + 1)) > "$2/quality.log" 2>&1 &
  tables=$!
  training "$2" "$processes" || failed=1
  wait "$tables" || failed=1
  exit "${failed:-0}"
  ;;
*) usage ;;
esac
