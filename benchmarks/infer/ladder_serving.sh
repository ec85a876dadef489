#!/usr/bin/env bash
# Ladder-Residual's measurements of serving with fcsd's engine: Tables 1, 2 and 6, Figures 2 and 4, with NVLink and
# without (NCCL_P2P_DISABLE=1). Weights are random, and layers are scaled down: see benchmarks/infer/ladder_serving.py.
# Usage: benchmarks/infer/ladder_serving.sh GPUS             one piece of at most MINUTES; start it again until it says
#                                                             that all measurements are done
#        benchmarks/infer/ladder_serving.sh GPUS short       70B's width, 8 layers: decode at batch 1 and 64, prefill of
#                                                             4096 and 16384 tokens, both links; about 130 s on four H200s
#        benchmarks/infer/ladder_serving.sh GPUS 70B,8B      a piece with some of 1B, 3B, 8B, 34B, 70B and 176B
# Environment: OUT=ladder-serving  MINUTES=9  PYTHON=python3  REDUCE=nccl (kinds of reduction, the best of which counts)
#   OPTIONS= (more options of `python -m benchmarks.infer`, such as --no-graphs)
#   SECONDS_PER_LINK=72 (of the short form, after which a link is left)
set -uo pipefail
cd "$(dirname "$0")/../.."
gpus=${1:?GPUS is missing, for example: benchmarks/infer/ladder_serving.sh 4}
what=${2:-1B,3B,8B,34B,70B,176B}
python=${PYTHON:-python3} out=${OUT:-ladder-serving} REDUCE=${REDUCE:-nccl}
export REDUCE OPTIONS=${OPTIONS:-} PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"

if [ "$what" != short ]; then
    exec "$python" -m benchmarks.infer.ladder_serving run "$gpus" "$out" --sizes "$what" --minutes "${MINUTES:-9}"
fi

# Prompts of 256 tokens: batches of 16 and 64 prefill 4096 and 16384 tokens. Batch 1 and 64 come first.
status=0
short() {
    # shellcheck disable=SC2086 # OPTIONS is split into words
    timeout -k 10 "${SECONDS_PER_LINK:-72}" "$python" -m benchmarks.infer "${SHAPE:-llama3-70b}" --layers 8 --tp "$gpus" \
        --batch 1,64,16,4 --prompt 256 --new 17 --rounds 2 --reduce "$REDUCE,none" --out "$out/short-$1" "${@:2}" $OPTIONS
    local ended=$?
    echo "$1: ended with $ended after $SECONDS s"
    [ "$ended" = 0 ] || status=1
}
short nvlink --wirings standard,ladder,parallel,desync-2x,desync-4x --bounds standard,ladder
short no-nvlink --wirings standard,ladder,desync-4x --bounds standard --no-nvlink
# What a link that was stopped has left in its infer.json, too.
shopt -s nullglob
"$python" - "$out"/short-*/infer.json <<'PYTHON'
import json, sys
from benchmarks.infer.table import table
for path in sys.argv[1:]:
    print(path, table(json.load(open(path))["rows"]), sep="\n")
PYTHON
exit $status
