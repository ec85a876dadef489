#!/usr/bin/env bash
# Runs a module on the GPUs of this machine as if they were of several machines, so that there is a slow network between them.
# NCCL takes processes with different values of NCCL_HOSTID for different hosts. Between them it uses its network transport,
# here TCP over the loopback device, and inside a node it uses NVLink. fcsd does not read the variable: where it copies rows
# between the GPUs of one host by itself, it would still do so, so runs of `fcsd distill` need parallel.transport: nccl.
# Usage: benchmarks/as_nodes.sh NODES GPUS_OF_A_NODE MODULE [OPTION...]
#   benchmarks/as_nodes.sh 2 2 fcsd bench links --out links.json
# Without GPUs the processes communicate through gloo, which knows no nodes; that tries a command and measures nothing.
set -euo pipefail
nodes=${1:?the number of nodes} gpus=${2:?the GPUs of a node}
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0
export NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-4}" NCCL_NSOCKS_PERTHREAD="${NCCL_NSOCKS_PERTHREAD:-4}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}" TORCH_NCCL_HIGH_PRIORITY="${TORCH_NCCL_HIGH_PRIORITY:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
started=()
trap 'kill "${started[@]}" 2> /dev/null || true' EXIT # if a node fails, the others would wait for it
for ((node = 0; node < nodes; node++)); do
    NCCL_HOSTID="node-$node" CUDA_VISIBLE_DEVICES=$(seq -s, $((node * gpus)) $((node * gpus + gpus - 1))) \
        python3 -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$gpus" \
        --master-addr 127.0.0.1 --master-port "${MASTER_PORT:-29517}" -m -- "${@:3}" &
    started+=($!)
done
for _ in "${started[@]}"; do
    wait -n
done
