"""The values of quantised weights: a decoder for each layout, and what the values of its tensors must satisfy.

Products are taken in the dtypes in which the libraries that write these files take them, so that the values are theirs,
bit for bit.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .layouts import Scheme, Shape, needed, scale_of

Tensors = Mapping[str, Tensor]  # the suffix of a tensor's name -> the tensor

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64},
}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of eight lies in the four bits of this number
_PART = 1 << 22  # values that are decoded at a time: temporaries take at most 24 bytes each, and so 100 MB


def dequantise(scheme: Scheme, tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values ``[out, in]`` of a linear layer's weights; ``[experts, in, out]`` of MXFP4 as gpt-oss has it.

    Codes are unpacked a part at a time, so that little more than the result is in memory.

    Args:
        tensors: those of the layer by the suffixes of their names, see :func:`fcsd.models.quantised.layouts.held_of`.
        dtype: of the result. Products are rounded to it from the dtype in which the method's library takes them.

    Raises:
        ValueError: the tensors do not belong together.
    """
    if lacking := [suffix for suffix in needed(scheme) if suffix not in tensors]:
        raise ValueError(f"{lacking[0]} is missing")
    return _DECODERS[scheme.layout](scheme, tensors, dtype)


def faulty(scheme: Scheme, suffix: str, tensor: Tensor, shape: Shape | None) -> str | None:
    """What is wrong with the values of a tensor, in words; None if nothing is, or if it holds codes alone.

    Args:
        shape: of the weight; None if it is not known.
    """
    if suffix.endswith("shape"):
        return None if shape in (None, tuple(tensor.tolist())) else f"says {tensor.tolist()}, not {list(shape or ())}"
    if suffix.endswith("g_idx"):
        # A file without an order of columns may say so by -1.
        groups = scheme.grid(1, tensor.numel())[1]
        bad = (tensor < 0) | (tensor >= groups)
        return f"names group {tensor[bad][0]} of {groups}" if bad.any() and not (tensor == -1).all() else None
    if suffix == "qzeros" and scheme.offset:
        full = unpacked(tensor, scheme.bits).to(torch.int16) + scheme.offset >= 1 << scheme.bits
        return f"holds zero points that overflow {scheme.bits} bits when 1 is added to them" if full.any() else None
    if suffix == "_scales":
        return "holds an exponent of 255, which is no number" if (tensor == 255).any() else None
    if "scale" not in suffix or not tensor.is_floating_point():
        return None
    values = tensor.float()
    if not torch.isfinite(values).all():
        return "holds a scale that is not finite"
    # A group of values that are all far smaller than the largest of the matrix has no smaller scale in eight bits.
    small = tensor.dtype == torch.float8_e4m3fn
    return None if small or (values != 0).all() else "holds a scale of zero"


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The numbers from 0 to ``2 ** bits - 1`` that lie densely in int32 words, from the lowest bit on.

    Args:
        words: ``[..., words]``, int32.

    Returns:
        ``[..., words * 32 // bits]``, uint8.
    """
    if bits in (4, 8):
        found = words.contiguous().view(torch.uint8)
        return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(-2)
    first = torch.arange(words.shape[-1] * 32 // bits) * bits
    wide = words.long() & 0xFFFFFFFF
    wide = torch.cat([wide, torch.zeros_like(wide[..., :1])], -1)  # the last number may end with the last word
    pair = wide[..., first // 32] | (wide[..., first // 32 + 1] << 32)
    return ((pair >> (first % 32)) & ((1 << bits) - 1)).to(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """The fp4 numbers of bytes, the lower half first: ``[..., n]`` -> ``[..., 2 n]``, float32."""
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


def _in_parts(rows: int, columns: int, dtype: torch.dtype, part: Callable[[int, int], Tensor]) -> Tensor:
    """A matrix ``[rows, columns]`` that is made some rows at a time: ``part`` gives those from a first to a last."""
    step = max(32, _PART // max(columns, 1) // 32 * 32)
    if rows <= step:
        return part(0, rows).to(dtype).contiguous()
    whole = torch.empty(rows, columns, dtype=dtype)
    for start in range(0, rows, step):
        whole[start : start + step] = part(start, min(start + step, rows))
    return whole


def _scaled(codes: Tensor, zeros: Tensor | None, scales: Tensor, width: int) -> Tensor:
    """``(codes - zeros) * scales`` of rows, in the dtype of the scales.

    Args:
        codes: ``[rows, columns]``.
        zeros: ``[rows or 1, groups]``.
        scales: ``[rows or 1, groups]``.
        width: columns of a group; the last group may have fewer.
    """
    rows, columns = codes.shape
    groups = scales.shape[-1]
    if groups == 1 or columns == groups * width:
        shaped = codes.view(rows, groups, -1).to(scales.dtype)
        shaped = shaped if zeros is None else shaped - zeros.to(scales.dtype).unsqueeze(-1)
        return (shaped * scales.unsqueeze(-1)).flatten(1)
    return _by_index(codes, zeros, scales, torch.arange(columns) // width)


def _by_index(codes: Tensor, zeros: Tensor | None, scales: Tensor, group: Tensor) -> Tensor:
    """As :func:`_scaled`, with the group of each column."""
    values = codes.to(scales.dtype)
    values = values if zeros is None else values - zeros.to(scales.dtype)[:, group]
    return values * scales[:, group]


def _require(shape: Shape, wanted: Shape, what: str) -> None:
    if shape != wanted:
        raise ValueError(f"{what} is {list(shape)}, not {list(wanted)}")


def _packed(scheme: Scheme, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    rows, columns = (int(size) for size in tensors["weight_shape"])
    words, scales = tensors["weight_packed"], tensors["weight_scale"]
    _require(words.shape, (rows, -(-columns * scheme.bits // 32)), "weight_packed")
    down, across = scheme.grid(rows, columns)
    scales, middle = scales.reshape(down, across), 1 << (scheme.bits - 1)
    zeros = None
    if not scheme.symmetric:  # packed down the rows
        zeros = unpacked(tensors["weight_zero_point"].T, scheme.bits)[:, :down].T.to(torch.int16) - middle
    order = tensors.get("weight_g_idx")
    order = None if order is None or (order < 0).all() else order.long()

    def part(start: int, stop: int) -> Tensor:
        codes = unpacked(words[start:stop], scheme.bits)[:, :columns].to(torch.int16) - middle
        own, zero = (one if one is None or down == 1 else one[start:stop] for one in (scales, zeros))
        assert own is not None
        if order is not None:
            return _by_index(codes, zero, own, order)
        return _scaled(codes, zero, own, scheme.block[1] or columns)

    return _in_parts(rows, columns, dtype, part)


def _plain(scheme: Scheme, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    codes, scales = tensors["weight"], tensors[scale_of(scheme)]
    rows, columns = codes.shape[-2:]
    down, across = scheme.grid(rows, columns)
    if scales.numel() != codes.shape[:-2].numel() * down * across:
        told = f"in blocks of {list(scheme.block)}" if all(scheme.block) else "with a scale for each row"
        raise ValueError(f"{rows} x {columns} values {told} have {list(scales.shape)} scales")
    if codes.ndim > 2:  # a stack of matrices
        each = zip(codes, scales, strict=True)
        stack = [{**tensors, "weight": one, scale_of(scheme): its} for one, its in each]
        return torch.stack([_plain(scheme, one, dtype) for one in stack])
    if scheme.layout == "inverse":  # as transformers computes
        scales = scales.float()
    if scheme.layout == "modelopt8":  # as its library computes
        scales = scales.to(dtype)
    scales = scales.reshape(down, across)
    zeros = None if scheme.symmetric else tensors["weight_zero_point"].reshape(down, across)
    height, width = scheme.block[0] or rows, scheme.block[1] or columns

    def part(start: int, stop: int) -> Tensor:
        own = torch.arange(start, stop) // height
        return _scaled(codes[start:stop], None if zeros is None else zeros[own], scales[own], width)

    return _in_parts(rows, columns, dtype, part)


def _nvfp4(scheme: Scheme, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """compressed-tensors divides by the scale of the matrix, ModelOpt multiplies by it."""
    if scheme.layout == "modelopt4":
        codes, rounded = tensors["weight"], dtype
        scales = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    else:
        codes, rounded = tensors["weight_packed"], torch.bfloat16
        scales = tensors["weight_scale"].to(rounded) / tensors["weight_global_scale"]
    rows, columns = codes.shape[0], codes.shape[1] * 2
    _require(scales.shape, scheme.grid(rows, columns), "weight_scale")

    def part(start: int, stop: int) -> Tensor:
        return _scaled(_halves(codes[start:stop]), None, scales[start:stop], scheme.block[1]).to(rounded)

    return _in_parts(rows, columns, dtype, part)


def _awq(scheme: Scheme, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    words, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    columns, rows = len(words), words.shape[1] * 8
    groups = scheme.grid(rows, columns)[1]
    _require(scales.shape, (groups, rows), "scales")
    _require(zeros.shape, (groups, words.shape[1]), "qzeros")
    width = scheme.block[1] or columns
    zeros = _awq_codes(zeros)
    whole = torch.empty(rows, columns, dtype=dtype)
    step = max(1, _PART // rows)
    for start in range(0, columns, step):
        group = torch.arange(start, min(start + step, columns)) // width
        codes = _awq_codes(words[start : start + step])
        whole[:, start : start + step] = ((codes - zeros[group]) * scales[group]).T
    return whole


def _awq_codes(words: Tensor) -> Tensor:
    """``[n, words]`` -> ``[n, words * 8]``, int8."""
    return unpacked(words, 4).view(len(words), -1, 8)[..., list(_AWQ_ORDER)].flatten(1).to(torch.int8)


def _gptq(scheme: Scheme, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    words, scales = tensors["qweight"], tensors["scales"]
    columns, rows = len(words) * 32 // scheme.bits, words.shape[1]
    groups = scheme.grid(rows, columns)[1]
    _require(scales.shape, (groups, rows), "scales")
    zeros = unpacked(tensors["qzeros"], scheme.bits)[:, :rows].to(torch.int16) + scheme.offset
    _require(zeros.shape, (groups, rows), "qzeros")
    order = tensors.get("g_idx")
    order = torch.arange(columns) // (scheme.block[1] or columns) if order is None else order.long()
    _require(order.shape, (columns,), "g_idx")
    zeros, scales = zeros.T.contiguous(), scales.T.contiguous()

    def part(start: int, stop: int) -> Tensor:
        codes = unpacked(words[:, start:stop].T, scheme.bits)
        return _by_index(codes, zeros[start:stop], scales[start:stop], order)

    return _in_parts(rows, columns, dtype, part)


def _mxfp4(scheme: Scheme, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    blocks, exponents = tensors["_blocks"], tensors["_scales"]
    _require(blocks.shape, (*exponents.shape, 16), "_blocks")
    whole = torch.empty(len(blocks), blocks.shape[2] * 32, blocks.shape[1], dtype=dtype)
    for expert, (codes, exponent) in enumerate(zip(blocks, exponents, strict=True)):
        values = _halves(codes).bfloat16()
        whole[expert] = torch.ldexp(values, exponent.int().unsqueeze(-1) - 127).flatten(1).T
    return whole


_DECODERS: dict[str, Callable[[Scheme, Tensors, torch.dtype], Tensor]] = {
    **{
        "packed": _packed,
        "plain": _plain,
        "inverse": _plain,
        "modelopt8": _plain,
        "nvfp4": _nvfp4,
        "modelopt4": _nvfp4,
    },
    **{"awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4},
}
