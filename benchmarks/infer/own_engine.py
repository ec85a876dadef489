"""Times prefill and decoding in fcsd's own engine: wirings, all-reduce backends, batches and tensor-parallel degrees.

All variants of one degree and batch run in turns, on one model and one key-value cache, so that changes of the clocks
affect all of them alike. The bound of a wiring is the same computation with reductions of kind ``none``: it sends
nothing inside the layers, and its results are wrong. The sum of the embedding and the exchange of logits remain in
every row, the bound's too.

The sizes are those of Ladder-Residual §3: a prompt of 1024 tokens and 512 new ones. Here every prompt of a batch is
another one, and every new token is the most likely one.

What does not fit into a GPU's memory gets a row that says so, and the run goes on.
"""

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from benchmarks.infer.table import draw, table
from benchmarks.infer.workload import Times, Workload, compare, row
from transformers import PreTrainedModel

from fcsd.bench.runner import finished, write
from fcsd.bench.serve.model import wiring_for
from fcsd.bench.shapes import SHAPES
from fcsd.engine.decode import GRAIN, Stepper
from fcsd.engine.fused import fuse
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.slots import Slots, why_no_slots
from fcsd.engine.weights import load_tensor_parallel, random_tensor_parallel
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world
from fcsd.models.wiring_block import DESYNC, Wiring
from fcsd.parallel.all_reduce.reduce import Reduction
from fcsd.parallel.tensor.tp_plan import TensorGroup

PATIENCE = timedelta(hours=2)  # how long ranks wait for others
T = TypeVar("T")


class Variant(NamedTuple):
    """What takes turns: the name of a wiring, and an all-reduce backend."""

    wiring: str
    reduce: str


def bench(load: Workload, out: Path | None = None) -> dict[str, Any]:
    """Measure all variants, print a table to stderr on rank 0, and return what ``infer.json`` holds.

    Every process of the run must call this function.

    Args:
        load: the workload; there are as many processes as its largest degree.
        out: directory for ``infer.json``, which is written again after each degree and batch, and for ``infer.png``.

    Returns:
        ``workload``, ``environment`` and ``rows``, one for each degree, batch, wiring and kind. Times are medians over
        the rounds: ``prefill_ms`` of the whole batch, ``decode_ms`` of one step, ``tokens_per_s`` of all new tokens
        including the prefill. ``times_standard`` is the speed relative to the standard wiring with its fastest right
        kind, ``of_bound`` the share of the bound's speed; both for prefill and decode, null where nothing was measured
        to compare with. ``drift`` is the last round's decode time relative to the first round's. A row that is
        ``out_of_memory`` has no times.

    Raises:
        ConfigError: an all-reduce backend is unknown, or a wiring, or a degree does not fit the model,
            the processes or the device.
        BadInputError: the checkpoint cannot be loaded.
    """
    world = join_world()
    if max(load.degrees) > world.size:
        raise ConfigError(f"degree {max(load.degrees)} needs as many processes, and there are {world.size}")
    for kind in load.reduce:
        Reduction(dist.group.WORLD, kind, 0)  # a kind that these ranks cannot have is refused here
    world = replace(world, group=dist.new_group(backend="gloo", timeout=PATIENCE))
    workload = asdict(load)
    result: dict[str, Any] = {"workload": workload, "environment": snapshot(), "rows": []}
    for degree in load.degrees:
        group = dist.new_group(list(range(degree)))
        talk = dist.new_group(list(range(degree)), backend="gloo", timeout=PATIENCE)
        if world.rank < degree:
            ranks, team = TensorGroup(group, degree, world.rank), replace(world, size=degree, group=talk)
            model = if_it_fits(lambda ranks=ranks: _model(load, ranks, world), team)
            for batch in load.batches:
                result["rows"] += _rows(model, load, ranks, batch, team)
                write(result, out and out / "infer.json", world.rank)
            del model
        world.everywhere(lambda: None)  # a barrier whose timeout is long enough
    if world.rank == 0:
        print(table(result["rows"]), file=sys.stderr, flush=True)
        if out is not None:
            draw(result["rows"], f"{load.model}, prompts of {load.prompt} tokens, {load.new} new", out / "infer.png")
    return result


def _model(load: Workload, ranks: TensorGroup, world: World) -> PreTrainedModel:
    dtype = getattr(torch, load.dtype)
    if load.model in SHAPES:
        config = SHAPES[load.model](load.layers)
        model = random_tensor_parallel(config, dtype=dtype, device=world.device, ranks=ranks)
    else:
        model = load_tensor_parallel(load.model, dtype=dtype, device=world.device, ranks=ranks)
    fuse(model, world.device.type == "cuda")
    return model


def _rows(
    model: PreTrainedModel | None, load: Workload, ranks: TensorGroup, batch: int, team: World
) -> list[dict[str, Any]]:
    """The results of all variants under one degree and batch. ``model`` is None if it does not fit."""
    # Nothing can be dropped on one rank, so Desync has no row there.
    names = [name for name in load.wirings if ranks.degree > 1 or name not in DESYNC]
    times: dict[Variant, Times | None] = {
        Variant(name, kind): None for name in names for kind in load.reduce if load.times(name, kind)
    }
    if model is not None:
        on_gpu = model.device.type == "cuda"
        times |= turns(
            model,
            ranks,
            team,
            list(times),
            {name: wiring_for(name, model.config, ranks.degree) for name in names},
            load.prompts(batch, model.config.get_text_config().vocab_size),
            load.new,
            rounds=load.rounds,
            graphs=load.graphs and on_gpu,
        )
    rows = [row(load, ranks.degree, batch, key.wiring, key.reduce, found) for key, found in times.items()]
    for own in rows:
        compare(own, rows)
    return rows


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
) -> dict[Variant, Times]:
    """Milliseconds of ``prefill`` and of a ``decode`` step in each round, for the variants that fit into memory.

    Args:
        model: the model, which is rewired in place.
        prompts: lists of token ids of the same length.
        new: tokens of an answer, the first of which comes from the prefill.
        graphs: whether decoding is captured as CUDA graphs.

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
        wire_tensor_parallel(model, wirings[key.wiring], ranks, key.reduce)
        prefill = _timed(lambda: stepper.prefill(prompts, batch), ranks, team)
        return prefill, _timed(lambda: stepper.decode(new - 1, list(batch)), ranks, team) / (new - 1)

    for round_ in range(-1, rounds):  # the first round warms up and captures graphs
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
