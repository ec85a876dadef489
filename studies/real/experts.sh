#!/usr/bin/env bash
# Makes a mixture of experts of a dense model, heals it to that model, then converts it to farskip and heals it again
# with its experts divided over two processes. Usage: studies/real/experts.sh DENSE OUT TOKENS NAME=DIR [NAME=DIR]
#   DENSE     a llama without biases, the teacher of every run
#   OUT       the directory for everything; the same command goes on after an interruption
#   TOKENS    of each run, such as 12e6
#   NAME=DIR  texts, as studies.real.heal takes them; the first is `own` if there are two
# MIRROR=DIR asks benchmarks, too. EXPERTS, SET, LAYERS, BATCH and AT_ONCE replace the values below. PYTHON=COMMAND runs
# another Python.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dense="$1" out="$2" tokens="$3"
shift 3
names="" texts=()
for text in "$@"; do
  texts+=(--text "$text") names+="${names:++}${text%%=*}"
done
read -ra experts <<< "${EXPERTS:---experts 8 --active 4 --shared 512}"
python=${PYTHON:-python}
mkdir -p "$out"

# The teacher has no experts that could be divided, and layers with divided experts cannot be compiled.
run() { # NAME FROM WIRING LAYERS
  printf '{"name": "%s", "from": "%s", "wiring": "%s", "layers": "%s", "text": "%s", "tokens": %s, "batch": %s, ' \
    "$1" "$2" "$3" "$4" "$names" "$tokens" "${BATCH:-32768}"
  printf '"lr": 1e-3, "gpus": 2, "untrained": true, "set": {"parallel.ep_size": 2, '
  printf '"parallel.teacher_placement": "replicated", "train.compile": false%s}}\n' "${SET:+, $SET}"
}
heal() { "$python" -m studies.real.heal "$dense" "$out" --cases "$@" "${texts[@]}"; }

[ -e "$out/divided" ] || "$python" -m studies.real.experts "$dense" "$out/divided" "${experts[@]}" "${texts[@]}"
run moe divided standard all > "$out/first.jsonl"
heal "$out/first.jsonl"
[ -e "$out/moe/run/final" ] || exit 1
{
  run moe-farskip-2-29 moe farskip "${LAYERS:-2-29}"
  run moe-farskip-all moe farskip all
  run moe-again moe standard all # what the same tokens do without a conversion
} > "$out/second.jsonl"
heal "$out/second.jsonl" --at-once "${AT_ONCE:-3}"
healed=("$out"/moe/run/final "$out"/moe-again/run/final "$out"/moe-farskip-{2-29,all}/run/final)
if [ -n "${MIRROR:-}" ]; then
  "$python" -m fcsd eval "$out/divided" "${healed[@]}" --baseline "$dense" --data-mirror "$MIRROR" --limit 1000 --gpus 2 \
    --tasks piqa,arc_easy,arc_challenge,hellaswag,openbookqa,winogrande,commonsense_qa --out "$out/eval"
fi
"$python" -m fcsd chat "$out/moe-farskip-2-29/run/final" --gpus 1 --max-new-tokens 48 --json > "$out/answers.jsonl"
