"""Compiled layers compute what uncompiled ones do, and are not compiled again for the shapes of generation."""

from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch

from fcsd.distill import prepare
from fcsd.distill.inputs import student_source
from fcsd.distill.student import chosen_parts, load_student, train_parts
from fcsd.distill.teacher.targets import compile_layers, final_hidden, left_out, without_compiling
from fcsd.errors import ConfigError
from fcsd.models.build import decoder_layers, wire
from fcsd.models.wiring import Wiring


def test_compiled_layers_give_the_same_gradients(tmp_path: Path) -> None:
    recipe = runs.resolved(tmp_path, train__compile=True).recipe
    results = []
    for compiled in (False, True):
        model = tiny.model("llama").double()
        wire(model, Wiring("farskip", tuple(range(len(decoder_layers(model))))))
        if compiled:
            compile_layers(model, recipe, backend="aot_eager")
        ids = torch.arange(32).view(2, 16) % model.config.vocab_size
        model(ids, labels=ids, use_cache=False).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
        with without_compiling(recipe), torch.no_grad():
            results.append(dict(enumerate([model(ids[:, :7]).logits])))
    for one, other in zip(results[:2], results[2:], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value)
    assert decoder_layers(model)[0]._compiled_call_impl is not None


LORA: dict[str, Any] = {"train__adapter": {"rank": 4, "alpha": 8.0}, "optim__train": ["norms"]}
HALF: dict[str, Any] = {"init": {"wiring": "ladder", "layers": "50%"}, "optim__train": ["converted"]}


@pytest.mark.parametrize(
    ("arch", "changes", "shared"),
    [
        ("llama", LORA, None),
        ("llama", HALF, 1),
        ("llama", {**HALF, "init": {"wiring": "desync-2x", "layers": "50%", "gpus": 2}}, 2),
        pytest.param("deepseek_v2", LORA, None, marks=pytest.mark.nightly),
        pytest.param("deepseek_v2", HALF, 1, marks=pytest.mark.nightly),
    ],
)
def test_compiled_layers_are_student_and_teacher_in_turn(
    tmp_path: Path, arch: str, changes: dict[str, Any], shared: int | None
) -> None:
    """The layers change their wiring, their adapters and their weights between two passes of a step."""
    runs.write_models(tmp_path, arch)
    model = str(tmp_path / ("teacher" if "init" in changes else "student"))
    recipe = runs.resolved(tmp_path, model=model, train__compile=True, **changes).recipe
    chosen, positions = chosen_parts(recipe, student_source(recipe)), torch.arange(12).repeat(2, 1)
    assert chosen is not None
    columns = {"input_ids": torch.arange(24).view(2, 12), "position_ids": positions}
    results = []
    for compiled in (False, True):
        student = load_student(recipe, dtype=torch.float32, device=torch.device("cpu")).train()
        parts, generator = train_parts(student, recipe, chosen), torch.Generator().manual_seed(0)
        for _, parameter in parts.tensors():
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        if compiled:
            compile_layers(student, recipe, backend="eager")
        source, passes = prepare.share_weights(parts, recipe), []
        for _ in range(2):
            targets = source.get_targets(columns)
            assert shared == (targets.prefix and targets.prefix.layers)
            theirs = targets.output[0]
            with left_out(student, targets.prefix):
                ours = final_hidden(student, columns)
            assert (theirs - ours).abs().max() > 0.1
            (theirs - ours).square().mean().backward()
            passes += [theirs, ours.detach()]
        results.append([*passes, *(parameter.grad for _, parameter in parts.tensors())])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain)


def test_without_the_field_nothing_is_compiled(tmp_path: Path) -> None:
    model = tiny.model("llama")
    compile_layers(model, runs.resolved(tmp_path).recipe)
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))


def test_divided_experts_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile cannot be combined with parallel\.ep_size"):
        runs.resolved(tmp_path, train__compile=True, parallel__ep_size=2)
