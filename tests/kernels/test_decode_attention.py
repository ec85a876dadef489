"""Attention of single queries by Triton kernels equals its torch reference and reads no key outside of the ranges."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels.decode import attention as module
from fcsd.kernels.decode.attention import decode_attention, decode_attention_reference

KEYS, PLACES = 200, 256
# The first position, one in the middle, the last one, and a window.
RANGES = [[0, 0], [0, 70], [0, KEYS - 1], [37, 150]]


@pytest.fixture
def exact_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply and round bf16. It multiplies the bits as integers, and cuts off in casts."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(data, given, wanted, mode)
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def widened(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for x in (a, b)
            )
        return dot(builder, a, b, *rest)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)


def draw(group: int, size: int, value_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """A query, keys and values of two key-value heads, and ranges. Keys are a view of more, values lie by token."""
    generator = torch.Generator().manual_seed(0)
    rows = len(RANGES)
    query = torch.randn(rows, 2 * group, size, generator=generator)
    key = torch.randn(rows, 2, PLACES, size, generator=generator)
    value = torch.randn(rows, PLACES, 2, value_size, generator=generator)
    query, key, value = (x.to(DEVICE, dtype) for x in (query, key, value))
    return query, key[:, :, :KEYS], value.transpose(1, 2)[:, :, :KEYS], torch.tensor(RANGES, device=DEVICE)


@pytest.mark.parametrize(
    ("group", "size", "value_size", "parts"), [(1, 64, 64, 2), (4, 80, 80, 3), (8, 128, 128, 1), (3, 24, 16, 9)]
)
def test_it_is_the_reference_and_reads_only_the_range(group: int, size: int, value_size: int, parts: int) -> None:
    query, key, value, ranges = draw(group, size, value_size)
    expected = decode_attention_reference(query.double(), key.double(), value.double(), ranges, 0.1)
    for row, (first, last) in enumerate(RANGES):  # a key or value that is read changes the sum, also by a weight of 0
        for states in (key, value):
            states[row, :, :first] = states[row, :, last + 1 :] = torch.nan
    found = decode_attention(query, key, value, ranges, 0.1, parts)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_about_as_exact_as_torch(dtype: torch.dtype, exact_bf16: None) -> None:
    *states, ranges = draw(4, 80, 64, dtype)
    exact = decode_attention_reference(*(x.double() for x in states), ranges, 0.1)
    found = decode_attention(*states, ranges, 0.1, 2)
    by_torch = decode_attention_reference(*states, ranges, 0.1)
    assert found.dtype == dtype
    assert (found - exact).norm() <= 1.5 * (by_torch - exact).norm()


def test_one_range_stands_for_all_rows() -> None:
    query, key, value, ranges = draw(2, 16, 16)
    found = decode_attention(query, key, value, ranges[3:], 0.1)
    torch.testing.assert_close(found, decode_attention_reference(query, key, value, ranges[3:], 0.1))


def test_fewer_keys_are_read_at_once_if_shared_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, expected in ((232448, (64, 64, 32)), (101376, (64, 64, 16)), (65536, (64, 32, 16))):
        monkeypatch.setattr(module, "shared_memory", lambda device, room=room: room)
        half, single = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
        heads_of_128, latents = (16, 128, 128), (16, 512 + 64, 0)
        found = module.keys_at_once(half, *heads_of_128), *(module.keys_at_once(x, *latents) for x in (half, single))
        assert found == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_follows_the_ranges(dtype: torch.dtype) -> None:
    query, key, value, ranges = draw(8, 128, 128, dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # Triton compiles the kernels, which is not allowed during a capture
        decode_attention(query, key, value, ranges, 0.1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode_attention(query, key, value, ranges, 0.1)
    for first, last in ((0, 0), (0, 63), (5, 64), (100, KEYS - 1)):
        ranges.copy_(torch.tensor([first, last]).expand(len(ranges), 2))
        graph.replay()
        exact = decode_attention_reference(query.double(), key.double(), value.double(), ranges, 0.1)
        rounding = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding)
        assert torch.equal(found, decode_attention(query, key, value, ranges, 0.1))
