"""Encodes and decodes records by Triton kernels, which equal ``reference`` bit for bit.

This holds for compiled kernels and for Triton's interpreter. The arithmetic is chosen so that every backend computes
the same bits: divisions are correctly rounded, and there is no fused multiply-add, no logarithm and no atomic
operation. Numbers are rounded to bf16 by integer arithmetic, because a cast to bf16 in the interpreter drops bits
instead of rounding.

The kernels also move rows, as ``moves`` describes: ``encode`` reads a row once and writes its records to all their
places, ``decode`` reads each record from its place, and ``decode_sum`` adds the records of a row. Without places, row i
is record i.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.kernels.bit_split.arithmetic import beside, from_bf16, to_bf16, uniform
from fcsd.kernels.bit_split.draws import Draws
from fcsd.kernels.bit_split.format import Format
from fcsd.kernels.bit_split.values import eighths, encode_values, load_values, store_record, words_of


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


DEFAULT_LAUNCH = Launch()
_DOTS = Launch(parts=1, warps=1)


def encode(
    rows: Tensor,
    format: Format,
    draws: Draws | None = None,
    weight: Tensor | None = None,
    places: Tensor | None = None,
    count: int | None = None,
    launch: Launch = DEFAULT_LAUNCH,
) -> Tensor:
    """Encode rows ``[n, width]``, bf16 or fp32, as records, uint8 ``[count, row_bytes]``.

    Args:
        draws: see ``codec.encode``; not together with ``places``.
        weight: see ``moves.encode_at``.
        places: see ``moves.encode_at``; None encodes row i as record i.
        count: the number of records; None for as many as rows.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    layout = format.layout(rows.shape[1])
    records = rows.new_empty(len(rows) if count is None else count, layout.bytes, dtype=torch.uint8)
    key = {"pair": None, "seed": 0, "step_number": 0, "lane": 0}
    if draws is not None:
        key = {"pair": draws.pair.contiguous(), "seed": draws.seed, "step_number": draws.step, "lane": draws.lane}
    options = {"CLIP": format.clip, "ROUNDING": format.rounding, "EXACT": rows.dtype == torch.bfloat16}
    _launch(_encode_kernel, rows.contiguous(), records, format, launch, weight, places, **options, **key)
    return records


def decode(
    records: Tensor,
    format: Format,
    width: int,
    dtype: torch.dtype,
    source: Tensor | None = None,
    launch: Launch = DEFAULT_LAUNCH,
) -> Tensor:
    """Decode records, uint8 ``[n, row_bytes]``, to rows ``[n, width]`` of ``dtype``, bf16 or fp32.

    Args:
        source: see ``moves.decode_from``; None decodes record i as row i.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    rows = records.new_empty(len(records) if source is None else len(source), width, dtype=dtype)
    _launch(_decode_kernel, rows, records.contiguous(), format, launch, None, source)
    return rows


def decode_sum(
    records: Tensor,
    format: Format,
    width: int,
    dtype: torch.dtype,
    weight: Tensor | None,
    places: Tensor,
    launch: Launch = DEFAULT_LAUNCH,
) -> Tensor:
    """Decode records and sum those of each row: ``[n, width]`` of ``dtype``; see ``moves.decode_sum``."""
    rows = records.new_empty(len(places), width, dtype=dtype)
    _launch(_sum_kernel, rows, records.contiguous(), format, launch, weight, places)
    return rows


def encode_sum(records: Tensor, format: Format, width: int, launch: Launch = DEFAULT_LAUNCH) -> Tensor:
    """Sum records ``[ranks, n, row_bytes]`` over ranks and encode the sums; see ``moves.encode_sum``."""
    sums = torch.empty_like(records[0])
    if not sums.numel():
        return sums
    layout, groups = format.layout(width), width // format.group
    block = min(launch.values // format.group, triton.next_power_of_2(groups))
    with torch.cuda.device_of(records):
        _encode_sum_kernel[(len(sums), triton.cdiv(groups, block))](
            records.contiguous(),
            sums,
            **_constants(format, width, launch),
            BYTES=layout.bytes,
            BLOCK=block,
            PADDING=layout.end,
            RANKS=len(records),
            CLIP=format.clip,
            ROUNDING=format.rounding,
            num_warps=_warps(format, block, launch),
            enable_fp_fusion=False,
        )
    return sums


def decode_dots(records: Tensor, format: Format, rows: Tensor, places: Tensor, launch: Launch = _DOTS) -> Tensor:
    """The scalar products of rows and decoded records, fp32; see ``moves.decode_dots``."""
    layout, (count, width) = format.layout(rows.shape[1]), rows.shape
    block = min(launch.values // format.group, triton.next_power_of_2(width // format.group))
    dots = rows.new_empty(places.shape, dtype=torch.float32)
    if count:
        with torch.cuda.device_of(rows):
            _dots_kernel[(count, places.shape[1])](
                rows.contiguous(),
                records.contiguous(),
                places.contiguous(),
                dots,
                **_constants(format, width, launch),
                BYTES=layout.bytes,
                BLOCK=block,
                num_warps=_warps(format, block, launch),
                enable_fp_fusion=False,
            )
    return dots


def _launch(
    kernel: triton.JITFunction,
    rows: Tensor,
    records: Tensor,
    format: Format,
    launch: Launch,
    weight: Tensor | None,
    places: Tensor | None,
    **options: object,
) -> None:
    """Start a kernel with one program for each ``launch.values`` values of a row."""
    count, width = rows.shape
    if count == 0:
        return
    layout, groups = format.layout(width), width // format.group
    block = min(launch.values // format.group, triton.next_power_of_2(groups))
    top_k = 1 if places is None else places.shape[1] if places.dim() == 2 else 1
    with torch.cuda.device_of(rows):
        kernel[(count, triton.cdiv(groups, block))](
            rows,
            records,
            None if weight is None else weight.detach().contiguous(),
            None if places is None else places.contiguous(),
            **_constants(format, width, launch),
            BYTES=layout.bytes,
            BLOCK=block,
            PADDING=layout.end,
            TOP_K=top_k,
            num_warps=_warps(format, block, launch),
            enable_fp_fusion=False,
            **options,
        )


def _constants(format: Format, width: int, launch: Launch) -> dict[str, object]:
    layout = format.layout(width)
    return {
        "WIDTH": width,
        "BITS": format.bits,
        "GROUP": format.group,
        "SPIKES": format.spikes,
        "INTEGER": format.meta == "int",
        "SCALES": layout.scales,
        "ZEROS": layout.zeros,
        "ENDS": layout.spikes,
        "INDICES": layout.indices,
        "PARTS": min(launch.parts, format.group // 8),
    }


def _warps(format: Format, groups: int, launch: Launch) -> int:
    """The warps of a program with ``groups`` groups, each of which has a thread for every ``parts`` words."""
    lanes = max(1, format.group // 8 // launch.parts)
    return max(1, min(launch.warps, groups * lanes // 32))


@triton.jit(do_not_specialize=["seed", "step_number", "lane"])
def _encode_kernel(
    rows,
    records,
    weight,
    places,
    pair,
    seed,
    step_number,
    lane,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
    TOP_K: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
    EXACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    place = column % GROUP
    rest = PADDING + tl.arange(0, 16)
    x = tl.load(rows + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    noise = None
    if pair is not None:
        noise = uniform(seed, word, tl.load(pair + row), step_number, lane, eighths())
    if weight is None:  # once for all places
        codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
            x, place, noise, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, EXACT
        )
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = row
        if places is not None:
            at = tl.load(places + row * TOP_K + k)
        if weight is not None:
            y = x * tl.load(weight + row * TOP_K + k).to(tl.float32)
            if EXACT:
                y = tl.where(y == y, from_bf16(to_bf16(y)), y)
            codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
                y, place, noise, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, EXACT
            )
        record = records + at * BYTES
        store_record(
            record,
            codes,
            scale,
            zero,
            least_bits,
            greatest_bits,
            least_at,
            greatest_at,
            word,
            group,
            inside & (at >= 0),
            WIDTH,
            BITS,
            GROUP,
            SPIKES,
            INTEGER,
            SCALES,
            ZEROS,
            ENDS,
            INDICES,
        )
        if PADDING < BYTES and tl.program_id(1) == 0:
            tl.store(record + rest, tl.zeros([16], tl.uint8), mask=(rest < BYTES) & (at >= 0))


@triton.jit
def _stored(out, x, broken, inside):
    """Store values, bf16 or fp32; those of broken groups are NaN."""
    if out.dtype.element_ty == tl.bfloat16:
        bits = tl.where(broken, 0x7FC0, to_bf16(x)).to(tl.uint16)
        tl.store(out.to(tl.pointer_type(tl.uint16)), bits, mask=inside)
    else:
        tl.store(out, tl.where(broken, float("nan"), x), mask=inside)


@triton.jit
def _decode_kernel(
    rows,
    records,
    weight,
    places,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
    TOP_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    at = row
    if places is not None:
        at = tl.load(places + row).to(tl.int64)
        inside = inside & (at >= 0)
    x, broken = load_values(
        records + at * BYTES,
        word,
        group,
        inside,
        WIDTH,
        BITS,
        GROUP,
        SPIKES,
        INTEGER,
        SCALES,
        ZEROS,
        ENDS,
        INDICES,
        PARTS,
    )
    if places is not None:
        x = tl.where(at >= 0, x, 0.0)
        broken = broken & (at >= 0)
    _stored(rows + row * WIDTH + column, x, beside(broken), column < WIDTH)


@triton.jit
def _sum_kernel(
    rows,
    records,
    weight,
    places,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
    TOP_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    LANES: tl.constexpr = GROUP // (8 * PARTS)  # pyright: ignore[reportOperatorIssue]
    total = tl.zeros([PARTS, BLOCK, LANES, 8], tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = tl.load(places + row * TOP_K + k)
        inside = (group < WIDTH // GROUP) & (at >= 0)
        x, broken = load_values(
            records + at * BYTES,
            word,
            group,
            inside,
            WIDTH,
            BITS,
            GROUP,
            SPIKES,
            INTEGER,
            SCALES,
            ZEROS,
            ENDS,
            INDICES,
            PARTS,
        )
        x = tl.where(beside(broken & inside), float("nan"), x)
        if rows.dtype.element_ty == tl.bfloat16:  # a row that is decoded alone has this dtype
            x = tl.where(x == x, from_bf16(to_bf16(x)), x)
        if weight is not None:
            x = x * tl.load(weight + row * TOP_K + k).to(tl.float32)
        total += tl.where(at >= 0, x, 0.0)
    _stored(rows + row * WIDTH + column, total, total != total, column < WIDTH)


@triton.jit
def _encode_sum_kernel(
    records,
    sums,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
    RANKS: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = words_of(group, GROUP, PARTS)
    place = (tl.expand_dims(word, 3) * 8 + eighths()) % GROUP
    LANES: tl.constexpr = GROUP // (8 * PARTS)  # pyright: ignore[reportOperatorIssue]
    total = tl.zeros([PARTS, BLOCK, LANES, 8], tl.float32)
    for rank in tl.static_range(RANKS):  # pyright: ignore[reportGeneralTypeIssues]
        x, broken = load_values(
            records + (rank * rows + row) * BYTES,
            word,
            group,
            inside,
            WIDTH,
            BITS,
            GROUP,
            SPIKES,
            INTEGER,
            SCALES,
            ZEROS,
            ENDS,
            INDICES,
            PARTS,
        )
        total += tl.where(beside(broken), float("nan"), x)
    codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
        total, place, None, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, False
    )
    record = sums + row * BYTES
    store_record(
        record,
        codes,
        scale,
        zero,
        least_bits,
        greatest_bits,
        least_at,
        greatest_at,
        word,
        group,
        inside,
        WIDTH,
        BITS,
        GROUP,
        SPIKES,
        INTEGER,
        SCALES,
        ZEROS,
        ENDS,
        INDICES,
    )
    if PADDING < BYTES and tl.program_id(1) == 0:
        rest = PADDING + tl.arange(0, 16)
        tl.store(record + rest, tl.zeros([16], tl.uint8), mask=rest < BYTES)


@triton.jit
def _dots_kernel(
    rows,
    records,
    places,
    dots,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(places + row * tl.num_programs(1) + k)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH // GROUP, BLOCK):
        group = start + tl.arange(0, BLOCK)
        inside = (group < WIDTH // GROUP) & (at >= 0)
        word = words_of(group, GROUP, PARTS)
        column = tl.expand_dims(word, 3) * 8 + eighths()
        y, broken = load_values(
            records + at * BYTES,
            word,
            group,
            inside,
            WIDTH,
            BITS,
            GROUP,
            SPIKES,
            INTEGER,
            SCALES,
            ZEROS,
            ENDS,
            INDICES,
            PARTS,
        )
        y = tl.where(beside(broken & inside), float("nan"), y)
        if rows.dtype.element_ty == tl.bfloat16:
            y = tl.where(y == y, from_bf16(to_bf16(y)), y)
        x = tl.load(rows + row * WIDTH + column, mask=(column < WIDTH) & (at >= 0), other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(tl.sum(x * y, 3), 0), 1)
    tl.store(dots + row * tl.num_programs(1) + k, tl.sum(total, 0))
