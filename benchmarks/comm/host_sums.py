"""Times and checks sums through memory of the host beside NCCL, and the products beside them.

    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 benchmarks/comm/host_sums.py OUT.json

Every size is summed by every way in eager mode and by replays of a CUDA graph, and compared with the sum in fp32 in the
order of ranks to the last bit; in a format, with the same records over NCCL (random sizes: ``host_sums_stress.py``).
The last part has a rank that dies while a graph waits for it, so the ranks have to be started without torchrun, which
would end them itself; DEAD=0 leaves it out. PYTHONPATH is the root of the repository.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.bit_split import Format
from fcsd.kernels.host.layout import BLOCKS, ONE_SHOT
from fcsd.launch.environment import snapshot
from fcsd.parallel.all_reduce import host_table, quantised
from fcsd.parallel.all_reduce.host import HostSums, sums_of

SIZES = tuple(2**power for power in range(13, 27))
FORMATS = ("int8", "int6", "int5", "int4")
MOST = {"one_shot": ONE_SHOT, "in_blocks": BLOCKS}


def ways_of(size: int) -> list[str]:
    """The exact ways for so many bytes."""
    return [way for way in ("one_shot", "in_blocks", "exchange") if size <= MOST.get(way, size)]


def literal(x: Tensor) -> Tensor:
    """The sum in fp32 in the order of ranks, rounded once."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(x.dtype)


def wrong(sums: HostSums, dtype: torch.dtype, sizes: tuple[int, ...]) -> list[str]:
    """The cases whose bits are not those of the reference."""
    found = []
    for size in sizes:
        for way in ways_of(size):
            x = torch.randn(size // dtype.itemsize, device="cuda").to(dtype)
            out = torch.empty_like(x)
            sums.all_reduce(x, out, way)
            if not torch.equal(out, literal(x)):
                found.append(f"{way} {dtype} {size}")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                sums.all_reduce(x, out, way)
                sums.all_reduce(out, out, way)
            for _ in range(3):
                x.copy_(torch.randn_like(x, dtype=torch.float32))
                graph.replay()
                torch.cuda.synchronize()
                if not torch.equal(out, literal(literal(x))):
                    found.append(f"{way} {dtype} {size} in a graph")
    return found


def wrong_formats(sums: HostSums) -> list[str]:
    """The formats whose sums differ from those by the same records over NCCL."""
    found = []
    for name in FORMATS:
        for rows in (1, 16, 1000, 4096):
            x = torch.randn(rows, 4096, device="cuda").to(torch.bfloat16)
            expected, out = x.clone(), torch.empty_like(x)
            quantised.all_reduce(expected, Format.parse(name), dist.group.WORLD).wait()
            for way in ["exchange"] + ["in_blocks"] * sums.codes(x, Format.parse(name)):
                for _ in range(3):  # the second time an exchange is recorded, and then replayed
                    out.zero_()
                    sums.all_reduce(x, out, way, Format.parse(name))
                if not torch.equal(out, expected):
                    found.append(f"{way} {name} {rows} rows")
    return found


def under(sums: HostSums) -> dict[str, Any]:
    """Milliseconds of 24 products of 4096 x 4096 matrices alone, and beside sums of 16 MiB and of 64 KiB."""
    a = torch.randn(4096, 4096, device="cuda").to(torch.bfloat16)
    c, side = torch.empty_like(a), torch.cuda.Stream()
    large, small = (torch.randn(n, 4096, device="cuda").to(torch.bfloat16) for n in (2048, 8))
    runs: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "NCCL, 16 MiB": lambda: [dist.all_reduce(large.clone()) for _ in range(14)],
        "host, 16 MiB": lambda: [sums.all_reduce(large, torch.empty_like(large)) for _ in range(18)],
        "NCCL, 64 KiB": lambda: [dist.all_reduce(small) for _ in range(300)],
        "host, 64 KiB": lambda: [sums.all_reduce(small, small) for _ in range(600)],
    }
    found = {}
    for name, run in runs.items():
        times = []
        for _ in range(7):
            dist.barrier()
            torch.cuda.synchronize()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(24):
                torch.mm(a, a, out=c)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        found[name] = round(statistics.median(times), 3)
    return found


def dead_rank(sums: HostSums) -> None:
    """The last rank ends without a word; the others replay a graph of sums and have to end, too, with exit code 6."""
    x = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            sums.all_reduce(x, x)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    if sums.rank == sums.size - 1:
        os.kill(os.getpid(), 9)
    graph.replay()
    torch.cuda.synchronize()
    print("a sum without its last rank has ended", flush=True)


def main() -> None:
    """See the head of this file."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(rank)
    found: dict[str, Any] = {
        "command": f"NCCL_P2P_DISABLE={os.environ.get('NCCL_P2P_DISABLE', '0')} torchrun --nproc-per-node "
        f"{dist.get_world_size()} benchmarks/comm/host_sums.py OUT.json",
        "environment": snapshot(),
    }
    begun = time.monotonic()
    cpu = dist.new_group(backend="gloo")
    sums = sums_of(cpu)
    found["seconds to open"] = round(time.monotonic() - begun, 2)

    def write() -> None:
        if rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")

    few = (16, 4096, 65536, 1 << 17, 1 << 20, 40 << 20)
    found["wrong"] = (
        wrong(sums, torch.bfloat16, SIZES) + wrong(sums, torch.float32, few) + wrong(sums, torch.float16, few)
    )
    found["wrong formats"] = wrong_formats(sums)
    write()

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x)  # in place, as nothing is read of the result
        return x

    def gathered(x: Tensor) -> Tensor:
        out = x.new_empty(dist.get_world_size(), *x.shape)
        dist.all_gather_into_tensor(out, x)
        return out

    def scattered(x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x)
        return out

    begun, stock = time.monotonic(), host_table.Stock(nccl, gathered, scattered)
    int8, int4 = (host_table.measured(sums, stock, cpu, Format.parse(name), SIZES) for name in ("int8", "int4"))
    found["seconds to measure"] = round((time.monotonic() - begun) / 2, 2)
    found["microseconds"] = {
        size: {name: round(value, 2) for name, value in (int8.sums.microseconds[size] | row).items()}
        for size, row in int4.sums.microseconds.items()
    }
    found["ways"] = dict(zip(int8.sums.sizes, int8.sums.ways, strict=True))
    for name, table in (("eager", int8.eager), ("gathers", int8.gathers), ("scatters", int8.scatters)):
        found[f"{name}, microseconds"] = {
            size: {way: round(value, 2) for way, value in row.items()} for size, row in table.microseconds.items()
        }
    write()
    found["products, ms"] = under(sums)
    write()
    if rank == 0:
        print(json.dumps({name: value for name, value in found.items() if name != "environment"}), flush=True)
    if os.environ.get("DEAD", "1") != "0":
        dead_rank(sums)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
