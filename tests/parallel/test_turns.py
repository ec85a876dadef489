"""Two passes in turns: the order is strict, results and errors arrive, and nothing is left running."""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar

import pytest
import torch

from fcsd.parallel.turns import in_turns, yield_turn


@pytest.fixture
def thread() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def steps(name: str, count: int, said: list[str]) -> str:
    for number in range(count):
        said.append(f"{name}{number}")
        yield_turn()
    return name


@pytest.mark.parametrize(
    "first, other, order",
    [
        (3, 3, "a0 b0 a1 b1 a2 b2"),
        (2, 4, "a0 b0 a1 b1 b2 b3"),
        (4, 2, "a0 b0 a1 b1 a2 a3"),
        (0, 2, "b0 b1"),
        (2, 0, "a0 a1"),
    ],
)
def test_each_goes_on_where_the_other_waits(thread: Executor, first: int, other: int, order: str) -> None:
    said: list[str] = []
    with in_turns(lambda: steps("b", other, said), thread) as pending:
        steps("a", first, said)
    assert " ".join(said) == order
    assert pending.value == "b"


def test_alone_there_are_no_turns() -> None:
    yield_turn()
    said: list[str] = []
    steps("a", 2, said)
    assert said == ["a0", "a1"]


def test_the_other_pass_has_the_callers_surroundings(thread: Executor) -> None:
    variable: ContextVar[str] = ContextVar("v", default="not set")
    variable.set("the caller's")
    with torch.no_grad(), in_turns(lambda: (torch.is_grad_enabled(), variable.get()), thread) as pending:
        pass
    assert pending.value == (False, "the caller's")
    with in_turns(torch.is_grad_enabled, thread) as pending:
        pass
    assert pending.value is True


def test_an_error_of_the_other_pass_is_raised_at_the_end(thread: Executor) -> None:
    said: list[str] = []

    def fails() -> None:
        steps("b", 1, said)
        raise KeyError("b")

    with pytest.raises(KeyError), in_turns(fails, thread):
        steps("a", 3, said)
    assert said == ["a0", "b0", "a1", "a2"]


def test_when_the_block_fails_the_other_pass_is_still_run_to_its_end(thread: Executor) -> None:
    said: list[str] = []
    with pytest.raises(ValueError), in_turns(lambda: steps("b", 3, said), thread):
        steps("a", 1, said)
        raise ValueError
    assert said == ["a0", "b0", "b1", "b2"]
    with in_turns(lambda: steps("b", 1, said), thread):  # the thread is free again
        pass
    assert said[-1] == "b0"
