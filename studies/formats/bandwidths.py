"""FlashCommunication V2's tables 9 and 10: how many times as fast as bf16 a collective is with each format.

The paper gives bandwidths of GPUs. Two kinds of rows are beside them: how many times fewer bytes travel, which follows
from a format alone, and what fcsd's collectives reached where they were measured.
"""

from collections.abc import Mapping
from typing import Any

from fcsd import markdown
from fcsd.kernels.bit_split import Format

# The formats of the paper's tables 9 and 10, and its bandwidths in GB/s: of NCCL in bf16, then in these formats.
SENT = ("int8", "int6", "int5", "int4:g32", "int3:g32", "int2:g32:sr")
TABLE_9 = {
    "L40, two steps": (10.43, 9.17, 12.05, 14.28, 15.00, 16.13, 16.19),
    "L40, by nodes": (10.43, 14.95, 19.53, 23.05, 24.22, 28.80, 27.01),
    "L40, by nodes, in chunks": (10.43, 19.44, 25.24, 29.75, 30.84, 30.24, 33.39),
    "A100": (89.15, 123.32, 137.72, 147.68, 148.61, 153.38, 122.46),
    "H800": (94.18, 128.78, 150.21, 173.38, 185.27, 187.31, 151.97),
    "H20": (209.14, 214.32, 225.55, 240.59, 263.62, 260.35, 202.11),
}
TABLE_10 = {
    "A100": (165.41, 183.99, 208.77, 212.15, 218.10, 206.22, 177.02),
    "H800": (169.76, 230.51, 276.82, 300.20, 341.87, 290.50, 259.61),
    "H20": (349.34, 323.52, 276.73, 289.06, 339.00, 290.33, 249.53),
}
# What follows ``quantised:FORMAT`` in the names of what ``benchmarks.comm.all_reduce`` times -> how the table names it.
WAYS = {
    "": "in one kernel",
    "in steps": "in two steps",
    "in one step": "in one step",
}

Speeds = Mapping[str, Mapping[str, float]]  # what was measured -> format of ``SENT`` -> times as fast as bf16


def to_text(paper: Mapping[str, tuple[float, ...]], measured: Speeds) -> str:
    """One of the two tables, in Markdown.

    Args:
        paper: ``TABLE_9`` or ``TABLE_10``.
        measured: what fcsd's collectives reached; a format that was not measured is missing.
    """
    bits = [Format.parse(format).bits_per_value for format in SENT]
    head = ["", *(f"`{format}`" for format in SENT)]
    body = [
        ["Bits as sent", *(f"{one:g}" for one in bits)],
        ["bf16 bytes / its bytes", *(f"{16 / one:.2f}" for one in bits)],
    ]
    for name, speeds in measured.items():
        body.append([f"fcsd: {name}", *(f"{speeds[one]:.2f}" if one in speeds else "-" for one in SENT)])
    for name, (plain, *others) in paper.items():
        body.append([f"Paper: {name}", *(f"{one / plain:.2f}" for one in others)])
    return markdown.table(head, body)


def of_all_reduce(record: Mapping[str, Any]) -> Speeds:
    """The speeds in a result of ``benchmarks.comm.all_reduce``: of ``quantised`` in each way over NCCL's in bf16.

    With ``--plain`` only the kernel was timed. A way whose result was wrong was not timed.
    """
    found = {}
    for way, name in WAYS.items():
        for size, times in record["ms"].items():
            taken = _of_way(times, way)
            if taken and times["nccl"] is not None:
                found[f"{_gpus(record)}, {name}, {_size(size)}"] = _speeds(times["nccl"], taken)
    return found


def _of_way(times: Mapping[str, list[float] | None], way: str) -> dict[str, list[float]]:
    """The times of one of ``WAYS`` by format."""
    found = {}
    for key, taken in times.items():
        kind, _, rest = key.partition(" ")
        if kind.startswith("quantised:") and rest == way and taken is not None:
            found[_format(kind.removeprefix("quantised:"))] = taken
    return found


def of_exchange(record: Mapping[str, Any]) -> Speeds:
    """The speeds in a result of ``benchmarks.comm.transports``: of the way of rows to the experts over that in bf16.

    Each way of sending has a row with packing, encoding, decoding and ordering, and one for the exchange alone.
    """
    gpus = _gpus(record)
    found = {}
    for experts, transports in record["ms"].items():
        for transport, times in transports.items():
            for part, plain in (("fused", "bf16"), ("wire", "bf16, wire")):
                name = f"{gpus}, {experts}, {transport}" + (", the exchange alone" if part == "wire" else "")
                taken = {
                    _format(key.removesuffix(f", {part}")): time
                    for key, time in times.items()
                    if key.endswith(f", {part}") and key != plain
                }
                found[name] = _speeds(times[plain], taken)
    return found


def _format(name: str) -> str:
    """The shortest name of a format, which is the same for ``int4`` and ``int4:g32``."""
    return str(Format.parse(name))


def _size(mib: str) -> str:
    """``16 KiB`` for ``0.015625 MiB``; sizes of at least one MiB stay as they are."""
    number = float(mib.removesuffix(" MiB"))
    return mib if number >= 1 else f"{1024 * number:g} KiB"


def _speeds(plain: list[float], times: Mapping[str, list[float]]) -> dict[str, float]:
    """Times as fast as bf16, by the medians, which are the first of the stored numbers."""
    return {format: plain[0] / times[_format(format)][0] for format in SENT if _format(format) in times}


def _gpus(record: Mapping[str, Any]) -> str:
    name = record["environment"]["gpus"][0]["name"].removeprefix("NVIDIA ")
    return f"{record['world']} {name}"
