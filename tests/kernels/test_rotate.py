"""The kernel of rotary embeddings equals its torch reference and transformers' functions, in values and gradients.

The kernel is compiled on a GPU and runs in Triton's interpreter elsewhere.
"""

import os

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe

from fcsd.kernels.rotary import HALVES, Pairs, rotate, rotate_reference

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"


def draw(batch: int, heads: int, seq: int, dim: int, rotated: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as a projection leaves them, ``[batch, seq, heads, dim]`` in memory, and the angles of ``rows`` rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, seq, heads, dim, generator=generator).transpose(1, 2)
    angles = 50 * torch.rand(rows, seq, rotated // 2, generator=generator)
    return x, angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 5, 16, 16, 2),  # three heads in a program of four, each row with angles of its own
        (2, 2, 3, 24, 12, 1),  # part of a head, whose half is no power of two; the same angles in all rows
        (1, 40, 2, 256, 256, 1),  # more heads than a program holds
        (2, 4, 0, 16, 16, 1),  # no tokens
    ],
)
@pytest.mark.parametrize("neighbours", [(False, False), (True, True), (True, False)])
def test_heads_and_gradients_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, neighbours: tuple[bool, bool]
) -> None:
    x, cos, sin = draw(*shape)
    pairs = Pairs((shape[3] - shape[4]) // 2, *neighbours)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    results: list[list[Tensor]] = []
    for function, device, each in ((rotate_reference, "cpu", torch.float64), (rotate, DEVICE, dtype)):
        # The exact values are those of inputs that are rounded to ``dtype``.
        inputs, *rest = (t.to(dtype).to(device, each) for t in (x, cos, sin, upstream))
        inputs.requires_grad_()
        out = function(inputs, *rest[:2], pairs)
        assert out.stride() == inputs.stride() or device == "cpu"
        results.append([t.detach().cpu().double() for t in (out, *torch.autograd.grad(out, inputs, rest[2]))])
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
    out = rotate(part, cos, sin)
    torch.testing.assert_close(out, rotate_reference(part, cos, sin))
    upstream = torch.randn(2, 16, 3, 4, device=DEVICE).permute(
        0, 3, 2, 1
    )  # neighbours in a head are not neighbours here
    found, expected = (torch.autograd.grad(f(part, cos, sin), part, upstream)[0] for f in (rotate, rotate_reference))
    torch.testing.assert_close(found, expected)
