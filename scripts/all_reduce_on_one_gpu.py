#!/usr/bin/env python
"""Time the kernels of the quantised all-reduce between two ranks that share one GPU, so that nothing crosses a link.

    python scripts/all_reduce_on_one_gpu.py [--formats int8 int5 int4] [--mib 256 64 16] [--out FILE]

Two streams of one process are the ranks. Each kernel gets at most half of the GPU, because a block waits for the block
of the other rank. The time divided by two is therefore about what a rank needs on a GPU of its own beside the link: the
arithmetic of the formats, and its own memory. Every result is compared with the reference first. ``turns`` is the
kernel that works in turns of 32 KiB, ``large`` the one whose blocks wait twice in all.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcsd.bench.out_file import out_file
from fcsd.bench.timing import on_gpu
from fcsd.kernels.all_reduce import launch, programs_quantised
from fcsd.kernels.all_reduce.memory import Shape, memory_of, room_bytes, rooms_of, total_bytes
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.kernels import Launch
from fcsd.launch.environment import snapshot
from fcsd.parallel.quantised.simulated_all_reduce import simulate_all_reduce

RANKS = 2
HALF = 64 * 2**20  # bytes of a half of a room
TURNS_BLOCKS = 64
LAUNCHES = (Launch(1024, 1, 1), Launch(1024, 4, 1), Launch(2048, 4, 2), Launch(2048, 1, 2), Launch(4096, 4, 4))
REPEATS = 9
Reduce = Callable[[int, Tensor], Any]  # of a rank


def most_blocks(compiled: Any) -> int:
    """How many blocks of a kernel one rank may have, so that those of both ranks are on the GPU at the same time."""
    properties = torch.cuda.get_device_properties(0)
    threads = 32 * compiled.metadata.num_warps
    registers = 65536 // (threads * max(32, -(-compiled.n_regs // 8) * 8))
    shared = properties.shared_memory_per_multiprocessor // (compiled.metadata.shared + 1024)
    return properties.multi_processor_count * (3 * min(registers, shared, 2048 // threads, 24) // 4) // RANKS


def _compiled() -> dict[Any, Any]:
    """The compiled versions of the large kernel."""
    return programs_quantised.large_kernel.device_caches[0][0]


def on_both(reduce: Reduce, xs: list[Tensor], streams: list[torch.cuda.Stream]) -> None:
    """Let both ranks reduce at the same time."""
    current = torch.cuda.current_stream()
    for rank, stream in enumerate(streams):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            reduce(rank, xs[rank])
    for stream in streams:
        current.wait_stream(stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="+", default=["int8", "int5", "int4"])
    parser.add_argument("--mib", type=float, nargs="+", default=[256, 64, 16])
    parser.add_argument("--out", type=out_file)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("all_reduce_on_one_gpu.py times kernels on a GPU, and this machine has none")
    device = torch.device("cuda", 0)
    memories = [torch.zeros(total_bytes(RANKS), dtype=torch.uint8, device=device) for _ in range(RANKS)]
    halls = [torch.zeros(room_bytes(RANKS, HALF), dtype=torch.uint8, device=device) for _ in range(RANKS)]
    memory = [memory_of(rank, [one.data_ptr() for one in memories], device) for rank in range(RANKS)]
    rooms = [rooms_of([one.data_ptr() for one in halls], HALF, device) for _ in range(RANKS)]
    streams = [torch.cuda.Stream() for _ in range(RANKS)]

    def in_turns(format: Format, rank: int, x: Tensor) -> None:
        launch.all_reduce_quantised(x, memory[rank], Shape(False, TURNS_BLOCKS), format)

    def large(format: Format, shape: Launch, blocks: int, rank: int, x: Tensor) -> None:
        launch.all_reduce_quantised_large(x, memory[rank], rooms[rank], format, blocks, shape)

    found: list[dict[str, Any]] = []
    for text in arguments.formats:
        format = Format.parse(text)
        most: dict[Launch, int] = {}
        for shape in LAUNCHES:
            compiled = set(_compiled())
            on_both(
                partial(large, format, shape, 64),
                list(torch.randn(RANKS, 1024, 4096, device=device).bfloat16()),
                streams,
            )
            most[shape] = min(most_blocks(_compiled()[key]) for key in set(_compiled()) - compiled)
        for mib in arguments.mib:
            values = [torch.randn(int(mib * 2**20) // 8192, 4096, device=device).bfloat16() for _ in range(RANKS)]
            expected = simulate_all_reduce(torch.stack([one[:4096] for one in values]), format)
            ways: dict[str, Reduce] = {f"turns, {TURNS_BLOCKS} blocks": partial(in_turns, format)}
            for shape, blocks in most.items():
                for number in (blocks, blocks // 2):
                    ways[f"large, {tuple(shape)}, {number} blocks"] = partial(large, format, shape, number)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for repeat in range(REPEATS + 1):
                for name, way in ways.items():
                    xs = [one.clone() for one in values]
                    times[name].append(on_gpu(lambda way=way, xs=xs: on_both(way, xs, streams)))
                    if repeat == 0 and not all(torch.equal(x[:4096], expected) for x in xs):
                        raise SystemExit(f"{text}, {mib:g} MiB, {name}: the result is wrong")
            for name, each in times.items():
                found.append({"format": text, "mib": mib, "way": name, "ms": statistics.median(each[1:])})
                print(f"{text:6}{mib:6g} MiB  {name:40}{found[-1]['ms']:8.3f} ms", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"environment": snapshot(), "found": found}, indent=1))


if __name__ == "__main__":
    main()
