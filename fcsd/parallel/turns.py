"""Runs two forward passes in turns: while one waits for its rows, the host launches the kernels of the other.

The teacher's forward pass keeps the standard wiring, so nothing in the pass itself can hide its all-to-alls. The
student's pass of the same micro-batch can hide them: wherever one of the two passes is about to wait for a collective,
or for the split sizes, the other pass goes on. Both passes launch their kernels on the same stream, in an order that
depends only on their code. The order of the kernels and of the collectives is therefore the same on every rank. Each
pass computes the same as it would alone.

The main thread runs the student, because autograd numbers the nodes of each thread separately, and these numbers set
the order of the backward pass (``order.py``). Only one of the two threads runs at a time.
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
    """Let the other pass go on, if two passes take turns. The caller calls it right before a wait.

    In a backward pass the call has no effect, because autograd's threads do not take turns.
    """
    turns = _turns.get()
    if turns is not None:
        turns.switch()


class Pending(Generic[T]):
    """The result of the other pass; ``value`` is set when the block of ``in_turns`` has ended."""

    value: T


@contextmanager
def in_turns(other: Callable[[], T], thread: Executor) -> Iterator[Pending[T]]:
    """Run ``other`` in turns with the block. The block has the first turn, and at its end the rest of ``other`` is run.

    Gradient mode, the current stream and context variables in ``other`` are those of the caller. An error in ``other``
    is raised at the end of the block. If the block raises an error, ``other`` is run to its end first, because other
    ranks run it and wait for this rank.

    Args:
        other: the other pass.
        thread: an executor with one thread, which runs ``other``. The caller uses it for all passes, because CUDA
            libraries initialise themselves for each new thread.
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
    """Keeps track of which of two threads has the turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = _FIRST
        self._ended = [False, False]

    def switch(self) -> None:
        """Give the turn to the other thread and wait to get it back; return at once if the other thread has ended."""
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
        """Give the turn to the other thread and do not take it again."""
        with self._changed:
            self._ended[own] = True
            self._turn = 1 - own
            self._changed.notify_all()
