#!/usr/bin/env bash
# Carries vLLM to a Hopper GPU machine without a network, and checks originals and converted models there.
#
# Usage: benchmarks/carried/vllm_gpu.sh COMMAND [FOLDER]
#   build   on a machine with a package index, and ptxas and fatbinary of CUDA 13 (20 CPU minutes): downloads vLLM and
#           what it needs, takes out of vLLM what a Hopper GPU does not run, compiles what is left as PTX, and writes
#           three archives to FOLDER
#   items   in fcsd's own environment: writes the requests of the eleven tasks, with the answers of transformers, to
#           FOLDER (some minutes on two CPU cores)
#   one     on one GPU: eager, whole CUDA graphs, compiled; the server
#   tasks   on one GPU: the eleven tasks
#   two     on two GPUs: tensor parallelism 2, with and without divided experts; latent attention; two stages
#   beside  on two GPUs: converted models with shared experts beside the routed ones
#   quantised  on one GPU: checkpoints as people serve them (AWQ, GPTQ, compressed-tensors), by vLLM's choice of kernels
#           and by its Marlin kernels
#   sums    on two GPUs: quantised and symmetric sums, tables of sums, and the bound, which has to be wrong
#   exchange  on two GPUs: data-parallel attention, with divided experts and vLLM's exchange of tokens
#   rows    on TP GPUs (two): the plans in PLANS for `parity serve`. Parts between semicolons run at the same
#           time; a part with a case for vLLM's kernels for latent attention uses them
#   serve   times originals, wirings and bounds: `fcsd bench serve` with the words in SERVE; its files are in $OUT/serve.
#           Several of them run at once on different GPUs, each with CUDA_VISIBLE_DEVICES and OUT of its own. BENCH is
#           another program in the place of `python3 -m fcsd`
#   load    the same by `python3 -m benchmarks.vllm load`, with loads for the bound and for sums at once
#   trace   the times of single steps, and their traces: `python3 -m benchmarks.vllm trace` with the words in TRACE;
#           its files are in $OUT/steps
#
# With ONE_GPU=2 in the environment two ranks share one GPU (benchmarks/vllm/one_gpu.py): whether it is right, not how fast.
#
# FOLDER is .vllm by default. VLLM=0.33.0 builds that version; it runs beside 0.24.0 with a WORK of its own. The GPU machine needs Python 3.12, torch 2.11 for CUDA 13 and transformers 5.17, FOLDER, and
# fcsd, benchmarks, tests and assets of this repository. Every part ends before second $LIMIT; a part that fails or hangs
# does not keep the others from running. What the parts have found is in $OUT/COMMAND.json after every row of theirs; it
# is printed at the end, and the logs are in $OUT/COMMAND-logs.tar.gz then. SIGINT and SIGTERM end all parts. The exit
# status is 0 if every part ended and found what it should.
set -uo pipefail
cd "$(dirname "$0")/../.."

version=${VLLM:-0.24.0}
command=${1:?build, items, one, tasks, two, beside, quantised, sums, exchange, rows, serve, load or trace}
case $command in
build | items | one | tasks | two | beside | quantised | sums | exchange | rows | serve | load | trace) ;;
*) echo "no command $command: build, items, one, tasks, two, beside, quantised, sums, exchange, rows, serve, load or trace" >&2 && exit 2 ;;
esac
folder=${2:-.vllm}
WORK=${WORK:-/tmp/vllm-work}
site=$WORK/site
models=$WORK/models
# Commands on different GPUs share what was unpacked, and have logs and caches of their own.
lane=${CUDA_VISIBLE_DEVICES:+-${CUDA_VISIBLE_DEVICES//,/-}}
logs=$WORK/logs-$command$lane
cache=$WORK/cache$lane
# Everything that vLLM 0.24.0 imports and the GPU machine does not have, pydantic for fcsd among it. Versions are given
# where vLLM asks for one or where a later one is known not to go with 0.24.0.
wheels="annotated-types apache-tvm-ffi==0.1.15.post2 astor blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf==0.20.0
    dill diskcache==5.6.3 distro docstring-parser fastapi==0.136.3 httptools httpx-sse ijson interegular jiter jmespath
    jsonschema jsonschema-specifications lark==1.2.2 llguidance==1.7.6 loguru lm-format-enforcer==0.11.3 mcp==1.30.0
    model-hosting-container-standards==0.1.16 msgspec openai==2.54.0 openai-harmony==0.0.8 opentelemetry-api
    opentelemetry-sdk outlines_core==0.2.14 partial-json-parser prometheus-fastapi-instrumentator pybase64
    pydantic==2.14.3 pydantic-core==2.50.4 pydantic-extra-types pydantic-settings pyjwt python-json-logger
    python-multipart pyzmq referencing rpds-py setproctitle sniffio sse-starlette starlette==1.1.0 typing-inspection
    uvicorn watchfiles websockets xgrammar==0.2.8"
if [ "$version" = 0.33.0 ]; then
    wheels="${wheels/openai-harmony==0.0.8/oss-harmony==0.0.11}"
    wheels="${wheels/mcp==1.30.0/mcp==2.3.0 mcp-types==2.3.0 httpx2 httpcore2 truststore annotated-doc} orjson"
fi

build() {
    set -e
    local downloaded platforms="--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any"
    downloaded=$(mktemp -d)
    for n in $(seq 17 39); do platforms="$platforms --platform manylinux_2_${n}_x86_64"; done
    local options="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp"
    options="$options --abi cp312 --abi abi3 --abi none"
    mkdir -p "$folder"
    # shellcheck disable=SC2086 # the lists are split into words on purpose
    python3 -m pip download -q $options $platforms -d "$downloaded/wheels" $wheels
    # shellcheck disable=SC2086
    python3 -m pip download -q $options $platforms -d "$downloaded" "vllm==$version"
    python3 benchmarks/carried/vllm_slim.py "$downloaded"/vllm-*.whl "$folder"
    # Unpacked and in one archive, the wheels take two thirds of their size.
    for wheel in "$downloaded"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$downloaded/site"; done
    python3 -c 'import shutil, sys; shutil.make_archive(sys.argv[1], "xztar", sys.argv[2])' \
        "$folder/packages" "$downloaded/site"
    rm -r "$downloaded"
    du -sm "$folder"
}

# The requests of the eleven tasks, by the tokenizer and with the answers of the original and of the converted teacher.
items() {
    set -e
    local temporary
    temporary=$(mktemp -d)
    mkdir -p "$folder"
    python3 -m fcsd convert assets/teacher "$temporary/teacher" --wiring farskip --layers all --no-check
    python3 -m benchmarks.vllm items record "$temporary/teacher" "$folder/items-teacher.json.gz" --limit "${ITEMS:-50}"
    python3 -m benchmarks.vllm items record assets/teacher "$folder/items-teacher.base.json.gz" --limit "${ITEMS:-50}"
    rm -r "$temporary"
}

# Unpack one of the archives that were carried.
extract() {
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')" \
        "$folder/$1.tar.xz" "$site"
}

# Unpack what was carried. A second call on the same machine finds it.
unpack() {
    [ -f "$site/complete" ] && return
    mkdir -p "$site"
    extract packages &
    local extracting=$!
    extract vllm || return
    [ ! -e "$folder/kernels.tar.xz" ] || extract kernels || return # older archives of vLLM hold its kernels
    wait "$extracting" || return
    # vLLM finds fcsd's plugin by an entry point, which an installed package has and a copy of the repository has not.
    mkdir -p "$site/fcsd-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: fcsd\nVersion: 0\n' > "$site/fcsd-0.dist-info/METADATA"
    printf '[vllm.general_plugins]\nfcsd = fcsd.serve.vllm.plugin:register\none_gpu = benchmarks.vllm.one_gpu:register\n' \
        > "$site/fcsd-0.dist-info/entry_points.txt"
    touch "$site/complete"
}

# The seconds that are left.
left() {
    echo $((LIMIT > SECONDS ? LIMIT - SECONDS : 1))
}

# job NAME COMMAND...: a part in the background. NAME.log is its output, NAME.rc its exit status, NAME.pid its process.
job() {
    local name=$1
    shift
    (
        timeout -k 3 "$(left)" "$@" > "$logs/$name.log" 2>&1 &
        echo $! > "$logs/$name.pid"
        trap '' INT TERM # the status is written in any case
        wait $!
        echo $? > "$logs/$name.rc"
    ) &
}

# The parts that are running. A signal to the process of a part reaches all its processes.
running() {
    local file
    for file in "$logs"/*.pid; do
        [ -e "$file" ] && [ ! -e "${file%.pid}.rc" ] && cat "$file"
    done
}

report() {
    python3 -m benchmarks.vllm report "$logs" "$OUT/$command"
}

# After SIGINT or SIGTERM: end the parts, give them five seconds, and report what they have found.
stop() {
    trap '' INT TERM
    local process
    for process in $(running); do kill -TERM "$process"; done
    for _ in $(seq 50); do
        [ -n "$(running)" ] || break
        sleep 0.1
    done
    report
    echo "$command: stopped after $SECONDS s"
    exit 1
}

# What the machine has of the things that compiling kernels and starting several processes need.
machine() {
    nvidia-smi --query-gpu=name,memory.total,memory.used --format=csv,noheader
    echo "gcc $(command -v gcc), ptxas $(command -v ptxas), cores $(env -u OMP_NUM_THREADS nproc), load $(cut -d" " -f1 /proc/loadavg), $(df -h /dev/shm | tail -1)"
    python3 -c 'import os, sysconfig; p = sysconfig.get_path("include") + "/Python.h"; print(p, os.path.exists(p))'
}

if [ "$command" = build ] || [ "$command" = items ]; then
    $command
    exit
fi
for needed in "$folder/vllm.tar.xz" "$folder/packages.tar.xz" fcsd benchmarks/vllm/parity.py tests/tiny.py assets/teacher; do
    [ -e "$needed" ] || { echo "$PWD/$needed is missing; nothing was run" >&2 && exit 2; }
done

OUT=${OUT:-$WORK/out}
rm -rf "$logs"
mkdir -p "$logs" "$OUT"
ulimit -n 65536 2> /dev/null
# Caches below $WORK: the home directory may be missing or read-only. Only the loopback interface is sure to exist.
# vLLM's processes are forked, which saves an import of 15 s each; one thread for OpenMP, which does not survive a fork.
export HOME=${HOME:-$WORK/home} XDG_CACHE_HOME=$cache VLLM_CACHE_ROOT=$cache/vllm
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor
export VLLM_HOST_IP=127.0.0.1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo VLLM_WORKER_MULTIPROC_METHOD=fork
export NO_PROXY=127.0.0.1,localhost
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1
# Left out of the carried vLLM, or off on these machines (NVLink multicast).
export VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
SECONDS=0
LIMIT=${LIMIT:-300} # seconds until every part has to have ended
export VLLM_LOGS=$logs VLLM_OUT=$OUT/$command
trap stop INT TERM
machine
exec 9> "$WORK/lock" # two commands may run at once, on different GPUs
flock 9
unpack 9>&- || { echo "$folder could not be unpacked; nothing was run" >&2 && exit 1; }
exec 9>&-
echo "unpacked after $SECONDS s"

case $command in serve | load | trace) ;; *)
    # Products of float32 by float32 arithmetic; and DeepSeek's attention expanded, because the bundled teacher's latent
    # vectors are smaller than those that vLLM's kernels for latent attention know.
    export TRITON_F32_DEFAULT=ieee VLLM_MLA_DISABLE=1
    ;;
esac
# A part imports vLLM once (10 to 20 s) and then serves one model after the other, the most telling ones first.
serve="python3 -m benchmarks.vllm parity serve $models"
latent="env VLLM_MLA_DISABLE=0 $serve"
small=qwen2_moe-farskip glm=glm4_moe-farskip deepseek=deepseek_v2-farskip wide=deepseek_v2-latent dense=llama-ladder
# shellcheck disable=SC2086 # $serve is split into words
case $command in
one)
    job float32 $serve {$small,qwen3_moe-farskip,teacher,glm4_moe-farskip}/float32/eager
    job bfloat16 $serve $small/bfloat16/graph {$small,teacher}/bfloat16/default
    job fp8 $serve qwen3_moe-fp8/bfloat16/eager
    job server python3 -m benchmarks.vllm server "$models" --seconds $(($(left) - 8))
    ;;
tasks)
    for name in teacher teacher.base; do
        job "$name" python3 -m benchmarks.vllm parity items "$models" $name --items "$folder" --out "$OUT"
    done
    ;;
two)
    job float32 $serve --tp 2 $small/float32/{eager/ep,pressure,graph,graph/ep,eager}
    job others $serve --tp 2 {$glm,$deepseek}/float32/eager/ep {$glm,$deepseek}/float32/eager $small/float32/{default/ep,eager/always}
    job bfloat16 $serve --tp 2 $small/bfloat16/{default,default/ep,graph/ep}
    job compiled $serve --tp 2 $glm/bfloat16/default/ep teacher/bfloat16/default
    job latent $latent --tp 2 $wide/bfloat16/{default/ep,graph/ep,default}
    job stages $serve --pp 2 $small/float32/eager
    ;;
beside)
    job float32 $serve --tp 2 $small/float32/graph/{beside,ep/beside} $deepseek/float32/graph/{ep/beside,beside} \
        $glm/float32/eager/{ep/,}beside+always $small/float32/{eager/beside+always,pressure/beside+always,eager/beside}
    job compiled $serve --tp 2 $small/float32/default/{ep/,}beside $deepseek/float32/default/ep/beside \
        $glm/float32/default/beside
    job bfloat16 $serve --tp 2 $small/bfloat16/default/{beside,ep/beside} $glm/bfloat16/default/ep/beside \
        teacher/bfloat16/default/beside
    job latent $latent --tp 2 $wide/bfloat16/{default/ep,graph/ep,default}/beside
    ;;
quantised)
    job dense $serve llama-awq/{bfloat16/eager/marlin,float16/eager} llama-w4a16/bfloat16/eager/marlin \
        llama-nvfp4a16/bfloat16/eager llama-fp8-dynamic/bfloat16/eager/marlin llama-auto-round/bfloat16/eager
    job gptq $serve llama-gptq/{bfloat16/eager/marlin,float16/eager} llama-gptq-ordered/bfloat16/eager/{,marlin} \
        llama-w8a8/bfloat16/eager
    job experts $serve qwen3_moe-{awq,w4a16,gptq}/bfloat16/eager/marlin qwen3_moe-awq/float16/eager
    job experts-8 $serve qwen3_moe-{nvfp4a16,fp8-dynamic,w8a8}/bfloat16/eager qwen3_moe-fp8-dynamic/bfloat16/eager/marlin
    job graphs $serve {llama,qwen3_moe}-awq/bfloat16/default llama-w8a8/bfloat16/graph
    ;;
sums)
    job rounded $serve --tp 2 $dense/float32/graph/{int8,int4,none}
    job tables $serve --tp 2 $dense/float32/graph/{table,table-int8,table-late} $dense/float32/eager/table
    peers=$dense/float32/graph/symmetric
    [ "${NCCL_P2P_DISABLE:-0}" = 0 ] || peers= # without peer access the plugin refuses symmetric sums
    job experts $serve --tp 2 $small/float32/graph/{ep/int8+beside,int4,ep/table-late+beside} $peers
    job compiled $serve --tp 2 $dense/float32/default/{int8,table-int8,table}
    job compiled-experts $serve --tp 2 $small/float32/default/ep/{int8,table}+beside
    ;;
exchange)
    job graphs $serve --dp 2 {$small,$deepseek}/float32/graph/ep
    job compiled $serve --dp 2 {$small,$glm}/float32/default/ep
    job latent $latent --dp 2 $wide/bfloat16/{default,graph}/ep
    ;;
rows)
    IFS=';' read -ra parts <<< "${PLANS:?PLANS is missing: plans of parity serve, in parts between semicolons}"
    for part in "${!parts[@]}"; do
        program=$serve
        [[ ${parts[part]} = *-latent/* ]] && program=$latent
        job "part-$part" $program --tp "${TP:-2}" ${parts[part]}
    done
    ;;
serve | load)
    # It imports for up to 14 s before its minutes begin, and ends its servers and prints what it has found after them.
    minutes=$(python3 -c "print(($(left) - 24) / 60)")
    program="${BENCH:-python3 -m fcsd} bench serve"
    [ "$command" = serve ] || program="python3 -m benchmarks.vllm load"
    # shellcheck disable=SC2086 # the words are split
    job "$command" $program --out "$OUT/$command" --minutes "$minutes" ${SERVE:-llama3-8b --tp 2}
    ;;
trace)
    # shellcheck disable=SC2086
    job trace python3 -m benchmarks.vllm trace --out "$OUT/steps" ${TRACE:-llama3-8b --layers 16 --tp 2}
    ;;
esac
wait
case $command in serve | load) cat "$logs/$command.log" ;; trace) tail -n 60 "$logs/trace.log" ;; esac
report
status=$?
echo "$command: ended after $SECONDS s with $status"
exit $status
