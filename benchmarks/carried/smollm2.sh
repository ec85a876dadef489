# What quantised_gpu.sh and cheap_gpu.sh do alike on a GPU machine without a network; they source it.

WORK=${WORK:-/tmp/quantised} in=$WORK/in out=${OUT:-$WORK/out}

say() { echo "$SECONDS s: $*"; }

# take_in NEEDED PART ...: copies parts to where all are collected; fails until the weights and NEEDED are there
take_in() {
    local part needed=$1
    shift
    mkdir -p "$in" "$out"
    for part in "$@"; do cp -r "$part"/. "$in"; done
    for part in weights.0 weights.1 weights.2 $needed; do
        [ -e "$in/$part" ] || { say "waits for another part"; return 1; }
    done
}

# Installs the packages of the parts, and makes the original of their weights, once.
unpack() {
    export HF_HUB_OFFLINE=1 TQDM_DISABLE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
    export PYTHONPATH=$WORK/site:$PWD
    [ -e "$WORK/site" ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$in"/wheels/*.whl
    [ -e "$WORK/model.gguf" ] || cat "$in"/weights.? > "$WORK/model.gguf"
    [ -e "$WORK/original/config.json" ] || CUDA_VISIBLE_DEVICES='' python3 -m studies.real.read_gguf "$WORK/model.gguf" "$WORK/original"
}

# write FOLDER TOKENS: lets the original write text, once
write() {
    [ -e "$1/write.json" ] ||
        python3 -m fcsd write "$WORK/original" --tokens "$2" --batch-size "${ROWS:-1024}" --out "$1" 2> "$out/own.log"
}
