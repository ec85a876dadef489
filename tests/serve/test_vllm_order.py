"""Inductor keeps a start before its cover and a wait behind it; without the newest tensor it would not."""

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fcsd.serve.vllm.reduction import Reducer, Sum, define_operators

WEIGHTS = [torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


class Hasty(Reducer):
    """The negative control: a wait that names only what it waits for."""

    def wait(self, sum_: Sum, newest: Tensor) -> Tensor:
        return super().wait(sum_, sum_.total)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's group of two ranks that hold the same."""
    group = SimpleNamespace(_all_reduce_out_place=lambda x: x.mul_(2))
    parallel_state: Any = ModuleType("vllm.distributed.parallel_state")
    distributed: Any = ModuleType("vllm.distributed")
    parallel_state._groups = {"tp:0": lambda: group}
    distributed.parallel_state = parallel_state
    for fake in (ModuleType("vllm"), distributed, parallel_state):
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    define_operators()


def ladder_layer(reducer: Reducer, x: Tensor, stream: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """The second half of a layer and the first half of the next: each sum travels under one product."""
    m = x @ weights[0]
    mlp = reducer.start(m)
    a = torch.nn.functional.rms_norm(stream, (16,)) @ weights[1]
    attention = reducer.start(a)
    stream = stream + reducer.wait(mlp, attention.total)
    b = torch.nn.functional.rms_norm(stream, (16,)) @ weights[2]
    stream = stream + reducer.wait(attention, b)
    return torch.nn.functional.rms_norm(stream, (16,)) @ weights[3], stream


def order(reducer: Reducer) -> list[str]:
    """Starts, waits and products in the order of the generated code."""
    torch._dynamo.reset()
    x, stream = torch.randn(8, 16), torch.randn(8, 16)
    with torch.no_grad():
        expected = ladder_layer(reducer, x, stream.clone(), *WEIGHTS)
        compiled = torch.compile(lambda *inputs: ladder_layer(reducer, *inputs), fullgraph=True)
        found, code = run_and_get_code(compiled, x, stream.clone(), *WEIGHTS)
    torch.testing.assert_close(found, expected)
    body = code[-1][code[-1].index("def call(") :]
    return re.findall(r"ops\.fcsd\.reduce_(start|wait)|extern_kernels\.(?:\w*)(mm)\(", body)


def test_a_compiler_keeps_what_covers_a_sum(ranks: None) -> None:
    wanted = ["mm", "start", "mm", "start", "wait", "mm", "wait", "mm"]
    assert ["".join(found) for found in order(Reducer(2, "tp:0"))] == wanted
    assert ["".join(found) for found in order(Hasty(2, "tp:0"))] != wanted
