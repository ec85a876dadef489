"""Times prefill and decoding in fcsd's own engine, all variants in turns on one model and one key-value cache.

All variants of one batch share the weights, so that changes of the clocks affect all of them alike. A wiring is timed
with its sums in flight and with its sums at once. The bound of a wiring is the same computation with reductions of the
backend ``none``: it sends nothing inside the layers, and its results are wrong. The sum of the embedding and the
exchange of logits remain, in the bound too.

The engine answers a whole batch at once and has no arrivals, so there is no load here: that is for vLLM.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.bench.runner import finished, say
from fcsd.bench.serve.model import prompts_of, usual_wirings, wiring_for
from fcsd.bench.serve.variants import Missing, Role, label
from fcsd.bench.serve.workload import STANDARD, Workload
from fcsd.engine.decode import GRAIN, Stepper
from fcsd.engine.fused import fuse
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.slots import Slots, why_no_slots
from fcsd.engine.weights import random_tensor_parallel
from fcsd.errors import ConfigError
from fcsd.launch.world import World, join_world
from fcsd.models.wiring_block import Wiring
from fcsd.parallel.all_reduce.reduce import Reduction
from fcsd.parallel.all_reduce.ways import Way, Ways
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.progress import duration

FEW = 128  # tokens by which the speed of a CPU is estimated
PATIENCE = timedelta(hours=2)  # how long ranks wait for others
NCCL, SYMMETRIC, BOUND = "nccl", "symmetric", "none"  # backends of the engine's reductions
Times = dict[str, list[float]]  # milliseconds in each round: of the ``prefill``, and of one step of ``decode``
T = TypeVar("T")


class Variant(NamedTuple):
    """What takes turns: the name of a wiring, and how it sums in all steps."""

    wiring: str
    way: Way


def bench(load: Workload, config: PretrainedConfig, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure the original, the wirings and the bound. Every process of the run must call this function.

    Args:
        load: the workload; there are ``tp`` processes.
        write: gets what was found so far, after each figure.

    Returns:
        ``variants``, ``missing`` and ``notes``, as of ``under_vllm.bench``.
    """
    until = time.monotonic() + 60 * load.minutes
    world = join_world().patient(PATIENCE)
    if world.size != load.tp:
        raise ConfigError(f"--gpus {load.tp} needs as many processes, and there are {world.size}")
    names = usual_wirings(load, config)
    wirings = {name: wiring_for(name, config, load.tp) for name in (STANDARD, *names)}
    ranks, missing = TensorGroup(dist.group.WORLD, load.tp, world.rank), {}
    backends = []
    for backend in load.sums or (NCCL, SYMMETRIC):
        try:
            Reduction(dist.group.WORLD, backend, 0)
            backends.append(backend)
        except ConfigError as error:
            if load.sums:
                raise
            missing["symmetric memory"] = Missing(str(error))
    missing["load"] = Missing("fcsd's engine has no arrivals; --engine vllm has", needless=True)
    first, *others = [Way(backend, travels) for travels in (True, False) for backend in backends]
    variants = {label("original", way, first): Variant(STANDARD, way) for way in (first, *others) if way.travels} | {
        label(name, way, first): Variant(name, way) for name in names for way in (first, *others)
    }
    variants["bound"] = Variant(names[0], Way(BOUND))
    model = random_model(config, ranks, world, torch.bfloat16)
    found = {
        name: {"role": role(key, first), "wiring": key.wiring, **key.way._asdict(), "rounds": {}}
        for name, key in variants.items()
    }

    def more() -> bool:
        return world.lowest(until - time.monotonic()) > 0

    work = [("decode", n, n, load.short, load.answer) for n in load.batches]
    work += [("prefill", tokens, load.arrivals, tokens, 1) for tokens in load.prompts]
    notes = ["one model had all wirings, and all variants took turns"]
    result = {"variants": found, "missing": missing, "notes": notes}
    vocabulary, on_gpu = config.get_text_config().vocab_size, model.device.type == "cuda"
    if not on_gpu:
        notes.append("there was no GPU: times on CPUs say nothing about GPUs, nor whether a conversion pays there")
        key, few = variants["bound"], prompts_of(1, min(load.short, FEW), vocabulary, seed=0)
        tried = turns(model, ranks, world, [key], wirings, few, 1, rounds=1, graphs=False)
        _require_short(load, work, 2 * len(variants) * tried[key]["prefill"][0] / 1e3 / len(few[0]), world)
    for kind, size, batch, prompt, new in work:
        if not more():
            notes.append(f"no time was left for {kind} {size}; give it more --minutes")
            continue
        say(world, f"{kind} {size}")
        prompts = prompts_of(batch, prompt, vocabulary, seed=size)
        options = {"rounds": load.rounds, "graphs": on_gpu, "more": more}
        times = turns(model, ranks, world, [*variants.values()], wirings, prompts, new, **options)
        for name, key in variants.items():
            if times.get(key) is None:
                notes.append(f"{name}: {kind} {size} does not fit into memory")
            elif times[key][kind]:
                found[name]["rounds"][kind, size] = times[key][kind]
        write(result)
    return result


def _require_short(load: Workload, work: Sequence[tuple[str, int, int, int, int]], each: float, world: World) -> None:
    """Refuse sizes of which one alone takes longer than the whole time, as the defaults do on a CPU.

    Args:
        each: about the seconds of a token in the two rounds that all variants take in any case.
    """
    seconds, kind, size = max(
        (batch * (prompt + new - 1) * each, kind, size) for kind, size, batch, prompt, new in work
    )
    if world.lowest(60 * load.minutes - seconds) < 0:
        raise ConfigError(
            f"without a GPU, {kind} {size} takes about {duration(seconds)}, and --minutes is {load.minutes:g}",
            "Give smaller sizes: --prompt-tokens 64 --concurrency 2 --batches 1,4 --answer 8; or more --minutes.",
        )


def role(variant: Variant, first: Way) -> Role:
    """The role of a variant; a wiring is ``wired`` in the first way, and has other ways beside it."""
    if variant.way.reduce == BOUND:
        return "bound"
    if variant.wiring == STANDARD:
        return "original"
    return "wired" if variant.way == first else "way"


def random_model(config: PretrainedConfig, ranks: TensorGroup, world: World, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights in the engine, with the modules that the engine fuses."""
    model = random_tensor_parallel(config, dtype=dtype, device=world.device, ranks=ranks)
    fuse(model, world.device.type == "cuda")
    return model


def if_it_fits(work: Callable[[], T], team: World) -> T | None:
    """The result of ``work`` on all ranks; None if the memory of a GPU did not suffice on one of them.

    The ranks allocate parts of the same size, so they run out of memory in the same call of ``work``, also where it
    communicates.
    """
    found: list[T] = []

    def attempt() -> bool:
        try:
            found.append(work())
        except torch.OutOfMemoryError:
            return False
        return True

    if all(team.everywhere(attempt)):
        return found[0]
    found.clear()
    gc.collect()
    if team.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def turns(
    model: PreTrainedModel,
    ranks: TensorGroup,
    team: World,
    variants: Sequence[Variant],
    wirings: Mapping[str, Wiring],
    prompts: Sequence[Sequence[int]],
    new: int,
    *,
    rounds: int,
    graphs: bool,
    more: Callable[[], bool] = lambda: True,
) -> dict[Variant, Times]:
    """Milliseconds of ``prefill`` and of a ``decode`` step in each round, for the variants that fit into memory.

    Args:
        model: the model, which is rewired in place.
        prompts: lists of token ids of the same length.
        new: tokens of an answer, the first of which comes from the prefill; 1 decodes nothing.
        graphs: whether decoding is captured as CUDA graphs.
        more: says before each round but the first two, on all ranks alike, whether there is time for it.

    Raises:
        ConfigError: the model cannot have a static cache.
    """
    length = -(-(len(prompts[0]) + new) // GRAIN) * GRAIN
    reason = why_no_slots(model, length)
    if reason is not None:
        raise ConfigError(f"a static cache of {length} tokens cannot hold this model's keys: {reason}")
    batch = range(len(prompts))
    slots = Slots(len(prompts), length, model.device)
    cache = Stepper(model, slots, graphs).cache
    steppers = {key: Stepper(model, slots, graphs, cache) for key in variants}
    times: dict[Variant, Times] = {key: {"prefill": [], "decode": []} for key in variants}

    def turn(key: Variant) -> tuple[float, float]:
        stepper = steppers[key]
        wire_tensor_parallel(model, wirings[key.wiring], ranks, Ways(key.way))
        prefill = _timed(lambda: stepper.prefill(prompts, batch), ranks, team)
        if new == 1:
            return prefill, 0.0
        return prefill, _timed(lambda: stepper.decode(new - 1, list(batch)), ranks, team) / (new - 1)

    for round_ in range(-1, rounds):  # the first round warms up and captures graphs
        if round_ > 0 and not more():
            break
        for key in list(steppers):
            found = if_it_fits(lambda key=key: turn(key), team)
            if found is None:
                del steppers[key], times[key]  # the memory of its graphs is free for the others
            elif round_ >= 0:
                times[key]["prefill"].append(found[0])
                times[key]["decode"].append(found[1])
    return times


def _timed(work: Callable[[], Any], ranks: TensorGroup, world: World) -> float:
    """Milliseconds of ``work``, which starts on all ranks at once and ends by reading a result on the host."""
    dist.barrier(group=ranks.group)
    start = finished(world.device)
    work()
    return (time.perf_counter() - start) * 1e3
