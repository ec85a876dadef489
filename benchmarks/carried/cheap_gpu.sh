#!/usr/bin/env bash
# Measures cheap ways to lose less in healing on SmolLM2-135M-Instruct on a GPU machine without a network, by
# `studies.real.cheap_ways`.
#
# Usage: benchmarks/carried/cheap_gpu.sh COMMAND
#   build MIRROR TRAIN HELD_OUT [FOLDER]   in fcsd's own environment, after `quantised_gpu.sh build`: packs every sixth
#           document of TRAIN as token ids and the questions of MIRROR into FOLDER; FOLDER is .cheap
#   call PART ...    on the GPU machine: takes in the parts of `quantised_gpu.sh build`, and FOLDER. With the last one it
#           installs the packages, lets the original write OWN tokens, and measures until SECONDS_ALL after the beginning
#           of this call. Results are in $OUT. Another call finds in WORK what this one made, and adds the WAYS it names.
#
# WORK is where it runs, and may be that of quantised_gpu.sh. The machine needs what that one needs.
set -euo pipefail
cd "$(dirname "$0")/../.."

. benchmarks/carried/smollm2.sh

build() {
    local mirror=${1:?MIRROR is missing} train=${2:?TRAIN is missing} held_out=${3:?HELD_OUT is missing} folder=${4:-.cheap} made
    made=$(mktemp -d)
    cat .quantised/?/weights.? > "$made/model.gguf"
    python3 -m studies.real.read_gguf "$made/model.gguf" "$made/original"
    awk 'NR % 6 == 1' "$train" > "$made/train.jsonl"
    python3 -m studies.real.texts "$made/original" "$made/train.jsonl" "$held_out" "$made/texts" --first "${FOREIGN:-4.3e6}"
    rm -rf "$folder" && mkdir -p "$folder"
    mv "$made/texts/foreign" "$folder"
    python3 -m studies.real.questions "$made/original" "$mirror" "$folder/questions.json.gz"
    rm -r "$made"
    du -sm "$folder"
}

call() {
    take_in questions.json.gz "$@" || return 0
    mkdir -p "$WORK/cheap"
    unpack
    say "the original writes"
    write "$WORK/cheap/own" "${OWN:-4.3M}"
    cp "$WORK/cheap/own/write.json" "$out/own.json"
    say "the ways"
    python3 -m studies.real.cheap_ways "$WORK/original" "$WORK/cheap" --text own="$WORK/cheap/own" --text foreign="$in/foreign" \
        --questions "$in/questions.json.gz" --tokens "${TOKENS:-8e6}" --ways "${WAYS:-base,long,rates,mean,twice,task}" \
        --seconds $((${SECONDS_ALL:-450} - SECONDS)) 2> "$out/study.log" | tee "$out/study.txt" || tail -n 20 "$out/study.log"
    cp "$WORK/cheap/results.jsonl" "$out"
    python3 -m studies.real.cheap_ways --table "$out/results.jsonl" | tee "$out/table.md"
    say "ended"
}

case ${1:-} in
build | call) "$@" ;;
*) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
