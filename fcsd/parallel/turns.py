"""Two forward passes in turns: while one waits for its rows, the host gives the device the other's work.

The teacher's forward pass keeps the standard wiring, whose all-to-alls nothing in the pass itself can cover. The
student's pass of the same micro-batch can: wherever one of the two is about to wait for a collective, or for the split
sizes, the other one goes on. Both give their kernels to the same stream, in an order that depends on their code alone,
so that it is the same on every rank, and so is the order of their collectives. Neither pass computes anything else than
it would alone.

The main thread runs the student, because autograd numbers the nodes of each thread separately and the order of the
backward pass goes by these numbers (``order.py``). Only one of the two threads runs at a time.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_turns: ContextVar["_Turns | None"] = ContextVar("the turns that this thread takes part in", default=None)


def yield_turn() -> None:
    """Lets the other pass go on, if two take turns; to be called right before a wait.

    A backward pass calls this without effect: autograd's threads take part in no turns.
    """
    turns = _turns.get()
    if turns is not None:
        turns.switch()


class Pending(Generic[T]):
    """What the other pass returned: ``value`` is there after the block of ``in_turns``."""

    value: T


@contextmanager
def in_turns(other: Callable[[], T], thread: Executor) -> Iterator[Pending[T]]:
    """Runs ``other`` in turns with the block, which begins; at the end of the block the rest of ``other`` is run.

    Gradient mode, the current stream and context variables in ``other`` are those of the caller. What ``other`` raises
    is raised at the end of the block; when the block raises, ``other`` is run to its end first, because other ranks run
    it and wait for this one.

    Args:
        thread: an executor with one thread, which runs ``other``. It is kept from pass to pass, because libraries of
            CUDA set themselves up for each new thread.
    """
    turns = _Turns()
    pending: Pending[T] = Pending()
    grad = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        turns.wait_for_turn(_OTHER)
        try:
            _turns.set(turns)
            with torch.set_grad_enabled(grad), torch.cuda.stream(stream):
                pending.value = other()
        finally:
            turns.end(_OTHER)

    running = thread.submit(copy_context().run, run)
    token = _turns.set(turns)
    try:
        yield pending
    finally:
        _turns.reset(token)
        turns.end(_FIRST)
        wait([running])
    running.result()  # raises what ``other`` raised


_FIRST, _OTHER = 0, 1


class _Turns:
    """Whose turn it is, of two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = _FIRST
        self._ended = [False, False]

    def switch(self) -> None:
        """Gives the turn away and waits for it; goes on at once when the other one has ended."""
        with self._changed:
            own = self._turn
            if self._ended[1 - own]:
                return
            self._turn = 1 - own
            self._changed.notify_all()
        self.wait_for_turn(own)

    def wait_for_turn(self, own: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == own)

    def end(self, own: int) -> None:
        """Gives the turn away for good."""
        with self._changed:
            self._ended[own] = True
            self._turn = 1 - own
            self._changed.notify_all()
