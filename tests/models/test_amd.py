"""A model that AMD trained with FarSkip and gated latent attention is what AMD's published file computes.

The oracle is a literal reading of ``modeling_instella_moe.py`` of Instella-MoE. It calls modules of transformers' own
DeepSeek-V3, and has the gate, the two streams and the range of layers written out.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import texts
import tiny
import torch
import torch.distributed as dist
import transformers
from ranks import in_group
from reloads import fork_reloads
from safetensors.torch import load_file, save_file
from studies.formats.simulated_model import SimulatedCommunication, over_formats
from torch import Tensor, nn

from fcsd.checkpoint.inspection import inspect_checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.weights import load_tensor_parallel
from fcsd.errors import BadInputError, ConfigError
from fcsd.export.final import export_model
from fcsd.models.adapters.lora import add_adapters
from fcsd.models.build import load_model, unwired, wire, wiring_of
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.plan.model import MetaModel
from fcsd.serve.vllm.config import base_config

KEYS = [
    {},
    {"farskip_start_idx": 2},
    {"farskip_start_idx": 1, "farskip_end_idx": 2},
    {"attn_only_farskip": True},
    {"mlp_only_farskip": True, "farskip_start_idx": 2, "farskip_end_idx": 1e4},
]


def write(folder: Path, **keys: Any) -> None:
    """A tiny checkpoint as AMD publishes it: DeepSeek-V3's tensors and gates, its type, and AMD's class and keys."""
    tiny.model("deepseek_v3", q_lora_rank=None, initializer_range=0.2).save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    for layer in range(4):
        gate = torch.randn(4 * 16, 64, generator=generator)
        tensors[f"model.layers.{layer}.self_attn.gate_proj.weight"] = gate
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    own = {
        "architectures": ["InstellaMoEForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_instella_moe.InstellaMoEConfig",
            "AutoModelForCausalLM": "modeling_instella_moe.InstellaMoEForCausalLM",
        },
        "farskip": True,
        "gated_attention": True,
    }
    (folder / "config.json").write_text(json.dumps({**config, **own, **keys}))
    (folder / "modeling_instella_moe.py").write_text("raise SystemExit('code of a checkpoint was run')\n")


def gated(attention: Any, gate: Tensor, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    projection, attention.o_proj = attention.o_proj, nn.Identity()
    heads = attention(hidden_states=x, **kwargs)[0]
    attention.o_proj = projection
    return projection(heads * torch.sigmoid(x @ gate.T))


@torch.no_grad()
def oracle(folder: Path, ids: Tensor) -> Tensor:
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    plain = transformers.DeepseekV3Config.from_dict({key: value for key, value in raw.items() if "farskip" not in key})
    model: Any = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, config=plain)
    given: list[dict[str, Any]] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    model(ids, use_cache=False)

    last = min(raw.get("farskip_end_idx", 1e4), len(model.model.layers) - 1)
    residual: Tensor = model.model.embed_tokens(ids)
    without_routed: Tensor | None = None
    for index, layer in enumerate(model.model.layers):
        to_attn, to_mlp = residual, None
        if raw.get("farskip_start_idx", 0) <= index <= last:
            to_attn = residual if without_routed is None or raw.get("mlp_only_farskip") else without_routed
            to_mlp = None if raw.get("attn_only_farskip") else residual
        gate = tensors[f"model.layers.{index}.self_attn.gate_proj.weight"]
        residual = residual + gated(layer.self_attn, gate, layer.input_layernorm(to_attn), given[index])
        x = layer.post_attention_layernorm(residual if to_mlp is None else to_mlp)
        shared = layer.mlp.shared_experts(x) if hasattr(layer.mlp, "experts") else None
        without_routed = None if shared is None else residual + shared
        residual = residual + layer.mlp(x)
    return model.lm_head(model.model.norm(residual))


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: "-".join(keys) or "all")
def test_a_model_of_amd_is_what_its_file_computes(keys: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "amd", **keys)
    report = convert_checkpoint(tmp_path / "amd", tmp_path / "out")
    assert report.parity == 4  # with the wiring off, both are gated DeepSeek-V3
    ids = tiny.tokens()
    model = load_model(tmp_path / "out")
    expected = oracle(tmp_path / "amd", ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        step = model(ids[:, :16], use_cache=True)
        rest = model(ids[:, 16:], past_key_values=step.past_key_values).logits
        torch.testing.assert_close(torch.cat([step.logits, rest], dim=1), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(wire(model, unwired())(ids).logits, expected, atol=1e-2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """AMD's checkpoint and the copy of it that fcsd writes."""
    root = tmp_path_factory.mktemp("amd")
    write(root / "amd")
    convert_checkpoint(root / "amd", root / "out", check=False)
    return root / "amd", root / "out"


def test_the_copy_says_the_wiring_and_has_no_keys_or_code_of_amd(folders: tuple[Path, Path]) -> None:
    amd, out = folders
    assert inspect_checkpoint(amd).problems == [] and "which `fcsd convert` keeps" in inspect_checkpoint(amd).to_text()
    report = inspect_checkpoint(out)
    assert report.problems == []
    assert report.rewired is not None and report.rewired["border"] == "partial" and report.architecture[:4] == "Fcsd"
    assert report.rewired["layers"] == [0, 1, 2, 3] and report.parameters == sum(
        tensor.numel() for tensor in load_file(out / "model.safetensors").values()
    )
    config = json.loads((out / "config.json").read_text())
    assert not any("farskip" in key for key in config) and config["gated_attention"] is True
    assert not list(out.glob("*instella*"))
    assert MetaModel(str(out)).numbers.total == sum(p.numel() for p in load_model(out).parameters())


@pytest.mark.parametrize("how", [{"wiring": "ladder"}, {"layers": "1-2"}, {"variant": "attn-only"}, {"border": "full"}])
def test_its_wiring_cannot_be_changed(folders: tuple[Path, Path], how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained with a wiring of its own"):
        convert_checkpoint(folders[0], tmp_path / "again", **how)


def test_without_the_copy_it_is_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="trained with AMD's farskip keys"):
        load_model(folders[0])
    write(tmp_path / "other", architectures=["OtherForCausalLM"])
    with pytest.raises(BadInputError, match="rewired already, by AMD's farskip keys"):
        convert_checkpoint(tmp_path / "other", tmp_path / "out")
    found = base_config(json.loads((folders[1] / "config.json").read_text()), "there")
    assert found is not None and found["gated_attention"], "the vLLM plugin gives vLLM's attention its gate"


def test_it_is_exported_and_reloads_without_fcsd(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_reloads(monkeypatch)
    export_model(str(folders[1]), tmp_path / "exported")
    with torch.no_grad():
        ids = tiny.tokens()
        expected = oracle(folders[0], ids)
        torch.testing.assert_close(load_model(tmp_path / "exported")(ids).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def _sharded(rank: int, folder: Path) -> Tensor:
    ranks = TensorGroup(dist.group.WORLD, 2, rank)
    model: Any = load_tensor_parallel(folder, dtype=torch.float32, device="cpu", ranks=ranks)
    wire_tensor_parallel(model, wiring_of(model.config), ranks)
    return model(tiny.tokens(), use_cache=False).logits


def test_the_engine_computes_it_on_one_rank_and_on_two(folders: tuple[Path, Path]) -> None:
    amd, out = folders
    expected, alone = oracle(amd, tiny.tokens()), TensorGroup(None, 1, 0)
    model: Any = load_tensor_parallel(out, dtype=torch.float32, device="cpu", ranks=alone)
    wire_tensor_parallel(model, wiring_of(model.config), alone, "none")
    with torch.no_grad():
        torch.testing.assert_close(model(tiny.tokens(), use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    for logits in in_group(2, _sharded, out):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_it_is_distilled_further_with_experts_on_two_ranks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[1], tmp_path / "student")
    texts.tokenizer().save_pretrained(tmp_path / "student")
    recipe = runs.resolved(tmp_path, teacher=str(tmp_path / "student"), train__steps=2, parallel__ep_size=2)
    runs.train(recipe, size=2)
    export_model(str(tmp_path / "run"), tmp_path / "exported")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("student", "exported"))
    assert before.keys() == after.keys()
    gates = [name for name in before if name.endswith("gate_proj.weight") and "self_attn" in name]
    assert len(gates) == 4 and not any(torch.equal(before[name], after[name]) for name in gates)


def test_gradients_with_recomputed_and_compiled_layers_are_the_same(folders: tuple[Path, Path]) -> None:
    """The gate of a step is not that of the step in which a layer was compiled."""
    model: Any = load_model(folders[1]).train()
    batches = [tiny.tokens(seed=1), tiny.tokens(seed=2)]
    expected = [step(model, ids) for ids in batches]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recomputed = [step(model, ids) for ids in batches]
    model.gradient_checkpointing_disable()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    compiled = [step(model, ids) for ids in batches]
    for found in (recomputed, compiled):
        for mine, true in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected[0][1], expected[1][1])


def step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the first gate."""
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), model.model.layers[0].self_attn.gate_proj.weight.grad.clone()


@torch.no_grad()
def test_adapters_and_simulated_ranks_keep_the_gate(folders: tuple[Path, Path]) -> None:
    """They replace the projection in front of which the gate is."""
    model: Any = load_model(folders[1])
    expected = model(tiny.tokens(), use_cache=False).logits
    with over_formats(model, SimulatedCommunication(all_reduce=Tensor.float, tp_degree=2)):
        torch.testing.assert_close(model(tiny.tokens(), use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    paths = {f"model.layers.{layer}.self_attn.o_proj": f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)}
    add_adapters(model, paths, rank=2, alpha=4.0, seed=0)
    torch.testing.assert_close(model(tiny.tokens(), use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
