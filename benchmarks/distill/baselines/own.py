"""The sides of fcsd: the feed, engine, loss and step of ``fcsd distill``, which trains all weights or adapters."""

from dataclasses import replace
from typing import Any

import torch
from benchmarks.distill.baselines.setting import Setting, Watch

from fcsd.config import Adapter
from fcsd.distill.experts.expert_parallel import wire_sharded
from fcsd.distill.optim import update
from fcsd.distill.prepare import share_weights
from fcsd.distill.step.engine import Training, build_training
from fcsd.distill.step.feed import feeding
from fcsd.distill.step.one_step import launch_step
from fcsd.distill.student import train_parts
from fcsd.distill.teacher.targets import LiveTeacher, TeacherSource, pack_attention
from fcsd.distill.train_engine import TrainEngine
from fcsd.models.adapters.targets import choose


def distill(setting: Setting, watch: Watch) -> float:
    """A ``Side``: takes the steps as ``fcsd distill`` does."""
    return _take(setting, watch, _full(setting))


def distill_plainly(setting: Setting, watch: Watch) -> float:
    """A ``Side``: as ``distill``, but transformers' code computes norms, MLPs and routed experts, and ZeRO updates."""
    parallel = setting.recipe.parallel.model_copy(update={"fused": False})
    setting = replace(setting, recipe=setting.recipe.model_copy(update={"parallel": parallel}))
    return _take(setting, watch, _full(setting, by_zero=True))


def distill_adapters(setting: Setting, watch: Watch) -> float:
    """A ``Side``: trains adapters as in a recipe with ``train.adapter: {}``. The teacher of the setting is not used."""
    recipe = setting.recipe
    train = recipe.train.model_copy(update={"adapter": Adapter()})
    recipe = recipe.model_copy(update={"train": train})
    model = setting.new_student()
    parts = train_parts(model, recipe, choose(model, Adapter().targets, recipe.optim.train))
    training = build_training(model, TeacherSource(), recipe, setting.world, parts=parts)
    return _take(setting, watch, replace(training, source=share_weights(parts, recipe)))


def _full(setting: Setting, by_zero: bool = False) -> Training:
    recipe, world = setting.recipe, setting.world
    pack_attention(setting.teacher, recipe)
    wire_sharded(setting.teacher, 1, recipe.parallel)
    source = LiveTeacher(setting.teacher, recipe.objective)
    return build_training(setting.new_student(), source, recipe, world, by_zero=by_zero)


def _take(setting: Setting, watch: Watch, training: Training) -> float:
    """Takes the steps, and returns the loss of the first one."""
    recipe, world = setting.recipe, setting.world
    update.install(training.engine, recipe)
    if world.device.type == "cuda":
        watch.weights = sum(parameter.nbytes for parameter in training.model.parameters())
        training = replace(training, engine=_Weighed(training.engine, watch))
    loss = float("nan")
    try:
        with feeding(setting.rows, recipe, world, 1, watch.steps) as feed:
            for step in range(1, watch.steps + 1):
                micros = feed.take()
                watch.waited = feed.waited
                launched = launch_step(training, micros, recipe, world, step)
                if step == 1:
                    loss = launched.metrics()["loss"]
                watch.ended(step)
    finally:  # DeepSpeed would keep the memory of a step that did not end
        training.engine.destroy()
    return loss


class _Weighed:
    """Wraps an engine and tells the watch how many bytes a forward pass leaves for the backward pass."""

    def __init__(self, engine: TrainEngine, watch: Watch) -> None:
        self._engine, self._watch = engine, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *arguments: Any) -> Any:
        before = torch.cuda.memory_allocated()
        result = self._engine(*arguments)
        self._watch.activations = torch.cuda.memory_allocated() - before
        return result
