"""Config and tensors that do not go together, or not with themselves: each refused in one line, nothing touched."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sparse_checkpoint
import tiny
from gate import edit, open_base, refused, shards

from fcsd.checkpoint import INDEX, inspect_checkpoint, read_layout
from fcsd.errors import BadInputError

# --- tensors against config (L2)


def rewrite(path: Path, change: Callable[[dict[str, tuple[str, tuple[int, ...]]]], Any]) -> None:
    """Replace the weights by one file of zeros with the changed names, dtypes and shapes."""
    tensors = {name: (t.dtype, t.shape) for name, t in read_layout(path).tensors.items()}
    change(tensors)
    for file in [*shards(path), path / INDEX]:
        file.unlink()
    sparse_checkpoint.write_header(path / "model.safetensors", tensors)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda t: t.pop("model.norm.weight"), ["1 missing (model.norm.weight)"]),
        (lambda t: t.pop("lm_head.weight"), ["1 missing (lm_head.weight)"]),
        (lambda t: t.pop(EXPERT), [f"1 missing ({EXPERT})"]),
        (lambda t: [t.pop(n) for n in list(t) if ".experts.3." in n], ["9 missing", "experts.3.", ", ...)"]),
        (lambda t: t.update(ghost=("F32", (1,))), ["1 unexpected (ghost)"]),
        (lambda t: t.update({"a\n\ud800": ("F32", (1,))}), [r"1 unexpected ('a\n\ud800')"]),
        (lambda t: t.update({EXPERT.replace(".3.", ".8."): t[EXPERT]}), ["1 unexpected", ".experts.8."]),
        (lambda t: t.update({ROUTER: ("F32", (7, 64))}), [ROUTER, "F32 [7, 64], not", "[8, 64]"]),
        (lambda t: t.update({EXPERT: ("F32", (64, 32))}), [EXPERT, "[64, 32], not", "[32, 64]"]),
        (lambda t: t.update({EXPERT: ("U8", (32, 64))}), [EXPERT, "U8 [32, 64], not"]),
        (lambda t: t.update({EXPERT: ("F8_E4M3", (32, 64))}), [EXPERT, "F8_E4M3 [32, 64], not"]),
        (lambda t: t.clear() or t.update(x=("F32", (1,))), ["4 layers, but the files hold only 1 tensors"]),
    ],
)
def test_tensors_that_do_not_match(model, change, reasons):
    rewrite(model, change)
    refused(model, *reasons)
    assert inspect_checkpoint(str(model)).problems if reasons[0][0] != "4" else True


# --- config.json (L5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen4_moe"}, "'qwen4_moe' is not supported; the supported type with the closest name is"),
        ({"model_type": "t5"}, "'t5' is not supported"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": ["llama"]}, "has no model_type"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "architectures is"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "not a list of class names"),
        ({"architectures": ["a\nb"]}, "not a list of class names"),
        ({"model_type": "a\nb"}, "has no model_type"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers is 4.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": [4]}, "num_hidden_layers is [4]"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": 9_999}, "9999 layers, but the files hold only"),
        ({"num_hidden_layers": 5}, "missing (model.layers.4."),
        ({"num_hidden_layers": 3}, "unexpected (model.layers.3."),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 1}, "num_experts_per_tok, 2, exceeds num_experts, 1"),
        ({"num_experts": 7}, "num_experts, 7, is not num_local_experts, 8"),
        ({"num_local_experts": 7}, "unexpected"),
        ({"num_local_experts": 9}, "missing (model.layers.0.mlp.experts.8."),
        ({"num_local_experts": 99_999}, "99999 experts in 4 layers"),
        ({"num_experts_per_tok": -2}, "num_experts_per_tok is -2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok, 9, exceeds num_local_experts, 8"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is null"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"dtype": 0}, "dtype is '0', not one of"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads, 3, does not divide num_attention_heads, 4"),
        ({"hidden_size": 128}, "wrong ("),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers is not a list of layers from 0 to 3"),
        ({"mlp_only_layers": 7}, "mlp_only_layers is not a list"),
        ({"rms_norm_eps": "small"}, "transformers cannot build"),
        ({"hidden_act": "no_such_function"}, "transformers cannot build"),
        ({"layer_types": ["full_attention"] * 9}, "transformers cannot build"),
        ({"rms_norm_eps": float("1e308") * 10}, "Infinity is not a finite number"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "(ValueError: None is no size of a group",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 8}},
            "gptq' (5 bits) is not",
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "0 is no size of a group"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantisation 'bitsandbytes' is not supported"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
            "(W4A8_AWQ) is not",
        ),
        ({"quantization_config": "fp8"}, "quantisation None is not supported"),
        ({"attn_implementation": "org/kernels"}, "asks for code of its own to be run, 'org/kernels'"),
        ({"transformers_weights": "other.safetensors"}, "names weights of its own"),
        ({"_attn_implementation": "org/kernels:fn"}, "asks for code of its own to be run"),
        ({"attn_implementation": {"text_config": ["org/kernels"]}}, "asks for code of its own to be run"),
        ({"nested": [{"experts_implementation": "org/kernels"}]}, "asks for code of its own to be run"),
        ({"fcsd": {"version": 1}}, "do not belong together"),
        ({"model_type": "fcsd_qwen3_moe"}, "do not belong together"),
        ({"model_type": "fcsd_qwen3_moe", "fcsd": {"version": 2}}, "version 2"),
        ({"model_type": "fcsd_qwen3_moe", "fcsd": {"version": 1, "wiring": "farskip"}}, "fcsd block keys differ"),
        ({"farskip": "yes"}, "the farskip keys do not hold"),
    ],
)
def test_config_values(model, change, reason):
    edit(model / "config.json", lambda config: config.update(change))
    refused(model, reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not strict JSON"),
        (b"{", "not strict JSON"),
        (b"[]", "holds a JSON list"),
        (b"null", "holds a JSON NoneType"),
        ('{"model_type": "llama"}'.encode("utf-16"), "not strict JSON"),
        (b'\xef\xbb\xbf{"model_type": "llama"}', "not strict JSON"),
        (b'{"model_type": "llama", "model_type": "qwen3"}', "duplicate key 'model_type'"),
        (b'{"rope_theta": NaN}', "NaN is not a finite number"),
        (b'{"rope_theta": 1e999}', "1e999 is not a finite number"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 32 levels deep"),
        (b" " * (11 << 20) + b"{}", "larger than 10 MB"),
    ],
)
def test_config_text(model, text, reason):
    (model / "config.json").write_bytes(text)
    refused(model, reason)


def test_config_of_a_gigabyte(model):
    with (model / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    refused(model, "larger than 10 MB")


NASTY = (
    None,
    True,
    -1,
    0,
    1,
    3,
    10**30,
    0.5,
    "",
    "x",
    "org/x",
    [],
    [-1],
    ["x"] * 99,
    {},
    {"rope_type": "x"},
    {"x": {}},
)


def check_config_values(model: Path, cases: list[tuple[str, Any]]) -> int:
    """With each key set to each value in turn, the gate opens or says why not, nothing else; returns how often."""
    text = (model / "config.json").read_text()
    opened = 0
    for key, value in cases:
        (model / "config.json").write_text(json.dumps({**json.loads(text), key: value}))
        for call in (open_base, inspect_checkpoint):
            try:
                call(str(model))
                opened += 1
            except BadInputError as error:
                assert "\n" not in str(error), (key, value)
    return opened


def test_any_value_under_any_key(model):
    keys = sorted(json.loads((model / "config.json").read_text()))
    cases = random.Random(0).sample([(key, value) for key in keys for value in NASTY], 150)
    assert check_config_values(model, cases) > 30


@pytest.mark.nightly
@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_every_value_under_every_key(arch, tmp_path):
    tiny.model(arch).save_pretrained(tmp_path)
    keys = sorted(json.loads((tmp_path / "config.json").read_text()))
    keys += ["quantization_config", "farskip", "farskip_start_idx", "fcsd", "text_config", "vision_config", "dtype"]
    check_config_values(tmp_path, [(key, value) for key in keys for value in NASTY])


def test_infinity_is_accepted_where_published_models_have_it(model) -> None:
    """Nemotron's and Mamba 2's steps have no upper limit, which their config.json writes as a literal."""
    edit(model / "config.json", lambda config: config.update(time_step_limit=[0.0, float("inf")]))
    assert "Infinity" in (model / "config.json").read_text()
    assert open_base(str(model)).config.raw["time_step_limit"] == [0.0, float("inf")]
    edit(model / "config.json", lambda config: config.update(time_step_limit=[0.0, float("-inf")]))
    refused(model, "-Infinity is not a finite number")


def test_other_files_have_the_same_limits(model) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))
    assert inspect_checkpoint(model).problems == []
    (model / "generation_config.json").write_text('{"temperature": 1e400}')
    refused(model, "generation_config.json: is not strict JSON (1e400 is not a finite number)")
