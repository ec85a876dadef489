#!/usr/bin/env bash
# Carries vLLM to a Hopper GPU machine without a network, and checks originals and converted models there.
#
#   scripts/vllm_gpu.sh build [FOLDER]     on a machine with a package index: downloads vLLM and what it needs, takes out
#                                          of vLLM what a Hopper GPU does not run, and writes about 50 MiB to FOLDER
#   scripts/vllm_gpu.sh one [FOLDER]       on one GPU: eager, whole CUDA graphs, compiled; the server
#   scripts/vllm_gpu.sh two [FOLDER]       on two GPUs: tensor parallelism 2, with and without divided experts
#   LIMIT=500 scripts/vllm_gpu.sh time     on two GPUs: time to first token of a model as large as Qwen3-30B-A3B
#
# FOLDER is .vllm by default. The GPU machine needs Python 3.12, torch 2.11 for CUDA 13 and transformers 5.17, FOLDER, and
# fcsd, scripts, tests and assets of this repository. Every part ends before second $LIMIT. Rows go to stdout and $OUT.
set -uo pipefail
cd "$(dirname "$0")/.."

version=0.24.0
command=${1:?build, one, two or time}
case $command in build | one | two | time) ;; *) echo "no command $command: build, one, two or time" >&2 && exit 2 ;; esac
folder=${2:-.vllm}
WORK=${WORK:-/tmp/vllm-work}
site=$WORK/site
# Everything that vLLM 0.24.0 imports and the GPU machine does not have, pydantic for fcsd among it. Versions are given
# where vLLM asks for one or where a later one is known not to go with 0.24.0.
wheels="annotated-types apache-tvm-ffi==0.1.15.post2 astor blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf==0.20.0
    dill diskcache==5.6.3 distro docstring-parser fastapi==0.136.3 httptools httpx-sse ijson interegular jiter jmespath
    jsonschema jsonschema-specifications lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3 mcp==1.30.0
    model-hosting-container-standards==0.1.16 msgspec openai==2.54.0 openai-harmony==0.0.8 opentelemetry-api
    opentelemetry-sdk outlines_core==0.2.14 partial-json-parser prometheus-fastapi-instrumentator pybase64
    pydantic==2.14.3 pydantic-core==2.50.4 pydantic-extra-types pydantic-settings pyjwt python-json-logger
    python-multipart pyzmq referencing rpds-py setproctitle sniffio sse-starlette starlette==1.1.0 typing-inspection
    uvicorn watchfiles websockets xgrammar==0.2.8"

build() {
    set -e
    local downloaded platforms="--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any"
    downloaded=$(mktemp -d)
    for n in $(seq 17 39); do platforms="$platforms --platform manylinux_2_${n}_x86_64"; done
    local options="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp"
    options="$options --abi cp312 --abi abi3 --abi none"
    mkdir -p "$folder/wheels"
    # shellcheck disable=SC2086 # the lists are split into words on purpose
    python3 -m pip download -q $options $platforms -d "$folder/wheels" $wheels
    # shellcheck disable=SC2086
    python3 -m pip download -q $options $platforms -d "$downloaded" "vllm==$version"
    python3 scripts/vllm_slim.py "$downloaded"/vllm-*.whl "$folder/vllm.tar.xz"
    rm -r "$downloaded"
    du -sm "$folder"
}

# Unpack what was carried. A second call on the same machine finds it.
unpack() {
    [ -d "$site/vllm" ] && return
    mkdir -p "$site"
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$folder"/wheels/*.whl &
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')" \
        "$folder/vllm.tar.xz" "$site" || return
    wait
    # vLLM finds fcsd's plugin by an entry point, which an installed package has and a copy of the repository has not.
    mkdir -p "$site/fcsd-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: fcsd\nVersion: 0\n' > "$site/fcsd-0.dist-info/METADATA"
    printf '[vllm.general_plugins]\nfcsd = fcsd.serve.vllm.plugin:register\n' > "$site/fcsd-0.dist-info/entry_points.txt"
}

# The seconds that are left.
left() {
    echo $((LIMIT > SECONDS ? LIMIT - SECONDS : 1))
}

# job NAME ARGUMENTS...: a part of vllm_gpu.py in the background, with a log file.
job() {
    local name=$1
    shift
    timeout -k 3 "$(left)" python3 scripts/vllm_gpu.py "$1" "$WORK/models" "${@:2}" > "$WORK/$name.log" 2>&1 &
}

# The rows that were found, and for each part the errors that it met. Rows and logs go to $OUT, too.
report() {
    local log
    for log in "$WORK"/*.log; do
        echo "== $(basename "$log" .log)"
        grep -E '^(ROW|MISSING) ' "$log" || tail -20 "$log" | cut -c1-300
        grep -oE '[A-Za-z_.]*(Error|Exception): .*' "$log" | cut -c1-300 | sort | uniq -c | sort -rn | head -6
    done
    sed -n 's/^ROW //p' "$WORK"/*.log > "$OUT/$command.jsonl"
    tar -czf "$OUT/$command-logs.tar.gz" -C "$WORK" $(cd "$WORK" && echo *.log)
    rm "$WORK"/*.log
    [ -s "$OUT/$command.jsonl" ]
}

# The converted teacher through `fcsd serve`, asked over HTTP.
server() {
    local url
    timeout -k 3 "$(left)" python3 -m fcsd serve "$WORK/models/teacher" --port 8011 -- --max-model-len 512 --enforce-eager \
        --kv-cache-memory-bytes 268435456 --gpu-memory-utilization 0.3 > "$WORK/url" 2> "$WORK/server-stderr" &
    local process=$!
    while [ $SECONDS -lt $((LIMIT - 8)) ]; do
        url=$(head -1 "$WORK/url")
        [ -n "$url" ] || ! kill -0 "$process" 2> /dev/null && break
        sleep 1
    done
    echo "URL ${url:-none}"
    python3 - "${url:-http://127.0.0.1:8011}" <<'PYTHON'
import json, sys, urllib.request
base = sys.argv[1].rstrip("/").removesuffix("/v1")
def ask(path, **body):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))
name = ask("/v1/models")["data"][0]["id"]
question = "Question: What is 12 plus 30? Answer:"
answer = ask("/v1/completions", model=name, prompt=question, max_tokens=16, temperature=0)
print("ROW", json.dumps(dict(case="fcsd serve", model=name, answer=answer["choices"][0]["text"])))
PYTHON
    kill -TERM "$process"
    wait "$process"
    echo "fcsd serve ended with $?"
    grep -vE 'INFO|^$' "$WORK/server-stderr" | tail -8 | cut -c1-300
}

if [ "$command" = build ]; then
    build
    exit
fi
for needed in "$folder/vllm.tar.xz" "$folder/wheels" fcsd scripts/vllm_parity.py tests/tiny.py assets/teacher; do
    [ -e "$needed" ] || { echo "$PWD/$needed is missing; nothing was run" >&2 && exit 2; }
done

OUT=${OUT:-$WORK/out}
mkdir -p "$WORK" "$OUT"
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1
export VLLM_CACHE_ROOT=$WORK/cache VLLM_WORKER_MULTIPROC_METHOD=spawn OMP_NUM_THREADS=2
# Products of float32 by float32 arithmetic; and DeepSeek's attention expanded, because the bundled teacher's latent
# vectors are smaller than those that vLLM's kernels for latent attention know.
export TRITON_F32_DEFAULT=ieee VLLM_MLA_DISABLE=1
SECONDS=0
LIMIT=${LIMIT:-300} # seconds until every part has to have ended
unpack || exit
echo "unpacked after $SECONDS s"
if [ ! -d "$WORK/models" ]; then
    timeout -k 3 "$(left)" python3 scripts/vllm_gpu.py imports > "$WORK/imports.log" 2>&1 &
    making=()
    for cases in "qwen3_moe-farskip qwen2_moe-farskip" "glm4_moe-farskip teacher qwen3_30b"; do
        # shellcheck disable=SC2086 # two cases
        timeout -k 3 "$(left)" python3 scripts/vllm_gpu.py make "$WORK/models" $cases 2> "$WORK/make-stderr" &
        making+=($!)
    done
    wait "${making[@]}" || tail -5 "$WORK/make-stderr" | cut -c1-400
fi
echo "ready after $SECONDS s"
case $command in
one)
    job float32_eager serve --case qwen3_moe-farskip,qwen2_moe-farskip,glm4_moe-farskip,teacher --dtype float32 --mode eager
    job float32_default serve --case qwen2_moe-farskip --dtype float32 --mode default
    job bfloat16_graph serve --case qwen3_moe-farskip,qwen2_moe-farskip --dtype bfloat16 --mode graph
    job bfloat16_default serve --case qwen3_moe-farskip,teacher --dtype bfloat16 --mode default
    server > "$WORK/server.log" 2>&1
    ;;
two)
    job float32_eager serve --case qwen2_moe-farskip,glm4_moe-farskip --dtype float32 --mode eager --tp 2
    job float32_graph serve --case qwen2_moe-farskip,qwen3_moe-farskip --dtype float32 --mode graph --tp 2
    job float32_default serve --case qwen2_moe-farskip,glm4_moe-farskip --dtype float32 --mode default --tp 2
    job bfloat16_experts serve --case qwen2_moe-farskip,qwen3_moe-farskip --dtype bfloat16 --mode default --tp 2 --ep
    ;;
time)
    # Random weights route unevenly; every model gets the same evenly random routing instead.
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random job first_tokens time --case qwen3_30b --tp 2
    ;;
esac
wait
report && echo "$command: done after $SECONDS s"
