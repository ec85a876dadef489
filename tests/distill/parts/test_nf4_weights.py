"""Adapters beside weights in NF4: a run, its resume, the merged model, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import quantised
import runs
import torch
from runs import cut_short, outcome, train
from safetensors.torch import load_file, save_file

from fcsd import extras
from fcsd.checkpoint import read_object
from fcsd.distill.inputs import student_source
from fcsd.distill.parts import read_parts
from fcsd.distill.student import chosen_parts, load_student, train_parts
from fcsd.errors import ConfigError
from fcsd.export.final import export_model
from fcsd.models.adapters.lora import add_adapters, matrices
from fcsd.models.adapters.nf4 import in_nf4, load_nf4, nf4_layers, plain_linear, plain_weight
from fcsd.models.build import load_model
from fcsd.parallel.weights.trained import load_trained
from fcsd.plan import Hardware, plan_run

NF4: dict[str, Any] = {"train__adapter": {"rank": 4, "alpha": 8.0, "targets": ["attention"], "base": "nf4"}}
BESIDE: dict[str, Any] = {**NF4, "optim__train": ["norms"], "train__dtype": "bf16"}
PARTS = Path("parts")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    runs.write_models(folder, "llama")
    return folder


def test_a_run_its_resume_and_the_merged_model(llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = runs.resolved(llama, output_dir=str(run), **BESIDE)
    train(recipe)
    shorter = cut_short(run, tmp_path / "resumed")
    train(runs.resolved(llama, output_dir=str(shorter), **BESIDE))
    assert outcome(shorter) == outcome(run)
    assert "quantization_config" not in read_object(run / "final/config.json")

    chosen = chosen_parts(recipe.recipe, student_source(recipe.recipe))
    assert chosen is not None
    student = load_student(recipe.recipe, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert set(nf4_of(student)) == set(nf4_layers(merged_in(run)))
    parts = train_parts(student, recipe.recipe, chosen)
    load_trained(parts, read_parts(run / "checkpoints/step-4" / PARTS), "the checkpoint", None)
    ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rounded, merged = student(ids).logits.float(), merged_in(run)(ids).logits.float()
        original = load_model(llama / "student", dtype=torch.bfloat16)(ids).logits.float()
    # They differ by the rounding of merged weights to bf16, and from the original by that to four bits.
    assert (rounded - merged).norm() < 0.1 * (original - merged).norm()
    assert (rounded - merged).norm() < 0.03 * rounded.norm()

    later = parts.merge()  # one weight after the other, when it is written
    assert {name for name, weight in student.named_parameters() if weight.is_meta} == later.keys()
    final = load_file(run / "final" / "model.safetensors")
    assert later and all(torch.equal(make(), final[name]) for name, make in later.items())

    export_model(run, tmp_path / "exported", checkpoint="step-4")
    final, exported = (load_file(path / "model.safetensors") for path in (run / "final", tmp_path / "exported"))
    assert final.keys() == exported.keys()
    assert all(torch.equal(final[name], exported[name]) and final[name].is_floating_point() for name in final)


@pytest.mark.gpu
def test_on_a_gpu_adapters_learn_beside_nf4_as_beside_the_decoded_weights(llama: Path, tmp_path: Path) -> None:
    """The losses and norms of three steps, and what the merged weights moved; sums in bf16 differ by their order."""
    decoded, on_cpu = decoded_weights(llama, "cuda"), decoded_weights(llama, "cpu")
    whole = load_file(llama / "student" / "model.safetensors")
    for name, value in decoded.items():
        # Where a value is halfway between two codes, a CPU and a GPU may choose different ones.
        assert (on_cpu[name] - value).norm() < 0.05 * (whole[name] - value).norm() < 0.01 * whole[name].norm()
    for name in ("teacher", "student"):
        shutil.copytree(llama / name, tmp_path / name)
        save_file(whole | decoded, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    config = tmp_path / "student" / "config.json"
    config.write_text(config.read_text().replace(str(llama), str(tmp_path)))
    plain = {**BESIDE, "train__adapter": {**NF4["train__adapter"], "base": None}}
    for folder, changes in ((llama, BESIDE), (tmp_path, plain)):
        train(runs.resolved(folder, output_dir=str(folder / "three"), **{**changes, "train__steps": 3}))
    (found, merged), (expected, weights) = (runs.numbers(folder / "three") for folder in (llama, tmp_path))
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-2)
    moved = {name: (weights[name] - value).norm() for name, value in decoded.items()}
    assert {name for name, far in moved.items() if far} == {name for name in moved if "self_attn" in name}
    assert all((merged[name].float() - weights[name].float()).norm() <= 0.25 * far for name, far in moved.items())


def decoded_weights(llama: Path, device: str) -> dict[str, torch.Tensor]:
    """The student's weights in NF4, by name, as they are decoded on a device."""
    model = load_nf4(llama / "student", dtype=torch.bfloat16, device=torch.device(device))
    return {f"{path}.weight": plain_weight(model.get_submodule(path)).float().cpu() for path in nf4_of(model)}


def nf4_of(model: torch.nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if in_nf4(module)]


def merged_in(run: Path) -> Any:
    return load_model(run / "final", dtype=torch.bfloat16, device="cpu")


def test_an_adapted_layer_computes_what_it_does_beside_the_decoded_weight() -> None:
    import bitsandbytes

    base = bitsandbytes.nn.Linear4bit(96, 40, bias=True, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    plain = plain_linear(base)
    plain.weight = torch.nn.Parameter(plain_weight(base), requires_grad=False)
    x = torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(0))
    found = []
    for layer in (base, plain):
        adapted = add_adapters(torch.nn.Sequential(layer), {"layer": "0"}, 4, 8.0, seed=0)["layer"]
        torch.nn.init.normal_(matrices(adapted)[1], generator=torch.Generator().manual_seed(1))
        given = x.clone().requires_grad_()
        out = adapted(given)
        out.square().sum().backward()
        found.append([out, given.grad, *(matrix.grad for matrix in matrices(adapted))])
    for rounded, expected in zip(*found, strict=True):
        torch.testing.assert_close(rounded, expected, rtol=1e-4, atol=1e-3)
    assert base.weight.grad is None and plain.weight.grad is None


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__tp_size": 2, "parallel__zero_stage": 2},
        {"parallel__ep_size": 2},
        {"train__compile": True},
    ],
)
def test_what_does_not_go_with_it_is_refused_with_the_recipe(llama: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train\.adapter"):
        runs.resolved(llama, **{**BESIDE, **changes})


def test_models_that_cannot_have_it_are_refused_before_they_are_loaded(
    llama: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())  # as if all were installed
    packed = quantised.write_by("packed", "llama", tmp_path / "packed")
    for data, reason, changes in (
        (folder, "routed experts", {}),
        (llama, "already", {"model": str(packed), "init": {"wiring": "ladder"}}),
        (llama, "down_proj.weight", {"optim__train": ["down_proj"]}),
    ):
        recipe = runs.resolved(data, **{**BESIDE, **changes}).recipe
        with pytest.raises(ConfigError, match=reason) as refused:
            chosen_parts(recipe, student_source(recipe))
        assert refused.value.hint
        with pytest.raises(ConfigError, match=reason):
            plan_run(recipe, Hardware(gpus=1))


def test_the_extra_is_named_where_it_is_missing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "bitsandbytes" else installed(name))
    recipe = runs.resolved(llama, **BESIDE).recipe
    with pytest.raises(ConfigError, match=r"train\.adapter\.base nf4 needs bitsandbytes: pip install 'fcsd\[nf4\]'"):
        chosen_parts(recipe, student_source(recipe))
