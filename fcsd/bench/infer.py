"""Times prefill and decoding in fcsd's own engine: wirings, kinds of reduction, batches and tensor-parallel degrees.

All variants of one degree and batch run in turns, on one model and one key-value cache, so that changes of the clocks
affect all of them alike. The bound of a wiring is the same computation with reductions of kind ``none``: it sends
nothing inside the layers, and its results are wrong. The sum of the embedding and the exchange of logits remain in
every row, the bound's too.

The sizes are those of Ladder-Residual §3: a prompt of 1024 tokens and 512 new ones. Here every prompt of a batch is
another one, and every new token is the most likely one.

What does not fit into a GPU's memory gets a row that says so, and the run goes on.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fcsd.bench.infer_table import draw, table
from fcsd.bench.shapes import SHAPES
from fcsd.errors import ConfigError, unknown_value
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world
from fcsd.models.build import check_desync, wiring_of
from fcsd.models.wiring_block import DESYNC, NAMES, Wiring
from fcsd.parallel.tensor.division import Experts, TensorGroup
from fcsd.parallel.tensor.layer import wire_tensor_parallel
from fcsd.parallel.tensor.reduce import WRONG_RESULTS, Kind, Reduction
from fcsd.parallel.tensor.weights import load_tensor_parallel, random_tensor_parallel
from fcsd.serve.decode import GRAIN, Stepper
from fcsd.serve.slots import Slots, why_no_slots

_PATIENCE = timedelta(hours=2)  # how long ranks that a small degree does not need wait for the others
_BASE, _OWN = "standard", "own"
T = TypeVar("T")
Variant = tuple[str, Kind]  # the name of a wiring, and the kind of its reductions
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        model: a name in ``fcsd.bench.shapes``, or the directory of a checkpoint.
        layers: decoder layers of a shape; a checkpoint has its own number.
        degrees: tensor-parallel degrees.
        batches: numbers of prompts.
        prompt: tokens of a prompt.
        new: tokens that are decoded after each prompt, the first of which comes from the prefill.
        wirings: names of wirings, each applied to every layer; ``own`` is the wiring of the checkpoint.
        reduce: kinds of reduction, see ``parallel.tensor.reduce.Kind``.
        bounds: the wirings that are also timed by the kinds with wrong results; None for all of them.
        experts: how ranks share the experts, see ``load_tensor_parallel``.
        dtype: ``float32`` or ``bfloat16``.
        graphs: whether decoding is captured as CUDA graphs; on CPUs nothing is captured.
        rounds: how often each variant is timed; the variants take turns.

    Raises:
        ConfigError: a value is unknown or out of range.
    """

    model: str
    layers: int = 8
    degrees: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (1,)
    prompt: int = 1024
    new: int = 512
    wirings: tuple[str, ...] = (_BASE, "ladder")
    reduce: tuple[Kind, ...] = ("nccl", "none")
    experts: Experts = "sliced"
    dtype: str = "bfloat16"
    graphs: bool = True
    rounds: int = 3
    bounds: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.wirings:
            known = [_OWN, *(known for known in NAMES if known != "desync")]
            if name not in known:
                raise unknown_value("wiring", name, known)
        for name in self.bounds or ():
            if name not in self.wirings:
                raise unknown_value("wiring for a bound", name, self.wirings)
        if self.experts not in ("sliced", "whole"):
            raise unknown_value("division of experts", self.experts, ("sliced", "whole"))
        if self.dtype not in ("float32", "bfloat16"):
            raise unknown_value("dtype", self.dtype, ("float32", "bfloat16"))
        if self.new < 2 or min((*self.degrees, *self.batches, self.prompt, self.rounds)) < 1:
            raise ConfigError("degrees, batches, prompts and rounds are at least 1, and new tokens at least 2")
        if self.model not in SHAPES and not (Path(self.model) / "config.json").is_file():
            raise ConfigError(f"{self.model} is neither a shape nor a checkpoint", hint=f"shapes: {', '.join(SHAPES)}")


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
        ConfigError: a kind of reduction is unknown, or a wiring or a degree does not fit the model or the processes.
        BadInputError: the checkpoint cannot be loaded.
    """
    world = join_world()
    if max(load.degrees) > world.size:
        raise ConfigError(f"degree {max(load.degrees)} needs as many processes, and there are {world.size}")
    for kind in load.reduce:
        Reduction(dist.group.WORLD, kind, 0)  # an unknown kind is refused here
    world = replace(world, group=dist.new_group(backend="gloo", timeout=_PATIENCE))
    result: dict[str, Any] = {"workload": asdict(load), "environment": snapshot(), "rows": []}
    for degree in load.degrees:
        group = dist.new_group(list(range(degree)))
        talk = dist.new_group(list(range(degree)), backend="gloo", timeout=_PATIENCE)
        if world.rank < degree:
            ranks, team = TensorGroup(group, degree, world.rank), replace(world, size=degree, group=talk)
            model = _if_it_fits(lambda ranks=ranks: _model(load, ranks, world), team)
            for batch in load.batches:
                result["rows"] += _rows(model, load, ranks, batch, team)
                if out is not None and world.rank == 0:
                    out.mkdir(parents=True, exist_ok=True)
                    (out / "infer.json").write_text(json.dumps(result, indent=1))
            del model
        world.everywhere(lambda: None)  # a barrier whose timeout is long enough
    if world.rank == 0:
        print(table(result["rows"]), file=sys.stderr, flush=True)
        if out is not None:
            draw(result["rows"], f"{load.model}, prompts of {load.prompt} tokens, {load.new} new", out / "infer.png")
    return result


def _model(load: Workload, ranks: TensorGroup, world: World) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": getattr(torch, load.dtype), "device": world.device}
    options |= {"ranks": ranks, "experts": load.experts}
    if load.model in SHAPES:
        return random_tensor_parallel(SHAPES[load.model](load.layers), **options)
    return load_tensor_parallel(load.model, **options)


def _if_it_fits(work: Callable[[], T], team: World) -> T | None:
    """The result of ``work`` on all ranks of a degree; None if the memory of a GPU did not suffice on one of them.

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


def _rows(
    model: PreTrainedModel | None, load: Workload, ranks: TensorGroup, batch: int, team: World
) -> list[dict[str, Any]]:
    """The results of all variants under one degree and batch. ``model`` is None if it does not fit."""
    # Nothing can be dropped on one rank, so Desync has no row there.
    names = [name for name in load.wirings if ranks.degree > 1 or name not in DESYNC]
    times: dict[Variant, Times | None] = {
        (name, kind): None
        for name in names
        for kind in load.reduce
        if kind not in WRONG_RESULTS or load.bounds is None or name in load.bounds
    }
    if model is not None:
        times |= _times(model, load, ranks, batch, team, list(times))
    rows = [_row(load, ranks.degree, batch, *key, found) for key, found in times.items()]
    for row in rows:
        _compare(row, rows)
    return rows


def _times(
    model: PreTrainedModel, load: Workload, ranks: TensorGroup, batch: int, team: World, variants: list[Variant]
) -> dict[Variant, Times]:
    """Milliseconds of ``prefill`` and of a ``decode`` step in each round, for the variants that fit."""
    length = -(-(load.prompt + load.new) // GRAIN) * GRAIN
    reason = why_no_slots(model, length)
    if reason is not None:
        raise ConfigError(f"a static cache of {length} tokens cannot hold this model's keys: {reason}")
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(vocabulary, (batch, load.prompt), generator=generator).tolist()
    slots = Slots(batch, length, model.device)
    graphs = load.graphs and model.device.type == "cuda"
    wirings = {name: _wiring(name, model, ranks.degree) for name, _ in variants}
    cache = Stepper(model, slots, graphs).cache
    steppers = {key: Stepper(model, slots, graphs, cache) for key in variants}
    times: dict[Variant, Times] = {key: {"prefill": [], "decode": []} for key in variants}

    def turn(key: Variant) -> tuple[float, float]:
        stepper = steppers[key]
        wire_tensor_parallel(model, wirings[key[0]], ranks, key[1])
        prefill = _timed(lambda: stepper.prefill(prompts, range(batch)), ranks, team)
        decode = _timed(lambda: stepper.decode(load.new - 1, list(range(batch))), ranks, team)
        return prefill, decode / (load.new - 1)

    for round_ in range(-1, load.rounds):  # the first round warms up and captures graphs
        for key in list(steppers):
            found = _if_it_fits(lambda key=key: turn(key), team)
            if found is None:
                del steppers[key], times[key]  # the memory of its graphs is free for the others
            elif round_ >= 0:
                times[key]["prefill"].append(found[0])
                times[key]["decode"].append(found[1])
    return times


def _wiring(name: str, model: PreTrainedModel, degree: int) -> Wiring:
    """The wiring of this name over all layers, or the model's own."""
    if name == _OWN:
        return wiring_of(model.config)
    layers = () if name == _BASE else tuple(range(model.config.get_text_config().num_hidden_layers))
    wiring = Wiring(name, layers, tp_degree=degree if name in DESYNC else 1)
    check_desync(model.config, wiring)
    return wiring


def _timed(work: Callable[[], Any], ranks: TensorGroup, world: World) -> float:
    """Milliseconds of ``work``, which starts on all ranks at once and ends by reading a result on the host."""
    dist.barrier(group=ranks.group)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def _row(load: Workload, degree: int, batch: int, wiring: str, kind: str, times: Times | None) -> dict[str, Any]:
    """One row; ``times`` is None if the variant does not fit into memory."""
    prefill = decode = speed = drift = None
    if times is not None:
        prefill, decode = (statistics.median(times[name]) for name in ("prefill", "decode"))
        speed = batch * load.new / (prefill + decode * (load.new - 1)) * 1e3
        drift = times["decode"][-1] / times["decode"][0]
    return {
        "tp": degree,
        "batch": batch,
        "wiring": wiring,
        "reduce": kind,
        "exact": kind not in WRONG_RESULTS,
        "out_of_memory": times is None,
        "prefill_ms": prefill,
        "decode_ms": decode,
        "tokens_per_s": speed,
        "drift": drift,
        "rounds": times,
    }


def _compare(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add to a row its speed relative to the standard wiring and to its bound."""
    timed = [other for other in rows if not other["out_of_memory"]]
    for phase in ("prefill", "decode"):
        key = f"{phase}_ms"
        standard = [other[key] for other in timed if other["wiring"] == _BASE and other["exact"]]
        bound = [other[key] for other in timed if other["wiring"] == row["wiring"] and not other["exact"]]
        own = row[key]
        row[f"{phase}_times_standard"] = min(standard) / own if standard and own is not None else None
        row[f"{phase}_of_bound"] = min(bound) / own if bound and own is not None else None
