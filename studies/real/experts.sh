#!/usr/bin/env bash
# Makes a mixture of experts of a dense model, heals it to that model, then converts it to farskip and heals it again
# with its experts divided over two processes. Usage: studies/real/experts.sh DENSE OUT TOKENS NAME=DIR [NAME=DIR]
#   DENSE     a llama without biases, the teacher of every run
#   OUT       the directory for everything; the same command goes on after an interruption
#   TOKENS    of each run, such as 12e6; or of the first and of those that begin from it, such as 12e6,8e6
#   NAME=DIR  texts, as studies.real heal takes them; the first is `own` if there are two
# MIRROR=DIR asks benchmarks, too. EXPERTS, LAYERS, BATCH, LIMIT (of the questions) and SET (of every
# recipe) replace the values below. PYTHON=COMMAND runs another Python.
# What is wanted most comes first: farskip on LAYERS is healed, asked and answers before farskip on all layers begins.
# The control is healed beside it, and a healed model is measured and asked while the next run starts.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
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
heal() { # FILE OF CASES, how many at once; it goes on in the background as $healing
  echo "$SECONDS s: ${1##*/}"
  "$python" -m studies.real heal "$dense" "$out" --cases "$1" --at-once "$2" "${texts[@]}" & healing=$!
}
healed() { # wait until a model has been healed, before it is measured
  until [ -e "$out/$1/run/final" ]; do
    kill -0 $healing 2> /dev/null || [ -e "$out/$1/run/final" ] || { echo "$1 was not healed" >&2; return 1; }
    sleep 0.5
  done
  echo "$SECONDS s: $1 is healed"
}
ask() { # benchmarks of the models that there are; a model that was asked before is not asked again
  [ -n "${MIRROR:-}" ] || return 0
  local models=() where=$(cd "$out" && pwd)
  mkdir -p "$out/models" # results call a model after its directory
  for model in "$@"; do
    [ "$model" = divided ] && from="$where/divided" || from="$where/$model/run/final"
    [ -e "$from" ] || continue
    ln -sfn "$from" "$out/models/$model"
    models+=("$out/models/$model")
  done
  "$python" -m fcsd eval "${models[@]}" --baseline "$dense" --data-mirror "$MIRROR" --gpus 2 --out "$out/eval" --json \
    --tasks piqa,arc_easy,hellaswag,openbookqa --limit "${LIMIT:-2500}" > "$out/eval.part"
  mv "$out/eval.part" "$out/eval.json"
  echo "$SECONDS s: asked $*"
}

# Divided experts cannot be compiled, and the teacher has none that could be divided. The last run
# keeps whole experts, whose passes can be captured: where experts are changes no result but by rounding.
whole='"train.compile": false'
divided='"train.compile": false, "parallel.ep_size": 2, "parallel.teacher_placement": "replicated"'
[ -e "$out/divided" ] || "$python" -m studies.real experts "$dense" "$out/divided" "${experts[@]}" "${texts[@]}"
run moe divided standard all "$first" "$whole" > "$out/first.jsonl"
{
  run farskip-2-29 moe farskip "${LAYERS:-2-29}" "$second" "$divided"
  run moe-again moe standard all "$second" "$whole" # what the same tokens do without a conversion
} > "$out/second.jsonl"
run farskip-all moe farskip all "$second" "$whole" > "$out/third.jsonl"

heal "$out/first.jsonl" 1
healed moe
heal "$out/second.jsonl" 2
ask divided moe
healed farskip-2-29
answer() {
  "$python" -m fcsd chat "$out/farskip-2-29/run/final" --gpus 1 --max-new-tokens 48 --json > "$out/answers.part" &&
    mv "$out/answers.part" "$out/answers.jsonl" || echo "the engine did not answer" >&2
}
[ -e "$out/answers.jsonl" ] || answer & answering=$!
ask farskip-2-29 divided moe
wait $answering $healing
heal "$out/third.jsonl" 1
ask farskip-2-29 divided moe moe-again
wait $healing
ask farskip-2-29 divided moe moe-again farskip-all
