"""What traces of a step record: its phases, from which ``fcsd.bench.account`` says where time goes, and all threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import record_function

PREFIX = "fcsd.phase::"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Records the block as a phase of the step. Phases may be nested; an event belongs to the innermost one."""
    with record_function(PREFIX + name):
        yield


def all_threads() -> Any:
    """The setting ``experimental_config`` of torch's profilers with which they record the ranges of all threads.

    Without it a trace has the kernels of a teacher that runs in turns with the student, but none of the ranges of its
    thread, so that its communication would count as computation.
    """
    return _ExperimentalConfig(profile_all_threads=True)
