#!/usr/bin/env bash
# Expert-parallel distillation at full width on random weights: a save at step 5, SIGKILL, a resume, ten steps in all.
# Usage: OUT=DIR benchmarks/distill/resume.sh [GPUS [LAYERS [SHAPE [SEQUENCE]]]]      needs no network, no installation
# Scratch files, up to 35 bytes a parameter, go to TMPDIR; in memory (TMPDIR=/dev/shm) saves do not wait for a disk.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1
gpus="${1:-4}" layers="${2:-8}" shape="${3:-deepseek-v2-lite}" seq="${4:-4096}"
scratch="$(mktemp -d)" && trap 'rm -rf "$scratch"' EXIT
mkdir -p "${OUT:?set it to a directory for the results}"
say() { echo "==== $1 ($SECONDS s)"; }
say "a random $shape of $layers layers, and its conversion"
python3 -m benchmarks.random_checkpoint "$shape" "$scratch/teacher" --layers "$layers" --tokenizer assets/teacher
python3 -m fcsd convert "$scratch/teacher" "$scratch/student" --wiring farskip --no-check
cat > "$scratch/recipe.yaml" << YAML
name: $shape-$layers
model: $scratch/student
output_dir: $scratch/run
data: {sources: [{path: assets/corpus/held_out.jsonl}], seq_len: $seq}
objective: {kl: 1.0, sft: 1.0}
train: {batch_tokens: $((2 * gpus * seq)), micro_batch_size: 1, steps: 10, log_every: 1}
optim: {lr: 1e-4, warmup_steps: 2}
parallel: {zero_stage: 2, ep_size: $gpus}
checkpoint: {every_steps: 5}
YAML
python3 -m fcsd plan "$scratch/recipe.yaml" --gpus "$gpus" > "$OUT/plan.txt" 2>&1 & planner=$!
run_until() { # LOG PATTERN FILE: start the run, and SIGKILL every process of it once FILE has PATTERN
  python3 -m fcsd distill "$scratch/recipe.yaml" --gpus "$gpus" 2> "$OUT/$1" & launcher=$!
  until grep -qs "$2" "$3"; do kill -0 "$launcher" || { cat "$OUT/$1"; exit 1; }; sleep 0.1; done
  kill -KILL $(awk -v p="$launcher" '$4 == p { print $1 }' /proc/[0-9]*/stat 2> /dev/null) "$launcher" || true
  wait "$launcher" || du -sh "$scratch"/run/checkpoints/step-5
}
say "five steps and a checkpoint"
run_until first.log seal "$scratch/run/checkpoints/step-5/MANIFEST.json"
say "killed; resumed, to the tenth step but not its checkpoint"
run_until second.log '"step": 10,' "$scratch/run/metrics.jsonl"
cp "$scratch/run/metrics.jsonl" "$OUT"
cat "$OUT"/{first,second}.log
wait "$planner" || true
cat "$OUT/plan.txt"
say "done"
