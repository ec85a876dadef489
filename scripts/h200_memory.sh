#!/usr/bin/env bash
# The places for AdamW's states, in turns: fp32 and bf16 moments on the GPU, both on the host, and AdamW on the host.
# Usage: OUT=DIR scripts/h200_memory.sh [GPUS [LAYERS [SHAPE [SEQUENCE [ROUNDS]]]]]    needs no network, no installation
# By default: half of Qwen3-30B-A3B's layers on four GPUs, which puts as many bytes of experts on each GPU as all layers
# on eight; `scripts/h200_memory.sh 2 12` does the same on two. CAP is the GiB that torch may take on a GPU in every
# setting but the first: a card of 80 GB has 79, of which the plan leaves 4 to CUDA and NCCL. fp32 moments on the GPU
# do not fit there: this setting runs without a cap, which is what the times refer to, and with it, which shows that
# memory runs out. A step has ACCUMULATION micro-batches of one row on each GPU: 4 of 4096 tokens, as in the packaged
# recipe on eight GPUs. TIMEOUT is the most seconds of a run.
# It leaves OUT/ROUND-SETTING.json of each run and OUT/settings.json. No GPU has run this script yet.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1
gpus="${1:-4}" layers="${2:-24}" shape="${3:-qwen3-30b-a3b}" seq="${4:-4096}" rounds="${5:-3}"
cap="${CAP:-75}" failed=0
mkdir -p "${OUT:?set it to a directory for the results}" || exit
take() { # ROUND SETTING OPTION...
    echo "==== round $1: $2 ($SECONDS s)" >&2
    timeout "${TIMEOUT:-170}" python3 -m fcsd bench memory "$shape" --layers "$layers" --gpus "$gpus" --seq "$seq" \
        --accumulation "${ACCUMULATION:-4}" --steps "${STEPS:-5}" --set train.activation_checkpointing=true \
        --out "$OUT/$1-$2.json" "${@:3}"
    local code=$?
    [ "$code" = 0 ] || [ "$code" = 8 ] || failed=1 # 8: memory ran out, which is a result
}
for round in $(seq "$rounds"); do
    take "$round" fp32
    [ "$round" = 1 ] && take "$round" fp32-capped --cap "$cap"
    take "$round" bf16 --cap "$cap" --set optim.moments=bf16
    take "$round" moments --cap "$cap" --set optim.offload=moments
    take "$round" bf16-moments --cap "$cap" --set optim.offload=moments --set optim.moments=bf16
    take "$round" host --cap "$cap" --set optim.offload=host
done
python3 -m fcsd.bench.memory_settings "$OUT"/[0-9]*-*.json --out "$OUT/settings.json" || failed=1
exit "$failed"
