#!/usr/bin/env bash
# Heals a real model on one machine, from the download to the export: convert, plan, distil, evaluate, export.
# Usage: studies/real/checkpoint.sh MODEL OUT [OPTIONS]
#   MODEL                a hub id such as allenai/OLMoE-1B-7B-0924, or a directory with the same files
#   OUT                  the directory for everything that is written; the same command goes on after an interruption
# Options, with their defaults:
#   --tokens 50e6        tokens to distil on
#   --data NAME          a data set of the hub (HuggingFaceFW/fineweb-edu), or a file or folder with a column "text"
#   --subset NAME        configuration of the data set of the hub (sample-10BT)
#   --held-out FILE      a text that is only measured on; with it, the best checkpoint is exported
#   --wiring farskip     what `fcsd convert` takes, as --layers does
#   --layers all
#   --seq-len 2048       tokens of a row
#   --batch-tokens 65536 tokens of an optimizer step
#   --gpus 1             GPUs of the machine
#   --gpu-mem 80         memory of a GPU in GiB, for the plan
#   --tasks NAMES        benchmarks (piqa,arc_easy,arc_challenge,hellaswag)
#   --limit N            only N questions of each benchmark, evenly spread
#   --data-mirror DIR    take the benchmarks from a directory; docs/evaluation.md says how to make it
#   --set KEY=VALUE      override a value of the recipe; repeatable
#   --downloads          list the downloads, for a machine without a network, and stop
#   --dry-run            print the recipe and the commands, and stop
# Installs first what is missing, as scripts/test.sh does. FCSD_VENV=DIR uses another environment than .venv, and
# FCSD=COMMAND another fcsd than that of the environment.
set -euo pipefail
here="$(cd "$(dirname "$0")/../.." && pwd)"
usage() { sed -n '3,23s/^# \{0,1\}//p' "$0" >&2; exit 2; }

model="" out="" tokens=50e6 data=HuggingFaceFW/fineweb-edu subset=sample-10BT held_out="" wiring=farskip layers=all
seq_len=2048 batch_tokens=65536 gpus=1 gpu_mem=80 tasks=piqa,arc_easy,arc_challenge,hellaswag stop=""
sets=() questions=()
while [ $# -gt 0 ]; do
  case "$1" in
    --downloads|--dry-run) stop="${1#--}"; shift; continue ;;
    --help|-h) usage ;;
    --*) [ $# -ge 2 ] || { echo "$1 needs a value" >&2; usage; } ;;
    *) if [ -z "$model" ]; then model="$1"; elif [ -z "$out" ]; then out="$1"; else usage; fi; shift; continue ;;
  esac
  case "$1" in
    --tokens | --data | --subset | --held-out | --wiring | --layers | --seq-len | --batch-tokens | --gpus | --gpu-mem | --tasks)
      name=${1#--}
      printf -v "${name//-/_}" %s "$2" ;;
    --limit) questions+=(--limit "$2") ;;
    --data-mirror) questions+=(--data-mirror "$2") ;;
    --set) sets+=(--set "$2") ;;
    *) echo "there is no option $1" >&2; usage ;;
  esac
  shift 2
done
[ -n "$out" ] || usage

if [ "$stop" = downloads ]; then
  [ -d "$model" ] || echo "hf download $model --exclude '*.bin' '*.pth' '*.gguf'"
  [ -e "$data" ] || echo "hf download $data --repo-type dataset --include '${subset/-//}/*' # or fewer files; then --data FOLDER"
  for task in ${tasks//,/ }; do
    case "$task" in
      piqa) name=baber/piqa ;;
      arc_*) name=allenai/ai2_arc ;;
      hellaswag) name=Rowan/hellaswag ;;
      *) echo "# $task: docs/evaluation.md, 'A mirror of the real benchmarks', lists its data set"; continue ;;
    esac
    echo "hf download $name --repo-type dataset --local-dir mirror/$name # then --data-mirror mirror"
  done | sort -u
  exit
fi

if [ -e "$data" ]; then
  source="{path: \"$data\"}"
else # a row of a data set on the web has more than 500 tokens on average; only so many rows are downloaded
  rows=$(LC_ALL=C awk "BEGIN {printf \"%d\", $tokens / 500 + 1000}")
  source="{path: \"$data\", subset: \"$subset\", format: hf, streaming: true, max_rows: $rows}"
fi
recipe="# Written by studies/real/checkpoint.sh.
name: real-checkpoint
model: \"$out/converted\" # its fcsd block names the teacher
output_dir: \"$out/run\"
data:
  sources: [$source]
  held_out: $([ -n "$held_out" ] && echo "{path: \"$held_out\"}" || echo null)
  seq_len: $seq_len
objective: {kl: 1.0, sft: 0.0}
train:
  tokens: $tokens
  batch_tokens: $batch_tokens
  micro_batch_size: 1
  activation_checkpointing: true
  eval_every: $([ -n "$held_out" ] && echo 100 || echo 0)
optim: {lr: 2e-5, warmup_steps: 10}
parallel: {ep_size: 1, zero_stage: 2}
checkpoint: {every_steps: 0, every_minutes: 30, keep: 1}"

run() { # MADE TITLE COMMAND...; a command whose result MADE exists is not repeated
  local made="$1" title="$2"; shift 2
  if [ -n "$stop" ]; then
    printf '# %s\n' "$title"; printf '%q ' "$@"; printf '\n'
  elif [ -n "$made" ] && [ -e "$made" ]; then
    printf '\n==== %s: done before, %s exists\n' "$title" "$made"
  else
    printf '\n==== %s\n' "$title"; "$@"
  fi
}

if [ -n "$stop" ]; then
  printf '%s\n\n' "$recipe"
else
  mkdir -p "$out"
  if [ -e "$out/recipe.yaml" ] && [ "$(cat "$out/recipe.yaml")" != "$recipe" ]; then
    echo "$out was begun with other options, which $out/recipe.yaml shows. Give the same options, or another OUT." >&2
    exit 2
  fi
  printf '%s\n' "$recipe" > "$out/recipe.yaml"
  if [ -z "${FCSD:-}" ]; then
    cd "$here" && source scripts/venv.sh && cd - > /dev/null
  fi
fi
read -ra fcsd <<< "${FCSD:-fcsd}"

run "$out/converted" "inspect: what the model is" "${fcsd[@]}" inspect "$model"
run "$out/converted" "convert: rewire the model, and prove that nothing else changed" \
  "${fcsd[@]}" convert "$model" "$out/converted" --wiring "$wiring" --layers "$layers"
run "$out/run/final" "plan: memory, hours; if the run does not fit, this ends with the change that does" \
  "${fcsd[@]}" plan "$out/recipe.yaml" --gpus "$gpus" --gpu-mem "$gpu_mem" "${sets[@]}"
run "$out/run/final" "distil $tokens tokens; resumes from the newest checkpoint" \
  "${fcsd[@]}" distill "$out/recipe.yaml" --gpus "$gpus" "${sets[@]}"
run "" "evaluate: the original, its untrained conversion and the healed model; resumes" \
  "${fcsd[@]}" eval "$out/converted" "$out/run/final" --baseline "$model" --untrained "$out/converted" \
  --tasks "$tasks" "${questions[@]}" --gpus "$gpus" --out "$out/run/eval"
run "$out/exported" "export: a directory to give to others, reloaded by a process without fcsd" \
  "${fcsd[@]}" export "$out/run" "$out/exported"
[ -n "$stop" ] || printf '\nThe healed model is %s. Its scores are in %s.\n' "$out/exported" "$out/run/eval/table.md"
