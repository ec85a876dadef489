"""Time all-reduces: the backends of ``reduce`` beside NCCL's and torch's, over sizes (FlashCommunication V2, table 9).

    torchrun --nproc-per-node 4 -m benchmarks.comm.all_reduce [--mib 256 64 1] [--formats int8 int5]
        [--plain] [--out FILE]

All ways to reduce are timed in turns, and every result is compared with the reference first, but for those of torch.
A way with a wrong result is not timed, and makes the program end with exit code 1. On GPUs each way runs twice: in a
CUDA graph, as in a decoding step; and without one (``, no graph``), where the time of small messages is that of the
host, which starts kernels. Messages of up to 4 MiB are reduced ``CALLS`` times in each run. For each backend the file
also has the kernels that a GPU runs for one reduction. With ``--plain`` the quantised reductions are left out. The
program runs over gloo on a machine without GPUs, where the times say nothing about GPUs.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.comm import all_reduce_ways
from benchmarks.comm.all_reduce_ways import Way
from benchmarks.out_file import out_file
from benchmarks.sent import bits_sent
from benchmarks.turns import Timing, timings
from studies.formats.simulated_all_reduce import simulate_all_reduce
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fcsd.bench.runner import table, write
from fcsd.kernels.bit_split import Format
from fcsd.launch.environment import snapshot
from fcsd.launch.world import join_world, leave

WIDTH = 4096
QUANTISED = "quantised:"  # the names of quantised ways begin with it, and a format follows
NO_GRAPH = ", no graph"  # ends the names of ways whose kernels the host starts, on GPUs
FORMATS = ("int8", "int6", "int5", "int4", "int3", "int2:sr")  # the columns of the paper's table 9
REPEATS = 10
CALLS = 10  # of one run of a small message
SMALL = 4 * 2**20  # bytes
CHECKED = 4096  # the most rows that are compared with the reference
ERROR = 2**-6  # the largest error of values that are not quantised, as a share of the sum of the summands' magnitudes


def right(way: Way, device: torch.device, rows: int) -> bool:
    """Whether an all-reduce gives all ranks the same bits: those of the reference if it is quantised, else the sum.

    On a GPU a CUDA graph must give them as well.
    """
    x = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16)
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    captured = x.clone()
    way.run(x)
    if way.format is not None:
        same = torch.equal(x, simulate_all_reduce(torch.stack(every), way.format))
    else:
        summands = torch.stack(every).float()
        same = bool(((x.float() - summands.sum(0)).abs() <= ERROR * summands.abs().sum(0)).all())
    if x.is_cuda:
        replay = _captured(lambda: way.run(captured))
        captured.copy_(every[dist.get_rank()])
        replay()
        same = same and torch.equal(captured, x)
    ends = [torch.empty_like(x) for _ in every]
    dist.all_gather(ends, x)
    wrong = torch.tensor(int(not same or not all(torch.equal(one, x) for one in ends)), device=device)
    dist.all_reduce(wrong)
    return not wrong.item()


def bench(
    mib: float, device: torch.device, formats: Sequence[str] = FORMATS, repeats: int = REPEATS, plain: bool = False
) -> dict[str, Timing | None]:
    """Time an all-reduce of ``mib`` MiB of bf16 values a rank. All ranks call it.

    ``formats`` are those of the quantised reductions, which ``plain`` leaves out.

    Returns: the milliseconds of one reduction in each way, by its name; None if its result is wrong. On GPUs these are
        times in a CUDA graph, and those without one follow, under names that end in ``NO_GRAPH``.
    """
    rows = max(1, int(mib * 2**20) // (2 * WIDTH))
    values = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16)
    x = values.clone()
    wires = [Format.parse(text) for text in formats]
    ways = all_reduce_ways.kinds([] if plain else wires)
    ways |= all_reduce_ways.of_torch(values)
    correct = {name: not way.checked or right(way, device, min(rows, CHECKED)) for name, way in ways.items()}
    calls = CALLS if values.nbytes <= SMALL else 1
    runs = {name: _times(way, x, calls) for name, way in ways.items() if correct[name]}
    if x.is_cuda:
        runs = {name: _captured(run) for name, run in runs.items()} | {name + NO_GRAPH: runs[name] for name in runs}
    timed = timings(runs, device, repeats, before=lambda: x.copy_(values))
    found: dict[str, Timing | None] = dict.fromkeys(ways)
    return found | {name: Timing(*(time / calls for time in taken)) for name, taken in timed.items()}


def _times(way: Way, x: Tensor, calls: int) -> Callable[[], Any]:
    """Reduce ``x`` ``calls`` times."""

    def several() -> None:
        for _ in range(calls):
            way.run(x)

    return several


def _captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same in a CUDA graph."""
    run()  # what is made at the first call cannot be made in a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def kernels_of(way: Way, x: Tensor) -> list[str]:
    """The kernels and copies that this rank's GPU runs for one reduction of ``x``. All ranks call this."""
    way.run(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        way.run(x)
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() or () if event.device_type.name == "CUDA"]


def _kernels(device: torch.device, formats: Sequence[str]) -> dict[str, list[str]]:
    """``kernels_of`` each backend, by its name; empty without a GPU."""
    if device.type == "cpu":
        return {}
    x = torch.zeros(16, WIDTH, device=device, dtype=torch.bfloat16)
    return {name: kernels_of(way, x) for name, way in all_reduce_ways.kinds(map(Format.parse, formats)).items()}


def to_text(found: dict[str, dict[str, Timing | None]]) -> str:
    """A table of microseconds: ways below each other, sizes beside each other, each with its ratio to NCCL."""
    names = list(dict.fromkeys(name for timed in found.values() for name in timed))
    rows = {name: {size: _cell(timed, name) for size, timed in found.items()} for name in names}
    text = table(rows, "microseconds (speed over nccl)")
    formats = dict.fromkeys(re.split("[ ,]", name)[0].removeprefix(QUANTISED) for name in names if QUANTISED in name)
    return f"{text}\non the wire: {bits_sent(formats)}" if formats else text


def _cell(timed: dict[str, Timing | None], name: str) -> str | None:
    if name not in timed:
        return None
    own, nccl = timed[name], timed.get("nccl" + (NO_GRAPH if name.endswith(NO_GRAPH) else ""))
    if own is None or nccl is None:
        return "wrong"
    return f"{own.median * 1e3:.1f} ({nccl.median / own.median:.2f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=float, nargs="+", default=[64], help="MiB of bf16 values of each rank")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--plain", action="store_true", help="leave out quantised reductions")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=out_file, help="JSON file, which is written again after each size")
    arguments = parser.parse_args()
    world = join_world()
    given = {name: value for name, value in vars(arguments).items() if name not in ("mib", "out")}
    found: dict[str, dict[str, Timing | None]] = {}
    result = {"environment": snapshot(), "world": world.size, "width": WIDTH, **given, "ms": found}
    for mib in arguments.mib:
        found[f"{mib:g} MiB"] = bench(mib, world.device, **given)
        write(result, arguments.out, world.rank)
    # A profiler slows what runs after it.
    result["kernels"] = _kernels(world.device, [] if arguments.plain else arguments.formats)
    write(result, arguments.out, world.rank)
    if world.rank == 0:
        print(to_text(found), file=sys.stderr, flush=True)
    leave(SystemExit(int(any(time is None for timed in found.values() for time in timed.values()))))


if __name__ == "__main__":
    main()
