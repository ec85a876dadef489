"""Time the transports between the GPUs of one host, alone and beside matrix products.

    torchrun --nproc-per-node 4 -m benchmarks.comm.transports [--quantised FORMAT ...] [--out FILE]

``--quantised`` times instead the whole way of 384 MiB of rows from the tokens to the experts, in bf16 and in each
format (``expert_rows``). It also runs over gloo on a machine without GPUs, where the times say nothing about GPUs.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from benchmarks.comm import expert_rows
from benchmarks.out_file import out_file
from benchmarks.turns import timings
from torch import Tensor

from fcsd.bench.runner import table, write
from fcsd.errors import FcsdError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world, leave
from fcsd.parallel.all_reduce.host import sums_of
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.host import HostTransport, streams
from fcsd.parallel.transports.symmetric_memory import open_buffers
from fcsd.parallel.transports.transport import Splits, Transport, all_to_all, splits_of

WIDTH = 2048
SIZES = {"32 MiB": 2**13, "384 MiB": 98304}  # bytes that a rank sends -> rows of WIDTH bf16 values
REPEATS = 10


def uneven(world: int, rows: int) -> list[list[int]]:
    """A matrix of how many rows each rank (row) sends to each rank (column).

    Every rank sends ``rows`` in all. It sends up to twice as many of them to one rank as to another.
    """
    shares = [[2 + (sender + 2 * receiver) % 3 for receiver in range(world)] for sender in range(world)]
    matrix = [[rows * share // sum(row) for share in row] for row in shares]
    for sender, row in enumerate(matrix):
        row[sender] += rows - sum(row)
    return matrix


def check(transport: Transport, world: World) -> None:
    """Compares the rows of exchanges of different sizes with those of NCCL.

    One of the exchanges is larger than the buffers that the first one has allocated.

    Raises:
        FcsdError: an exchange returned other rows than NCCL.
    """
    last = [[0] * (world.size - 1) + [64] for _ in range(world.size)]
    nothing = [[0] * world.size for _ in range(world.size)]
    matrices = [uneven(world.size, 1000), nothing, last, uneven(world.size, 5000), uneven(world.size, 1100)]
    for number, matrix in enumerate(matrices * 20):
        splits = splits_of(matrix, world.rank)
        rows = torch.randn(sum(splits.sends), WIDTH, device=world.device, dtype=torch.bfloat16)
        results = []
        for send in (transport, all_to_all):
            received, work = send(rows, splits, dist.group.WORLD, number % 3 == 0)
            work.wait()
            results.append(received)
        if not torch.equal(*results):
            raise FcsdError(f"exchange {number} on rank {world.rank} brought other rows than NCCL")


def launching(transport: Transport, rows: Tensor, splits: Splits) -> Callable[[], Any]:
    """Makes a function that starts an exchange and returns a function that waits for it."""

    def exchange() -> Callable[[], Any]:
        kept, work = transport(rows, splits, dist.group.WORLD, False)
        return lambda: (work.wait(), kept)

    return exchange


def measure(exchange: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of an exchange alone, of matrix products alone, and of both at once."""
    a = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(6):
            torch.matmul(a, b)

    def both() -> None:
        wait = exchange()
        products()
        wait()

    runs = {"alone": lambda: exchange()(), "products": products, "both": both}
    return {name: timed.median for name, timed in timings(runs, a.device, REPEATS).items()}


def time_rows_to_experts(formats: list[str], tokens: int, repeats: int, out: Path | None) -> NoReturn:
    """Print the table of ``expert_rows``, and write it to ``out`` with the settings. Ends the process."""
    world = join_world()
    transports: dict[str, Transport] = {"NCCL" if world.device.type == "cuda" else "gloo": all_to_all}
    # Where the GPUs cannot copy, this transport sends everything by NCCL, and the table would show NCCL's times twice.
    if world.device.type == "cuda" and open_buffers(dist.group.WORLD, WIDTH) is not None:
        transports["copies"] = CopiesTransport(open_buffers)
    timed = expert_rows.bench(world, transports, formats, tokens, repeats)
    if world.rank == 0:
        print(expert_rows.to_text(timed, formats), file=sys.stderr, flush=True)
        settings = {"world": world.size, "tokens": tokens, "top_k": expert_rows.TOP_K, "width": expert_rows.WIDTH}
        write({"environment": snapshot(), **settings, "repeats": repeats, "ms": timed}, out)
    leave(SystemExit(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quantised", nargs="+", metavar="FORMAT", help="time rows to experts in these formats")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of each rank, for --quantised")
    parser.add_argument("--repeats", type=int, default=20, help="for --quantised")
    parser.add_argument("--out", type=out_file)
    arguments = parser.parse_args()
    if arguments.quantised:
        time_rows_to_experts(arguments.quantised, arguments.tokens, arguments.repeats, arguments.out)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.comm.transports times exchanges between GPUs, and this machine has none")
    world = join_world()
    found: dict[str, Any] = {"environment": snapshot(), "world": world.size, "rows": SIZES, "ms": {}}
    shown: dict[str, dict[str, str | None]] = {}
    by_host = HostTransport(sums_of, streams())
    check(CopiesTransport(open_buffers), world)
    check(by_host, world)
    for size, count in SIZES.items():
        splits = splits_of(uneven(world.size, count), world.rank)
        rows = torch.randn(sum(splits.sends), WIDTH, device=world.device, dtype=torch.bfloat16)
        exchanges = {
            "NCCL": launching(all_to_all, rows, splits),
            "copies": launching(CopiesTransport(open_buffers), rows, splits),
            "host": launching(by_host, rows, splits),
        }
        found["ms"][size] = {name: measure(exchange) for name, exchange in exchanges.items()}
        for name, ms in found["ms"][size].items():
            away = sum(splits.sends) - splits.sends[world.rank]
            speed = {"GB/s out": f"{away * WIDTH * 2 / ms['alone'] / 1e6:.1f}"}
            shown[f"{size}, {name}"] = {**{part: f"{time:.3f}" for part, time in ms.items()}, **speed}
    if world.rank == 0:
        print(table(shown, "ms"), file=sys.stderr, flush=True)
    write(found, arguments.out, world.rank)
    leave(SystemExit(0))


if __name__ == "__main__":
    main()
