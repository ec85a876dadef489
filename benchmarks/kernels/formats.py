"""the formats on a GPU: are kernels and reference equal in every bit, and how fast are the kernels?

    python -m benchmarks.kernels.formats [--moves] [--out FILE]

The speed of encode and decode is the number of bytes that they read and write per second, as a share of what a copy
within the GPU reaches on the same rows. The benchmark prints a table, and ``--out`` writes all figures as JSON. The
exit code is 1 if any bit differs. ``--moves`` times the kernels at both ends of an exchange, which also move rows,
beside those that move bf16.
"""

import argparse
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from benchmarks.kernels.rates import copy_rate
from benchmarks.out_file import out_file
from benchmarks.turns import timings
from torch import Tensor

from fcsd.bench.runner import table, write
from fcsd.kernels import rows as token_rows
from fcsd.kernels.bit_split import Format, kernels, reference
from fcsd.launch.environment import snapshot

WIDTH = 4096  # values of a row
# Rows that are timed, 512 MiB in bf16. They do not fit into a GPU's cache, and a kernel takes longer than its launch.
ROWS = 65536
REPEATS = 7
RUNS = 10  # runs that are launched one after another in each repeat, so that the GPU does not wait for the host
WORKERS = 16  # processes that compile and check; compiling takes nearly all of the time
TIMED = (
    "int8",
    "int8:int",
    "int7",
    "int6",
    "int5",
    "int5:g128:sr",
    "int4:g128",
    "int4",
    "int4:g32:int",
    "int4:g128:sr",
    "int3",
    "int3:g128:sr",
    "int2:g32:sr",
    "int2:g64:sr:clip0.7",
    "int2:g128:sr:clip0.6",
)
MOVED = ("int8", "int6", "int5", "int4", "int4:g128")
TOKENS, TOKEN_WIDTH, TOP_K = 16384, 2048, 6  # 384 MiB of bf16 rows


def all_formats() -> list[str]:
    """The names of the formats of all bit widths, groups and kinds of scale, with and without spikes.

    Some formats with spikes are also clipped.
    """
    metas: tuple[Literal["bf16", "int"], ...] = ("bf16", "int")
    found = [
        str(Format(bits, group, spikes, meta))
        for bits, group, spikes, meta in product(range(2, 9), (32, 64, 128), (False, True), metas)
    ]
    clipped = [str(Format(bits, 64, True, meta, 0.7)) for bits, meta in product((2, 3), metas)]
    edges = [str(Format(bits, group, True, "int")) for bits, group in product((3, 7, 8), (16, 256))]
    return found + clipped + edges


def sample(width: int) -> Tensor:
    """Rows, fp32 ``[8, width]``, each with one of the difficult cases that a format must handle."""
    rows = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    rows[0, 1::7] *= 1000  # massive activations
    rows[1] = -3.3  # constant
    rows[2] = rows[2].abs() + 5  # one-sided
    rows[3, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    rows[4] = (torch.arange(width) % 16) / 2  # ties
    rows[5] *= 2.0**-124  # some of these values are subnormal
    rows[6, ::5] = 3e38  # the range of a group overflows
    rows[7] = -0.0
    return rows


def differences(name: str, device: str, width: int = WIDTH) -> list[str]:
    """Lists where kernels and reference differ in format ``name``: "encode bfloat16", "decode float32", ..."""
    format, found = Format.parse(name), []
    dtypes = [(torch.bfloat16, torch.int16), (torch.float32, torch.int32)]
    # The dtype and the group size do not interact, so fp32 is checked for large groups only.
    for dtype, bits in dtypes if format.group >= 128 else dtypes[:1]:
        rows = sample(width).to(device, dtype)
        records = reference.encode(rows, format)
        if not torch.equal(kernels.encode(rows, format), records):
            found.append(f"encode {dtype}".replace("torch.", ""))
        decoded = [part.decode(records, format, width, dtype) for part in (kernels, reference)]
        decoded = [torch.where(rows.isnan(), torch.nan, rows).view(bits) for rows in decoded]
        if not torch.equal(*decoded):
            found.append(f"decode {dtype}".replace("torch.", ""))
    return found


def milliseconds(run: Callable[[], Any]) -> float:
    """Milliseconds of one run on the GPU: the median over repeats, each of which is the mean of ``RUNS`` runs."""

    def several() -> None:
        for _ in range(RUNS):
            run()

    return timings({"": several}, torch.device("cuda"), REPEATS)[""].median / RUNS


def measure(name: str, rows: Tensor, copy: float) -> dict[str, float]:
    """Measures encode, decode, and both one after the other: their milliseconds, and their share of a copy's speed.

    Args:
        name: the format.
        rows: ``[rows, width]`` on the GPU.
        copy: bytes per millisecond that a copy within the GPU reads and writes.
    """
    format = Format.parse(name)
    records = kernels.encode(rows, format)
    moved = rows.nbytes + records.nbytes  # bytes that encode reads and writes; decode moves as many
    encode = milliseconds(lambda: kernels.encode(rows, format))
    decode = milliseconds(lambda: kernels.decode(records, format, rows.shape[1], rows.dtype))
    return {
        "bits_on_the_wire": 8 * records.nbytes / rows.numel(),
        "encode_ms": encode,
        "decode_ms": decode,
        "encode_share": moved / encode / copy,
        "decode_share": moved / decode / copy,
        "share": 2 * moved / (encode + decode) / copy,
    }


def moves(name: str | None, tokens: int = TOKENS) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """The kernels that move the rows of ``tokens`` tokens in format ``name``, or None for bf16.

    ``pack`` writes the rows of tokens in the order in which they are sent, ``pack weighted`` multiplies them by their
    weights, ``order`` puts rows in the order of experts, ``sum`` adds the weighted rows of each token, and ``dots``
    computes the gradients of the weights.

    Returns: the kernels by name, and which of the first four differ in a bit from two kernels that encode or decode and
        move rows one after the other.
    """
    generator = torch.Generator().manual_seed(0)
    count = tokens * TOP_K
    x = torch.randn(tokens, TOKEN_WIDTH, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.rand(tokens, TOP_K, generator=generator).cuda()
    source = torch.randperm(count, generator=generator).cuda()  # of each row
    places = source.argsort().view(tokens, TOP_K)
    sent, ordered, sums = x.new_zeros(count, TOKEN_WIDTH), x.new_empty(count, TOKEN_WIDTH), torch.empty_like(x)
    if name is None:
        return {
            "pack": lambda: token_rows.spread(x, None, places, sent),
            "pack weighted": lambda: token_rows.spread(x, weight, places, sent),
            "order": lambda: token_rows.spread(sent, None, places.view(-1, 1), ordered),
            "sum": lambda: token_rows.collect(sent, weight, places, sums),
            "dots": lambda: token_rows.dots(x, sent, places),
        }, []
    format = Format.parse(name)
    records = kernels.encode(x, format, places=places, count=count)
    found = {
        "pack": lambda: kernels.encode(x, format, places=places, count=count),
        "pack weighted": lambda: kernels.encode(x, format, weight=weight, places=places, count=count),
        "order": lambda: kernels.decode(records, format, TOKEN_WIDTH, x.dtype, source),
        "sum": lambda: kernels.decode_sum(records, format, TOKEN_WIDTH, x.dtype, weight, places),
        "dots": lambda: kernels.decode_dots(records, format, x, places),
    }
    token_rows.spread(x, weight, places, sent)
    decoded = kernels.decode(records, format, TOKEN_WIDTH, x.dtype)
    token_rows.collect(decoded, weight, places, sums)
    expected = {
        "pack": kernels.encode(x, format)[source // TOP_K],
        "pack weighted": kernels.encode(sent, format),
        "order": decoded[source],
        "sum": sums,
    }
    return found, [way for way, rows in expected.items() if not torch.equal(found[way](), rows)]


def cells(at: dict[str, float]) -> dict[str, str | None]:
    """The cells of what ``measure`` found; shares are of a copy's speed."""
    return {
        "bits": f"{at['bits_on_the_wire']:.2f}",
        "encode ms": f"{at['encode_ms']:.3f}",
        "its share": f"{at['encode_share']:.0%}",
        "decode ms": f"{at['decode_ms']:.3f}",
        "share of it": f"{at['decode_share']:.0%}",
        "both": f"{at['share']:.0%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--moves", action="store_true", help="also time the kernels that move rows")
    parser.add_argument("--out", type=out_file, help="JSON file to write the figures to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels.formats compares kernels on a GPU, and this machine has none")
    names = all_formats()
    workers = multiprocessing.get_context("spawn").Pool(min(WORKERS, os.cpu_count() or 1))
    with workers as pool:
        found = dict(zip(names, pool.map(partial(differences, device="cuda"), names, chunksize=1), strict=True))
    wrong = {name: parts for name, parts in found.items() if parts}

    rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    copy = copy_rate(rows) / 1e3  # bytes per millisecond
    speeds = {name: measure(name, rows, copy) for name in TIMED}
    moving = [None, *MOVED] if arguments.moves else []
    moved: dict[str, dict[str, float]] = {}
    for name in moving:
        ways, differing = moves(name)
        wrong |= {f"moves of {name}": differing} if differing else {}
        moved[name or "bf16"] = {way: milliseconds(run) for way, run in ways.items()}
    result = {
        "environment": snapshot(),
        "rows": ROWS,
        "width": WIDTH,
        "checked": names,
        "different": wrong,
        "copy_gb_per_s": copy / 1e6,
        "formats": speeds,
        "moves_ms": moved,
    }
    write(result, arguments.out)
    print(f"{len(names)} formats: kernels and reference differ in {len(wrong)}")
    for name, parts in list(wrong.items())[:8]:
        print(f"  {name}: {', '.join(parts)}")
    print(f"copy {copy / 1e6:.0f} GB/s read and written, {ROWS} rows of {WIDTH} bf16 values; shares are of this figure")
    print(table({name: cells(at) for name, at in speeds.items()}, "format"))
    if moved:
        rows_of = {name: {way: f"{at:.3f}" for way, at in each.items()} for name, each in moved.items()}
        print(table(rows_of, "moves, ms"))
    if wrong:
        raise SystemExit(f"kernels and references differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
