#!/usr/bin/env bash
# HierMoE's comparisons on one host that imitates two nodes: copies inside of a node, slow NCCL between nodes.
# Usage: OUT=DIR benchmarks/comm/hierarchy.sh [GPUS]      default: 4 GPUs, two nodes of two; about three minutes
# Leaves OUT/hierarchy.json, and OUT/moves_nvlink.json with the moves of experts over NVLink. Each part of the first file
# is written when it is complete.
set -uo pipefail
cd "$(dirname "$0")/../.."
gpus=${1:-4}
: "${OUT:?set it to a directory for the results}"
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

hierarchy() { # SECONDS FILE [OPTION...]
    timeout "$1" python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m benchmarks.comm.hierarchy \
        --node-size 2 --out "$OUT/$2" "${@:3}"
}

NCCL_P2P_DISABLE=1 hierarchy "${SECONDS_SLOW:-600}" hierarchy.json
slow=$?
hierarchy "${SECONDS_NVLINK:-120}" moves_nvlink.json --parts moves
exit $((slow ? slow : $?))
