"""The side of fcsd: the feed, the engine, the loss and the step of ``fcsd distill``."""

from dataclasses import replace

from benchmarks.distill.baselines.setting import Setting, Watch

from fcsd.distill.experts.expert_parallel import wire_sharded
from fcsd.distill.optim import update
from fcsd.distill.step.engine import build_training
from fcsd.distill.step.feed import feeding
from fcsd.distill.step.one_step import launch_step
from fcsd.distill.teacher.original import pack_attention
from fcsd.distill.teacher.targets import LiveTeacher


def distill(setting: Setting, watch: Watch) -> float:
    """A ``Side``: takes the steps as ``fcsd distill`` does."""
    return _distill(setting, watch, by_zero=False)


def distill_plainly(setting: Setting, watch: Watch) -> float:
    """A ``Side``: as ``distill``, but transformers' code computes norms, MLPs and routed experts, and ZeRO updates."""
    parallel = setting.recipe.parallel.model_copy(update={"fused": False})
    recipe = setting.recipe.model_copy(update={"parallel": parallel})
    return _distill(replace(setting, recipe=recipe), watch, by_zero=True)


def _distill(setting: Setting, watch: Watch, *, by_zero: bool) -> float:
    recipe, world = setting.recipe, setting.world
    pack_attention(setting.teacher, recipe)
    wire_sharded(setting.teacher, 1, recipe.parallel)
    source = LiveTeacher(setting.teacher, recipe.objective)
    training = build_training(setting.new_student(), source, recipe, world, by_zero=by_zero)
    update.install(training.engine, recipe)
    loss = float("nan")
    with feeding(setting.rows, recipe, world, 1, watch.steps, source) as feed:
        for step in range(1, watch.steps + 1):
            micros = feed.take()
            watch.waited = feed.waited
            launched = launch_step(training, micros, recipe, world, step)
            if step == 1:
                loss = launched.metrics()["loss"]
            watch.ended(step)
    training.engine.destroy()
    return loss
