#!/usr/bin/env bash
# Three places for AdamW's states, in turns: fp32 moments, bf16 moments, and the optimizer on the host.
# Usage: OUT=DIR scripts/h200_memory.sh [GPUS [LAYERS [SHAPE [SEQUENCE [ROUNDS]]]]]    needs no network, no installation
# By default: half of Qwen3-30B-A3B's layers on four GPUs, which puts as many bytes of experts on each GPU as all layers
# on eight. CAP is the GiB that torch may take on a GPU in the last two settings: a card of 80 GB has 79, of which the
# plan leaves 4 to CUDA and NCCL. The first setting does not fit there. It has no cap, and is what the times refer to.
# It leaves OUT/ROUND-SETTING.json of each run and OUT/settings.json. No GPU has run this script yet.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1
gpus="${1:-4}" layers="${2:-24}" shape="${3:-qwen3-30b-a3b}" seq="${4:-4096}" rounds="${5:-3}"
mkdir -p "${OUT:?set it to a directory for the results}"
take() { # ROUND SETTING OPTION...
    echo "==== round $1: $2 ($SECONDS s)" >&2
    python3 -m fcsd bench memory "$shape" --layers "$layers" --gpus "$gpus" --seq "$seq" --accumulation 4 --steps 4 \
        --set train.activation_checkpointing=true --out "$OUT/$1-$2.json" "${@:3}"
}
for round in $(seq "$rounds"); do
    take "$round" fp32
    take "$round" bf16 --cap "${CAP:-75}" --set optim.moments=bf16
    take "$round" host --cap "${CAP:-75}" --set optim.offload=host
done
python3 -m fcsd.bench.memory_settings "$OUT"/[0-9]*-{fp32,bf16,host}.json --out "$OUT/settings.json"
