"""Kernels that number copies and write tails (compiled on a GPU, else in Triton's interpreter) are their references."""

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels import copies, copies_reference


def chosen(rows: int, top_k: int, experts: int, none: float) -> Tensor:
    """Different experts for each row in a random order; a share ``none`` of them is -1."""
    generator = torch.Generator().manual_seed(rows + top_k)
    found = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :top_k]
    return torch.where(torch.rand(found.shape, generator=generator) < none, -1, found)


# The last case has a row of one choice, groups of one expert, and more groups than a row has choices.
CASES = [(50, 6, 4, 4, 0.0), (33, 8, 8, 2, 0.5), (5, 3, 2, 3, 1.0), (0, 3, 2, 3, 0.0), (3, 1, 7, 1, 0.3)]


@pytest.mark.parametrize(("rows", "top_k", "groups", "span", "none"), CASES)
def test_copies_and_tails_are_those_of_the_reference(rows: int, top_k: int, groups: int, span: int, none: float):
    experts = chosen(rows, top_k, groups * span, none)
    entries = min(top_k, span)
    # Experts and weights of a relay are columns of records; the first column belongs to something else.
    wide = torch.cat([torch.full((rows, 1), 99), experts, experts], dim=1).short().to(DEVICE)
    of_rows = torch.rand(rows, 2 + top_k, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:, 1 : 1 + top_k]
    expected = copies_reference.number_copies(experts, groups, span, entries)
    for given in (experts.to(DEVICE), wide[:, 1 : 1 + top_k]):
        found = copies.number_copies(given, groups, span, entries)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype == torch.int64
            assert torch.equal(one.cpu(), other)
    count = int((expected.row_of >= 0).sum())
    tails = []
    for by, where in ((copies, found), (copies_reference, copies_reference.Copies(*(x.to(DEVICE) for x in expected)))):
        weights = torch.full((count, entries + 1), 7.0, device=DEVICE)
        numbers = torch.full((count, entries + 3), 7, dtype=torch.int16, device=DEVICE)
        by.write_tails(weights[:, :entries], numbers[:, :entries], of_rows, where)
        tails.append((weights.cpu(), numbers.cpu()))
    for one, other in zip(*tails, strict=True):
        assert torch.equal(one, other)
