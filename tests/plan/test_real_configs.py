"""Published models: their config.json is planned at the published size, or refused with the reason.

``real_configs.json`` has them as their repositories do, one on each line.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fcsd.checkpoint.config_json import read_config
from fcsd.errors import BadInputError
from fcsd.plan.model import MetaModel

CONFIGS = json.loads((Path(__file__).parent / "real_configs.json").read_text())
# Billions of parameters, all and active, of the language model as its makers give them.
SIZES = {
    "Qwen/Qwen3.5-35B-A3B": (35, 3),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": (80, 3),
    "google/gemma-4-26B-A4B": (26, 4),
    "deepseek-ai/DeepSeek-V3.2": (671, 37),
    "zai-org/GLM-5": (744, 40),
    "openai/gpt-oss-20b": (21, 3.6),
    "MiniMaxAI/MiniMax-M2.5": (229, 10),
    "XiaomiMiMo/MiMo-V2-Flash": (309, 15),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (109, 17),
}
REFUSED = {
    "moonshotai/Kimi-K2-Instruct": "Kimi-K2; its layers are those of deepseek_v3",
    "moonshotai/Kimi-K2.5": "the language model alone is quantised",
    "deepseek-ai/DeepSeek-V4-Flash": "the supported type with the closest name is deepseek_v3",
}


def folder(name: str, tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return tmp_path


def test_each_config_is_here_for_something() -> None:
    assert CONFIGS.keys() == SIZES.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", SIZES)
def test_a_published_model_is_planned_at_its_size(name: str, tmp_path: Path) -> None:
    numbers = MetaModel(str(folder(name, tmp_path))).numbers
    total, active = SIZES[name]
    assert numbers.total / 1e9 == pytest.approx(total, rel=0.04)
    assert numbers.active / 1e9 == pytest.approx(active, rel=0.3)  # some leave out the embedding


def test_a_model_whose_experts_were_dequantised_is_planned_at_its_size(tmp_path: Path) -> None:
    """Its makers give a thousand billion parameters, 32 of them active."""
    text = {k: v for k, v in CONFIGS["moonshotai/Kimi-K2.5"]["text_config"].items() if k != "quantization_config"}
    numbers = MetaModel(str(folder("moonshotai/Kimi-K2.5", tmp_path, text_config=text))).numbers
    assert numbers.total / 1e12 == pytest.approx(1, rel=0.04) and numbers.active / 1e9 == pytest.approx(32, rel=0.04)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_model_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """At once, and not after the flag for its code was given."""
    for trust in (False, True):
        with pytest.raises(BadInputError, match="is not supported") as refused:
            read_config(folder(name, tmp_path), trust_remote_code=trust)
        assert REFUSED[name] in str(refused.value)


def test_kimi_k2_is_read_under_the_name_that_its_refusal_gives(tmp_path: Path) -> None:
    path = folder("moonshotai/Kimi-K2-Instruct", tmp_path, model_type="deepseek_v3")
    assert read_config(path, trust_remote_code=True).quantization == "fp8"
    assert MetaModel(str(path)).numbers.total / 1e9 == pytest.approx(1026, rel=0.01)


def test_quantisation_that_config_json_hides_is_found(tmp_path: Path) -> None:
    """A file beside it may name it, which is read, or the part of the language model alone, which is refused."""
    path = folder("zai-org/GLM-5", tmp_path)
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert str(read_config(path).method) == "4-bit floats in groups of 16 (modelopt)"
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(BadInputError, match=r"hf_quant_config.*W4A8_AWQ.*is not supported"):
        read_config(path)
    (path / "hf_quant_config.json").unlink()
    scout = CONFIGS["meta-llama/Llama-4-Scout-17B-16E-Instruct"]
    inner = {**scout["text_config"], "quantization_config": {"quant_method": "compressed-tensors"}}
    (path / "config.json").write_text(json.dumps({**scout, "text_config": inner}))
    with pytest.raises(BadInputError, match="the language model alone is quantised"):
        read_config(path)


def test_a_class_that_is_spelt_in_another_way_is_accepted(tmp_path: Path) -> None:
    """As that of Phi-3.5-MoE, but no class that computes something else."""
    config = {"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).model_type == "phimoe"
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["PhiMoEForSequenceClassification"]}))
    with pytest.raises(BadInputError, match="not \\['PhimoeForCausalLM'\\]"):
        read_config(tmp_path)
