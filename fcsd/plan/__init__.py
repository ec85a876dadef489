"""``fcsd plan``: whether a recipe fits, how long it takes and what it costs, from config.json and the meta device.

No weight is read. ``setup`` takes from the recipe what the plan depends on. ``model`` counts the parameters of the
architecture. ``activations`` measures what its layers keep for the backward pass. ``memory`` adds up the memory of a
GPU. ``speed`` computes time and cost. ``search`` finds a change that makes a recipe fit, or faster. ``uncounted`` names
what the plan leaves out. ``configs`` holds the configurations of the models in the packaged recipes, so that planning
also works without the hub.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from transformers import PretrainedConfig

from fcsd.config import Adapter, Recipe, ResolvedRecipe, accumulation, vary
from fcsd.errors import BadInputError, ConfigError, DoesNotFitError
from fcsd.models.build import arch_of
from fcsd.models.quantised.method import Method, plain_copy
from fcsd.models.rope import require_short_rows
from fcsd.models.selection import select_layers
from fcsd.models.wiring_block import DESYNC, Wiring
from fcsd.parallel.expert.dispatcher import check_divided, check_formats
from fcsd.parallel.quantised import formats_of
from fcsd.parallel.tensor.shard import check_sharded
from fcsd.plan.memory import Memory, disk_bytes, host_bytes, memory, state_width
from fcsd.plan.model import MetaModel, ModelNumbers, of_rank
from fcsd.plan.search import assignments, candidates, changes, cheapest, quicker
from fcsd.plan.setup import GIB, USABLE, Hardware, Parts, Setup, setup_of, uncounted, with_parts
from fcsd.plan.speed import Speed, readable, speed

GAIN = 0.95  # a change that leaves more of the hours than this is not worth a line; plans are less exact than that


@dataclass(frozen=True)
class Change:
    """A change of a recipe that makes it fit, or makes it faster.

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
        host: most bytes of host memory that each process needs: while it loads, or with the optimizer on the host.
        disk: bytes of the checkpoints that exist at the same time.
        change: the cheapest change that makes the recipe fit. None if it fits, or if no change makes it fit.
        faster: the micro-batches, with or without recompute, with which a run that fits is fastest, the assignment that
            gains most first; None if they gain less than a twentieth of the hours.
        adapted: a change to adapters that makes the recipe fit; None if it fits, or if it cannot or need not be made.
        packaged: names of the models whose configuration comes from ``fcsd/plan/configs``, because neither the hub nor
            its cache had it.
        method: how the files hold the student's weights; None if they hold them as they are.
        not_counted: settings of the recipe whose effect the plan does not know, each with a few words about it.
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
    faster: Change | None = None
    adapted: Change | None = None
    packaged: tuple[str, ...] = ()
    method: Method | None = None
    not_counted: tuple[str, ...] = ()

    @property
    def held(self) -> int:
        """Bytes of all weights, and of gradients and optimizer states of those that train, on all GPUs together."""
        setup, total = self.setup, self.numbers.total
        changed, trained = (total, total) if setup.parts is None else (setup.parts.own, setup.parts.trained)
        total += trained if setup.parts is not None and setup.parts.drafts else 0
        weights = total + (changed if setup.teacher != "none" else 0)  # the teacher has its own of what changes
        states = 0 if setup.offload == "host" else state_width(setup)
        return setup.width * weights - setup.spared + int((states + setup.gradient_width) * trained)

    def check(self) -> None:
        """Refuses a plan that does not fit.

        Raises:
            DoesNotFitError: the run needs more memory than a GPU has.
        """
        if not self.memory.fits:
            need = f"it needs {self.memory.total / GIB:.1f} GiB of each GPU"
            have = f"{self.memory.usable / GIB:.1f} GiB are usable"
            raise DoesNotFitError(f"{self.name} does not fit: {need}, of which {have}", hint=self.advice())

    def advice(self) -> str:
        """A sentence that names the cheapest change that makes the recipe fit, or says that there is none.

        Adapters are named first. They train less, so it also names the cheapest change that trains as much.
        """
        found = self._full_training()
        if self.adapted is not None:
            found = (
                f"it fits with adapters in place of a second copy and of all optimizer states: "
                f"{self.described(self.adapted)}; to train all weights, {found}"
            )
        if self.method is None:
            return found
        return (
            f"{found}; training decodes the {self.method}, so they take what the bf16 release takes; beside that "
            "release, adapters of a dense model have train.adapter.base: nf4"
        )

    def _full_training(self) -> str:
        usable = self.memory.usable - self.memory.context
        if self.change is None and self.setup.parts is not None and self.setup.parts.rounded is not None:
            peak = self.memory.peak
            shorter = " or a shorter data.seq_len" if peak.weights + peak.optimizer < usable else ""
            return (
                f"every GPU holds all weights, {peak.weights / GIB:.1f} GiB with those in NF4, which cannot be divided "
                f"(train.adapter.base): it takes GPUs of {math.ceil(self.memory.total / USABLE / GIB)} GiB{shorter}"
            )
        if self.change is None and self.setup.parts is not None and self.setup.parts.rank and not self.numbers.experts:
            return (
                "every GPU holds all weights beside adapters, which nothing divides: it takes larger GPUs, the weights "
                "in four bits (train.adapter.base: nf4), or optim.train: [converted] with parallel.tp_size"
            )
        if self.change is None and 0 < self.hardware.world * usable < self.held:
            return (
                f"the weights and what belongs to those that train take {self.held / GIB:,.0f} GiB, and a GPU has "
                f"{usable / GIB:.0f} for them: it takes at least {math.ceil(self.held / usable)} such GPUs, "
                "among which they are divided (parallel.tp_size for a dense model, parallel.ep_size for experts)"
            )
        if self.change is None:
            return (
                "none of the settings that fcsd plan tries makes it fit; larger GPUs or a shorter data.seq_len may, "
                "and so may a larger train.batch_tokens, which more GPUs can share"
            )
        new = self.change
        more = ""
        if new.disk > self.disk:
            more += f", {new.disk / 1e9:,.0f} GB of disk instead of {self.disk / 1e9:,.0f}"
        if new.host > self.host:
            more += f", {new.host / GIB:,.0f} GiB of host memory for each process instead of {self.host / GIB:,.0f}"
        return f"the cheapest change that makes it fit is {self.described(new, more)}"

    def described(self, new: Change, more: str = "") -> str:
        """What to write for a change, and what it takes; ``more`` stands between memory and time."""
        return (
            f"{' '.join(new.written)} ({new.total / GIB:.1f} GiB of each GPU{more}, "
            f"{readable(new.hours)} instead of {readable(self.speed.hours)})"
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
        BadInputError: the student or the teacher is not a model, or ``parallel.tp_size`` would shard quantised ones.
        ConfigError: the batch, the experts or the heads cannot be split evenly over the GPUs, a Desync wiring is for
            another ``parallel.tp_size``, the rows of the student cannot be rounded to the formats of
            ``parallel.quantised``, or short documents would get the rotary factors of long ones.
    """
    accumulation(recipe, hardware.world)
    model = MetaModel(recipe.model, rewired=recipe.init.wiring is not None)
    teacher = model if recipe.teacher is None else MetaModel(recipe.teacher)
    named = {recipe.model: model, recipe.teacher or recipe.model: teacher}
    models = [(name, m.config, m.wiring, m.method) for name, m in named.items()]
    check_models(recipe, hardware.world, models)
    for name, one in named.items():
        require_short_rows(one.config, recipe.data.seq_len, name)
    setup = setup_for(recipe, hardware.world, model)
    desync = recipe.init.wiring in DESYNC or (recipe.init.wiring is None and model.wiring.name in DESYNC)
    ranks = (recipe.init.gpus if recipe.init.wiring else model.wiring.tp_degree) if desync else 1
    offer = None
    if setup.parts is None and recipe.teacher is None and not desync:
        offer = partial(model.parts, Adapter(), [])

    def accepted(values: Mapping[str, object]) -> bool:
        try:
            varied = vary(ResolvedRecipe(recipe, {}), values).recipe
            if "parallel.tp_size" in values:
                check_models(varied, hardware.world, models)
        except (BadInputError, ConfigError):
            return False
        return True

    planned = plan_setup(recipe.name, model, teacher.numbers, setup, hardware, utilisation, accepted, offer)
    return replace(
        planned,
        packaged=tuple(name for name, one in named.items() if one.packaged),
        method=model.method,
        not_counted=tuple(uncounted(recipe, hardware, ranks)),
    )


def check_models(
    recipe: Recipe, processes: int, models: Sequence[tuple[str, PretrainedConfig, Wiring, Method | None]]
) -> None:
    """Refuses models that processes cannot divide as ``parallel`` says. Only configs are read.

    Args:
        models: the name, the config, its wiring and the method of its quantised weights, of the student and, behind it,
            of a teacher in memory if there is one.

    Raises:
        ConfigError: see ``check_formats``, ``check_sharded`` and ``check_divided``.
        BadInputError: tensor-parallel ranks would shard a quantised model.
    """
    parallel = recipe.parallel
    if parallel.quantised.any:
        check_formats(formats_of(parallel.quantised), models[0][1], recipe.model)
    if parallel.tp_size > 1:
        inits = [recipe.init, *[None] * len(models)]
        sharded = [(*model[:3], init) for model, init in zip(models, inits, strict=False)]
        check_sharded(sharded, parallel, processes)
    for number, (name, config, _, method) in enumerate(models):
        if parallel.tp_size > 1 and method is not None:
            what = f"{name} is quantised ({method.name}), and parallel.tp_size above 1 cannot load that"
            raise BadInputError(what, plain_copy(name))
        if number and parallel.teacher_ep_size == 1:
            continue
        hint = f"set parallel.{'teacher_placement: replicated' if number else 'ep_size: 1'}"
        check_divided(config, name, parallel, processes, hint)


def plan_setup(
    name: str,
    model: MetaModel,
    teacher: ModelNumbers,
    setup: Setup,
    hardware: Hardware,
    utilisation: float | None = None,
    accepted: Callable[[Mapping[str, object]], bool] = lambda _: True,
    offer: Callable[[], Parts] | None = None,
) -> Plan:
    """Plans as :func:`plan_run` does, for models and a recipe that have been read already.

    Args:
        accepted: whether the recipe accepts new values, which are given by dotted key; others are not suggested.
        offer: counts the adapters that are suggested if the recipe does not fit; None suggests none.
    """

    def of_ranks(new: Setup) -> tuple[ModelNumbers, ModelNumbers]:
        return of_rank(model.numbers, new.tp_size), of_rank(teacher, new.tp_size)

    def memory_of(new: Setup, hardware: Hardware) -> Memory:
        own, of_teacher = of_ranks(new)
        return memory(own, of_teacher, model.layer_bytes(new), of_one_rank(new), hardware)

    def speed_of(new: Setup, hardware: Hardware = hardware) -> Speed:
        own, of_teacher = of_ranks(new)
        return speed(own, of_teacher, of_one_rank(new), hardware, utilisation)

    def hours_of(new: Setup, hardware: Hardware = hardware) -> float:
        return speed_of(new, hardware).hours

    def changed(new: Setup, hardware: Hardware, written: list[str]) -> Change:
        return Change(
            written=written,
            total=memory_of(new, hardware).total,
            disk=disk_bytes(model.numbers, new),
            host=host_bytes(of_ranks(new)[0], of_one_rank(new)),
            hours=hours_of(new, hardware),
        )

    divides = arch_of(model.config).autoep is not None

    def possible(new: Setup, hardware: Hardware) -> bool:
        can_run = divides or new.ep_size == 1
        return can_run and memory_of(new, hardware).fits and accepted(assignments(setup, new))

    experts, needed = model.numbers.experts, memory_of(setup, hardware)
    time, change, faster = speed_of(setup), None, None
    adapted: Change | None = None
    if not needed.fits:
        found = cheapest(setup, hardware, experts, possible)
        change = None if found is None else changed(*found, written=changes(setup, *found))
        if offer is not None:
            here = takewhile(
                lambda found: found[1] == hardware, candidates(with_parts(setup, offer()), hardware, experts)
            )
            light = next((new for new, _ in here if possible(new, hardware)), None)
            adapted = None if light is None else changed(light, hardware, written=changes(setup, light, hardware))
    elif (best := _best([new for new in quicker(setup, experts) if possible(new, hardware)], hours_of)) is not None:
        parts = replace(setup, micro_batch_size=best.micro_batch_size), replace(setup, recompute=best.recompute)
        written = [text for part in sorted(parts, key=hours_of) for text in changes(setup, part, hardware)]
        faster = changed(best, hardware, written)
        faster = faster if faster.hours <= GAIN * time.hours else None
    return Plan(
        name=name,
        numbers=model.numbers,
        setup=setup,
        hardware=hardware,
        memory=needed,
        speed=time,
        host=host_bytes(of_ranks(setup)[0], of_one_rank(setup)),
        disk=disk_bytes(model.numbers, setup),
        change=change,
        faster=faster,
        adapted=adapted,
    )


def of_one_rank(setup: Setup) -> Setup:
    """The setup with what one tensor-parallel rank has of the parts that train."""
    return setup if setup.parts is None else replace(setup, parts=setup.parts.of_rank(setup.tp_size))


def setup_for(recipe: Recipe, world: int, model: MetaModel) -> Setup:
    """The setup of a recipe on ``world`` processes, with what trains beside frozen weights of ``model``, the student.

    Raises:
        ConfigError: the recipe names a part that the model does not have.
    """
    setup = setup_of(recipe, world, len(model.numbers.layers), model.plain)
    if recipe.frozen_beside is None:
        return setup
    if recipe.train.draft_head:
        return with_parts(setup, model.draft_parts())
    return with_parts(setup, model.parts(recipe.train.adapter, recipe.optim.train, _wiring_of(recipe, model)))


def _wiring_of(recipe: Recipe, model: MetaModel) -> Wiring:
    """The wiring of the student: that of the recipe, or else its own."""
    init = recipe.init
    if init.wiring is None:
        return model.wiring
    layers = select_layers(init.layers, len(model.numbers.layers))
    how = init.variant, init.border or "", init.distance, init.gpus, init.reduce or ""
    try:
        return Wiring(init.wiring, layers, *how)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _best(setups: list[Setup], hours_of: Callable[[Setup], float]) -> Setup | None:
    """The first setup, and so the one with the smallest micro-batch, whose hours are the fewest up to a fiftieth."""
    least = min(map(hours_of, setups), default=0.0)
    return next((setup for setup in setups if hours_of(setup) <= 1.02 * least), None)
