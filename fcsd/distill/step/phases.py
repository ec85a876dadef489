"""The phases of a step, which its traces record, and from which ``benchmarks.train.account`` says where time goes."""

from contextlib import AbstractContextManager
from typing import Any

from torch.profiler import record_function

PREFIX = "fcsd.phase::"


def phase(name: str) -> AbstractContextManager[Any]:
    """Records the block as a phase of the step. Phases may be nested; an event belongs to the innermost one."""
    return record_function(PREFIX + name)
