"""Makes random sums through memory of the host, a million by default, and compares every bit with the right one.

    NCCL_P2P_DISABLE=1 python benchmarks/comm/host_sums_stress.py OUT.json [--ranks 2] [--sums 1000000] [--seconds 60]
        [--streams] [--eager]

Every rank makes the values of all ranks itself, from a count of rounds, so the right sums need no other way to travel:
the sum in the order of ranks, or in INT8 what the records of all ranks mean (``parallel.all_reduce.quantised``).
Sizes, ways, dtypes, and whether a sum replaces its values are drawn anew for each batch of 400 sums. The batches are
CUDA graphs, replayed in a random order on two streams of each rank; with ``--eager`` they are started one by one.

Ranks are processes, each on a GPU of its own if there are enough. Processes that share a GPU take turns of about two
milliseconds, so a rank is set aside in the middle of everything, and a sum takes as long. With ``--streams`` the ranks
are streams of one process on one GPU, which run at the same time; copy engines, whose queues such ranks would share,
are left out. OUT.json has how many sums were made, by way and dtype, and how many values were wrong. The exit status
is 1 if one was.
"""

import argparse
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from fcsd.bench.runner import without_folders
from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.moves import decode_ranks, encode_sum
from fcsd.kernels.host import compiled
from fcsd.kernels.host.layout import BLOCKS, ONE_SHOT, total_bytes
from fcsd.launch.environment import snapshot
from fcsd.parallel.all_reduce.host import HostSums, sums_of
from fcsd.parallel.all_reduce.host_memory import HostMemory

SUMS = 400  # of a batch
BATCHES = 12
LIMIT = 30.0  # seconds that a rank waits for another one
CODED, INT8 = "in_blocks:int8", Format(8)
INTEGERS = {2: torch.int16, 4: torch.int32}


def drawn(source: random.Random, engines: bool) -> list[tuple[str, int, bool]]:
    """The sums of a batch: way, bytes, and whether a sum is written over its values. Most are small."""
    cases = []
    for _ in range(SUMS):
        way = source.choices(("one_shot", "in_blocks", CODED, "exchange"), (90, 10, 10, 2 if engines else 0))[0]
        most = {"one_shot": ONE_SHOT, "in_blocks": BLOCKS, CODED: BLOCKS}.get(way, 1 << 20)
        unit = 4 * INT8.group if way == CODED else 16  # whole groups of any dtype, or lines
        largest = most if source.random() < 0.02 else min(most, unit << source.randrange(11))
        cases.append((way, unit * source.randint(1, largest // unit), source.random() < 0.3))
    return cases


class Batch:
    """Sums of one rank that follow each other, and their comparison; ``run`` makes them with other values each time.

    Args:
        sums: of this rank.
        dtype: of the values.
        cases: see ``drawn``.
        device: where the values are.
    """

    def __init__(self, sums: HostSums, dtype: torch.dtype, cases: list[tuple[str, int, bool]], device: str) -> None:
        self.sums, self.dtype, self.cases = sums, dtype, cases
        count = sum(size for _, size, _ in cases) // dtype.itemsize
        self.coded = sum(size for way, size, _ in cases if way == CODED) // dtype.itemsize  # values, before the others
        self.values = torch.zeros(sums.size, count, dtype=dtype, device=device)
        self.out = torch.zeros(count, dtype=dtype, device=device)
        self.places = torch.arange(count, dtype=torch.int32, device=device)
        self.round = torch.zeros((), dtype=torch.int32, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def run(self) -> None:
        """Make all sums once, and add the values that are not the right sum's to ``wrong``."""
        self.fill()
        begin = {True: 0, False: self.coded}
        for way, size, in_place in self.cases:
            coded = way == CODED
            here = slice(begin[coded], begin[coded] + size // self.dtype.itemsize)
            begin[coded] = here.stop
            x, out = self.values[self.sums.rank][here], self.out[here]
            if in_place:
                out.copy_(x)
                x = out
            if coded:
                self.sums.all_reduce(x.view(-1, INT8.group), out, "in_blocks", INT8)
            else:
                self.sums.all_reduce(x, out, way)
        self.compare()

    def fill(self) -> None:
        """Values that no round before had, and nothing in the place of the sums."""
        self.round.add_(1)
        for rank in range(self.sums.size):
            mixed = self.places * 1664525 + (self.round * 40503 + rank) * 1013904223
            mixed = (mixed ^ (mixed >> 15)) * 739982445
            self.values[rank] = ((mixed >> 12) & 0xFFFF).float().sub_(32767.5).mul_(1 / 1024).to(self.dtype)
        self.out.zero_()

    def compare(self) -> None:
        """Add the number of values that differ from the right sum; see the head of this file."""
        total = torch.zeros(self.out.shape, device=self.out.device)
        for values in self.values:
            total += values.float()
        if self.coded:
            rows = total[: self.coded].view(-1, INT8.group)
            records = torch.stack([encode(v[: self.coded].float().view(rows.shape), INT8) for v in self.values])
            if len(records) == 2:
                decode_ranks(records, INT8, rows)
            else:
                sums = torch.empty_like(records[0])
                encode_sum(records, INT8, INT8.group, sums)
                rows.copy_(decode(sums, INT8, INT8.group, rows.dtype))
        bits = INTEGERS[self.dtype.itemsize]
        self.wrong.add_((total.to(self.dtype).view(bits) != self.out.view(bits)).sum())


class Rank:
    """One rank on a GPU: its batches, ready to be started, and its two streams."""

    def __init__(self, sums: HostSums, engines: bool, eager: bool) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.last = self.streams[0]
        source = random.Random(0)  # the same sums on all ranks
        dtypes = [list(compiled.KINDS)[number % len(compiled.KINDS)] for number in range(BATCHES)]
        self.batches = [Batch(sums, dtype, drawn(source, engines), "cuda") for dtype in dtypes]
        self.starts: list[Callable[[], None]] = []
        for batch in self.batches:
            with torch.cuda.stream(self.last):
                batch.fill()  # loads torch's kernels, which cannot be done while a kernel of the other rank waits
                batch.compare()
                batch.wrong.zero_()
            torch.cuda.synchronize()
            if eager:
                self.starts.append(batch.run)
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.last):
                batch.run()
            self.starts.append(graph.replay)

    def start(self, batch: int, stream: int) -> None:
        """Start a batch on one of the streams, after the batch before."""
        self.streams[stream].wait_stream(self.last)
        self.last = self.streams[stream]
        with torch.cuda.stream(self.last):
            self.starts[batch]()

    def wrong(self) -> int:
        """The values that were wrong so far."""
        torch.cuda.synchronize()
        return sum(int(batch.wrong) for batch in self.batches)


def stressed(ranks: list[Rank], options: argparse.Namespace, group: Any = None, first: bool = True) -> bool:
    """Start batches until there are enough sums or the time is over; whether all were right."""
    source, made, begun = random.Random(1), Counter(), time.monotonic()
    found: dict[str, Any] = {
        "command": without_folders(" ".join(sys.argv)),
        "environment": snapshot(),
        "ranks": options.ranks,
    }
    found["a rank is"] = "a stream" if options.streams else f"a process, {torch.cuda.device_count()} GPUs"
    batches, wrong, going = ranks[0].batches, 0, True
    step = 25 if options.streams or torch.cuda.device_count() >= options.ranks else 1
    while going:
        for _ in range(step):
            batch, stream = source.randrange(BATCHES), source.randrange(2)
            for rank in ranks:
                rank.start(batch, stream)
            made.update(f"{way} {batches[batch].dtype}" for way, _, _ in batches[batch].cases)
        wrong = sum(rank.wrong() for rank in ranks)
        seconds = time.monotonic() - begun
        going = made.total() < options.sums and seconds < options.seconds and not wrong
        if group is not None:
            told = torch.tensor([int(going), wrong])
            gathered = [torch.zeros_like(told) for _ in range(options.ranks)]
            dist.all_gather(gathered, told, group=group)
            wrong = sum(int(one[1]) for one in gathered)
            going = bool(gathered[0][0]) and not wrong
        if first:
            found |= {"sums": made.total(), "wrong values": wrong, "seconds": round(seconds, 2), "made": dict(made)}
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    if first:
        print({name: found[name] for name in ("a rank is", "ranks", "sums", "wrong values", "seconds")}, flush=True)
    return not wrong


def as_processes(rank: int, options: argparse.Namespace, port: int) -> None:
    """One of several processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    enough = torch.cuda.device_count() >= options.ranks
    torch.cuda.set_device(rank if enough else 0)
    sums = sums_of(dist.group.WORLD, limit=LIMIT)
    right = stressed([Rank(sums, True, options.eager)], options, dist.group.WORLD, rank == 0)
    dist.barrier()
    os._exit(0 if right else 1)


class Beside(compiled.Gpu):
    """The GPU of a rank that shares its process, and what the process has mapped, with the first one."""

    def __init__(self, ranks: int, address: int) -> None:
        super().__init__(ranks)
        self._address = address

    def mapped(self, address: int, size: int) -> int:
        return self._address


def as_streams(options: argparse.Namespace) -> bool:
    """All ranks in this process."""
    file = os.memfd_create("fcsd-sums")
    os.ftruncate(file, total_bytes(options.ranks))
    torch.zeros(1, device="cuda")
    memories = [HostMemory(rank, [os.getpid()] * options.ranks, file, LIMIT) for rank in range(options.ranks)]
    mapped = compiled.register(memories[0].address, total_bytes(options.ranks))
    ranks = []
    for memory in memories:
        memory.address = memories[0].address
        ranks.append(Rank(HostSums(memory, Beside(options.ranks, mapped)), False, options.eager))
    torch.cuda.synchronize()
    right = stressed(ranks, options)
    for memory in memories:
        memory.close()
    return right


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sums", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    if options.streams:
        # Read when CUDA starts: all kernels are loaded at once, and no two streams share a queue.
        os.environ |= {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        sys.exit(0 if as_streams(options) else 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(as_processes, (options, port), options.ranks)


if __name__ == "__main__":
    main()
