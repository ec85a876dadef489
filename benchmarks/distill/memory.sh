#!/usr/bin/env bash
# The places for AdamW's states, in turns: fp32 and bf16 moments on the GPU, both on the host, and AdamW on the host.
# Usage: OUT=DIR benchmarks/distill/memory.sh [GPUS [LAYERS [SHAPE [SEQUENCE [ROUNDS]]]]]    needs no network, no installation
# By default: half of Qwen3-30B-A3B's layers on four GPUs, which puts as many bytes of experts on each GPU as all layers
# on eight; `benchmarks/distill/memory.sh 2 12` and `1 6` do the same on two GPUs and on one.
#
# Variables: CAP is the GiB that torch may take on a GPU in every setting but fp32: a card of 80 GB has 79, of which the
# plan leaves 4 to CUDA and NCCL. fp32 moments on the GPU do not fit there. The setting fp32 runs without a cap, and the
# times refer to it; fp32-capped shows that memory runs out. A step has ACCUMULATION micro-batches of one row on each
# GPU: 4 of 4096 tokens, as in the packaged recipe on eight GPUs. STEPS is the number of steps of a run, TIMEOUT the
# most seconds of one, and SETTINGS the settings in their order.
# It leaves OUT/ROUND-SETTING.json at the end of each run, and OUT/settings.json.
set -uo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1
gpus="${1:-4}" layers="${2:-24}" shape="${3:-qwen3-30b-a3b}" seq="${4:-4096}" rounds="${5:-3}"
capped=(--cap "${CAP:-75}") failed=0
mkdir -p "${OUT:?set it to a directory for the results}" || exit
for round in $(seq "$rounds"); do
    for setting in ${SETTINGS:-fp32 fp32-capped bf16 moments bf16-moments host}; do
        case "$setting" in
        fp32) options=() ;;
        fp32-capped) options=("${capped[@]}") ;;
        bf16) options=("${capped[@]}" --set optim.moments=bf16) ;;
        moments) options=("${capped[@]}" --set optim.offload=moments) ;;
        bf16-moments) options=("${capped[@]}" --set optim.offload=moments --set optim.moments=bf16) ;;
        host) options=("${capped[@]}" --set optim.offload=host) ;;
        *) echo "error: $setting is not a setting" >&2 && exit 2 ;;
        esac
        echo "==== round $round: $setting ($SECONDS s)" >&2
        timeout "${TIMEOUT:-170}" python3 -m fcsd bench memory "$shape" --layers "$layers" --gpus "$gpus" --seq "$seq" \
            --accumulation "${ACCUMULATION:-4}" --steps "${STEPS:-5}" --set train.activation_checkpointing=true \
            --out "$OUT/$round-$setting.json" "${options[@]}"
        code=$?
        [ "$code" = 0 ] || [ "$code" = 8 ] || failed=1 # 8: memory ran out, which is a result
    done
done
python3 -m benchmarks.distill.memory_settings "$OUT"/[0-9]*-*.json --out "$OUT/settings.json" || failed=1
exit "$failed"
