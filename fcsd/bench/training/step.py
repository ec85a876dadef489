"""Times a training step of an expert-parallel MoE under several variants, and its bound without communication.

All variants run in turns on one model, one DeepSpeed engine and in one process group, so that changes of the GPUs'
clocks and memory affect all of them alike. The learning rate is zero, so every variant routes the same tokens through
the same weights. Before the variants are timed, the benchmark does three things:

- It measures and prints the cover and the wire time of every collective, with the ceiling of what can be hidden.
  Rows are not deduplicated in this measurement.
- It counts and prints the rows that dispatch sends with and without deduplication.
- It compares the loss and the gradients of each overlapped variant with those of the same computation under the
  eager-sync schedule. Fused variants are compared with fused ones, and variants on a quantised wire or with another
  deduplication with the same.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.bench.shapes import SHAPES
from fcsd.bench.timing import finished
from fcsd.bench.training import ceilings, row_counts
from fcsd.bench.training.ceilings import CoverMeter, Window
from fcsd.bench.training.equality import loss_and_norms, worst_difference
from fcsd.bench.training.model import evenly_routed, make_engine
from fcsd.bench.training.record import record
from fcsd.bench.training.table import headline, table
from fcsd.bench.training.variants import Choices, eager_name, variants
from fcsd.bench.training.workload import COPIES, Workload
from fcsd.errors import ConfigError, FcsdError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, barrier, join_world
from fcsd.models.wiring import Wiring
from fcsd.parallel import trace
from fcsd.parallel.expert.formats import check_formats
from fcsd.parallel.expert.hierarchical import dispatcher_of
from fcsd.parallel.overlap import overlap
from fcsd.parallel.quantised.rows import Quantiser, WireFormats
from fcsd.parallel.transports.traffic import Traffic


def bench(load: Workload, out: Path | None = None, *, traced: bool = False) -> dict[str, Any]:
    """Measures all variants, prints the results to stderr on rank 0, and returns the content of ``train.json``.

    Every process of the run must call this function.

    Args:
        out: directory for ``train.json``, which is written again after each router.
        traced: also writes to ``out`` a Chrome trace of one step of each rank. The step is that of the last variant
            that overlaps, under the first router.

    Raises:
        ConfigError: a variant copies rows into the memory of other processes, and there are no GPUs; the ranks are not
            several whole nodes of ``load.node_size``; or the rows of the model cannot be rounded to a format.
        FcsdError: an overlapped variant computed something else than under the eager-sync schedule.
    """
    begun = time.monotonic()
    world = join_world()
    if world.device.type != "cuda" and any(COPIES in name for name in load.variants):
        raise ConfigError("only GPUs copy rows into each other's memory", hint="leave out the variants named copies")
    dispatchers = {dedup: dispatcher_of(dedup, world.size, load.node_size) for dedup in (load.dedup, *load.more_dedups)}
    config = SHAPES[load.shape](load.layers)
    quantisers = {formats: Quantiser(WireFormats.parse(formats)) for formats in load.wires}
    for quantiser in quantisers.values():
        check_formats(quantiser.formats, config, load.shape)
    engine = make_engine(config, load.micro_batch, world, recompute=load.recompute, optimizer=load.optimizer)
    model = engine.module.model
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(0, model.config.vocab_size, (load.micro_batch, load.seq), generator=generator).to(world.device)
    traffic = Traffic()
    choices = variants(model, load, dispatchers[load.dedup], traffic)
    for name, (base, dedup, formats) in load.changed.items():
        changes: dict[str, Any] = {} if dedup is None else {"dispatcher": dispatchers[dedup]}
        changes |= {} if formats is None else {"quantiser": quantisers[formats]}
        choices[name] = partial(choices[base], **changes)
        choices[eager_name(name)] = partial(choices[eager_name(base)], **changes)
    result: dict[str, Any] = {"workload": asdict(load), "world": world.size, "environment": snapshot(), "routers": {}}
    for router in load.routers:
        _say(world, f"\n{router} router, {time.monotonic() - begun:.0f} s after the start")
        with evenly_routed(model) if router == "uniform" else nullcontext():
            result["routers"][router] = _under_one_router(engine, ids, choices, traffic, load, world)
            if out is not None and traced and router == load.routers[0]:
                _trace(engine, ids, choices[load.overlapped[-1]], out, world)
        if out is not None and world.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            (out / "train.json").write_text(json.dumps(result, indent=1))
    if out is not None and traced and world.rank == 0 and world.device.type == "cuda":
        # Traces are read last, so that the measurements are already written if a trace cannot be read.
        first = result["routers"][load.routers[0]]
        traces = [trace.read(out / f"rank-{rank}.json.gz") for rank in range(world.size)]
        first["trace"] = trace.to_json(traces)
        (out / "train.json").write_text(json.dumps(result, indent=1))
        _say(world, trace.to_text(traces))
        _say(world, headline(traces, first["ceiling"]))
    _say(world, f"\nended {time.monotonic() - begun:.0f} s after the start")
    wrong = [
        f"{name} under the {router} router"
        for router, found in result["routers"].items()
        for name, held in found["equality"].items()
        if not held["equal"]
    ]
    if wrong:
        raise FcsdError(f"{', '.join(wrong)}: the schedule computes something else than its eager-sync self")
    return result


def _under_one_router(
    engine: Any, ids: Tensor, choices: Choices, traffic: Traffic, load: Workload, world: World
) -> dict[str, Any]:
    """Measures windows, equality and times under one router."""
    windows = _windows(engine, ids, load)
    _say(world, ceilings.to_text(windows))
    rows = row_counts.measure(engine, ids, load.node_size)
    _say(world, row_counts.to_text(rows))

    equality = {}
    for name in (*load.overlapped, *load.changed):
        equality[name] = _held(engine, ids, choices[eager_name(name)], choices[name], world)
    for name, held in equality.items():
        own = f"eager-sync against itself: {held['spread']:.2e}"
        _say(world, f"{name} against eager-sync: {held['difference']:.2e} relative; {own}")

    timed = {name: choices[name] for name in (*load.variants, *load.changed)}
    measured = _time(engine, ids, timed, traffic, load, world)
    _say(world, table(measured))
    for formats in load.wires:
        _say(world, f"{formats}: {WireFormats.parse(formats)}")
    return {
        "rows": rows,
        "windows": [asdict(window) for window in windows],
        "ceiling": {passes: ceilings.both(windows, passes) for passes in ceilings.passes_of(windows)},
        "equality": equality,
        "variants": measured,
    }


def _held(
    engine: Any, ids: Tensor, eager: Callable[[], Any], overlapped: Callable[[], Any], world: World
) -> dict[str, Any]:
    """Compares a variant with the same computation under the eager-sync schedule.

    Returns: the largest relative ``difference`` of loss and gradient norms; the ``spread``, which is the difference of
        two runs under the eager-sync schedule; and whether they count as ``equal``.
    """
    eager()
    reference, again = loss_and_norms(engine, ids), loss_and_norms(engine, ids)
    overlapped()
    spread = worst_difference(reference, again, world)
    error = worst_difference(reference, loss_and_norms(engine, ids), world)
    return {"difference": error, "spread": spread, "equal": error <= max(4 * spread, 1e-6)}


def _windows(engine: Any, ids: Tensor, load: Workload) -> list[Window]:
    meter = CoverMeter()
    overlap(engine.module.model, Wiring("farskip", tuple(range(load.layers))), choose=meter.choose, fused=load.fused)
    engine.backward(engine(ids))  # the first pass allocates buffers and tunes kernels, so it is not measured
    engine.step()
    windows = meter.measure(lambda: engine.backward(engine(ids)))
    engine.step()
    return windows


def _time(
    engine: Any, ids: Tensor, choices: Choices, traffic: Traffic, load: Workload, world: World
) -> dict[str, dict[str, Any]]:
    """Times every variant.

    Returns: for each variant, the ms of ``forward_backward`` and of the whole ``step`` for every timed step; the peak
        memory ``peak_gib``; and ``sent_bytes``, what this rank sends to others in dispatch and combine of a step (0
        for variants that do not count it).
    """
    on_cuda = world.device.type == "cuda"
    measured: dict[str, dict[str, Any]] = {
        name: {"forward_backward": [], "step": [], "peak_gib": 0.0, "sent_bytes": 0} for name in choices
    }
    for _ in range(load.rounds):
        for name, choose in choices.items():
            choose()
            traffic.reset()
            _timed_step(engine, ids, world)
            measured[name]["sent_bytes"] = traffic.sent
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(load.steps):
                both, whole = _timed_step(engine, ids, world)
                measured[name]["forward_backward"].append(both)
                measured[name]["step"].append(whole)
            if on_cuda:
                measured[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return measured


def _timed_step(engine: Any, ids: Tensor, world: World) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of the whole step."""
    barrier()
    start = finished(world.device)
    engine.backward(engine(ids))
    middle = finished(world.device)
    engine.step()
    return (middle - start) * 1e3, (finished(world.device) - start) * 1e3


def _trace(engine: Any, ids: Tensor, choose: Callable[[], Any], out: Path, world: World) -> None:
    """Traces one step on every rank into ``out``."""
    choose()
    engine.backward(engine(ids))
    engine.step()
    out.mkdir(parents=True, exist_ok=True)
    barrier()
    record(lambda: (engine.backward(engine(ids)), engine.step()), out / f"rank-{world.rank}.json.gz", world)
    barrier()


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
