"""Passes on fixed buffers give the terms and gradients of ordinary ones, and CUDA graphs those of uncaptured passes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import tiny
import torch
from torch import Tensor

from fcsd.config import Hidden, Objective
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.step.engine import Student
from fcsd.distill.step.graphs import FixedPasses, with_fixed_passes
from fcsd.distill.teacher.targets import LiveTeacher, TeacherSource
from fcsd.errors import ConfigError
from fcsd.kernels.packed_attention import document_borders, use_packed_attention
from fcsd.models.build import wire
from fcsd.models.wiring import Wiring

ROWS, SEQ = 2, 16
TERMS = ("kl", "sft", "hidden")
KINDS = {"deepseek_v2": "farskip", "qwen3_moe": "farskip", "llama": "ladder"}  # of models, and their wiring here
# The documents of the rows of three micro-batches. The third has more documents than there is room for.
LENGTHS = ([[16], [16]], [[4, 12], [9, 7]], [[1] * 16, [2] * 8])


def micro_batch(lengths: list[list[int]], seed: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = torch.randint(3, 60, (ROWS, SEQ), generator=generator)
    labels = torch.randint(3, 60, (ROWS, SEQ), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3 * seed] = IGNORE
    columns = {"input_ids": ids, "position_ids": positions, "labels": labels, "borders": document_borders(positions)}
    columns["kept"] = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    return {name: column.to(device) for name, column in columns.items()}


def models(device: str, dtype: torch.dtype, kind: str = "deepseek_v2") -> tuple[Student, LiveTeacher]:
    """A wired student in training mode and its teacher, both with packed attention."""
    objective = Objective(kl=1.0, sft=0.5, hidden=Hidden(weight=0.1), chunk_tokens=8)
    student, teacher = (tiny.model(kind, seed=seed).to(device, dtype) for seed in (1, 2))
    for model in (student, teacher):
        assert use_packed_attention(model)
        if dtype == torch.float64:
            model.set_experts_implementation("eager")  # grouped products have no fp64
    wire(student, Wiring(KINDS[kind], tuple(range(student.config.num_hidden_layers))))
    return Student(student, objective).train(), LiveTeacher(teacher.requires_grad_(False).eval(), objective)


def steps(student: Student, source: TeacherSource, device: str) -> list[Tensor]:
    """Two steps of three micro-batches: their terms and summed gradients. The weights change between the steps."""
    found = []
    for step in range(2):
        for seed, lengths in enumerate(LENGTHS):
            batch = micro_batch(lengths, seed, device)
            denominator = torch.tensor(5 + seed, device=device)
            terms = student(batch, source.get_targets(batch), denominator, TERMS)
            (torch.stack([(2 + n) * terms[name] for n, name in enumerate(TERMS)]).sum() * (1 + step)).backward()
            found += [terms[name].detach().clone() for name in TERMS]
        gradients = [(p, p.grad) for p in student.parameters() if p.grad is not None]
        found += [gradient.clone() for _, gradient in gradients]
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter -= 0.1 * gradient
                parameter.grad = None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_passes_give_the_terms_and_gradients_of_ordinary_ones(kind: str) -> None:
    """Three micro-batches are summed, so their gradients must not share memory; the number of documents varies."""
    results = []
    for fixed in (False, True):
        student, teacher = models("cpu", torch.float64, kind)
        results.append(steps(student, FixedPasses(student, teacher, capture=False) if fixed else teacher, "cpu"))
    assert len(results[0]) == len(results[1]) > 18
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one)


def test_a_loss_that_is_not_finite_spoils_no_later_step() -> None:
    results = []
    for spoiled in (False, True):
        student, teacher = models("cpu", torch.float32)
        passes = FixedPasses(student, teacher, capture=False)
        if spoiled:
            terms = student(micro_batch(LENGTHS[0], 1), passes, torch.tensor(5), TERMS)
            (torch.stack(list(terms.values())).sum() * math.nan).backward()  # as ``launch_step`` does
            assert all(p.grad.isnan().any() for p in student.parameters() if p.grad is not None)
            student.zero_grad()
        results.append(steps(student, passes, "cpu"))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_frozen_weight_gets_no_gradient_and_evaluation_takes_the_ordinary_way() -> None:
    student, teacher = models("cpu", torch.float32)
    frozen: Any = student.model.get_input_embeddings()
    frozen.weight.requires_grad_(False)
    passes = FixedPasses(student, teacher, capture=False)
    steps(student, passes, "cpu")
    assert frozen.weight.grad is None
    batch = micro_batch(LENGTHS[1], 1)
    with torch.no_grad():
        terms = student(batch, passes.get_targets(batch), torch.ones(()), ("sft",))
    assert not terms["sft"].requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_passes_are_those_on_fixed_buffers_bit_by_bit(kind: str) -> None:
    """The gradients of all three micro-batches are summed, and the third makes the graphs anew.

    DeepSpeed's hooks keep the nodes of autograd that add to the gradients, and these belong to the default stream.
    """
    results = []
    for capture in (False, True):
        student, teacher = models("cuda", torch.bfloat16, kind)
        nodes: list[Any] = [p.view_as(p).grad_fn for p in student.parameters()]
        results.append(steps(student, FixedPasses(student, teacher, capture=capture), "cuda"))
        assert all(node.next_functions for node in nodes)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@contextmanager
def failing_capture(why: str, kind: type[RuntimeError], end: type[RuntimeError]) -> Iterator[None]:
    """A capture as torch's: if the captured code fails, the end of the capture raises an error of its own."""
    try:
        raise kind(why)
    except kind:
        raise end("operation failed due to a previous error during capture")  # noqa: B904


@pytest.mark.parametrize(
    ("kind", "raised", "words"),
    [
        (RuntimeError, ConfigError, "CUDA graphs: the host waits and a second line$"),
        (torch.OutOfMemoryError, torch.OutOfMemoryError, "the host waits"),
    ],
)
def test_a_capture_that_fails_says_why_and_restores_the_stream(
    monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError], raised: type[Exception], words: str
) -> None:
    """Without a GPU, torch.cuda is replaced by doubles that fail as torch does on an H200."""
    streams, stream = ["default"], SimpleNamespace(wait_stream=lambda _: None)
    doubles = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "set_stream": lambda _: streams.append("restored"),
        "CUDAGraph": lambda: SimpleNamespace(pool=lambda: None),
        "graph": lambda *_, **__: failing_capture("the host waits\nand a second line", kind, RuntimeError),
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    student, teacher = models("cpu", torch.float32)
    passes = FixedPasses(student, teacher, capture=True)
    call = partial(student, micro_batch(LENGTHS[0], 1), passes, torch.tensor(5), TERMS)
    with pytest.raises(raised, match=words):
        call()
    assert streams[-1] == "restored"


def test_a_run_with_fixed_passes_is_one_without_up_to_rounding(tmp_path: Path) -> None:
    """On a CPU the recipe's field runs the passes without capture: DeepSpeed gets the same gradients.

    The resumed run makes its passes anew and ends with the bits of the run that was not interrupted.
    """
    runs.write_models(tmp_path)
    recipes = [
        runs.resolved(
            tmp_path, train__graph=graph, train__steps=steps, output_dir=str(tmp_path / name), optim__horizon=2
        )
        for name, graph, steps in (("without", False, 2), ("with", True, 2), ("parts", True, 1), ("parts", True, 2))
    ]
    runs.train_all(recipes)
    without, with_graph, parts = (runs.outcome(tmp_path / name) for name in ("without", "with", "parts"))
    assert parts == with_graph
    assert len(without[0]) == 2
    for one, other in zip(without[0], with_graph[0], strict=True):
        assert [float.fromhex(x) for x in other] == pytest.approx([float.fromhex(x) for x in one], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel__ep_size": 2}, "divided experts"),
        ({"train__activation_checkpointing": True}, r"train\.activation_checkpointing"),
        ({"train__attention": "masked"}, r"train\.attention masked"),
        ({"parallel__quantised": {"dispatch": "int8"}}, r"parallel\.quantised"),
        ({"deterministic": True}, "deterministic"),
        ({"objective__teacher_cache": {"path": "cache"}}, r"objective\.teacher_cache"),
    ],
)
def test_what_cannot_be_captured_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.graph cannot be combined with {why}"):
        runs.resolved(tmp_path, train__graph=True, **changes)


def test_linear_attention_whose_documents_differ_in_length_is_refused() -> None:
    model: Any = tiny.model("qwen3_next")
    recipe: Any = SimpleNamespace(train=SimpleNamespace(graph=True))
    with pytest.raises(ConfigError, match=r"train.graph cannot run qwen3_next: .* their lengths differ"):
        with_fixed_passes(SimpleNamespace(), recipe, [model])  # pyright: ignore[reportArgumentType]
