#!/usr/bin/env bash
# The capability study on a GPU machine that has no network and is lent for some minutes.
#   scripts/capability/lease.sh pack FOLDER         where there is a network: the wheels that such a machine lacks and the
#                                                   teacher's text, 23 MB, into FOLDER, which is carried to the machine
#   scripts/capability/lease.sh study FOLDER STUDY...     there: scripts/reproduce_capability.sh until nothing is left
#   scripts/capability/lease.sh siblings FOLDER MINUTES   there: trains the llama and the qwen3_moe teacher for so many
#                                                   minutes, each on a GPU of its own if there are two, and then does
#                                                   their studies on all GPUs. A teacher whose archive
#                                                   (llama.tar.gz, from OUT below) lies in FOLDER is not trained again
#   scripts/capability/lease.sh watch SECONDS OUT   there: waits until the time is over or nothing runs, copies
#                                                   results, teachers and logs to OUT, and prints how far the work is
# A command there may be shorter than the work, so start `study` and `siblings` in a session of their own, and watch:
#   setsid scripts/capability/lease.sh siblings .carried 5 > /dev/null 2>&1 & scripts/capability/lease.sh watch 560 $OUT
# Environment: WORK=/dev/shm/fcsd, and what scripts/reproduce_capability.sh takes, GPUS and PROCESSES among it.
#   TRAIN=--compile (options of scripts/teacher/train.py)  LAYOUTS="llama qwen3_moe" (the siblings)
# No GPU has run it. On a CPU, `siblings` trained both teachers for two steps and started the first study.
set -euo pipefail
cd "$(dirname "$0")/../.."
work="${WORK:-/dev/shm/fcsd}" python="${PYTHON:-python3}" gpus="${GPUS:-1}"
export GPUS="$gpus" TEACHER_TEXT="$work/teacher/train.jsonl" MINUTES="${MINUTES:-25}"
read -r -a order <<< "${LAYOUTS:-llama qwen3_moe}"
declare -A wirings=([llama]=ladder [qwen3_moe]=farskip)
declare -A studies=([llama]="table-1 table-4 desync" [qwen3_moe]="table-1")

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
    "$python" scripts/teacher/corpus.py --stdlib /usr/lib/python3.11 \
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

# Trains a teacher on one GPU.
train() { # LAYOUT GPU MINUTES
    # shellcheck disable=SC2086 # the options are split into words on purpose
    CUDA_VISIBLE_DEVICES="$2" "$python" scripts/teacher/train.py --layout "$1" --out "$work/$1" --minutes "$3" \
        --text "$work/teacher" ${TRAIN---compile} > "$work/$1.jsonl" 2> "$work/$1.log"
}

siblings() { # MINUTES
    local number=0 layout tokens
    for layout in "${order[@]}"; do
        [ ! -e "$work/$layout/config.json" ] || continue
        train "$layout" $((number % gpus)) "$1" &
        number=$((number + 1))
        [ $((number % gpus)) -ne 0 ] || wait
    done
    wait
    for layout in "${order[@]}"; do
        tokens="$("$python" -c 'import json, sys; print(json.loads(sys.argv[1])["tokens"])' \
            "$(grep '^{' "$work/$layout.jsonl" | tail -n 1)")" # other libraries print lines, too
        # shellcheck disable=SC2086 # the studies are split into words on purpose
        TEACHER="$work/$layout" TEACHER_TOKENS="$tokens" WIRING="${wirings[$layout]}" NEW="$work/capability_$layout.jsonl" \
            STORED="docs/results/capability_$layout.jsonl" \
            scripts/reproduce_capability.sh "$work/study_$layout" ${studies[$layout]} >> "$work/study_$layout.log" 2>&1 ||
            echo "the study of $layout is not complete; study_$layout.log says what is left" >&2
    done
}

# Copies to a folder what the work has found so far: few archives, because some machines give back few files.
collect() { # OUT
    local out layout
    out="$(cd "$1" && pwd)"
    (cd "$work" && tar -czf "$out/found.tar.gz.part" --ignore-failed-read \
        $(ls -d ./*.log ./*.jsonl ./*/logs ./*/eval/*/samples/*/strict/humaneval.jsonl 2> /dev/null)) || true
    mv "$out/found.tar.gz.part" "$out/found.tar.gz"
    for layout in "${order[@]}"; do
        [ ! -e "$work/$layout/config.json" ] || tar -czf "$out/$layout.tar.gz" -C "$work" "$layout" "$layout.jsonl"
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
[ $# -gt 2 ] || [ "$command $#" = "pack 2" ] || { sed -n '2,15s/^# *//p' "$0" >&2; exit 2; }
shift
case "$command" in
    pack) pack "$1" ;;
    watch) watch "$1" "$2" ;;
    study | siblings)
        rm -f "$work/ended"
        trap 'touch "$work/ended"' EXIT
        unpack "$1"
        shift
        if [ "$command" = siblings ]; then siblings "$1"; else
            NEW="$work/capability.jsonl" scripts/reproduce_capability.sh "$work/study" "$@" > "$work/study.log" 2>&1
        fi
        ;;
    *) echo "$command is no command of lease.sh; see its first lines" >&2 && exit 2 ;;
esac
