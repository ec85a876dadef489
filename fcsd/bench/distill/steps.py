"""The steps that the benchmark takes: one student and one teacher, wired for one variant after the other.

The packed rows, the feed, the loss, the engine and the optimizer step are those of ``fcsd distill``.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.bench.distill.workload import APART, BLOCKING, BOUND, MASKED, OVERLAPPED
from fcsd.bench.memory import random_corpus
from fcsd.bench.training.ceilings import NoWire
from fcsd.config import Recipe
from fcsd.distill.dtypes import DTYPES
from fcsd.distill.experts.expert_parallel import dispatcher_for, quantiser_of, randomise, wire_sharded
from fcsd.distill.optim import update
from fcsd.distill.prepare import training_rows
from fcsd.distill.step import graphs
from fcsd.distill.step.engine import build_engine
from fcsd.distill.step.feed import feeding
from fcsd.distill.step.one_step import launch_step, train_step
from fcsd.distill.step.phases import phase
from fcsd.distill.teacher.original import compile_layers, needs_teacher, pack_attention
from fcsd.distill.teacher.targets import live_teacher
from fcsd.launch.world import World, barrier
from fcsd.models.build import wiring_of
from fcsd.parallel.attention import join_attention
from fcsd.parallel.overlap import overlap
from fcsd.parallel.quantised.rows import Quantiser, WireFormats


class Steps:
    """One student and one teacher, with functions to choose a variant and to run steps of it."""

    def __init__(self, recipe: Recipe, rewired: PretrainedConfig, original: PretrainedConfig, world: World) -> None:
        self.recipe, self._chosen, self._world, self._taken = recipe, recipe, world, 0
        draw: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "seed": recipe.seed}
        student = randomise(rewired, recipe.parallel.ep_size, **draw, dispatched=recipe.parallel.wire.any)
        self.models: list[PreTrainedModel] = [student]
        self._teacher = None
        if needs_teacher(recipe):
            teacher = randomise(original, recipe.parallel.teacher_ep_size, **draw).requires_grad_(False)
            compile_layers(teacher, recipe)
            self.models.append(teacher)
            self._teacher = _in_phase("teacher", live_teacher(teacher, recipe.objective))
        engine = build_engine(student, recipe, world)
        update.install(engine, recipe)
        self._engine = _Phases(engine)
        self._rows = training_rows(recipe, [random_corpus(student.config.vocab_size, recipe.data.seq_len)])

    def choose(self, variant: str) -> None:
        """Wires both models for a variant."""
        parallel = self.recipe.parallel
        variant, _, wire = variant.partition("+")
        quantiser = Quantiser(WireFormats.parse(wire), self.recipe.seed) if wire else quantiser_of(self.recipe)
        self._engine.module.quantiser = quantiser
        apart = self.recipe.model_copy(update={"parallel": parallel.model_copy(update={"overlap": "off"})})
        # The recipe decides whether the passes of teacher and student run in turns.
        self._chosen = self.recipe if variant in (OVERLAPPED, BOUND) else apart
        on_cuda = self._world.device.type == "cuda"
        for model, ep_size, own in zip(
            self.models, (parallel.ep_size, parallel.teacher_ep_size), (quantiser, None), strict=False
        ):
            join_attention(model)
            model.set_attn_implementation("sdpa")
            if variant != MASKED:
                pack_attention(model, self.recipe)
            if variant in (OVERLAPPED, APART, MASKED) or ep_size == 1:
                wire_sharded(model, ep_size, parallel, own)
            elif variant == BLOCKING:
                dispatcher = dispatcher_for(parallel, ep_size)
                fused = parallel.fused and on_cuda
                overlap(model, wiring_of(model.config), "off", fused=fused, dispatcher=dispatcher, quantiser=own)
            else:
                overlap(model, wiring_of(model.config), fused=parallel.fused and on_cuda, transport=NoWire())
        graphs.install(self._engine.module, self._teacher, self.recipe, self.models)  # captured passes do not change

    def one(self) -> None:
        """Runs one step and waits until it is complete."""
        self._taken += 1
        train_step(self._engine, self._teacher, self._rows, self._chosen, self._world, self._taken)

    def several(self, count: int) -> dict[str, float]:
        """Runs one step that is not timed, then ``count`` timed steps in the way of ``fcsd distill``.

        Returns: mean ``seconds`` of a step, the share ``data_wait`` of them spent waiting for data, and the ``loss`` of
            the last step.
        """
        first, last = self._taken + 1, self._taken + 1 + count
        self._taken = last
        wait: Callable[[], None] = torch.cuda.synchronize if self._world.device.type == "cuda" else (lambda: None)
        began = waited = 0.0
        metrics: dict[str, float] = {}
        with feeding(self._rows, self.recipe, self._world, first, last) as feed:
            for step in range(first, last + 1):
                launched = launch_step(self._engine, self._teacher, feed.take(), self._chosen, self._world, step)
                if step in (first, last):
                    metrics = launched.metrics()
                    wait()
                if step == first:
                    barrier()
                    began, waited = time.perf_counter(), feed.waited
            seconds = time.perf_counter() - began
            return {"seconds": seconds / count, "data_wait": (feed.waited - waited) / seconds, "loss": metrics["loss"]}


class _Phases:
    """Wraps an engine so that each of its passes is recorded as a phase. The loss is a phase inside the student's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *arguments: Any) -> Any:
        with phase("student"):
            return self._engine(*arguments)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        with phase("backward"):
            return self._engine.backward(*arguments, **options)

    def step(self) -> Any:
        with phase("optimizer"):
            return self._engine.step()


def _in_phase(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with phase(name):
            return function(*arguments)

    return run
