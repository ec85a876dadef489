"""``fcsd plan``: whether a recipe fits, how long it takes and what it costs, from config.json and the meta device.

No weight is read. ``setup`` takes from the recipe what the plan depends on. ``model`` counts the parameters of the
architecture. ``activations`` measures what its layers keep for the backward pass. ``memory`` adds up the memory of a
GPU. ``speed`` computes time and cost. ``search`` finds a change that makes a recipe fit. ``configs`` holds the
configurations of the models in the packaged recipes, so that planning also works without the hub.
"""

from dataclasses import dataclass, replace

from fcsd.config import Recipe, accumulation
from fcsd.errors import ConfigError, DoesNotFitError
from fcsd.parallel.expert.formats import check_formats, formats_of
from fcsd.plan.memory import Memory, disk_bytes, host_bytes, memory
from fcsd.plan.model import MetaModel, ModelNumbers
from fcsd.plan.search import changes, cheapest
from fcsd.plan.setup import GIB, Hardware, Setup, setup_of
from fcsd.plan.speed import Speed, speed


@dataclass(frozen=True)
class Change:
    """A change that makes a recipe fit.

    Attributes:
        written: the assignments and flags to write.
        total: bytes of a GPU.
        disk: bytes of disk.
        host: bytes of host memory of a process.
        hours: hours of the run.
    """

    written: list[str]
    total: int
    disk: int
    host: int
    hours: float


@dataclass(frozen=True)
class Plan:
    """What a run of a recipe needs.

    Attributes:
        host: most bytes of host memory that each process needs: while it loads, or with the optimizer or its moments on
            the host.
        disk: bytes of the checkpoints that exist at the same time, and of the teacher cache.
        change: the cheapest change that makes the recipe fit. None if it fits, or if no change makes it fit.
        packaged: names of the models whose configuration comes from ``fcsd/plan/configs``, because neither the hub nor
            its cache had it.
    """

    name: str
    numbers: ModelNumbers
    setup: Setup
    hardware: Hardware
    memory: Memory
    speed: Speed
    host: int
    disk: int
    change: Change | None
    packaged: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuses a plan that does not fit.

        Raises:
            DoesNotFitError: the run needs more memory than a GPU has.
        """
        if not self.memory.fits:
            have = f"{self.memory.total / GIB:.1f} GiB a GPU needed, {self.memory.usable / GIB:.1f} usable"
            raise DoesNotFitError(f"{self.name} does not fit: {have}", hint=self.advice())

    def advice(self) -> str:
        """A sentence that names the cheapest change that makes the recipe fit, or says that there is none."""
        if self.change is None:
            return (
                "no change of the documented knobs makes it fit; larger GPUs, a shorter data.seq_len, or a "
                "train.batch_tokens that more GPUs can share would"
            )
        new = self.change
        more = ""
        if new.disk > self.disk:
            more += f", {new.disk / 1e9:,.0f} GB of disk instead of {self.disk / 1e9:,.0f}"
        if new.host > self.host:
            more += f", {new.host / GIB:,.0f} GiB of host memory a process instead of {self.host / GIB:,.0f}"
        return (
            f"cheapest change that fits: {' '.join(new.written)} ({new.total / GIB:.1f} GiB a GPU{more}, "
            f"{new.hours:,.1f} hours instead of {self.speed.hours:,.1f})"
        )


def plan_run(recipe: Recipe, hardware: Hardware, utilisation: float | None = None) -> Plan:
    """Plans a recipe within seconds, for a model of any size; no weight is read.

    Args:
        recipe: a complete recipe, such as ``load_recipe(...).recipe``.
        hardware: the GPUs that it would run on.
        utilisation: the share of the GPUs' peak FLOP/s that the steps reach, from 0 to 1. With None, the plan estimates
            it from measured and assumed constants.

    Returns:
        The plan, whether the recipe fits or not; ``Plan.check`` raises if it does not.

    Raises:
        BadInputError: the student or the teacher is not a model.
        ConfigError: the batch or the experts cannot be split evenly over the GPUs, or the rows of the student cannot be
            rounded to the formats of ``parallel.wire``.
    """
    accumulation(recipe, hardware.world)
    model = MetaModel(recipe.model, rewired=recipe.init.wiring is not None)
    if (formats := formats_of(recipe.parallel.wire)) is not None:
        check_formats(formats, model.config, recipe.model)
    followed = model if recipe.teacher is None else MetaModel(recipe.teacher)
    named = {recipe.model: model, recipe.teacher or recipe.model: followed}
    setup = setup_of(recipe, hardware.world, len(model.numbers.layers), model.plain)
    if not setup.possible(model.numbers.experts):
        have = f"{hardware.world} GPUs and {model.numbers.experts} experts a layer"
        raise ConfigError(
            f"parallel.ep_size {setup.ep_size} must divide both: {have}",
            hint="Change parallel.ep_size, --gpus or --nodes.",
        )
    planned = plan_setup(recipe.name, model, followed.numbers, setup, hardware, utilisation)
    return replace(planned, packaged=tuple(name for name, one in named.items() if one.packaged))


def plan_setup(
    name: str,
    model: MetaModel,
    teacher: ModelNumbers,
    setup: Setup,
    hardware: Hardware,
    utilisation: float | None = None,
) -> Plan:
    """Plans as :func:`plan_run` does, for models and a recipe that have been read already."""

    def memory_of(setup: Setup, hardware: Hardware) -> Memory:
        return memory(model.numbers, teacher, model.layer_bytes(setup), setup, hardware)

    needed, change = memory_of(setup, hardware), None
    if not needed.fits:
        found = cheapest(setup, hardware, model.numbers.experts, lambda s, h: memory_of(s, h).fits)
        if found is not None:
            changed, larger = found
            change = Change(
                written=changes(setup, changed, larger),
                total=memory_of(changed, larger).total,
                disk=disk_bytes(model.numbers, changed),
                host=host_bytes(model.numbers, changed),
                hours=speed(model.numbers, teacher, changed, larger, utilisation).hours,
            )
    return Plan(
        name=name,
        numbers=model.numbers,
        setup=setup,
        hardware=hardware,
        memory=needed,
        speed=speed(model.numbers, teacher, setup, hardware, utilisation),
        host=host_bytes(model.numbers, setup),
        disk=disk_bytes(model.numbers, setup),
        change=change,
    )
