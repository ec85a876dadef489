"""Builds what all sides of the comparison share: the teacher, the rows, the recipe, and the bound."""

from typing import Any

from benchmarks.distill.baselines.setting import Setting
from benchmarks.kernels.rates import product_rate
from benchmarks.train.random_run import random_corpus, random_run, require_all_trained
from benchmarks.train.step.workload import Workload

from fcsd.config import Objective, Recipe
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.experts.expert_parallel import randomise
from fcsd.distill.metrics import full_speed
from fcsd.distill.student import DTYPES
from fcsd.distill.teacher.targets import compile_layers
from fcsd.errors import ConfigError
from fcsd.launch.world import join_world


def prepare(load: Workload, public: bool = True) -> tuple[Setting, float | None, float | None]:
    """Builds the setting of a comparison, and measures the bound.

    Args:
        load: see ``benchmarks.distill.baselines.compare.bench``.
        public: whether public trainers are among the baselines, which do not have all settings of fcsd.

    Returns: the setting; the FLOP/s of a large bf16 matrix product on this device; and the tokens per second of a step
        in which everything ran at that rate. The last two are None on CPUs.

    Raises:
        ConfigError: there are several processes, or the recipe asks for something that the baselines do not do.
    """
    world = join_world()
    if world.size > 1:
        raise ConfigError("--against compares the steps of one process", hint="leave --gpus out")
    original = load.config
    size: Any = {"seq": load.seq, "micro_batch": load.micro_batch, "accumulation": load.accumulation}
    steps = load.steps + 4  # of a visit: those that are not timed, and a traced one, are among them
    rate = bound = None
    with random_run(original, "bench", **size, steps=steps, world=world, sets=load.sets) as (recipe, student):
        require_all_trained(recipe)
        if public:
            _check(recipe)
        if world.device.type == "cuda":
            rate = product_rate()
            bound = full_speed(recipe, 1, rate)
    draw: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "seed": recipe.seed}
    teacher = randomise(original, 1, **draw).requires_grad_(False)
    compile_layers(teacher, recipe)
    rows = training_rows(recipe, [random_corpus(student.get_text_config().vocab_size, load.seq, documents=1)])
    return Setting(recipe, student, teacher, rows, world), rate, bound


def _check(recipe: Recipe) -> None:
    """Checks that a recipe asks for nothing that only fcsd does."""
    asked, usual = (one.model_dump(exclude={"chunk_tokens"}) for one in (recipe.objective, Objective()))
    if asked != usual:
        raise ConfigError("the baselines compute KL at temperature 1 only", hint="leave --set objective... out")
    if (recipe.optim.offload, recipe.parallel.quantised.any) != ("none", False):
        raise ConfigError(
            "the baselines keep fp32 moments on the device and send no rows",
            hint="leave --set optim.offload and parallel.quantised out",
        )


def held_bytes(setting: Setting) -> int:
    """The bytes of both models' weights, and of the student's master weights and moments.

    They are the same on every side. The memory above them holds activations, logits, gradients and buffers.
    """
    weights = list(setting.teacher.parameters())
    masters = 4 if setting.recipe.train.dtype == "bf16" else 0
    return 2 * sum(p.nbytes for p in weights) + (masters + 8) * sum(p.numel() for p in weights)
