#!/usr/bin/env bash
# The capability study on a GPU machine that has no network and is lent for some minutes.
#   benchmarks/carried/lease.sh pack FOLDER         where there is a network: the wheels that such a machine lacks and the
#                                                   teacher's text, 23 MB, into FOLDER, which is carried to the machine
#   benchmarks/carried/lease.sh study FOLDER STUDY...     there: studies/capability/reproduce.sh until nothing is left
#   benchmarks/carried/lease.sh siblings FOLDER TOKENS   there: trains the llama and the qwen3_moe teacher on so many
#                                                   tokens, and does the studies of each. If there are two GPUs or
#                                                   more, the siblings share them out and work at the same time. A
#                                                   teacher whose archive (llama.tar.gz, from OUT below) lies in FOLDER
#                                                   is not trained again. LAYOUTS=moe_64 TRAIN="--rows 64 --lr 1e-3"
#                                                   trains and studies a larger model instead (257 MB, not in OUT)
#   benchmarks/carried/lease.sh watch SECONDS OUT   there: waits until the time is over or nothing runs, copies
#                                                   results, teachers and logs to OUT, and prints how far the work is
# A command there may be shorter than the work, so start `study` and `siblings` in a session of their own, and watch:
#   setsid benchmarks/carried/lease.sh siblings .carried 1e9 > /dev/null 2>&1 & benchmarks/carried/lease.sh watch 560 $OUT
# Environment: WORK=/dev/shm/fcsd, and what studies/capability/reproduce.sh takes, GPUS and PROCESSES among it.
#   TRAIN=--compile (options of studies/teacher/train.py)  LAYOUTS="llama qwen3_moe" (the siblings)
#   STUDIES= (the studies of each sibling, instead of all)
# On two H200s, `siblings .carried 1000079360` trained both teachers in 450 s and most models of Table 1 in 1000 s more.
set -euo pipefail
cd "$(dirname "$0")/../.."
work="${WORK:-/dev/shm/fcsd}" python="${PYTHON:-python3}" gpus="${GPUS:-1}"
export GPUS="$gpus" TEACHER_TEXT="$work/teacher/train.jsonl" MINUTES="${MINUTES:-25}"
read -r -a order <<< "${LAYOUTS:-llama qwen3_moe}"
declare -A wirings=([llama]=ladder [qwen3_moe]=farskip [moe_64]=farskip)
texts="table-1 tokens" # the studies whose texts are written while the teachers learn
[ "${order[*]}" != moe_64 ] || texts=larger
declare -A studies=([llama]="${STUDIES:-table-1 tokens table-4 desync}" [qwen3_moe]="${STUDIES:-table-1 tokens}"
    [moe_64]="${STUDIES:-larger}")

pack() {
    local folder="$1" made
    made="$(mktemp -d)"
    mkdir -p "$folder"
    local options="--disable-pip-version-check --quiet --no-deps"
    # shellcheck disable=SC2086 # the options are split into words on purpose
    "$python" -m pip download $options --only-binary :all: --python-version 3.12 --platform manylinux2014_x86_64 \
        --platform manylinux_2_28_x86_64 -d "$folder/wheels" \
        hjson pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection 'datasets==5.2.*' dill \
        multiprocess==0.70.19 lm-eval==0.4.13 evaluate==0.4.6 evalplus==0.3.1 appdirs termcolor tree-sitter \
        tree-sitter-python
    # shellcheck disable=SC2086
    DS_BUILD_OPS=0 "$python" -m pip wheel $options -w "$folder/wheels" deepspeed==0.19.8 tempdir wget
    (cd "$made" && apt-get download -qq python3.11-doc && dpkg -x python3.11-doc_*.deb docs)
    "$python" studies/teacher/corpus.py --stdlib /usr/lib/python3.11 \
        --docs "$made/docs/usr/share/doc/python3.11/html/_sources" --all "$made/teacher" --out "$made/assets"
    tar -czf "$folder/teacher.tar.gz" -C "$made" teacher
    rm -r "$made"
    du -sm "$folder"
}

# Installs the wheels and unpacks the text, once on a machine.
unpack() {
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
    [ -e "$work/unpacked" ] && return
    mkdir -p "$work"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$work/site" "$1"/wheels/*.whl
    local archive
    for archive in "$1"/*.tar.gz; do tar -xzf "$archive" -C "$work"; done # the text, and teachers trained before
    touch "$work/unpacked"
}

# Trains a teacher on one GPU, unless there is one. A part of a training leaves none.
train() { # LAYOUT TOKENS
    [ ! -e "$work/$1/config.json" ] || return 0
    # shellcheck disable=SC2086 # the options are split into words on purpose
    CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}" "$python" studies/teacher/train.py --layout "$1" --tokens "$2" \
        --out "$work/training_$1" --text "$work/teacher" ${TRAIN---compile} > "$work/$1.jsonl" 2> "$work/$1.log"
    mv "$work/training_$1" "$work/$1"
}

# A part of the studies of one sibling. The siblings have their texts in common, which lie in $work/texts.
study() { # LAYOUT TOKENS
    STORED="benchmarks/results/capability_$1.jsonl" NEW="$work/capability_$1.jsonl" TEACHER_TOKENS="$2" \
        studies/capability/reproduce.sh "$work/study_$1" "${@:3}" >> "$work/study_$1.log" 2>&1
}

sibling() { # LAYOUT TOKENS
    local layout="$1" tokens
    train "$layout" "$2"
    while [ ! -e "$work/texts/ended" ]; do sleep 1; done
    mkdir -p "$work/study_$layout"
    ln -sfn "$work/texts/text" "$work/study_$layout/text"
    ln -sfn "$work/texts/cache" "$work/study_$layout/cache"
    tokens="$("$python" -c 'import json, sys; print(json.loads(sys.argv[1])["tokens"])' \
        "$(grep '^{' "$work/$layout.jsonl" | tail -n 1)")" # other libraries print lines, too
    # shellcheck disable=SC2086 # the studies are split into words on purpose
    TEACHER="$work/$layout" WIRING="${wirings[$layout]}" study "$layout" "$tokens" ${studies[$layout]} ||
        echo "the study of $layout is not complete; study_$layout.log says what is left" >&2
}

siblings() { # TOKENS
    local at=0 each=$((gpus / ${#order[@]})) layout tokens
    tokens="$(printf %.0f "$1")"
    [ "$each" -gt 0 ] || each=$gpus
    # The texts need no GPU and no teacher, so they are written while the teachers learn.
    (
        mkdir -p "$work/texts"
        # shellcheck disable=SC2086 # the studies are split into words on purpose
        TEXTS_ONLY=1 DEVICE=cpu STORED=/dev/null NEW="$work/texts/none.jsonl" TEACHER_TOKENS="$tokens" \
            studies/capability/reproduce.sh "$work/texts" $texts > "$work/texts.log" 2>&1 || true
        touch "$work/texts/ended"
    ) &
    for layout in "${order[@]}"; do
        [ $((at + each)) -le "$gpus" ] || { wait; at=0; }
        CUDA_VISIBLE_DEVICES="$(seq -s , $at $((at + each - 1)))" GPUS="$each" PROCESSES=$((${PROCESSES:-8} * each / gpus)) \
            sibling "$layout" "$tokens" &
        at=$((at + each))
    done
    wait
}

# Copies to a folder what the work has found so far: few archives, because some machines give back few files.
collect() { # OUT
    local out layout
    out="$(cd "$1" && pwd)"
    (cd "$work" && tar -czf "$out/found.tar.gz.part" --ignore-failed-read \
        $(ls -d ./*.log ./*.jsonl ./*/logs ./*/eval/*/samples/*/strict/humaneval.jsonl 2> /dev/null)) || true
    mv "$out/found.tar.gz.part" "$out/found.tar.gz"
    for layout in "${order[@]}"; do
        if [ "$layout" != moe_64 ] && [ -e "$work/$layout/config.json" ]; then
            tar -czf "$out/$layout.tar.gz" -C "$work" "$layout" "$layout.jsonl"
        fi
    done
}

watch() { # SECONDS OUT
    local ends=$((SECONDS + $1))
    while [ $SECONDS -lt $ends ] && [ ! -e "$work/ended" ]; do sleep 5; done
    collect "$2"
    tail -n 1 "$work"/*.jsonl "$work"/study*.log 2> /dev/null | cut -c1-300 || true
    wc -l "$work"/*.jsonl 2> /dev/null || true
}

command="${1:-}"
[ $# -gt 2 ] || [ "$command $#" = "pack 2" ] || { sed -n '2,19s/^# *//p' "$0" >&2; exit 2; }
shift
case "$command" in
    pack) pack "$1" ;;
    watch) watch "$1" "$2" ;;
    study | siblings)
        folder="$(realpath "$1")"
        if [ "$PWD" != "$work/tree" ]; then # each command sends the checkout anew, which removes files for a moment
            mkdir -p "$work/tree"
            cp -r fcsd scripts assets docs "$work/tree"
            exec "$work/tree/benchmarks/carried/lease.sh" "$command" "$folder" "${@:2}"
        fi
        rm -f "$work/ended"
        trap 'touch "$work/ended"' EXIT
        unpack "$folder"
        shift
        if [ "$command" = siblings ]; then siblings "$1"; else
            NEW="$work/capability.jsonl" studies/capability/reproduce.sh "$work/study" "$@" > "$work/study.log" 2>&1
        fi
        ;;
    *) echo "$command is no command of lease.sh; see its first lines" >&2 && exit 2 ;;
esac
