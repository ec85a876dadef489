"""The names under which families of models are published, and their ``model_type``: people know the former.

The table serves error messages and docs/walkthrough.md. What fcsd supports is in ``archs.py`` alone.
"""

import re

from .archs import ARCHS

# (pattern of a model's name in lower case, the family's name, its model_type); the first row that matches counts
PRODUCTS = (
    (r"kimi-?k2", "Kimi-K2", "kimi_k2"),
    (r"kimi-?linear", "Kimi-Linear", "kimi_linear"),
    (r"deepseek-?v3\.2", "DeepSeek-V3.2", "deepseek_v32"),
    (r"deepseek-?(v3|r1)(?!-distill)", "DeepSeek-V3, -R1", "deepseek_v3"),
    (r"deepseek-?(coder-?)?v2(?!\d)", "DeepSeek-V2, -V2-Lite", "deepseek_v2"),
    (r"glm-?4\.[56](?!v)", "GLM-4.5, GLM-4.6", "glm4_moe"),
    (r"qwen3-?vl(?!.*(-a\d+b|embedding|reranker))", "Qwen3-VL", "qwen3_vl"),
    (r"qwen3-?vl(?!.*(embedding|reranker)).*-a\d+b", "Qwen3-VL-30B-A3B, -235B-A22B", "qwen3_vl_moe"),
    (r"qwen3\.[56](?!.*(embedding|reranker)).*-a\d+b", "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B", "qwen3_5_moe"),
    (r"qwen3\.[56](?!.*(embedding|reranker|-a\d+b))", "Qwen3.5, Qwen3.6", "qwen3_5"),
    (r"qwen3.*next", "Qwen3-Next", "qwen3_next"),
    (r"qwen3(?!\.\d)(?!.*(vl|omni)).*-a\d+b", "Qwen3-30B-A3B, -235B-A22B", "qwen3_moe"),
    (r"qwen3(?![.\d])(?!.*(vl|omni|embedding|reranker))", "Qwen3", "qwen3"),
    (r"qwen1\.5-moe|qwen2-57b-a14b", "Qwen1.5-MoE, Qwen2-57B-A14B", "qwen2_moe"),
    (r"qwen-?2(\.5)?(?![.\d])(?!.*(vl|omni|audio))", "Qwen2, Qwen2.5", "qwen2"),
    (r"mistral-small-3\.[12]|magistral-small-25", "Mistral-Small-3.1, -3.2, Magistral-Small", "mistral3"),
    (r"mixtral", "Mixtral", "mixtral"),
    (r"olmoe", "OLMoE", "olmoe"),
    (r"gpt-?oss", "gpt-oss", "gpt_oss"),
    (r"llama-?4", "Llama 4", "llama4"),
    (r"llama-?[23](?!.*vision)", "Llama 2, Llama 3", "llama"),
)
_LIKE = {"kimi_k2": "deepseek_v3"}  # model_type -> the supported one whose layers it has


def family(model_type: str) -> str:
    """The name of the family in brackets, after a blank; empty for a type that the table does not have."""
    names = [name for _, name, known in PRODUCTS if known == model_type]
    like = f"; its layers are those of {_LIKE[model_type]}" if model_type in _LIKE else ""
    return f" ({names[0]}{like})" if names else ""


def supported() -> str:
    """The supported types with the names of their families, for a hint."""
    return ", ".join(f"{model_type}{family(model_type)}" for model_type in ARCHS)


def product_hint(name: str) -> str:
    """The start of a hint for a model that was not found, if its name is that of a known family; otherwise empty."""
    last = name.rpartition("/")[2].lower()
    for pattern, _, model_type in PRODUCTS:
        if re.search(rf"(?:^|[-_])(?:{pattern})", last):
            known = "supports" if model_type in ARCHS else "does not support"
            return f"Models of this name have the model_type {model_type}{family(model_type)}, which fcsd {known}. "
    return ""
