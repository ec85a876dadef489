"""The first layers that student and teacher have in common are computed once, and nothing else changes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch

from fcsd.distill import prepare
from fcsd.distill.inputs import student_source
from fcsd.distill.step.engine import Student, switch_off_noise
from fcsd.distill.student import chosen_parts, load_student, train_parts
from fcsd.distill.teacher.targets import compile_layers, final_hidden, left_out, noted
from fcsd.models.adapters.targets import choose, shared_prefix
from fcsd.models.archs import ARCHS
from fcsd.models.build import decoder_layers, wire
from fcsd.models.wiring import Wiring

SOME = ("llama", "deepseek_v2", "jamba", "glm_moe_dsa", "gemma3_text")  # the last two pass on or choose more
LAST = Wiring("parallel", (2, 3))
COLUMNS = {
    "input_ids": torch.arange(24).reshape(2, 12),
    "position_ids": torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1),
    "borders": torch.tensor([0, 5, 12, 17, 24]),
}


def counted(model: Any) -> list[int]:
    """How often each decoder layer has computed something, a module inside of it; the list goes on counting."""
    counts = [0] * len(decoder_layers(model))

    def count(number: int, *_: Any) -> None:
        counts[number] += 1

    for number, layer in enumerate(decoder_layers(model)):
        for module in list(layer.modules())[1:]:
            module.register_forward_hook(partial(count, number))
    return counts


@pytest.mark.parametrize(
    "arch", [*SOME, *(pytest.param(name, marks=pytest.mark.nightly) for name in tiny.CONFIGS if name not in SOME)]
)
def test_a_student_in_training_goes_on_with_what_the_teacher_computed(arch: str) -> None:
    model = tiny.model(arch).eval()
    wired = choose(model, ["attention"], [], "converted", LAST)
    shared = shared_prefix(model, wired, LAST)
    if ARCHS[arch].blocks.cuts or ARCHS[arch].draws:
        assert shared == (2, 0)
        return
    assert shared == (2, 2)
    with torch.no_grad(), noted(model, 2) as found:
        final_hidden(model, COLUMNS)
    switch_off_noise(wire(model.train(), LAST))
    whole, counts = final_hidden(model, COLUMNS), counted(model)
    classes = [type(layer) for layer in decoder_layers(model)]
    with left_out(model, *found):
        rest = final_hidden(model, COLUMNS)
    assert counts[:2] == [0, 0] and all(counts[2:])
    assert torch.equal(rest, whole)
    assert [type(layer) for layer in decoder_layers(model)] == classes
    assert torch.equal(final_hidden(model, COLUMNS), whole)


def test_compiled_layers_are_left_out_too(tmp_path: Path) -> None:
    model = tiny.model("llama").eval()
    compile_layers(model, runs.resolved(tmp_path, train__compile=True).recipe, backend="eager")
    with torch.no_grad(), noted(model, 2) as found:
        whole = final_hidden(model, COLUMNS)
        changed = found[0]._replace(output=2 * found[0].output)
        with left_out(model, found[0]):
            assert torch.equal(final_hidden(model, COLUMNS), whole)
        with left_out(model, changed):
            assert not torch.equal(final_hidden(model, COLUMNS), whole)
    assert all(layer._compiled_call_impl is not None for layer in decoder_layers(model))


@pytest.mark.parametrize(("changes", "layers"), [({}, 2), ({"objective__hidden": {"weight": 0.1}}, 0)])
def test_a_step_with_adapters_computes_the_first_layers_once(
    folder: Path, changes: dict[str, Any], layers: int
) -> None:
    """Unless streams are compared."""
    adapter = {"train__adapter": {"rank": 4, "layers": "converted"}, "init": {"wiring": "farskip", "layers": "last:2"}}
    recipe = runs.resolved(folder, model=str(folder / "teacher"), **adapter, **changes).recipe
    chosen = chosen_parts(recipe, student_source(recipe))
    assert chosen is not None
    model = load_student(recipe, dtype=torch.float32, device=torch.device("cpu")).train()
    source = prepare.share_weights(train_parts(model, recipe, chosen), recipe)
    ones, counts = torch.ones(()), counted(model)
    batch = {**COLUMNS, "labels": COLUMNS["input_ids"]}
    targets = source.get_targets(batch)
    teacher = list(counts)
    loss = Student(model, recipe.objective)(batch, targets, ones, ("kl",))["kl"]
    assert [now == before for now, before in zip(counts, teacher, strict=True)] == [n < layers for n in range(4)]
    twice = Student(model, recipe.objective)(batch, targets._replace(prefix=None, streams={}), ones, ("kl",))["kl"]
    assert torch.equal(loss, twice) and loss > 0
