#!/usr/bin/env bash
# The distillation step of fcsd beside TRL's GKDTrainer and plain loops with Liger's divergence and kernels, on one GPU.
# Usage: OUT=DIR benchmarks/distill/baselines.sh [CASE...]      default: moe and dense; no network needed
# It needs the optional part `dev` and takes about four minutes on an H200. The case `liger` is a mixture of experts beside
# Liger's kernels and DeepSpeed AutoEP's layers: about two minutes on an H100.
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
    against=trl,loop-liger,fcsd-plain
    case $case in
    moe) shape=(deepseek-v2-lite --layers 5 --micro-batch 8) ;;
    dense) shape=(dense-1.5b --layers 28 --micro-batch 8) ;;
    liger)
        shape=(qwen3-30b-a3b --layers 4 --micro-batch 4 --largest)
        against=fcsd-plain,loop-liger-grouped,loop-liger-model,loop-liger-kl-grouped,autoep,autoep-gate-up,loop-liger-compiled
        ;;
    *) echo "error: no case $case" >&2 && exit 2 ;;
    esac
    echo "== $case ($SECONDS s)" >&2
    timeout "${TIMEOUT:-600}" python3 -m benchmarks.distill.baselines "${shape[@]}" --seq 4096 --rounds 2 --steps 2 \
        --against "${AGAINST:-$against}" --out "${OUT:?set it to a directory for the results}/$case" ||
        failed=1
done
exit "$failed"
