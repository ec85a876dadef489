"""Names the phases of a step in traces, so that ``fcsd.bench.account`` can say where the time of a step goes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

PREFIX = "fcsd.phase::"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Records the block as a phase of the step. Phases may be nested; an event belongs to the innermost one."""
    with record_function(PREFIX + name):
        yield
