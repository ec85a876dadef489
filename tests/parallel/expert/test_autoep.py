"""What the adapter of AutoEP leaves out changes no bit: choosing among all groups, and a second inverse of an order."""

from typing import Any

import pytest
import tiny
import torch
from ranks import in_group
from torch import Tensor

from fcsd.models.build import arch_of
from fcsd.parallel.expert import autoep
from fcsd.parallel.expert.autoep import expert_blocks, shard_experts
from fcsd.parallel.expert.permute import stable_order


@pytest.mark.parametrize("count", [2, 256, 257, 2**15, 2**15 + 1])
def test_short_keys_sort_as_long_ones(count: int) -> None:
    numbers = torch.randint(count, (1000,), generator=torch.Generator().manual_seed(0))
    numbers[:2] = torch.tensor([count - 1, 0])
    assert torch.equal(stable_order(numbers, count), torch.argsort(numbers, stable=True))


def _routed(rank: int, arch: str, keep_groups: bool) -> tuple[Any, list[Tensor]]:
    """Whether the routers choose groups, and what the first one chooses."""
    if keep_groups:
        autoep._choose_among_all = lambda router: None  # this process ends with the test
    model = tiny.model(arch)
    shard_experts(model, arch_of(model.config), 1)
    block = next(iter(expert_blocks(model).values()))
    tokens = torch.randn(50, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    router: Any = block.router
    return router.num_expert_groups, list(block.route(tokens))


def test_a_router_that_takes_all_groups_does_not_choose_any() -> None:
    ((before, expected),) = in_group(1, _routed, "deepseek_v2", True)
    ((groups, found),) = in_group(1, _routed, "deepseek_v2", False)
    assert (before, groups) == (1, None)
    assert all(map(torch.equal, found, expected))
    ((groups, _),) = in_group(1, _routed, "deepseek_v3", False)
    assert groups == 2  # it takes one of them


def _experts(rank: int, gathers: bool) -> tuple[int, list[Tensor]]:
    """How often a block's experts invert the order of rows of two ranks; outputs, and gradients of rows and weights."""
    from deepspeed.moe import ep_kernels

    model = tiny.model("qwen3_moe")
    shard_experts(model, arch_of(model.config), 1)
    block: Any = next(iter(expert_blocks(model).values()))
    counts = torch.tensor([[5, 0, 3, 1, 0, 7, 2, 0], [1, 0, 0, 4, 9, 0, 2, 0]])[:, : block.placement.slots]
    rows = torch.randn(int(counts.sum()), model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    rows.requires_grad_()
    if gathers:  # as on a GPU, where DeepSpeed has a kernel for this; the process ends with the test
        ep_kernels.permute_rows_supported = lambda rows: True
        ep_kernels.gather_rows = lambda rows, index: torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[index]
    inverses, inverse = [], ep_kernels.inverse_permutation
    ep_kernels.inverse_permutation = lambda *given: inverses.append(given) or inverse(*given)
    out = block.run(rows * 1, counts)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return len(inverses), [out, rows.grad, *(weight.grad for weight in block.experts.parameters())]


def test_gathers_of_rows_equal_autoeps_own_and_invert_their_order_once() -> None:
    ((_, expected),) = in_group(1, _experts, False)
    ((inverses, found),) = in_group(1, _experts, True)
    assert inverses == 1 and len(found) == 5
    assert all(map(torch.equal, found, expected))
