"""``fcsd export --quantise``: what is scaled and what is left out, what is refused, and what llm-compressor makes.

Tests that run llm-compressor are nightly: it admits no transformers as new as the one in constraints.txt, and runs
beside it (``pip install --target DIR --no-deps llmcompressor==0.14.0.1 compressed-tensors==0.19.0 loguru``).
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from fcsd import extras
from fcsd.checkpoint import read_object
from fcsd.cli.main import app
from fcsd.errors import BadInputError, ConfigError
from fcsd.export.final import export_model
from fcsd.export.quantise import METHODS, check_method, group_size, ignored, quantise_model, smoothed
from fcsd.export.reload import RECORD, check_record
from fcsd.models.archs import ARCHS
from fcsd.models.build import converted_config, load_model, model_classes, register, wire
from fcsd.models.export_template import render
from fcsd.models.wiring import Wiring

ALL = (0, 1, 2, 3)
COMPRESSES = pytest.mark.skipif(find_spec("llmcompressor") is None, reason="llmcompressor is not installed beside this")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("llama", {"input_layernorm": QKV, "post_attention_layernorm": GATED, "mlp.up_proj": ("mlp.down_proj",)}),
        (  # its norm behind the attention has the name of llama's norm before the MLP
            "gemma3_text",
            {"input_layernorm": QKV, "pre_feedforward_layernorm": GATED, "mlp.up_proj": ("mlp.down_proj",)},
        ),
        ("olmo2", {"mlp.up_proj": ("mlp.down_proj",)}),  # its norms have no reader: they stand behind the sub-blocks
        ("qwen3_moe", {"input_layernorm": QKV}),  # a router and routed experts read the other norm
        (
            "qwen2_moe",
            {"input_layernorm": QKV, "mlp.shared_expert.up_proj": ("mlp.shared_expert.down_proj",)},
        ),
    ],
)
def test_what_is_scaled_is_read_by_those_layers_alone(arch: str, expected: dict) -> None:
    model = wire(tiny.model(arch), Wiring("ladder", ALL))
    inside = "model.layers.1."
    found = {
        read.removeprefix(inside): tuple(path.removeprefix(inside) for path in readers)
        for read, readers in smoothed(model).items()
        if read.startswith(inside)
    }
    assert found == expected


def test_an_activation_between_up_and_down_is_noticed() -> None:
    model = tiny.model("llama")
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(torch.tanh(mlp.up_proj(x)))
    assert not any(read.endswith("up_proj") for read in smoothed(model))


def test_heads_and_gates_of_experts_stay() -> None:
    gates = [f"model.layers.{n}.mlp.shared_expert_gate" for n in ALL]
    assert ignored(tiny.model("qwen2_moe")) == [*gates, "lm_head"]
    vision = ignored(tiny.model("qwen3_vl"))
    assert "lm_head" in vision and any("visual" in path for path in vision)
    assert not any(".language_model." in path for path in vision)


def test_groups_divide_the_inputs_of_all_layers() -> None:
    assert group_size(tiny.model("llama"), ["lm_head"]) == 64
    assert group_size(tiny.model("llama", intermediate_size=96), ["lm_head"]) == 32
    with pytest.raises(BadInputError, match=r"no group of 16 inputs or more divides the layers' widths \[64, 100\]"):
        group_size(tiny.model("llama", intermediate_size=100), ["lm_head"])


@pytest.mark.parametrize(
    ("method", "text", "why"),
    [
        ("INT3", None, "there is no such method"),
        ("AWQ", None, "needs a text"),
        ("FP8_DYNAMIC", Path("text.jsonl"), "reads no text"),
        (None, Path("text.jsonl"), "which is not given"),
    ],
)
def test_what_does_not_go_together_is_refused(method: str | None, text: Path | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_method(method, text)


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "llmcompressor" else object())
    found = CliRunner().invoke(app, ["export", "model", str(tmp_path / "out"), "--quantise", "W4A16"])
    assert found.exit_code == 2
    assert found.stderr == "error: export --quantise needs llmcompressor: pip install 'fcsd[quantise]'\n"


def converted(arch: str, out: Path, wiring: Wiring, dtype: torch.dtype = torch.bfloat16, **changes: int) -> Path:
    """A tiny converted directory, with a tokenizer of the bundled teacher."""
    register()  # or experts would be saved as transformers holds them
    base = tiny.model(arch, dtype=dtype, **changes)
    config = converted_config(base.config, wiring.to_block())
    own = ARCHS[base.config.model_type]
    config.auto_map = own.auto_map
    model = model_classes(base.config.model_type)["AutoModelForCausalLM"](config).to(dtype)
    model.load_state_dict(base.state_dict())
    model.save_pretrained(out)
    for name, text in render(own).items():
        (out / name).write_text(text)
    teacher = Path(__file__).parents[2] / "assets/teacher"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((teacher / name).read_bytes())
    return out


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    letters = [" ".join("abcdefgh"[(n * m) % 8] for m in range(80)) for n in range(24)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in letters))
    return file


@pytest.mark.nightly
@COMPRESSES
@pytest.mark.parametrize(
    ("arch", "method", "calibrated"),
    [
        ("llama", "W4A16", True),
        ("llama", "W4A16", False),
        ("llama", "AWQ", True),
        ("llama", "W8A8", True),
        ("llama", "FP8_DYNAMIC", False),
        ("llama", "FP8_BLOCK", False),
        ("llama", "NVFP4A16", False),
        ("gemma3_text", "W8A8", True),
        ("qwen3_moe", "W4A16", True),
        ("qwen3_moe", "AWQ", True),
        ("qwen3_moe", "FP8_DYNAMIC", False),
    ],
)
def test_a_quantised_export_loads_without_fcsd(
    arch: str, method: str, calibrated: bool, text: Path, tmp_path: Path
) -> None:
    # The tokenizer of the text has more words than the other tiny models.
    wide = dict(hidden_size=128, intermediate_size=256, num_key_value_heads=4, vocab_size=4096)
    source = converted(arch, tmp_path / "source", Wiring("ladder", (1, 2, 3)), **wide)
    out = export_model(source, tmp_path / "out", quantise=method, calibration=text if calibrated else None)
    config = read_object(out / "config.json")
    assert (
        config["fcsd"]["wiring"] == "ladder" and config["quantization_config"]["quant_method"] == "compressed-tensors"
    )
    assert config["auto_map"]["AutoModelForCausalLM"].startswith("modeling_fcsd.")
    assert METHODS[method].scheme in (out / "README.md").read_text()
    assert (out / RECORD).is_file()
    check_record(out)
    sizes = [sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (source, out)]
    assert sizes[1] < sizes[0]
    ids = tiny.tokens()
    with torch.no_grad():
        plain, rounded = (load_model(folder)(ids).logits.float() for folder in (source, out))
    assert 0 < (rounded - plain).norm() < 0.4 * plain.norm()


@pytest.mark.nightly
@COMPRESSES
@pytest.mark.parametrize(
    "wiring", [Wiring("ladder", ALL), Wiring("farskip", (1, 2, 3)), Wiring("desync-4x", ALL, tp_degree=2)]
)
def test_calibration_passes_through_the_converted_wiring(wiring: Wiring, tmp_path: Path) -> None:
    source = converted("llama", tmp_path / "source", wiring, torch.float32)
    model = load_model(source)
    rows = [tiny.tokens(1, 32, seed)[0] for seed in range(3)]
    last = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers.3." in path]
    seen: dict[str, list[Tensor]] = {}

    def watch(network: nn.Module) -> list:
        hooks = []
        for path, module in network.named_modules():
            if isinstance(module, nn.Linear) and ".layers." in path:
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda _, given, path=path: seen.setdefault(path, []).append(given[0].detach().clone())
                    )
                )
        return hooks

    hooks = watch(model)
    with torch.no_grad():
        for row in rows:
            model(row[None], use_cache=False)
    expected, seen = seen, {}
    for hook in hooks:
        hook.remove()

    # Layers before the last keep their weights, so that every layer must read in calibration what it read above.
    others = [path for path in expected if path not in last]
    from llmcompressor.modifiers.gptq import GPTQModifier

    with pytest.MonkeyPatch.context() as patch:
        weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        step = GPTQModifier(config_groups=groups, ignore=["lm_head", *others])
        patch.setattr("fcsd.export.quantise._modifiers", lambda *_: [step])
        watch(model)
        before = model.get_submodule(last[0]).weight.clone()
        quantise_model(model, source, "W4A16", rows)
    assert not torch.equal(model.get_submodule(last[0]).weight, before), "it did quantise the last layer"
    for path, inputs in expected.items():
        for mine, theirs in zip(inputs, seen[path][: len(rows)], strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@COMPRESSES
def test_what_does_not_fit_is_refused_before_it_is_quantised(tmp_path: Path) -> None:
    source = converted("llama", tmp_path / "source", Wiring("ladder", ALL), torch.float32, vocab_size=4096)
    with pytest.raises(BadInputError, match="NVFP4A16 is read in bf16"):
        export_model(source, tmp_path / "out", quantise="NVFP4A16")
    with pytest.raises(BadInputError, match=r"blocks of \[128, 128\] do not divide its weight \[64, 64\]"):
        export_model(source, tmp_path / "out", quantise="FP8_BLOCK")
    assert not (tmp_path / "out").exists()
