"""Attention of single queries to latents by a Triton kernel equals its reference, and attention to expanded latents."""

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels.decode.attention import decode_attention_reference
from fcsd.kernels.decode.latents import latent_attention, latent_attention_reference

KEYS, PLACES = 100, 128
# The first position, one in the middle, the last one, and a window.
RANGES = [[0, 0], [0, 70], [0, KEYS - 1], [37, 90]]


def draw(heads: int, rank: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries, their rotated parts, latents, shared parts of keys, and ranges. Latents are a view of more."""
    generator = torch.Generator().manual_seed(0)
    rows = len(RANGES)
    shapes = ((heads, rows, rank), (rows, heads, width), (rows, PLACES, rank), (rows, PLACES, width))
    query, rotated, latent, shared = (torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return query.transpose(0, 1), rotated, latent[:, :KEYS], shared[:, :KEYS], torch.tensor(RANGES, device=DEVICE)


def widened(given: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in given]


@pytest.mark.parametrize(
    ("heads", "rank", "width", "parts"), [(4, 32, 16, 1), (16, 64, 64, 3), (20, 40, 24, 9), (2, 128, 8, None)]
)
def test_it_is_the_reference_and_reads_only_the_range(heads: int, rank: int, width: int, parts: int | None) -> None:
    query, rotated, latent, shared, ranges = draw(heads, rank, width)
    expected = latent_attention_reference(*widened((query, rotated, latent, shared, ranges)), 0.1)
    for row, (first, last) in enumerate(RANGES):  # a latent that is read changes the sum, also by a weight of 0
        for states in (latent, shared):
            states[row, :first] = states[row, last + 1 :] = torch.nan
    found = latent_attention(query, rotated, latent, shared, ranges, 0.1, parts)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_reference_is_attention_to_expanded_latents() -> None:
    own_part, rotated, latent, shared, ranges = widened(draw(4, 24, 16))
    to_keys, to_values = torch.randn(2, 4, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    latents = latent[:, None]
    query = torch.einsum("rhc,hcd->rhd", own_part, to_keys)
    keys = torch.cat([latents @ to_keys, shared[:, None].expand(-1, 4, -1, -1)], -1)
    expected = decode_attention_reference(torch.cat([query, rotated], -1), keys, latents @ to_values, ranges, 0.1)
    projected = torch.einsum("rhd,hcd->rhc", query, to_keys)
    found = latent_attention_reference(projected, rotated, latent, shared, ranges, 0.1)
    torch.testing.assert_close(torch.einsum("rhc,hcd->rhd", found, to_values), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_follows_the_ranges(dtype: torch.dtype) -> None:
    *states, ranges = draw(16, 512, 64, dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # Triton compiles the kernels, which is not allowed during a capture
        latent_attention(*states, ranges, 0.04)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = latent_attention(*states, ranges, 0.04)
    for first, last in ((0, 0), (0, 63), (5, 64), (10, KEYS - 1)):
        ranges.copy_(torch.tensor([first, last]).expand(len(ranges), 2))
        graph.replay()
        exact = latent_attention_reference(*widened((*states, ranges)), 0.04)
        rounding = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding)
        assert torch.equal(found, latent_attention(*states, ranges, 0.04))
