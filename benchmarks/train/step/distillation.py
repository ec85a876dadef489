"""The whole distillation step, teacher included, of random weights.

The dimensions are those of a published model or of a checkpoint's config. The recipe, the packed rows, the feed, the
loss, the engine and the optimizer step are those of ``fcsd distill``.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.train.random_run import draw_models, random_corpus, random_run
from benchmarks.train.step.model import in_phases
from benchmarks.train.step.variants import NoExchange
from benchmarks.train.step.workload import BLOCKING, BY_HOST, MASKED, OVERLAPPED, Workload
from benchmarks.turns import reset_peak
from studies.formats.directions import parse_formats
from transformers import PreTrainedModel

from fcsd.bench.runner import finished
from fcsd.checkpoint import open_checkpoint
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.experts.expert_parallel import dispatcher_for, quantiser_of, wire_sharded
from fcsd.distill.metrics import full_speed_of
from fcsd.distill.optim import update
from fcsd.distill.prepare import shares_weights
from fcsd.distill.step.engine import build_training
from fcsd.distill.step.feed import feeding
from fcsd.distill.step.one_step import launch_step, train_step
from fcsd.distill.student import chosen_parts, train_parts
from fcsd.distill.teacher.shared import SharedTeacher
from fcsd.distill.teacher.targets import LiveTeacher, TeacherSource, compile_layers, pack_attention
from fcsd.errors import ConfigError
from fcsd.launch.world import World, barrier
from fcsd.models.build import unwired, wiring_of
from fcsd.models.wiring import Wiring
from fcsd.parallel.attention import join_attention
from fcsd.parallel.expert.dispatcher import check_formats
from fcsd.parallel.overlap import overlap
from fcsd.parallel.quantised import Quantiser


class Distillation:
    """The ``Steps`` of distillation; see ``measure.Steps``.

    Raises:
        ConfigError: the recipe is invalid for this model or this number of processes, or the rows of the model cannot
            be rounded to a format.
    """

    def __init__(self, load: Workload, world: World) -> None:
        original = load.config
        size: Any = {"seq": load.seq, "micro_batch": load.micro_batch, "accumulation": load.accumulation}
        most = len(load.timed) * (load.rounds * (load.steps + 1) + 2)
        with random_run(original, "bench", **size, steps=most, world=world, sets=load.sets) as (recipe, rewired):
            if load.formats and recipe.parallel.ep_size == 1:
                raise ConfigError(
                    "--quantised needs experts that are divided among several processes", hint="add --gpus 2"
                )
            for format in load.formats:
                check_formats(parse_formats(format), rewired, load.shape)
            chosen = chosen_parts(recipe, open_checkpoint(recipe.model, weights=False))
            self.full_speed = full_speed_of(recipe, world)
        self._recipe, self._world, self._taken = recipe, world, 0
        self.batch_tokens = recipe.train.batch_tokens
        student, teacher = draw_models(recipe, rewired, original, world)
        self.models, source = [student], TeacherSource()
        self._parts = None if chosen is None else train_parts(student, recipe, chosen)
        if teacher is not None:
            compile_layers(teacher, recipe)
            self.models.append(teacher)
            source = LiveTeacher(teacher, recipe.objective)
        built = build_training(student, source, recipe, world, parts=self._parts)
        update.install(built.engine, recipe)
        self._built = self._training = replace(built, engine=in_phases(built.engine))
        self._rows = training_rows(recipe, [random_corpus(student.config.vocab_size, recipe.data.seq_len)])

    def check(self) -> dict[str, Any]:
        """Nothing: the variants differ in rounding."""
        return {}

    def choose(self, variant: str) -> None:
        """Wires both models for a variant, or the student and its own pass as the teacher if it freezes weights."""
        recipe, student = self._recipe, self.models[0]
        variant, _, format = variant.partition("+")
        quantiser = Quantiser(parse_formats(format)) if format else quantiser_of(recipe)
        ep_sizes = recipe.parallel.ep_size, recipe.parallel.teacher_ep_size
        for model, ep_size, own in zip(self.models, ep_sizes, (quantiser, None), strict=False):
            self._wire(variant, model, ep_size, own)
        training = replace(self._built, quantiser=quantiser)
        if self._parts is not None and shares_weights(recipe):
            rewire = partial(self._wire, variant, student, ep_sizes[0], None, unwired())
            shared = SharedTeacher(self._parts, recipe.objective, rewire if ep_sizes[0] > 1 else None)
            training = replace(training, source=shared)
        self._training = training

    def _wire(
        self,
        variant: str,
        model: PreTrainedModel,
        ep_size: int,
        quantiser: Quantiser | None,
        wiring: Wiring | None = None,
    ) -> None:
        """Wires a model for a variant; ``wiring`` is used in place of its own if experts are divided."""
        parallel, wiring = self._recipe.parallel, wiring or wiring_of(model.config)
        fused = parallel.fused and self._world.device.type == "cuda"
        join_attention(model)
        model.set_attn_implementation("sdpa")
        if variant != MASKED:
            pack_attention(model, self._recipe)
        if variant in (OVERLAPPED, MASKED, BY_HOST) or ep_size == 1:
            chosen = parallel.model_copy(update={"transport": "host"}) if variant == BY_HOST else parallel
            wire_sharded(model, ep_size, chosen, quantiser, wiring=wiring)
        elif variant == BLOCKING:
            dispatcher = dispatcher_for(parallel, ep_size)
            overlap(model, wiring, "off", fused=fused, dispatcher=dispatcher, quantiser=quantiser)
        else:
            overlap(model, wiring, fused=fused, transport=NoExchange())

    def one(self) -> None:
        """Runs one step and waits until it is complete."""
        self._taken += 1
        train_step(self._training, self._rows, self._recipe, self._world, self._taken)

    def several(self, count: int) -> dict[str, Any]:
        """Runs one step that is not timed, then ``count`` timed steps in the way of ``fcsd distill``.

        Returns: the mean ms of a ``step``, the share ``data_wait`` of them spent waiting for data, both as lists of one
            value, and the ``loss`` of the last step.
        """
        reset_peak(self._world.device)
        first, last = self._taken + 1, self._taken + 1 + count
        self._taken = last
        began = waited = 0.0
        metrics: dict[str, float] = {}
        with feeding(self._rows, self._recipe, self._world, first, last) as feed:
            for step in range(first, last + 1):
                launched = launch_step(self._training, feed.take(), self._recipe, self._world, step)
                if step in (first, last):
                    metrics = launched.metrics()
                    finished(self._world.device)
                if step == first:
                    barrier()
                    began, waited = time.perf_counter(), feed.waited
            seconds = time.perf_counter() - began
            data_wait = (feed.waited - waited) / seconds
        return {"step": [1e3 * seconds / count], "data_wait": [data_wait], "loss": metrics["loss"]}
