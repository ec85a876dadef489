#!/usr/bin/env bash
# FarSkip Figure 5: the speed-up of six DeepSeek-V2-Lite layers over world size, sixteen sequences of 4096 in each step.
# Usage: OUT=DIR benchmarks/train/world_sizes.sh [WORLD_SIZE...]      default: 2 4 8; needs no network, no installation
# Each leaves OUT/wsN/step.json; those of earlier calls are drawn, too. VARIANTS may name others, such as fused ones.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1
batch=16
[ $# -gt 0 ] || set -- 2 4 8
for gpus in "$@"; do
    [ $((batch % gpus)) = 0 ] || { echo "$gpus GPUs cannot share $batch sequences evenly" >&2; exit 2; }
    python3 -m fcsd bench step deepseek-v2-lite --layers 6 --variants "${VARIANTS:-standard,overlapped,comm-free}" \
        --routers initialised --gpus "$gpus" --micro-batch $((batch / gpus)) \
        --out "${OUT:?set it to a directory for the results}/ws$gpus"
done
python3 -m benchmarks.train.scaling "$OUT"/ws*/step.json --picture "$OUT/world_sizes.png"
