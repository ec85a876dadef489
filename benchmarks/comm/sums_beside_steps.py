"""Times a decoding step's products with sums in flight beside them, by every way to sum and several sizes of kernels.

    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 -m benchmarks.comm.sums_beside_steps OUT.json

The products are those of 32 layers of Llama-3 8B on one of two ranks, for 16, 64 and 256 answers, with norms and gates,
in a CUDA graph. As under `ladder`, the sum of each sub-block travels on a stream of its own beside the next one. What
the kernels of sums take of the GPU is set here by blocks and threads; `nothing` is the bound, which sends nothing.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fcsd.kernels.bit_split import Format
from fcsd.launch.environment import snapshot
from fcsd.parallel.all_reduce.host import HostSums, sums_of

HIDDEN, HEADS, FFN, LAYERS = 4096, 3072, 7168, 32
SHAPES = [(16, 512), (8, 512), (4, 512), (2, 512), (8, 256), (4, 256)]
INT8 = Format(8)


def sized(sums: HostSums, blocks: int, threads: int, first: int) -> None:
    """Give the kernels so many blocks and threads, and numbers of calls from ``first`` on, which no flag has yet."""
    for name, places in sums._places.items():
        grid = max(blocks, 16) if name == "in_codes" else blocks  # a block has room for so many scales alone
        sums._places[name] = places._replace(grid=grid, threads=threads)  # type: ignore[index]
        sums._calls[name] = sums.device.counters(grid).fill_(first)


def step(rows: int, weights: list[list[Tensor]], run: Callable[[Tensor], None]) -> torch.cuda.CUDAGraph:
    """A step of ``rows`` answers, captured."""
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    gain = torch.ones(HIDDEN, device="cuda").bfloat16()
    main, side = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    graph = torch.cuda.CUDAGraph()

    def work() -> None:
        stream, flying = x, []
        for layer in range(LAYERS):
            qkv, out, up, down = weights[layer % len(weights)]
            for block in range(2):
                if len(flying) == 2:  # the sum of the sub-block before the last one has come
                    total, event = flying.pop(0)
                    torch.cuda.current_stream().wait_event(event)
                    stream = stream + total
                given = F.rms_norm(stream, (HIDDEN,), gain)
                if block == 0:
                    y = (given @ qkv)[:, :2048].contiguous() @ out
                else:
                    gate, value = (given @ up).chunk(2, -1)
                    y = (F.silu(gate) * value) @ down
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    run(y)
                    event = torch.cuda.Event()
                    event.record(side)
                flying.append((y, event))
        torch.cuda.current_stream().wait_stream(side)

    with torch.cuda.stream(main):
        work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=main):
            work()
    return graph


def milliseconds(run: Callable[[], Any], count: int = 5) -> float:
    """The median of several replays."""
    times = []
    for _ in range(6):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return round(statistics.median(times[1:]), 4)


def main() -> None:
    """See the head of this file."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    sums = sums_of(dist.new_group(backend="gloo"))
    weights = [
        [0.01 * torch.randn(*shape, device="cuda").bfloat16()
         for shape in ((HIDDEN, HEADS), (2048, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN))]
        for _ in range(2)
    ]  # fmt: skip
    found: dict[str, Any] = {"environment": snapshot(), "milliseconds of a step": {}, "microseconds alone": {}}
    first = 1 << 10
    for rows in (16, 64, 256):
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        in_step = found["milliseconds of a step"].setdefault(rows, {})
        alone = found["microseconds alone"].setdefault(rows, {})

        def add(name: str, run: Callable[[Tensor], None], x: Tensor = x, rows: int = rows) -> None:
            in_step[name] = milliseconds(step(rows, weights, run).replay)  # noqa: B023
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    run(x)
            alone[name] = round(1e3 * milliseconds(graph.replay) / 20, 2)  # noqa: B023

        add("nothing", lambda y: None)
        add("NCCL", lambda y: dist.all_reduce(y))
        add("exchange", lambda y: sums.all_reduce(y, y, "exchange"))
        add("exchange, int8", lambda y: sums.all_reduce(y, y, "exchange", INT8))
        for blocks, threads in SHAPES:
            for method in ("one_shot", "in_blocks"):
                if method == "one_shot" and x.nbytes > 128 << 10:
                    continue
                first += 1 << 16
                sized(sums, blocks, threads, first)
                add(f"{method}, {blocks} x {threads}", lambda y, method=method: sums.all_reduce(y, y, method))
            add(f"in_blocks, int8, {max(blocks, 16)} x {threads}", lambda y: sums.all_reduce(y, y, "in_blocks", INT8))
            if rank == 0:
                Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    if rank == 0:
        for rows, row in found["milliseconds of a step"].items():
            for name, time in row.items():
                print(rows, name, time, found["microseconds alone"][rows][name], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
