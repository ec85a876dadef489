"""Converted classes: registered without remote code, saved under the original names, loaded strictly."""

import json
import subprocess
import sys

import pytest
import tiny
import torch
import transformers
from reloads import run_script
from representatives import representatives
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import inspect_checkpoint, read_config
from fcsd.convert import convert_checkpoint
from fcsd.engine.weights import load_tensor_parallel
from fcsd.errors import BadInputError
from fcsd.models.build import (
    LOGITS_ALONE,
    arch_of,
    converted_config,
    decoder_layers,
    load_model,
    model_classes,
    register,
    wire,
)
from fcsd.models.config_keys import cache_keyword
from fcsd.models.wiring import WiredLayer, Wiring
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.weights.random_init import random_model
from fcsd.parallel.weights.saving import write_configs
from fcsd.parity import first_layers
from fcsd.plan.model import MetaModel

ARCHS = list(tiny.CONFIGS)


def converted(model, wiring):
    """A converted model of its own class with the weights of ``model``."""
    config = converted_config(model.config, wiring.to_block())
    twin = model_classes(model.config.model_type)["AutoModelForCausalLM"](config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def names_and_shapes(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("arch", representatives("layer", "moe", "head", of=ARCHS))
def test_save_and_load_are_exact_under_the_original_names(arch, tmp_path):
    register()
    model, ids, wiring = tiny.model(arch), tiny.tokens(), Wiring("farskip", (1, 2, 3))
    twin = converted(model, wiring)
    model.save_pretrained(tmp_path / "base")
    twin.save_pretrained(tmp_path / "twin")
    assert names_and_shapes(tmp_path / "base") == names_and_shapes(tmp_path / "twin")
    base, again = (tiny.aligned(load_model(tmp_path / name)) for name in ("base", "twin"))
    with torch.no_grad():
        assert torch.equal(base(ids).logits, model(ids).logits)
        logits = wire(model, wiring)(ids).logits
        assert torch.equal(twin(ids).logits, logits)
        assert torch.equal(again(ids).logits, logits)
    assert again.config.model_type == f"fcsd_{model.config.model_type}"
    assert [isinstance(layer, WiredLayer) for layer in decoder_layers(again)] == [False, True, True, True]


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v2"])
def test_the_bare_model_is_wired_too(arch, tmp_path):
    register()
    twin, ids = converted(tiny.model(arch), Wiring("ladder", (0, 1, 2, 3))), tiny.tokens()
    twin.save_pretrained(tmp_path)
    bare = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(bare(ids).last_hidden_state, twin.model(ids).last_hidden_state)


def test_experts_are_computed_as_in_the_original():
    """Not one after the other, which takes several host synchronisations for each expert."""
    found = {}
    for arch in ARCHS:
        model = tiny.model(arch)
        twin = converted(model, Wiring("farskip", (0, 1, 2, 3)))
        found[arch] = twin.config.get_text_config()._experts_implementation
        assert found[arch] == model.config.get_text_config()._experts_implementation
    assert found["deepseek_v2"] == found["qwen3_moe"] == "grouped_mm"


def test_desync_survives_a_round_trip(tmp_path):
    register()
    twin, ids = converted(tiny.model("llama"), Wiring("desync-4x", (0, 1, 2, 3), tp_degree=2)), tiny.tokens()
    twin.save_pretrained(tmp_path)
    assert torch.equal(load_model(tmp_path)(ids).logits, twin(ids).logits)


@tiny.with_llama4
def test_llama4_with_vision(tmp_path):
    register()
    model, wiring = tiny.llama4_vision(), Wiring("farskip", (0, 1, 2, 3))
    image = torch.full((1, 4), 250)
    ids = torch.cat([tiny.tokens(1, 5), image, tiny.tokens(1, 6, seed=2)], dim=1)
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    twin = converted(model, wiring)
    twin.save_pretrained(tmp_path)
    with torch.no_grad():
        off = model(input_ids=ids, pixel_values=pixels).logits
        on = wire(model, wiring)(input_ids=ids, pixel_values=pixels).logits
        blind = model(input_ids=ids, pixel_values=torch.zeros_like(pixels)).logits
        assert not torch.equal(on, off) and not torch.equal(on, blind)
        for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
            assert torch.equal(load_model(tmp_path, auto=auto)(input_ids=ids, pixel_values=pixels).logits, on)


AUTO = "import transformers.models.auto.modeling_auto, fcsd"
# transformers imports its Auto classes in the middle of this, to write a docstring
MODEL = "import fcsd; from transformers import DeepseekV2Config"


@pytest.mark.parametrize("order", [AUTO, MODEL])
def test_import_fcsd_is_enough(order, tmp_path):
    twin, ids = converted(tiny.model("deepseek_v2"), Wiring("farskip", (0, 1, 2, 3))), tiny.tokens()
    twin.save_pretrained(tmp_path)
    torch.save((ids, twin(ids).logits), tmp_path / "expected.pt")
    code = f"""{order}
import sys
assert ("torch" in sys.modules) == ({order!r} != "import fcsd")
import torch
from transformers import AutoModelForCausalLM
ids, expected = torch.load({str(tmp_path / "expected.pt")!r})
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert torch.equal(model(ids).logits, expected) and type(model).__module__ == "fcsd.models.build"
"""
    if order == AUTO:  # in a process that imported transformers before it was forked
        (tmp_path / "code.py").write_text(code)
        ended, _, said = run_script([str(tmp_path / "code.py")], tmp_path, str(tmp_path / "modules"))
        assert ended == 0, said
    else:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def saved(tmp_path, arch="deepseek_v2"):
    tiny.model(arch).save_pretrained(tmp_path)
    return load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("arch", ["mixtral", "gpt_oss"])
def test_router_logits_that_the_config_asks_for_do_not_keep_a_batch_from_generating(arch, tmp_path):
    tiny.model(arch, output_router_logits=True).save_pretrained(tmp_path / "asks")
    batch = {"input_ids": torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]])}
    batch["attention_mask"] = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    expected = tiny.model(arch).generate(**batch, max_new_tokens=4, do_sample=False)
    model = load_model(tmp_path / "asks")
    assert torch.equal(model.generate(**batch, max_new_tokens=4, do_sample=False), expected)
    assert len(model(tiny.tokens(), output_router_logits=True).router_logits) == 4


@pytest.mark.parametrize("name", [None, *LOGITS_ALONE])
def test_a_config_that_asks_for_more_than_logits_changes_nothing_and_is_saved_as_it_was(name, tmp_path):
    """Conversion with its proof, the plan, generation, and the configs that a run writes."""
    tiny.model("mixtral").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").unlink()  # transformers makes one of the config
    file, ids = tmp_path / "base" / "config.json", tiny.tokens()
    numbers = MetaModel(str(tmp_path / "base")).numbers
    asked = {name: not LOGITS_ALONE[name]} if name else {}
    file.write_text(json.dumps(written := json.loads(file.read_text()) | asked))
    convert_checkpoint(tmp_path / "base", tmp_path / "out", wiring="farskip")
    assert json.loads((tmp_path / "out" / "config.json").read_text()).items() >= asked.items()
    assert MetaModel(str(tmp_path / "base")).numbers == numbers
    expected = tiny.model("mixtral").generate(ids, max_new_tokens=4, do_sample=False)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "base")
    loaded = load_model(tmp_path / "base", config=config)
    random = random_model(config, dtype=torch.float32, device="cpu", seed=0)
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert loaded.config._attn_implementation == "sdpa"
    for model in (loaded, random):
        assert set(model(ids)) == {"logits", cache_keyword()}
        (folder := tmp_path / str(id(model))).mkdir()
        write_configs(model, folder)
        assert json.loads((folder / "config.json").read_text()) == written
    assert name is None or getattr(config, name) == asked[name]


@pytest.mark.parametrize(
    ("arch", "none"),
    [("qwen2_moe", "shared_expert_intermediate_size"), ("deepseek_v3", "n_shared_experts")],
)
def test_shared_experts_of_width_zero_add_nothing(arch, none, tmp_path):
    model, ids = tiny.model(arch, **{none: 0}), tiny.tokens()
    model.save_pretrained(tmp_path / "base")
    assert inspect_checkpoint(tmp_path / "base").shared_experts == 0
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(load_model(tmp_path / "base")(ids).logits, logits)
        for degree in (1, 2):  # of two ranks, each has half of what is empty
            ranks = TensorGroup(None, degree, 0)
            part = load_tensor_parallel(tmp_path / "base", dtype=torch.float32, device="cpu", ranks=ranks)
            shared = [value for name, value in part.state_dict().items() if "shared_expert" in name]
            assert not any(value.numel() for value in shared if value.ndim == 2 and 0 in value.shape) and shared
        convert_checkpoint(tmp_path / "base", tmp_path / "out", wiring="farskip")  # proves: off is off
        wired = wire(model, Wiring("farskip", (0, 1, 2, 3)))(ids).logits
        assert torch.equal(load_model(tmp_path / "out")(ids).logits, wired)


def test_qwen3_coder_says_by_zero_that_it_has_no_shared_expert(tmp_path):
    model, ids = tiny.model("qwen3_moe"), tiny.tokens()
    model.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shared_expert_intermediate_size": 0}))
    assert inspect_checkpoint(tmp_path / "base").shared_experts == 0
    convert_checkpoint(tmp_path / "base", tmp_path / "out", wiring="ladder")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["shared_expert_intermediate_size"] == 0
    with torch.no_grad():
        logits = wire(model, Wiring("ladder", (0, 1, 2, 3)))(ids).logits
        assert torch.equal(load_model(tmp_path / "out")(ids).logits, logits)


def test_a_missing_expert_is_an_error(tmp_path):
    tensors = saved(tmp_path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInputError, match="conversion"):
        load_model(tmp_path)


def test_a_missing_an_extra_and_a_misshaped_tensor_are_errors(tmp_path):
    tensors = saved(tmp_path)
    kept = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=r"missing.*model\.norm\.weight"):
        load_model(tmp_path)
    save_file({**tensors, "model.norm.weight": kept[:3].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInputError, match="norm"):
        load_model(tmp_path)
    save_file(
        {**tensors, "model.norm.weight": kept, "more": kept.clone()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(BadInputError, match=r"unexpected.*more"):
        load_model(tmp_path)


def test_a_missing_file_of_weights_is_an_error(tmp_path):
    tiny.model("mixtral").save_pretrained(tmp_path, max_shard_size="100KB")
    first = min(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(BadInputError, match=first.name):
        load_model(tmp_path)


def test_an_unsupported_type_is_named(tmp_path):
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1)).save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match="gpt2"):
        load_model(tmp_path)


def test_a_type_that_the_installed_transformers_cannot_compute_is_refused(monkeypatch, tmp_path):
    model = tiny.llama4_vision()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("fcsd.models.build.version", lambda _: "5.24.0")
    for load in (
        lambda: load_model(tmp_path),
        lambda: random_model(model.config, dtype=torch.float32, device="cpu", seed=0),
        lambda: first_layers(tmp_path, [], read_config(tmp_path), arch_of(model.config), 1),
    ):
        with pytest.raises(BadInputError, match="cannot compute a llama4"):
            load()


@tiny.with_llama4
def test_llama4_with_vision_off_is_off():
    model = tiny.llama4_vision()
    ids = torch.cat([tiny.tokens(1, 5), torch.full((1, 4), 250), tiny.tokens(1, 6, seed=2)], dim=1)
    inputs = dict(input_ids=ids, pixel_values=torch.randn(1, 3, 28, 28), labels=ids)

    def run():
        model.zero_grad()
        out = model(**inputs)
        out.loss.backward()
        return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    before = run()
    wire(model, Wiring("standard", (0, 1, 2, 3)))
    apart = run()
    assert len(before) == len(apart) and all(map(torch.equal, before, apart))


def test_the_type_that_is_looked_up_is_registered_alone():
    """The modeling files of the others take a second to import."""
    code = (
        "import sys, fcsd, transformers\n"
        "config = transformers.AutoConfig.for_model('fcsd_llama')\n"
        "print(transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__)\n"
        "print(sorted(name for name in sys.modules if name.startswith('transformers.models.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    name, modules = done.stdout.splitlines()
    assert name == "FcsdLlamaForCausalLM" and ".modeling_llama'" in modules
    assert ".modeling_qwen3'" not in modules and ".modeling_mixtral'" not in modules
