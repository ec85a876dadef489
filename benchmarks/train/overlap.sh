#!/usr/bin/env bash
# Every case in which benchmarks/results measures overlap, on random weights of real dimensions; no network needed.
# Usage: OUT=DIR benchmarks/train/overlap.sh [GPUS [CASE...]]      default: 8 GPUs, all cases
# Each leaves OUT/CASE/step.json and, but for slow_link, traces of a step by copies. A case that fails stops the others.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1
gpus=${1:-8}
[ $# = 0 ] || shift
[ $# -gt 0 ] || set -- v2lite_8 v2lite_27 qwen3_8 qwen3_48 v3_6 v3_4 slow_link
variants=stock,standard-fused,overlapped-fused,copies-fused,comm-free-fused

step() { # CASE SHAPE LAYERS MICRO_BATCH [OPTION...]
    python3 -m benchmarks.train.step "$2" --layers "$3" --micro-batch "$4" --variants $variants --gpus "$gpus" \
        --out "${OUT:?set it to a directory for the results}/$1" "${@:5}"
}

for case in "$@"; do
    echo "== $case" >&2
    case $case in
        v2lite_8) step "$case" deepseek-v2-lite 8 4 --trace ;;
        v2lite_27) step "$case" deepseek-v2-lite 27 8 --recompute --rounds 2 --trace ;;
        qwen3_8) step "$case" qwen3-30b-a3b 8 4 --trace ;;
        qwen3_48) step "$case" qwen3-30b-a3b 48 4 --recompute --rounds 2 --trace ;;
        v3_6) step "$case" deepseek-v3 6 1 --no-optimizer --trace ;;
        v3_4) step "$case" deepseek-v3 4 1 --trace ;;
        slow_link) # as if the GPUs were of several hosts
            variants=standard-fused,overlapped-fused,comm-free-fused NCCL_P2P_DISABLE=1 \
                step "$case" deepseek-v2-lite 8 4 --rounds 2 ;;
        *) echo "no case $case" >&2; exit 2 ;;
    esac
done
