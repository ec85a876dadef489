"""Encodes and decodes records by Triton kernels, which equal ``reference`` bit for bit.

This holds for compiled kernels and for Triton's interpreter. The arithmetic is chosen so that every backend computes
the same bits, but for the payload of a NaN: divisions are correctly rounded, and there is no fused multiply-add, no
logarithm and no atomic operation.

The kernels also move rows, as ``moves`` describes: ``encode`` reads a row once and writes its records to all their
places, ``decode`` reads each record from its place, and ``decode_sum`` adds the records of a row. Without places, row i
is record i. A format whose groups do not divide the row is a ConfigError.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcsd.kernels.bit_split import programs
from fcsd.kernels.bit_split.format import Format
from fcsd.kernels.bit_split.values import Row


class Launch(NamedTuple):
    """How the values of a row are divided among the threads of a GPU. It changes no result.

    Attributes:
        values: the largest number of values that a program holds at once.
        parts: how many words of eight values of a group one thread holds, if the group has as many.
        warps: the largest number of warps of a program; a program has no more than its values occupy.
    """

    values: int = 2048
    parts: int = 4
    warps: int = 4


# The fastest launches on an H200, of those that were tried (benchmarks/results/formats_registers_h200.json).
_SUM = Launch(2048, 4, 2)
_DOTS = Launch(1024, 4, 1)


def launch_of_encode(format: Format) -> Launch:
    """The fastest way to encode."""
    if format.spikes:
        return Launch(2048, 2 if format.group >= 128 else 1, 2 if format.group == 32 else 1)
    return Launch(4096, 4, 2) if format.bits < 8 and format.group >= 128 else Launch(1024, 1, 1)


def launch_of_decode(format: Format) -> Launch:
    """The fastest way to decode."""
    if format.group < 128:
        return Launch(1024, 2, 1) if format.spikes else Launch(4096, 4, 4)
    return Launch(1024, 1, 2) if format.bits == 8 else Launch(2048, 1, 1)


def encode(
    rows: Tensor,
    format: Format,
    weight: Tensor | None = None,
    places: Tensor | None = None,
    count: int | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Encode rows ``[n, width]``, bf16 or fp32, as records, uint8 ``[count, row_bytes]``.

    Args:
        weight: see ``moves.encode_at``.
        places: see ``moves.encode_at``; None encodes row i as record i.
        count: the number of records; None for as many as rows.
        out: contiguous records to write to; None makes new ones.
        launch: how the kernel is launched; None for the fastest way that was measured.
    """
    number, width = rows.shape
    plan = plan_of(format, width, launch or launch_of_encode(format))
    records = out
    if records is None:
        records = rows.new_empty(number if count is None else count, plan.row.bytes, dtype=torch.uint8)
    tensors = [rows.contiguous(), records, _plain(weight), _plain(places)]
    top_k = 1 if places is None else places.shape[1]
    exact = rows.dtype == torch.bfloat16
    _start(programs.encode_kernel, (number, plan.programs), tensors, plan, TOP_K=top_k, EXACT=exact)
    return records


def decode(
    records: Tensor,
    format: Format,
    width: int,
    dtype: torch.dtype,
    source: Tensor | None = None,
    out: Tensor | None = None,
    ranks: int = 1,
    launch: Launch | None = None,
) -> Tensor:
    """Decode records, uint8 ``[ranks * n, row_bytes]``, to rows ``[n, width]`` of ``dtype``, bf16 or fp32.

    Args:
        records: what to decode: n records of each rank. The records of a row are added; see ``moves.decode_ranks``.
        source: see ``moves.decode_from``; None decodes record i as row i. Not with several ranks.
        out: contiguous rows to write to; None makes new ones.
        launch: how the kernel is launched; None for the fastest way that was measured.
    """
    rows = out
    if rows is None:
        rows = records.new_empty(len(records) // ranks if source is None else len(source), width, dtype=dtype)
    plan = plan_of(format, width, launch or launch_of_decode(format))
    tensors = [rows, records.contiguous(), _plain(source)]
    _start(programs.decode_kernel, (len(rows), plan.programs), tensors, plan, RANKS=ranks)
    return rows


def decode_sum(
    records: Tensor, format: Format, width: int, dtype: torch.dtype, weight: Tensor | None, places: Tensor
) -> Tensor:
    """Decode records and sum those of each row: ``[n, width]`` of ``dtype``; see ``moves.decode_sum``."""
    rows = records.new_empty(len(places), width, dtype=dtype)
    plan = plan_of(format, width, _SUM)
    tensors = [rows, records.contiguous(), _plain(weight), _plain(places)]
    _start(programs.sum_kernel, (len(rows), plan.programs), tensors, plan, TOP_K=places.shape[1])
    return rows


def encode_sum(records: Tensor, format: Format, width: int, sums: Tensor) -> None:
    """Sum records ``[ranks, n, row_bytes]`` over ranks and encode the sums; see ``moves.encode_sum``."""
    ranks, count, _ = records.shape
    plan = plan_of(format, width, launch_of_encode(format))
    tensors: list[Tensor | None] = [records.contiguous(), sums]
    _start(programs.encode_sum_kernel, (count, plan.programs), tensors, plan, RANKS=ranks)


def decode_dots(records: Tensor, format: Format, rows: Tensor, places: Tensor) -> Tensor:
    """The scalar products of rows and decoded records, fp32; see ``moves.decode_dots``."""
    dots = rows.new_empty(places.shape, dtype=torch.float32)
    tensors = [rows.contiguous(), records.contiguous(), _plain(places), dots]
    plan = plan_of(format, rows.shape[1], _DOTS)
    _start(programs.dots_kernel, (places.numel(), 1), tensors, plan, TOP_K=places.shape[1])
    return dots


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()


class Plan(NamedTuple):
    """What the kernels need to know of a format and a row.

    Attributes:
        row: the format of its record, and how a program holds its values.
        programs: how many programs share a row.
        options: how a kernel is compiled.
    """

    row: Row
    programs: int
    options: dict[str, Any]


@cache  # a small row takes less time than these lines
def plan_of(format: Format, width: int, launch: Launch) -> Plan:
    layout, groups = format.layout(width), width // format.group
    block = max(1, min(launch.values // format.group, 1 << (groups - 1).bit_length()))
    parts = min(launch.parts, format.group // 8)
    threads = block * (format.group // 8 // parts)
    row = Row(
        width, format.bits, format.group, format.spikes, format.meta == "int",
        layout.scales, layout.zeros, layout.spikes, layout.indices, layout.end, layout.bytes,
        format.clip, format.rounding, parts, block,
    )  # fmt: skip
    options = {"num_warps": max(1, min(launch.warps, threads // 32)), "enable_fp_fusion": False}
    return Plan(row, -(-groups // block), options)


def _start(kernel: Any, grid: tuple[int, int], tensors: list[Tensor | None], plan: Plan, **options: object) -> None:
    """Start a kernel with ``grid`` programs on the device of ``tensors``."""
    if grid[0]:
        with torch.cuda.device_of(tensors[0]):
            kernel[grid](*tensors, ROW=plan.row, **plan.options, **options)
