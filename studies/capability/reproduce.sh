#!/usr/bin/env bash
# FarSkip's experiments on quality, with the bundled teacher, in pieces of at most ten minutes: text to heal on, choice
# of batch and rate, training, evaluation under the suite `strict`, and studies/capability/CAPABILITY.md from the stored results.
# Usage: studies/capability/reproduce.sh WORK STUDY...      one piece of work; start it again until nothing is left
#        studies/capability/reproduce.sh page               studies/capability/CAPABILITY.md from benchmarks/results/capability.jsonl
#   WORK  keeps texts, runs and evaluations between pieces. A piece that finds no WORK repeats the runs that had not
#         ended, and no others.
#   STUDY table-1, annealed (its rows of annealed wiring), text (the kinds of text), recovery (over tokens), table-2,
#         figure-3, early-stop, anneal, chosen (layers), distance (of two sub-blocks),
#         scratch (training from random weights), on-policy (text that the models wrote), tokens (the
#         teacher's token ids); for a dense TEACHER also table-4 (Ladder's) and desync (converted and healed); larger
#         (for the TEACHER moe_64)
# Every model and every sweep that ends adds a line to NEW. Append these to benchmarks/results/capability.jsonl, which the
# next piece reads: runs that are in either file are not repeated.
# Environment: NEW=WORK/new.jsonl  MINUTES=9  UP_TO=1 (the largest share of the teacher's
#   tokens of a run)  PROCESSES=8 (models at a time, on all GPUs)  GPUS=1  DEVICE=cuda  PYTHON=python3
#   SET= (settings of all runs on at least SET_FROM of the tokens, for speed: train.graph=true)  SET_FROM=0.05
#   TEXTS_ONLY= (1 writes the texts of the studies and trains nothing)
#   LIMIT=all (questions of each benchmark; with fewer, the results are a trial, of which no page is made)
#   SWEEP_STEPS=50 (optimizer steps of each trial of a sweep)
#   TEACHER_TOKENS=1669595136 (both runs of the teacher's training)  TEACHER_TEXT=runs/teacher/train.jsonl
#   (studies/teacher/corpus.py writes it)  OTHER_TEXT=the installed Python packages
# Another teacher: TEACHER=DIR (studies/teacher/train.py --layout llama or qwen3_moe) with TEACHER_TOKENS (its last line
#   says them), WIRING=farskip or ladder, and STORED=benchmarks/results/capability_NAME.jsonl for its results; `page` writes
#   PAGE=studies/capability/CAPABILITY.md from STORED
# It needs no network. benchmarks/carried/lease.sh carries what a machine without one lacks, and trains the other teachers.
# It has run on four H200s, with six or seven models at a time on each GPU. Commands are forks of one process that has
# imported the libraries. If a fork cannot use the GPU, the script says so and starts ordinary processes. The study
# on-policy took one H200 555 s.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || { sed -n '4,25s/^# *//p' "$0" >&2; exit 2; }
python="${PYTHON:-python3}" stored="${STORED:-benchmarks/results/capability.jsonl}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ "$1" = page ]; then
  exec "$python" -m studies.capability.report --results "$stored" --page "${PAGE:-studies/capability/CAPABILITY.md}"
fi
[ $# -gt 1 ] || { sed -n '4,25s/^# *//p' "$0" >&2; exit 2; }
work="$1"
shift
exec "$python" -m studies.capability.work "$@" --work "$work" --new "${NEW:-$work/new.jsonl}" --results "$stored" \
  --minutes "${MINUTES:-9}" --up-to "${UP_TO:-1}" --processes "${PROCESSES:-8}" --gpus "${GPUS:-1}" --device "${DEVICE:-cuda}" \
  --teacher-tokens "${TEACHER_TOKENS:-1669595136}" ${TEACHER_TEXT:+--teacher-text "$TEACHER_TEXT"} \
  ${OTHER_TEXT:+--other-text "$OTHER_TEXT"} ${TEACHER:+--teacher "$TEACHER"} --wiring "${WIRING:-farskip}" \
  ${LIMIT:+--limit "$LIMIT"} ${SWEEP_STEPS:+--sweep-steps "$SWEEP_STEPS"} --set-from "${SET_FROM:-0.05}" ${TEXTS_ONLY:+--texts-only} \
  $(for setting in ${SET:-}; do echo --set "$setting"; done)
