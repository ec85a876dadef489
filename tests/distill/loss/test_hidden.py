"""The distance of the streams: equation 5 in float64, on every kind of wiring, recomputed, overlapped, in a run."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import tiny
import torch
from ranks import in_group
from torch import Tensor

from fcsd.config import Hidden, Objective
from fcsd.distill import loop
from fcsd.distill.loss.losses import IGNORE, squared_distance
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step.engine import Student
from fcsd.distill.teacher.targets import LiveTeacher, Targets, captured
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.build import decoder_layers, load_model, unwired, wire
from fcsd.models.wiring import Wiring

ALL = (0, 1, 2, 3)
WIRINGS = [
    ("deepseek_v2", Wiring("farskip", ALL)),
    ("qwen3_moe", Wiring("ladder", (1, 2))),
    ("llama", Wiring("parallel", ALL)),
    ("llama", Wiring("desync-4x", ALL, tp_degree=2)),
    ("llama", unwired()),
]


def batch(seed: int = 1) -> dict[str, Tensor]:
    ids = tiny.tokens(seed=seed)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.3, IGNORE)
    return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids), "labels": labels}


def test_distance_and_gradient_are_equation_5() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 9, 16, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 9, generator=generator) < 0.5
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss = squared_distance(ours, teacher, mask, denominator=7)
    expected = ((theirs - teacher).square().sum(-1) * mask).sum() / 7
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_distance_in_bf16_is_float64s_near_alignment_and_nothing_for_equal_streams() -> None:
    teacher = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    student = (teacher.float() * (1 + 2**-7)).bfloat16().requires_grad_()
    mask = torch.ones(1, 50, dtype=torch.bool)
    loss = squared_distance(student, teacher, mask)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((student.double() - teacher.double()).square().sum().item(), rel=1e-6)
    assert squared_distance(teacher, teacher, mask).item() == 0.0
    assert squared_distance(student, teacher, ~mask).item() == 0.0


def test_positions_that_do_not_count_may_hold_anything() -> None:
    student, teacher = torch.ones(1, 3, 4, requires_grad=True), torch.zeros(1, 3, 4)
    teacher[0, 1] = torch.nan
    loss = squared_distance(student, teacher, torch.tensor([[True, False, False]]))
    loss.backward()
    assert loss.item() == 4.0
    assert student.grad is not None and student.grad.sum().item() == 8.0


@pytest.mark.parametrize(("arch", "wiring"), WIRINGS)
@pytest.mark.parametrize("layers", ["all", "1,3"])
def test_loss_of_a_wired_model_is_equation_5_recomputed_or_not(arch: str, wiring: Wiring, layers: str) -> None:
    teacher, student = tiny.model(arch), wire(tiny.model(arch, seed=3), wiring).train()
    data, objective = batch(), Objective(hidden=Hidden(weight=1.0, layers=layers))
    module = Student(student, objective)
    chosen = ALL if layers == "all" else (1, 3)

    mask = (data["labels"] != IGNORE).unsqueeze(-1)
    inputs = {"input_ids": data["input_ids"], "use_cache": False}
    norm_inputs: dict[int, Tensor] = {}
    models: list[Any] = [student, teacher]
    for number, model in enumerate(models):  # the last one of transformers' hidden states is normed
        model.model.norm.register_forward_pre_hook(lambda _, args, n=number: norm_inputs.__setitem__(n, args[0]))
    outputs = [model(**inputs, output_hidden_states=True).hidden_states for model in models]
    ours, theirs = ([*states[1:-1], norm_inputs[n]] for n, states in enumerate(outputs))
    expected = sum(((ours[k] - theirs[k].detach()).square() * mask).sum() for k in chosen)
    assert isinstance(expected, Tensor)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    assert any(g.count_nonzero() for g in wanted.values())

    for recomputed in (False, True):
        if recomputed:
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        student.zero_grad()
        targets = LiveTeacher(teacher, objective).get_targets(data)
        assert tuple(targets.streams) == chosen
        loss = module(data, targets, torch.ones(()), ("hidden",))["hidden"]
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        found = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
        torch.testing.assert_close(
            found, wanted, rtol=1e-4, atol=1e-4 * float(max(g.abs().max() for g in wanted.values()))
        )


def test_no_stream_outlives_its_use_and_no_hook_stays() -> None:
    model, objective = tiny.model("llama"), Objective(hidden=Hidden(weight=1.0))
    targets = LiveTeacher(model, objective).get_targets(batch())
    Student(model, objective)(batch(), targets, torch.ones(()), ("hidden", "kl"))
    assert targets.streams == {}
    assert not any(layer._forward_hooks for layer in decoder_layers(model))
    with pytest.raises(ZeroDivisionError), captured(model, ALL):
        raise ZeroDivisionError
    assert not any(layer._forward_hooks for layer in decoder_layers(model))


def _overlapped(rank: int) -> list[str]:
    """Loss and gradients of the streams' distance under overlap, against the same parts in blocking order."""
    from divided import sharded
    from late import late_collectives

    from fcsd.parallel.overlap import overlap

    problems = []
    model = sharded("deepseek_v2")
    module = Student(model, Objective(hidden=Hidden(weight=1.0, layers="1,3")))
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        results = []
        for mode in ("off", "on"):
            overlap(model, Wiring("farskip", ALL), mode)
            model.zero_grad()
            zeros = torch.zeros(2, 24, 64)
            targets = Targets((zeros, torch.zeros(256, 64)), {1: zeros, 3: zeros})
            with late_collectives():
                terms = module(batch(seed=rank), targets, torch.ones(()), ("hidden", "sft"))
                (terms["hidden"] + terms["sft"]).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append((terms["hidden"].item(), gradients))
        (blocking, wanted), (loss, found) = results
        if loss != blocking or blocking == 0:
            problems.append(f"recomputed {recompute}: loss {loss}, not {blocking}")
        largest = max(float(g.abs().max()) for g in wanted.values())
        for name, gradient in wanted.items():
            if not torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6 * largest):
                problems.append(f"recomputed {recompute}: {name}")
    return problems


def test_streams_under_overlap_are_the_blocking_ones() -> None:
    assert in_group(2, _overlapped) == [[], []]


def distilled(folder: Path, out: Path, size: int = 1, **changes: Any) -> list[dict[str, Any]]:
    ranks.results(size, loop.distill_model, runs.resolved(folder, output_dir=str(out), **changes))
    return read_metrics(out)


def test_a_run_adds_the_weighted_distance(folder: Path, tmp_path: Path) -> None:
    hidden = {"weight": 1e-3, "layers": "last:2"}
    objective = {"objective__hidden": hidden, "train__steps": 3, "train__activation_checkpointing": True}
    metrics = distilled(folder, tmp_path / "one", **objective, train__micro_batch_size=8, parallel__zero_stage=0)
    spread = distilled(folder, tmp_path / "two", 2, **objective, train__micro_batch_size=2)
    for one, two in zip(metrics, spread, strict=True):
        assert one["loss"] == pytest.approx(one["kl"] + 0.5 * one["sft"] + 1e-3 * one["hidden"])
        assert two["hidden"] == pytest.approx(one["hidden"], rel=1e-4)
    assert metrics[-1]["hidden"] < metrics[0]["hidden"] and metrics[-1]["held_out_hidden"] > 0


def test_streams_alone_can_be_the_objective(folder: Path, tmp_path: Path) -> None:
    changes = {"objective__kl": 0.0, "objective__sft": 0.0, "objective__hidden": {"weight": 1.0}}
    metrics = distilled(folder, tmp_path / "run", **changes, train__steps=4)
    assert "kl" not in metrics[0] and metrics[-1]["hidden"] < metrics[0]["hidden"]
    assert load_model(tmp_path / "run" / "final").config.num_hidden_layers == 4


def test_streams_that_cannot_be_compared_are_refused(folder: Path, tmp_path: Path) -> None:
    hidden = {"weight": 1.0}
    tiny.model("deepseek_v2", hidden_size=32).save_pretrained(tmp_path / "narrow")
    tiny.model("deepseek_v2", num_hidden_layers=3).save_pretrained(tmp_path / "short")
    for name, what in (("narrow", "hidden size"), ("short", "number of layers")):
        with pytest.raises(BadInputError, match=f"{what} of student .*/student is .*{name}"):
            distilled(folder, tmp_path / "run", teacher=str(tmp_path / name), objective__hidden=hidden)
    with pytest.raises(ConfigError, match="the model has 4"):
        distilled(folder, tmp_path / "run", objective__hidden={**hidden, "layers": "3-9"})
    with pytest.raises(ConfigError, match="all 0"):
        runs.resolved(folder, objective__kl=0.0, objective__sft=0.0)
    assert not (tmp_path / "run").exists()
