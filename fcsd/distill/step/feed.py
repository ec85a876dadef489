"""Prepares the micro-batches of the coming steps in a thread while the device computes.

The thread works one step ahead of the training thread: it packs rows. On GPUs a micro-batch is copied from pinned
memory on a separate stream, and an event tells the stream of the training thread when the copy is done. The thread
draws no random number. The rows of a step depend only on the number of the step, so neither their order nor the point
where a resumed run continues depends on the thread.
"""

import queue
import threading
import time
from contextlib import closing, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from fcsd.config import Recipe
from fcsd.distill.data.rows import Mixture, batch
from fcsd.distill.loss.losses import IGNORE
from fcsd.launch.world import World

_AHEAD = 1  # the number of steps that wait in the queue, besides the one that the thread is preparing
_POLL = 0.05  # seconds between two checks whether the run has ended


class MicroBatch(NamedTuple):
    """Rows of one forward pass on this process.

    Attributes:
        rows: the numbers of these rows in the run.
        columns: ``input_ids``, ``position_ids`` and ``labels``, each ``[batch, seq]`` int64, and ``kept``, the
            positions in the flattened batch that have a label, ``[counted]`` int64.
        counted: ``[]`` int64, the number of positions with a label.
    """

    rows: range
    columns: dict[str, Tensor]
    counted: Tensor


def rows_of_step(recipe: Recipe, world: World, step: int) -> list[range]:
    """The row numbers of this rank's micro-batches in a step, counted from 1. No two ranks have the same row."""
    micro, whole = recipe.train.micro_batch_size, recipe.rows_per_step
    first = (step - 1) * whole + world.rank * micro
    return [range(start, start + micro) for start in range(first, step * whole, micro * world.size)]


def gather_step(rows: Mixture, recipe: Recipe, world: World, step: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step, in host memory."""
    gathered = []
    for numbers in rows_of_step(recipe, world, step):
        columns = batch(rows, numbers, recipe.train.draft_head)
        # The positions are computed on the host. On a GPU the host would have to wait to learn how many they are.
        columns["kept"] = (columns["labels"].flatten() != IGNORE).nonzero().squeeze(1)
        gathered.append(MicroBatch(numbers, columns, torch.tensor(len(columns["kept"]))))
    return gathered


def to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """Copies the columns of a micro-batch to ``device``.

    A copy from pinned memory is only launched; the host does not wait for it.
    """
    columns = {name: column.to(device, non_blocking=True) for name, column in micro.columns.items()}
    return micro._replace(columns=columns, counted=micro.counted.to(device, non_blocking=True))


class Feed:
    """The micro-batches of the steps ``first`` to ``last``, in their order; see ``feeding``.

    Attributes:
        waited: seconds that ``take`` has spent waiting for data so far.
    """

    def __init__(self, rows: Mixture, recipe: Recipe, world: World, first: int, last: int) -> None:
        self.waited = 0.0
        self._rows, self._recipe, self._world = rows, recipe, world
        self._copies = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._ready: queue.Queue[tuple[list[MicroBatch], torch.cuda.Event | None] | Exception]
        self._ready = queue.Queue(_AHEAD)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(first, last), name="feed", daemon=True)
        self._thread.start()

    def take(self) -> list[MicroBatch]:
        """The micro-batches of the next step, on the device.

        Raises: any error that the thread met while it prepared them.
        """
        began = time.perf_counter()
        found = self._ready.get()
        self.waited += time.perf_counter() - began
        if isinstance(found, Exception):
            raise found
        micros, copied = found
        if copied is not None:
            stream = torch.cuda.current_stream(self._world.device)
            stream.wait_event(copied)
            for micro in micros:
                for tensor in (*micro.columns.values(), micro.counted):
                    tensor.record_stream(stream)  # the tensor was allocated on the copy stream
        return micros

    def close(self) -> None:
        """Ends the thread and drops the steps that it has prepared."""
        self._ended.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._ready.get(timeout=_POLL)
        self._thread.join()

    def _work(self, first: int, last: int) -> None:
        try:
            for step in range(first, last + 1):
                micros = gather_step(self._rows, self._recipe, self._world, step)
                self._put(self._copied(micros))
                if self._ended.is_set():
                    return
        except Exception as error:
            self._put(error)

    def _copied(self, micros: list[MicroBatch]) -> tuple[list[MicroBatch], torch.cuda.Event | None]:
        if self._copies is None:
            return micros, None
        with torch.cuda.device(self._world.device), torch.cuda.stream(self._copies):
            found = [to_device(_pinned(micro), self._world.device) for micro in micros]
            event = torch.cuda.Event()
            event.record(self._copies)
        return found, event

    def _put(self, item: tuple[list[MicroBatch], torch.cuda.Event | None] | Exception) -> None:
        while not self._ended.is_set():
            with suppress(queue.Full):
                return self._ready.put(item, timeout=_POLL)


def feeding(rows: Mixture, recipe: Recipe, world: World, first: int, last: int) -> closing[Feed]:
    """Prepares the micro-batches of the steps ``first`` to ``last`` ahead of time, as long as the block runs."""
    return closing(Feed(rows, recipe, world, first, last))


def _pinned(micro: MicroBatch) -> MicroBatch:
    """A micro-batch in page-locked memory, from which copies to a GPU do not make the host wait."""
    columns = {name: column.pin_memory() for name, column in micro.columns.items()}
    return micro._replace(columns=columns, counted=micro.counted.pin_memory())
