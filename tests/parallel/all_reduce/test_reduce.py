"""A reduction in flight gives the bits of a blocking all-reduce, in values and gradients, on two ranks over gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_group
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.parallel.all_reduce.reduce import reduce


class _Late:
    """A collective whose result appears only when it is awaited; until then its tensor holds NaN."""

    def __init__(self, tensor: Tensor, group: Any, events: list[str]) -> None:
        self.tensor, self.events = tensor, events
        self.summed = tensor.clone()
        self.work: Any = dist.all_reduce(self.summed, group=group, async_op=True)
        tensor.fill_(float("nan"))
        events.append("start")

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()
        self.tensor.data.copy_(self.summed)  # as a collective does, unseen by autograd


class _BlockingSum(torch.autograd.Function):
    """The reference: sums in the forward pass, and waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _drawn(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def _step(rank: int, blocking: bool, kind: str = "nccl") -> dict[str, Tensor]:
    """A sub-block with its columns, then its rows divided over two ranks; and a second reader of its input."""
    group = dist.group.WORLD
    stream = _drawn(7, 3, 5, 8).requires_grad_()
    columns, rows = _drawn(10 + rank, 6, 8).requires_grad_(), _drawn(20 + rank, 8, 6).requires_grad_()
    x = stream * 1.5
    partial = torch.nn.functional.linear(torch.nn.functional.linear(x, columns).sigmoid(), rows)
    if blocking:
        whole: Any = _BlockingSum.apply(partial)
    else:
        whole = reduce(partial, group, kind).wait()
    (whole.square().sum() + x.sum()).backward()
    grads = {"stream": stream.grad, "columns": columns.grad, "rows": rows.grad}
    return {"whole": whole.detach().clone(), **{name: grad for name, grad in grads.items() if grad is not None}}


def _found(rank: int) -> dict[str, Any]:
    real, events = dist.all_reduce, []
    reference = _step(rank, blocking=True)

    def late(tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            return real(tensor, group=group)
        dist.all_reduce = real
        work = _Late(tensor, group, events)
        dist.all_reduce = late
        return work

    dist.all_reduce = late
    try:
        ours = _step(rank, blocking=False)
        no_grad = _drawn(rank, 4, 6).T  # not contiguous
        expected = _summed(no_grad)
        with torch.no_grad():
            plain = reduce(no_grad, dist.group.WORLD).wait()
            chosen = reduce(_drawn(rank, 4, 6).T, dist.group.WORLD, "auto").wait()
    finally:
        dist.all_reduce = real
    return {
        "keys": sorted(ours) == sorted(reference) == ["columns", "rows", "stream", "whole"],
        "different": [name for name in reference if not torch.equal(reference[name], ours[name])],
        "no grad": torch.equal(plain, expected) and torch.equal(chosen, expected),
        "events": list(events),
        "saved": _saved(),
        "none": _none(rank),
        "between GPUs": _refused("symmetric"),
    }


def _saved() -> str:
    y = _drawn(1, 4).requires_grad_().exp()  # autograd keeps the result of exp
    try:
        reduce(y, dist.group.WORLD).wait().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def _none(rank: int) -> bool:
    """The bound leaves every rank its own part."""
    x = _drawn(rank, 4)
    return torch.equal(reduce(x.clone(), dist.group.WORLD, "none").wait(), x)


def _refused(kind: str) -> str:
    try:
        reduce(torch.ones(4), dist.group.WORLD, kind)
    except ConfigError as error:
        return f"{error} {error.hint}"
    return "nothing was said"


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return in_group(2, _found)


def test_sums_and_gradients_are_the_bits_of_blocking_all_reduces(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["keys"] and rank["different"] == [] and rank["no grad"]


def test_a_sum_is_started_and_awaited_once(two_ranks: list[dict[str, Any]]) -> None:
    # The last two pairs are those of tensors without a gradient.
    assert [rank["events"] for rank in two_ranks] == [["start", "wait"] * 3] * 2


def test_a_tensor_that_autograd_keeps_is_not_overwritten_unnoticed(two_ranks: list[dict[str, Any]]) -> None:
    assert all("modified by an inplace operation" in rank["saved"] for rank in two_ranks)


def test_the_bound_sends_nothing_and_is_marked_as_wrong(two_ranks: list[dict[str, Any]]) -> None:
    assert all(rank["none"] for rank in two_ranks)


def test_the_kind_between_gpus_is_refused_on_cpus(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        said = rank["between GPUs"]
        assert "needs 2 to 8 GPUs of one host" in said
        assert said.endswith("use --all-reduce nccl, or under vLLM the backend vllm")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown all-reduce backend 'fast'"):
        reduce(torch.ones(1), None, "fast")  # type: ignore[arg-type]
