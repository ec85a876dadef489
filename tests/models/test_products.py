"""Names of products: errors translate them into model types, and the walkthrough lists them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fcsd.checkpoint.config_json import read_config
from fcsd.cli.main import app
from fcsd.errors import BadInputError
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of
from fcsd.models.products import PRODUCTS, nearest, product_hint, unknown_type

NAMES = {
    "moonshotai/Kimi-K2-Instruct-0905": "kimi_k2",
    "moonshotai/Kimi-K2.5": "kimi_k25",
    "zai-org/GLM-4.6": "glm4_moe",
    "GLM-4.5-Air": "glm4_moe",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3_moe",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": "qwen3_moe",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "Qwen/Qwen3-VL-2B-Instruct": "qwen3_vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "Qwen/Qwen2-VL-2B": "qwen2_vl",
    "OpenGVLab/InternVL3_5-8B-HF": "internvl",
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": "llava_onevision",
    "llava-hf/llava-v1.6-mistral-7b-hf": "llava_next",
    "llava-hf/llama3-llava-next-8b-hf": "llava_next",
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": "smolvlm",
    "HuggingFaceTB/SmolVLM-256M-Instruct": "idefics3",
    "HuggingFaceM4/Idefics3-8B-Llama3": "idefics3",
    "LiquidAI/LFM2-VL-1.6B": "lfm2_vl",
    "MiniMaxAI/MiniMax-M3": "minimax_m3_vl",
    "mistralai/Mistral-Small-4-119B-2603": "mistral3",
    "Qwen/Qwen3-VL-30B-A3B": "qwen3_vl_moe",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe",
    "Qwen/Qwen3.6-27B": "qwen3_5",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen2-57B-A14B": "qwen2_moe",
    "zai-org/GLM-4.7-Flash": "glm4_moe_lite",
    "zai-org/glm-4-9b-chat-hf": "glm",
    "MiniMaxAI/MiniMax-M2": "minimax_m2",
    "XiaomiMiMo/MiMo-V2-Flash": "mimo_v2_flash",
    "rednote-hilab/dots.llm1.inst": "dots1",
    "baidu/ERNIE-4.5-21B-A3B-PT": "ernie4_5_moe",
    "baidu/ERNIE-4.5-0.3B-PT": "ernie4_5",
    "LGAI-EXAONE/K-EXAONE-236B-A23B": "exaone_moe",
    "upstage/Solar-Open-100B": "solar_open",
    "tencent/Hunyuan-A13B-Instruct": "hunyuan_v1_moe",
    "tencent/Hunyuan-7B-Instruct": "hunyuan_v1_dense",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral",
    "google/gemma-7b-it": "gemma",
    "google/gemma-4-26b-a4b-it": "gemma4",
    "google/gemma-4-E2B-it": "gemma4",
    "google/gemma-3-1b-it": "gemma3_text",
    "google/gemma-3-4b-it": "gemma3",
    "microsoft/Phi-3.5-mini-instruct": "phi3",
    "microsoft/phi-4": "phi3",
    "nvidia/Nemotron-Mini-4B-Instruct": "nemotron",
    "amd/Instella-MoE-16B-A3B-Think": "deepseek_v3",
    "ai21labs/AI21-Jamba-1.5-Mini": "jamba",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_h",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "nemotron_h",
    "allenai/OLMo-7B-hf": "olmo",
    "allenai/Olmo-Hybrid-7B": "olmo_hybrid",
    "bigcode/starcoder2-15b": "starcoder2",
    "HuggingFaceTB/SmolLM3-3B": "smollm3",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi_linear",
    "zai-org/GLM-5": "glm_moe_dsa",
    "ibm-granite/granite-4.0-h-tiny": "granitemoehybrid",
    "LiquidAI/LFM2-8B-A1B": "lfm2_moe",
    "LiquidAI/LFM2-1.2B": "lfm2",
    "arcee-ai/Trinity-Mini": "afmoe",
    "microsoft/Phi-3.5-MoE-instruct": "phimoe",
    "skt/A.X-K1": "axk1",
    "skt/A.X-K2-Light": "axk2",
    "inclusionAI/Ling-3.0-Flash": "bailing_hybrid",
    "zai-org/GLM-4.5V": "glm4v_moe",
    "zai-org/GLM-4.1V-9B-Thinking": "glm4v",
    "mistralai/Ministral-3-8B-Base-2512": "mistral3",
    "stepfun-ai/Step-3.7-Flash": "step3p7",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek_v2",
    "deepseek-ai/DeepSeek-V3.1": "deepseek_v3",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek_v32",
    "deepseek-ai/DeepSeek-R1": "deepseek_v3",
    "meta-llama/Meta-Llama-3-8B": "llama",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4",
    "openai/gpt-oss-20b": "gpt_oss",
    "allenai/OLMoE-1B-7B-0924": "olmoe",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "mistral3",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral",
}
OTHERS = ["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen/Qwen3-VL-Embedding-2B"]
OTHERS += ["google/gemma-2-9b", "microsoft/Phi-4-mini-flash-reasoning", "zai-org/GLM-4-9B-0414"]
OTHERS += ["allenai/OLMo-2-1124-7B", "zai-org/GLM-4.6V", "runs/mine/final", "teacher"]
OTHERS += ["meta-llama/Llama-3.2-11B-Vision", "Qwen/Qwen3.5-35B-A3B-Reranker"]
OTHERS += ["llava-hf/LLaVA-NeXT-Video-7B-hf", "lmms-lab/llava-v1.6-34b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_translated(name: str) -> None:
    hint = product_hint(name)
    assert f"have the model_type {NAMES[name]} (" in hint
    assert ("fcsd supports" in hint) == (NAMES[name] in ARCHS)


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_not(name: str) -> None:
    assert product_hint(name) == ""


def test_every_supported_type_is_in_the_hint_with_its_product() -> None:
    for model_type in ARCHS:
        named = any(known == model_type for _, _, known in PRODUCTS)
        assert re.search(rf"(: |, ){model_type}{r' [(]' if named else ''}", str(unknown_type("other", None).hint))


def test_inspect_and_plan_translate_a_name_that_is_no_model_here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for command in (["inspect", "Kimi-K2"], ["plan", "tiny", "--set", "model=moonshotai/Kimi-K2", "--gpus", "1"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 3
        assert "model_type kimi_k2 (Kimi-K2; its layers are those of deepseek_v3), which fcsd does" in done.stderr


def test_an_unsupported_type_is_named_with_its_family_and_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "architectures": ["KimiForCausalLM"]}))
    for command in (["inspect", str(tmp_path)], ["plan", "tiny", "--set", f"model={tmp_path}", "--gpus", "1"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 3
        assert "model_type 'kimi_k2' (Kimi-K2; its layers are those of deepseek_v3) is not supported" in done.stderr
        assert "glm4_moe (GLM-4.5, GLM-4.6)" in done.stderr


@pytest.mark.parametrize(
    ("model_type", "architecture", "near"),
    [
        ("deepseek_v4", None, "deepseek_v"),
        ("qwen4_moe", None, "qwen"),
        ("zz_new", "Qwen3MoeForCausalLM", "qwen3_moe"),
    ],
)
def test_the_supported_type_with_the_closest_name_is_named(
    model_type: str, architecture: str | None, near: str, tmp_path: Path
) -> None:
    config = {"model_type": model_type} | ({"architectures": [architecture]} if architecture else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError) as read:
        read_config(tmp_path)
    with pytest.raises(BadInputError) as built:
        arch_of(SimpleNamespace(**{"architectures": None, **config}))  # pyright: ignore[reportArgumentType]
    assert f"closest name is {near}" in str(read.value) and f"closest name is {near}" in str(built.value)


def test_a_type_that_is_close_to_none_is_refused_without_one() -> None:
    assert nearest("bert-generation-xyz", ["Nothing"]) == ""
