#!/usr/bin/env bash
# Makes a mixture of experts of a dense model, heals it to that model, then converts it to farskip and heals it again
# with its experts divided over two processes. Usage: studies/real/experts.sh DENSE OUT TOKENS NAME=DIR [NAME=DIR]
#   DENSE     a llama without biases, the teacher of every run
#   OUT       the directory for everything; the same command goes on after an interruption
#   TOKENS    of each run, such as 12e6; or of the first and of those that begin from it, such as 12e6,8e6
#   NAME=DIR  texts, as studies.real.heal takes them; the first is `own` if there are two
# MIRROR=DIR asks benchmarks, too. EXPERTS, LAYERS, BATCH, GRAPH, AT_ONCE and SET (of every recipe) replace the values
# below. PYTHON=COMMAND runs another Python.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dense="$1" out="$2" first="${3%,*}" second="${3#*,}"
shift 3
names="" texts=()
for text in "$@"; do
  texts+=(--text "$text") names+="${names:++}${text%%=*}"
done
read -ra experts <<< "${EXPERTS:---experts 8 --active 4 --shared 512}"
python=${PYTHON:-python}
mkdir -p "$out"

run() { # NAME FROM WIRING LAYERS TOKENS SETTINGS
  printf '{"name": "%s", "from": "%s", "wiring": "%s", "layers": "%s", "tokens": %s, ' "${@:1:5}"
  printf '"text": "%s", "batch": %s, "lr": 1e-3, "gpus": 2, "untrained": true, "set": {%s%s}}\n' \
    "$names" "${BATCH:-32768}" "$6" "${SET:+, $SET}"
}
heal() { "$python" -m studies.real.heal "$dense" "$out" --cases "$@" "${texts[@]}"; }

# Divided experts can be neither captured nor compiled, and the teacher has none that could be divided.
whole="\"train.compile\": false, \"train.graph\": ${GRAPH:-true}"
divided='"train.compile": false, "parallel.ep_size": 2, "parallel.teacher_placement": "replicated"'
[ -e "$out/divided" ] || "$python" -m studies.real.experts "$dense" "$out/divided" "${experts[@]}" "${texts[@]}"
run moe divided standard all "$first" "$whole" > "$out/first.jsonl"
heal "$out/first.jsonl"
[ -e "$out/moe/run/final" ] || exit 1
{
  run farskip-2-29 moe farskip "${LAYERS:-2-29}" "$second" "$divided"
  run farskip-all moe farskip all "$second" "$divided"
  run moe-again moe standard all "$second" "$whole" # what the same tokens do without a conversion
} > "$out/second.jsonl"
heal "$out/second.jsonl" --at-once "${AT_ONCE:-3}"
"$python" -m fcsd chat "$out/farskip-2-29/run/final" --gpus 1 --max-new-tokens 48 --json > "$out/answers.jsonl" ||
  echo "the engine did not answer" >&2
if [ -n "${MIRROR:-}" ]; then
  "$python" -m fcsd eval "$out/divided" "$out"/*/run/final --baseline "$dense" --data-mirror "$MIRROR" \
    --tasks piqa,arc_easy,hellaswag,openbookqa --limit "${LIMIT:-2500}" --gpus 2 --out "$out/eval" --json > "$out/eval.json"
fi
