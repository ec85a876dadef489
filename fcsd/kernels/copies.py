"""Numbers the copies of deduplicated rows, and writes the tails of their records, by three Triton kernels.

``copies_reference.py`` computes the same in torch, with about thirty operations for each exchange. A GPU executes them
so fast that their launches determine how long a small exchange takes. Here one kernel marks which groups each row
needs, a cumulative sum numbers the copies, one kernel writes the indices, and one writes the tails.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.kernels import Copies

_ROWS = 32  # of a program


def number_copies(experts: Tensor, groups: int, span: int, choices: int) -> Copies:
    """See ``copies_reference.number_copies``. ``experts`` has any integer dtype; its rows may be part of wider ones."""
    count, top_k = experts.shape
    most = min(groups, top_k)
    found = Copies(*(experts.new_empty(count, columns, dtype=torch.int64) for columns in (most, top_k, top_k)))
    if not count:
        return found
    needed = torch.empty(groups, count, dtype=torch.int32, device=experts.device)
    widths: dict[str, Any] = {"TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "ROWS": _ROWS}
    grid = (triton.cdiv(count, _ROWS),)
    with torch.cuda.device_of(experts):
        sizes = count, experts.stride(0), groups, span
        _mark_kernel[grid](experts, needed, *sizes, GROUPS=triton.next_power_of_2(groups), **widths)
        number = needed.view(-1).cumsum(0)
        _number_kernel[grid](experts, number, *found, *sizes, most, choices, **widths)
    return found


def write_tails(weights: Tensor, experts: Tensor, of_rows: Tensor, copies: Copies) -> None:
    """See ``copies_reference.write_tails``. Entries of copies that ``copies`` does not name keep their values.

    ``weights`` and ``of_rows`` have neighbouring columns.
    """
    row_of, entry_of, places = copies
    count, top_k = entry_of.shape
    if not count:
        return
    most, entries = row_of.shape[1], weights.shape[1]
    sizes = count, weights.stride(0), experts.stride(0), of_rows.stride(0), most, entries
    widths: dict[str, Any] = {"TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "ROWS": _ROWS}
    widths |= {"MOST": triton.next_power_of_2(most), "ENTRIES": triton.next_power_of_2(entries)}
    with torch.cuda.device_of(weights):
        grid = (triton.cdiv(count, _ROWS),)
        _tails_kernel[grid](weights, experts, of_rows, row_of, entry_of, places, *sizes, **widths)


@triton.jit
def _chosen(experts, row, count, stride, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """The experts of rows, ``[ROWS, CHOICES]``; -1 where there is none."""
    k = tl.arange(0, CHOICES)
    inside = (row < count)[:, None] & (k < TOP_K)[None, :]
    return tl.load(experts + row[:, None] * stride + k[None, :], mask=inside, other=-1).to(tl.int64)


@triton.jit
def _mark_kernel(
    experts, needed, count, stride, groups, span,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes 1 to ``needed [groups, rows]`` where a row has an expert of the group, else 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = _chosen(experts, row, count, stride, TOP_K, CHOICES)
    group = tl.where(expert < 0, groups, expert // span)
    column = tl.arange(0, GROUPS)
    mark = tl.max((group[:, :, None] == column[None, None, :]).to(tl.int32), 1)
    inside = (row < count)[:, None] & (column < groups)[None, :]
    tl.store(needed + column[None, :].to(tl.int64) * count + row[:, None], mark, mask=inside)


@triton.jit
def _number_kernel(
    experts, number, row_of, entry_of, places, count, stride, groups, span, most, choices,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the indices of the copies; ``number [groups, rows]`` counts the copies up to each group and row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = _chosen(experts, row, count, stride, TOP_K, CHOICES)
    group = tl.where(expert < 0, groups, expert // span)  # the number of groups stands for no group
    k = tl.arange(0, CHOICES)
    inside = (row < count)[:, None] & (k < TOP_K)[None, :]
    there = group < groups
    copy = tl.load(number + group * count + row[:, None], mask=inside & there, other=0) - 1
    # [row, k, j]: whether the choice j is an earlier one of the same group as k.
    earlier = tl.sum(((group[:, :, None] == group[:, None, :]) & (k[None, None, :] < k[None, :, None])).to(tl.int64), 2)
    at = row[:, None] * TOP_K + k[None, :]
    tl.store(entry_of + at, tl.where(there, copy * choices + earlier, -1), mask=inside)
    # As torch's remainder, that of -1 is span - 1.
    tl.store(places + at, tl.where(there, expert % span, span - 1), mask=inside)
    # A row's copies are listed from the last group to the first one: a copy's place is the number of later groups.
    first = there & (earlier == 0)
    later = first[:, None, :] & (group[:, None, :] > group[:, :, None])  # [row, k, j]
    place = tl.sum(later.to(tl.int64), 2)
    tl.store(row_of + row[:, None] * most + place, copy, mask=inside & first)
    used = tl.sum(first.to(tl.int64), 1)
    rest = (row < count)[:, None] & (k[None, :] >= used[:, None]) & (k < most)[None, :]
    tl.store(row_of + row[:, None] * most + k[None, :], tl.full([ROWS, CHOICES], -1, tl.int64), mask=rest)


@triton.jit
def _tails_kernel(
    weights, experts, of_rows, row_of, entry_of, places,
    count, weight_stride, expert_stride, row_stride, most, entries,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, MOST: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k, m, e = tl.arange(0, CHOICES), tl.arange(0, MOST), tl.arange(0, ENTRIES)
    inside = (row < count)[:, None] & (k < TOP_K)[None, :]
    at = row[:, None] * TOP_K + k[None, :]
    entry = tl.load(entry_of + at, mask=inside, other=-1)
    there = entry >= 0
    copy = tl.where(there, entry // entries, -1)
    weight = tl.load(of_rows + row[:, None] * row_stride + k[None, :], mask=inside, other=0.0)
    place = tl.load(places + at, mask=inside, other=0)
    tl.store(weights + copy * weight_stride + entry % entries, weight, mask=there)
    tl.store(experts + copy * expert_stride + entry % entries, place.to(tl.int16), mask=there)
    # The entries of a copy are used from the first one on.
    listed = (row < count)[:, None] & (m < most)[None, :]
    number = tl.load(row_of + row[:, None] * most + m[None, :], mask=listed, other=-1)
    used = tl.sum((number[:, :, None] == copy[:, None, :]).to(tl.int32), 2)
    free = (number >= 0)[:, :, None] & (e[None, None, :] >= used[:, :, None]) & (e < entries)[None, None, :]
    to_weight = weights + number[:, :, None] * weight_stride + e[None, None, :]
    to_expert = experts + number[:, :, None] * expert_stride + e[None, None, :]
    tl.store(to_weight, tl.zeros([ROWS, MOST, ENTRIES], weights.dtype.element_ty), mask=free)
    tl.store(to_expert, tl.full([ROWS, MOST, ENTRIES], -1, tl.int16), mask=free)
