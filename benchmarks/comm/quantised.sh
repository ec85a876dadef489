#!/usr/bin/env bash
# Every case in which a target was set for quantised, deduplicated and placed communication, on at most four H200s.
# Usage: OUT=DIR benchmarks/comm/quantised.sh [GPUS [CASE...]]      default: 4 GPUs, all cases; no network needed
# Cases, with the files that they leave in OUT (benchmarks/results/quantised_communication.md lists the targets):
#   slow_link    a training step over a slow link: plain, deduplicated, INT8, both        slow_link/step.json
#   qwen3, v3    the same over NVLink at the widths of Qwen3-30B-A3B and DeepSeek-V3       qwen3/ and v3/step.json
#   rows         from token rows to rows in the order of experts                           rows.json
#   all_reduce   the all-reduces, also in steps                                            all_reduce.json
#   ttft         time to first token of Llama-3 8B and 70B shapes, NVLink and slow link    ttft_*/infer.json
#   swaps        training steps whose experts move, NVLink and slow link                   swaps_*.jsonl
#   kernels      encode and decode on one GPU                                              formats.json
# A case that fails is named at the end, and the exit code is then 1; the others run all the same.
# Environment: ROUNDS=3 of the training steps and of ttft  LAYERS_70B=16, of 80: layers are alike
set -uo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
gpus=${1:-4} rounds=${ROUNDS:-3}
[ $# = 0 ] || shift
[ $# -gt 0 ] || set -- slow_link qwen3 v3 rows all_reduce ttft swaps kernels
mkdir -p "${OUT:?set it to a directory for the results}"
OUT=$(cd "$OUT" && pwd)

step() { # CASE SHAPE LAYERS MICRO_BATCH OVERLAPPED_VARIANT [OPTION...]
    python3 -m benchmarks.train.step "$2" --layers "$3" --micro-batch "$4" --gpus "$gpus" --routers uniform \
        --rounds "$rounds" --steps 2 --variants "standard-fused,$5,comm-free-fused" --dedup off --dedup rank \
        --out "$OUT/$1" "${@:6}"
}
each() { # MODULE [OPTION...]: one process for each GPU
    python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m "$@"
}
ttft() { # NAME SHAPE LAYERS [OPTION...]: prompts of 1024 tokens, one and eight at once
    python3 -m benchmarks.infer "$2" --layers "$3" --tp "$gpus" --batch 1,8 --prompt 1024 --new 2 --rounds "$rounds" \
        --wirings standard,ladder --bounds standard --reduce \
        nccl,quantised:int8,quantised:int6,quantised:int5,quantised:int4,quantised:int3,quantised:int2:sr,none \
        --out "$OUT/ttft_$1" "${@:4}"
}
swaps() { # LINK: forty steps of four layers of DeepSeek-V2-Lite, with a search after every tenth
    local folder="$scratch/$1"
    cat > "$scratch/$1.yaml" << YAML
name: $1
model: $scratch/student
output_dir: $folder
data: {sources: [{path: assets/corpus/held_out.jsonl}], seq_len: 4096}
objective: {kl: 0.0, sft: 1.0}
train: {batch_tokens: $((gpus * 4 * 4096)), micro_batch_size: 4, steps: 40, log_every: 10}
optim: {lr: 1e-5}
parallel: {ep_size: $gpus, dedup: rank, placement: {every: 10}}
YAML
    python3 -m fcsd distill "$scratch/$1.yaml" --gpus "$gpus" && cp "$folder/metrics.jsonl" "$OUT/swaps_$1.jsonl" &&
        rm -rf "$folder" # its checkpoint takes 14 bytes for each parameter
}

measure() { # CASE
    case $1 in
        slow_link)
            NCCL_P2P_DISABLE=1 step slow_link deepseek-v2-lite 8 4 overlapped-fused \
                --quantised int8 --quantised dispatch=int8,combine=int8 ;;
        qwen3) step qwen3 qwen3-30b-a3b 8 4 copies-fused --quantised int8 ;;
        v3) step v3 deepseek-v3 4 1 copies-fused --quantised int8 ;;
        rows) each benchmarks.comm.transports --quantised int8 int6 int5 int4 int3 int2:sr --out "$OUT/rows.json" ;;
        all_reduce)
            each benchmarks.comm.all_reduce --mib 256 64 1 0.25 0.0625 0.015625 --formats int8 int6 int5 int4 int3 int2:sr \
                --repeats 20 --out "$OUT/all_reduce.json" ;;
        ttft)
            ttft 8b llama3-8b 32 && ttft 70b llama3-70b "${LAYERS_70B:-16}" &&
                ttft 8b_slow llama3-8b 32 --no-nvlink && ttft 70b_slow llama3-70b "${LAYERS_70B:-16}" --no-nvlink ;;
        swaps)
            scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT
            python3 -m benchmarks.random_checkpoint deepseek-v2-lite "$scratch/teacher" --layers 4 \
                --tokenizer assets/teacher &&
                python3 -m fcsd convert "$scratch/teacher" "$scratch/student" --wiring farskip --no-check &&
                swaps nvlink && NCCL_P2P_DISABLE=1 swaps slow ;;
        kernels) python3 -m benchmarks.kernels.formats --moves --out "$OUT/formats.json" ;;
        *) echo "no case $1" >&2; exit 2 ;;
    esac
}

failed=()
for case in "$@"; do
    echo "== $case ($SECONDS s)" >&2
    measure "$case" || failed+=("$case")
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
