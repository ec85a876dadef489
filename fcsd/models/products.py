"""The names under which families of models are published, and their ``model_type``: people know the former.

The table serves error messages and docs/reference/architectures.md. What fcsd supports is in ``archs.py`` alone.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from ..errors import BadInputError
from .archs import ARCHS

# (pattern of a model's name in lower case, the family's name, its model_type); the first row that matches counts
PRODUCTS = (
    (r"kimi-?k2\.[5-7]", "Kimi-K2.5 to -K2.7 in bf16", "kimi_k25"),
    (r"kimi-?k2", "Kimi-K2; its layers are those of deepseek_v3", "kimi_k2"),
    (r"kimi-?linear", "Kimi-Linear", "kimi_linear"),
    (r"deepseek-?v3\.2", "DeepSeek-V3.2", "deepseek_v32"),
    (r"deepseek-?(v3|r1)(?!-distill)", "DeepSeek-V3, -R1", "deepseek_v3"),
    (r"instella-moe", "Instella-MoE, trained with FarSkip", "deepseek_v3"),
    (r"deepseek-?(coder-?)?v2(?!\d)", "DeepSeek-V2, -V2-Lite", "deepseek_v2"),
    (r"glm-?4\.5v", "GLM-4.5V", "glm4v_moe"),
    (r"glm-?4\.1v", "GLM-4.1V", "glm4v"),
    (r"glm-?4\.[56](?!v)", "GLM-4.5, GLM-4.6", "glm4_moe"),
    (r"glm-?5(?!.*v)", "GLM-5", "glm_moe_dsa"),
    (r"glm-?4\.7-flash", "GLM-4.7-Flash", "glm4_moe_lite"),
    (r"glm-4-9b.*-hf|glm-edge-\d", "GLM-4-9B, GLM-Edge", "glm"),
    (r"minimax-m3", "MiniMax-M3", "minimax_m3_vl"),
    (r"minimax-m2", "MiniMax-M2", "minimax_m2"),
    (r"mimo-v2-flash", "MiMo-V2-Flash", "mimo_v2_flash"),
    (r"dots\.llm1", "dots.llm1", "dots1"),
    (r"ernie-4\.5-\d+b-a\d", "ERNIE-4.5-21B-A3B, -300B-A47B", "ernie4_5_moe"),
    (r"ernie-4\.5-0\.3b", "ERNIE-4.5-0.3B", "ernie4_5"),
    (r"k-exaone", "K-EXAONE", "exaone_moe"),
    (r"solar-open", "Solar Open", "solar_open"),
    (r"hunyuan-a13b", "Hunyuan-A13B", "hunyuan_v1_moe"),
    (r"hunyuan-[\d.]+b", "Hunyuan-0.5B to -7B", "hunyuan_v1_dense"),
    (r"llava-onevision-qwen2.*-hf", "LLaVA-OneVision of transformers' format (`-hf`)", "llava_onevision"),
    (r"llava-(v1\.6|next)(?!-video).*-hf", "LLaVA-NeXT (LLaVA 1.6) of transformers' format (`-hf`)", "llava_next"),
    (r"mistral-(7b|nemo)", "Mistral 7B, Mistral Nemo", "mistral"),
    (r"gemma-\d+b|codegemma", "Gemma, CodeGemma", "gemma"),
    (r"gemma-4(?!.*assistant)", "Gemma 4", "gemma4"),
    (r"gemma-3-(270m|1b)", "Gemma 3 270M, 1B", "gemma3_text"),
    (r"gemma-3-\d+b", "Gemma 3 4B, 12B, 27B", "gemma3"),
    (r"phi-?3(\.5)?-(mini|medium)|phi-?4(?!.*(flash|multimodal|vision))", "Phi-3, Phi-4", "phi3"),
    (r"(ai21-)?jamba", "Jamba", "jamba"),
    (r"nemotron-(h-\d|3-|nano-\d+b-v2)(?!.*(vl|omni|embed))", "Nemotron-H, Nano 2, Nemotron 3", "nemotron_h"),
    (r"nemotron-(4|mini)", "Nemotron-4, Nemotron-Mini", "nemotron"),
    (r"olmo-hybrid", "OLMo-Hybrid", "olmo_hybrid"),
    (r"olmo-[17]b.*-hf", "OLMo 1", "olmo"),
    (r"starcoder2", "StarCoder2", "starcoder2"),
    (r"granite-4\.", "Granite 4.0", "granitemoehybrid"),
    (r"lfm2(\.5)?-vl-", "LFM2-VL", "lfm2_vl"),
    (r"lfm2(\.5)?-\d+b-a\d", "LFM2-8B-A1B, -24B-A2B", "lfm2_moe"),
    (r"lfm2(\.5)?-[\d.]+[bm]", "LFM2", "lfm2"),
    (r"trinity-(nano|mini|large)", "Trinity", "afmoe"),
    (r"phi-3\.5-moe", "Phi-3.5-MoE", "phimoe"),
    (r"a\.x-k1", "A.X K1", "axk1"),
    (r"a\.x-k2", "A.X K2", "axk2"),
    (r"ling-3", "Ling 3.0", "bailing_hybrid"),
    (r"step-3\.7", "Step-3.7", "step3p7"),
    (r"smollm3", "SmolLM3", "smollm3"),
    (r"seed-oss", "Seed-OSS", "seed_oss"),
    (r"helium-1", "Helium 1", "helium"),
    (r"youtu-llm", "Youtu-LLM", "youtu"),
    (r"qwen-?2\.5-?vl", "Qwen2.5-VL", "qwen2_5_vl"),
    (r"qwen-?2-?vl", "Qwen2-VL", "qwen2_vl"),
    (r"internvl.*-hf", "InternVL of transformers' format (`-hf`)", "internvl"),
    (r"smolvlm2", "SmolVLM2", "smolvlm"),
    (r"idefics3|smolvlm(?!2)", "Idefics3, SmolVLM", "idefics3"),
    (r"qwen3-?vl(?!.*(-a\d+b|embedding|reranker))", "Qwen3-VL", "qwen3_vl"),
    (r"qwen3-?vl(?!.*(embedding|reranker)).*-a\d+b", "Qwen3-VL-30B-A3B, -235B-A22B", "qwen3_vl_moe"),
    (r"qwen3\.[56](?!.*(embedding|reranker)).*-a\d+b", "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B", "qwen3_5_moe"),
    (r"qwen3\.[56](?!.*(embedding|reranker|-a\d+b))", "Qwen3.5, Qwen3.6", "qwen3_5"),
    (r"qwen3.*next", "Qwen3-Next", "qwen3_next"),
    (r"qwen3(?!\.\d)(?!.*(vl|omni)).*-a\d+b", "Qwen3-30B-A3B, -235B-A22B", "qwen3_moe"),
    (r"qwen3(?![.\d])(?!.*(vl|omni|embedding|reranker))", "Qwen3", "qwen3"),
    (r"qwen1\.5-moe|qwen2-57b-a14b", "Qwen1.5-MoE, Qwen2-57B-A14B", "qwen2_moe"),
    (r"qwen-?2(\.5)?(?![.\d])(?!.*(vl|omni|audio))", "Qwen2, Qwen2.5", "qwen2"),
    (
        r"mistral-small-(3\.[12]|4)|magistral-small-25|ministral-3-",
        "Mistral-Small-3.1, -3.2, -4, Magistral-Small, Ministral 3",
        "mistral3",
    ),
    (r"mixtral", "Mixtral", "mixtral"),
    (r"olmoe", "OLMoE", "olmoe"),
    (r"gpt-?oss", "gpt-oss", "gpt_oss"),
    (r"llama-?4", "Llama 4", "llama4"),
    (r"llama-?[23](?!.*vision)", "Llama 2, Llama 3", "llama"),
)


def family(model_type: str) -> str:
    """The name of the family in brackets, after a blank; empty for a type that the table does not have."""
    named = product(model_type)
    return f" ({named})" if named else ""


def product(model_type: str) -> str | None:
    """The names under which models of a type are published; None for a type that the table does not have."""
    return next((name for _, name, known in PRODUCTS if known == model_type), None)


def nearest(model_type: str, architectures: Iterable[str] = ()) -> str:
    """What a message about an unsupported type ends with: the supported type whose name is closest; may be empty.

    Args:
        architectures: the classes that config.json names, which are compared where no type has a close name.
    """
    classes = {arch.causal_lm: name for name, arch in ARCHS.items()}
    close = get_close_matches(model_type, ARCHS, 1, 0.5)
    close = close or [classes[near] for one in architectures for near in get_close_matches(one, classes, 1, 0.8)]
    return f"; the supported type with the closest name is {close[0]}" if close else ""


def unknown_type(model_type: str, architectures: Iterable[str] | None, where: str = "") -> BadInputError:
    """The error of a type that no row has, whose hint lists those that have one; see ``nearest``."""
    text = f"{where}model_type {model_type!r}{family(model_type)} is not supported"
    known = ", ".join(f"{name}{family(name)}" for name in ARCHS)
    hint = f"Supported: {known}. docs/adding_an_architecture.md says how to add one."
    return BadInputError(text + nearest(model_type, architectures or ()), hint)


def product_hint(name: str) -> str:
    """The start of a hint for a model that was not found, if its name is that of a known family; otherwise empty."""
    last = name.rpartition("/")[2].lower()
    for pattern, _, model_type in PRODUCTS:
        if re.search(rf"(?:^|[-_])(?:{pattern})", last):
            known = "supports" if model_type in ARCHS else "does not support"
            return f"Models of this name have the model_type {model_type}{family(model_type)}, which fcsd {known}. "
    return ""
