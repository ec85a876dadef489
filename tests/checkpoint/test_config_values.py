"""Values of config.json that no tensor backs, and keys that are no settings, are refused before a model is built."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from gate import edit, open_base, refused

from fcsd.checkpoint import inspect_checkpoint
from fcsd.convert import convert_checkpoint

LONG = [1.0] * 1000


def longrope(short: list[float], long: list[float]) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}
    return {"rope_parameters": {**rope, "short_factor": short, "long_factor": long}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_labels": 2_000_000_000}, "num_labels is '2000000000', not a whole number from 0 to 10000"),
        ({"vision_config": {"num_labels": 2_000_000_000}}, "num_labels is '2000000000'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is 'True', not false"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention is 'all'"),
        ({"num_labels": -1}, "num_labels is '-1'"),
        ({"id2label": {str(i): "x" for i in range(10_001)}}, "id2label is a table of 10001, not a table of at most"),
        ({"label2id": ["x"]}, "label2id is \"['x']\", not a table of at most 10000 labels"),
        ({"table": {str(i): [i] for i in range(60_000)}}, "config.json: holds more than 100000 values"),
        ({"partial_rotary_factor": 1e12}, "partial_rotary_factor is '1000000000000.0'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1e12}}, "partial_rotary_factor is"),
        ({"dtype": "int8"}, "dtype is 'int8', not one of float64"),
        ({"torch_dtype": "nn"}, "torch_dtype is 'nn', not one of float64"),
        ({"return_dict": "no"}, "return_dict is 'no', not true or false"),
        ({"torchscript": True}, "torchscript is 'True', not false"),
        (longrope([1.0] * 8, LONG), "a short_factor and a long_factor of different lengths"),
        (longrope(LONG, LONG), "transformers cannot build this config.json"),
        ({"to_dict": 1}, "the key 'to_dict', which is no setting"),
        ({"attribute_map": {"hidden_size": "vocab_size"}}, "the key 'attribute_map', which is no setting"),
        ({"sub_configs": {"text_config": "x"}}, "config.json"),
    ],
)
@pytest.mark.parametrize("call", [open_base, inspect_checkpoint])
def test_values(model: Path, change: dict[str, Any], reason: str, call) -> None:
    edit(model / "config.json", lambda config: config.update(change))
    refused(model, reason, call=call)


def test_settings_that_say_what_is_so_anyway_are_accepted(model: Path) -> None:
    usual = {"num_labels": 2, "return_dict": True, "torchscript": False, "torch_dtype": "torch.bfloat16"}
    edit(model / "config.json", lambda config: config.update(usual, partial_rotary_factor=1.0))
    assert open_base(str(model)).comparison.problems() == {}


def test_a_model_that_builds_and_does_not_run_is_bad_input(tmp_path: Path) -> None:
    """Whatever no check covers ends in one line and exit code 3, and leaves nothing behind."""
    model = tmp_path / "model"
    tiny.model("deepseek_v2", topk_method="x").save_pretrained(model)
    refused(model, "transformers cannot run this model", call=lambda path: convert_checkpoint(path, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((model / "config.json").read_text())["topk_method"] == "x"
