"""Doubles of vLLM's modules, which the plugin imports where it needs them."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fcsd.serve.vllm import reduction


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Puts a double of one of vLLM's modules where an import finds it."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))

    def double(name: str, **contents: Any) -> ModuleType:
        found = ModuleType(name)
        vars(found).update(contents)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    return double


@pytest.fixture
def ranks(module: Callable[..., ModuleType]) -> None:
    """vLLM's group of two ranks that hold the same, which writes over its input as vLLM's does; and our operators."""
    group = SimpleNamespace(_all_reduce_out_place=lambda x: x.mul_(2), device_group="the process group")
    parallel_state = module("vllm.distributed.parallel_state", _groups={"tp:0": lambda: group})
    module("vllm.distributed", parallel_state=parallel_state, tensor_model_parallel_all_reduce=lambda x: x * 2)
    reduction.define_operators()
