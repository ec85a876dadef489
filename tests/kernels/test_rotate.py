"""The kernel of rotary embeddings equals its torch reference and transformers' functions, in values and gradients."""

from functools import partial

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe

from fcsd.kernels.rotary import HALVES, Pairs, rotate, rotate_reference


def draw(batch: int, heads: int, seq: int, dim: int, rotated: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as a projection leaves them, ``[batch, seq, heads, dim]`` in memory, and the angles of ``rows`` rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, seq, heads, dim, generator=generator).transpose(1, 2)
    angles = 50 * torch.rand(rows, seq, rotated // 2, generator=generator)
    return x, angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "shape"),
    [
        (3, 1, (5, 16, 16, 2)),  # three heads in a program of four, each row with angles of its own
        (2, 2, (3, 24, 12, 1)),  # part of a head, whose half is no power of two; the same angles in both rows
        (20, 4, (2, 256, 256, 1)),  # more heads than a program holds
        (4, 4, (0, 16, 16, 1)),  # no tokens
    ],
)
@pytest.mark.parametrize("neighbours", [(False, False), (True, True), (True, False)])
def test_heads_and_gradients_are_those_of_torch(
    heads: int, key_heads: int, shape: tuple[int, int, int, int], dtype: torch.dtype, neighbours: tuple[bool, bool]
) -> None:
    queries, cos, sin = draw(2, heads, *shape)
    _, dim, rotated, _ = shape
    keys = queries[:, :key_heads, :, : rotated + 2].clone()  # the kernel takes any order in memory, and another width
    pairs = Pairs((dim - rotated) // 2, *neighbours), Pairs(0, *neighbours)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator) for x in (queries, keys)]

    def both(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [rotate_reference(x, cos, sin, each) for x, each in zip((queries, keys), pairs, strict=True)]

    results: list[list[Tensor]] = []
    for function, device, each in (
        (both, "cpu", torch.float64),
        (partial(rotate, pairs=pairs[0], of_keys=pairs[1]), DEVICE, dtype),
    ):
        # The exact values are those of inputs that are rounded to ``dtype``.
        inputs = [x.to(dtype).to(device, each).requires_grad_() for x in (queries, keys)]
        out = function(*inputs, *(x.to(dtype).to(device, each) for x in (cos, sin)))
        gradients = torch.autograd.grad(out, inputs, [x.to(dtype).to(device, each) for x in upstream])
        results.append([x.detach().cpu().double() for x in (*out, *gradients)])
    assert all(x.transpose(1, 2).is_contiguous() for x in out)
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5  # bf16 has 8 bits, and Triton's interpreter truncates
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=rounding, atol=rounding)


def test_the_reference_is_the_functions_of_transformers() -> None:
    x, cos, sin = draw(2, 3, 5, 24, 16, 2)
    queries, keys = x, x[:, :1]
    for pairs, width, function, angles in (
        (HALVES, 24, glm4_moe.apply_rotary_pos_emb, (cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))),
        (Pairs(0, True, True), 16, deepseek_v2.apply_rotary_emb, (torch.complex(cos, sin),)),
        (Pairs(0, True), 16, deepseek_v3.apply_rotary_pos_emb_interleave, (cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))),
    ):
        expected = function(queries[..., :width], keys[..., :width], *angles)
        for given, wanted in zip((queries, keys), expected, strict=True):
            torch.testing.assert_close(rotate_reference(given[..., :width], cos, sin, pairs), wanted)


def test_heads_that_are_part_of_a_tensor_and_gradients_in_another_order() -> None:
    x, cos, sin = (t.to(DEVICE) for t in draw(2, 4, 3, 32, 16, 1))
    part = x[..., 8:24].detach().requires_grad_()
    upstream = torch.randn(2, 16, 3, 4, device=DEVICE).permute(0, 3, 2, 1)  # a head's dimensions are not neighbours
    found, expected = rotate(part, part, cos, sin), rotate_reference(part, cos, sin)
    for each in found:
        torch.testing.assert_close(each, expected)
    (gradient,) = torch.autograd.grad(found, part, (upstream, upstream))
    torch.testing.assert_close(gradient, 2 * torch.autograd.grad(expected, part, upstream)[0])
