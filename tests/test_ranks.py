"""The ranks of tests: a rank that ends without a result is noticed, and nobody waits for it."""

import os
import signal
from threading import Event

import pytest
from ranks import on_ranks


def _end(how: str) -> str:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(7)
    Event().wait()  # as for a rank that is gone
    return "never"


@pytest.mark.parametrize(("how", "code"), [("killed", -9), ("left", 7)])
def test_a_rank_without_a_result_fails_with_its_exit_code(how: str, code: int) -> None:
    with pytest.raises(ChildProcessError, match=f"rank 1 ended without a result, with exit code {code}$"):
        on_ranks(2, _end, how)


def _result(text: str) -> str:
    if os.environ["RANK"] == "1":
        raise ValueError(text)
    return text * 1_000_000  # more than a pipe holds


def test_results_and_errors_are_those_of_the_ranks() -> None:
    result, error = on_ranks(2, _result, "ab")
    assert result == "ab" * 1_000_000
    assert isinstance(error, ValueError) and str(error) == "ab"
