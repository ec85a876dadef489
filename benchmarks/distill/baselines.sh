#!/usr/bin/env bash
# The distillation step of fcsd beside TRL's GKDTrainer and a plain loop with Liger's divergence, on one GPU.
# Usage: OUT=DIR benchmarks/distill/baselines.sh [CASE...]      default: both cases, moe and dense; no network needed
# It needs the optional part `baselines` and takes about four minutes on an H200.
#
# Variables: AGAINST names the sides, TIMEOUT is the most seconds of a case. `fcsd-plain` is fcsd's own step without its
# fused kernels and with the update by DeepSpeed's ZeRO.
# Each case leaves OUT/CASE/baselines.json, which is written after every visit of a side. A case that fails does not
# stop the other.
set -uo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1
[ $# -gt 0 ] || set -- moe dense
failed=0
for case in "$@"; do
    case $case in
    moe) shape=(deepseek-v2-lite --layers 5) ;;
    dense) shape=(dense-1.5b --layers 28) ;;
    *) echo "error: no case $case" >&2 && exit 2 ;;
    esac
    echo "== $case ($SECONDS s)" >&2
    timeout "${TIMEOUT:-600}" python3 -m benchmarks.distill.baselines "${shape[@]}" --seq 4096 --micro-batch 8 --rounds 2 --steps 2 \
        --against "${AGAINST:-trl,loop-liger,fcsd-plain}" --out "${OUT:?set it to a directory for the results}/$case" ||
        failed=1
done
exit "$failed"
