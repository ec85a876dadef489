"""The phases of a step, which its traces record, and from which ``fcsd.bench.account`` says where time goes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

PREFIX = "fcsd.phase::"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Records the block as a phase of the step. Phases may be nested; an event belongs to the innermost one."""
    with record_function(PREFIX + name):
        yield
