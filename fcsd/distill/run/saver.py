"""Decides when a run saves a checkpoint, saves it beside the next steps if the recipe says so, and handles a full disk.

With ``checkpoint.overlap`` each rank copies its state to host memory. Then a thread of each rank writes the checkpoint
while the run goes on. The threads work together in the same way as the main threads do without overlap, but through a
gloo group of their own, so that they never meet a collective of the training. At most one checkpoint is being written.
All ranks take notice of its end after the same step.
"""

import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcsd.config import Checkpoint
from fcsd.distill.optim.host_copies import HostCopies, room_for
from fcsd.distill.run import checkpoints, manifest, snapshot
from fcsd.distill.run.checkpoints import WriteModel
from fcsd.distill.run.snapshot import Snapshot
from fcsd.distill.train_engine import Trained
from fcsd.errors import DiskError
from fcsd.foreign_errors import translate
from fcsd.launch.world import World

_ROOM = 1.1  # free space that a save needs, as a multiple of the size of the last checkpoint
_PATIENCE = timedelta(days=1)  # a rank whose disk is slow is no lost rank; the watchdog finds ranks that are stuck


class Saver:
    """Saves the checkpoints of a run in progress. Every rank has a saver, and all of them have the same state.

    Args:
        identity, write_model: see ``checkpoints.save``.
        settings: the ``checkpoint`` section of the recipe.
        failures: the number of saves in a row that may fail on a full disk.
        checkpoint: the checkpoint from which the run continues; None if it starts anew.

    Attributes:
        checkpoint: the last committed checkpoint; None before the first.
        seconds: the duration of the last save on the slowest rank, in seconds; 0 before the first save.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        trained: Trained,
        identity: dict[str, Any],
        write_model: WriteModel,
        *,
        settings: Checkpoint,
        failures: int,
        checkpoint: Path | None,
    ) -> None:
        self._folder, self._world, self._trained, self._identity = folder, world, trained, identity
        self._write_model, self._settings, self._failures = write_model, settings, failures
        self._failed, self._last = 0, time.monotonic()
        self._pending: tuple[int, Future[None]] | None = None  # the step whose checkpoint the thread writes
        self._copies: HostCopies | None = None
        self._overlap = settings.overlap
        if self._overlap:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
            self._writers = _writers(world)
        self.checkpoint = checkpoint
        self.seconds = 0.0

    def due(self, step: int, hosts: World) -> bool:
        """Whether ``checkpoint.every_steps`` or ``checkpoint.every_minutes`` asks for a checkpoint after this step.

        Args:
            hosts: all ranks, in a gloo group. The first rank whose minutes are over decides for all.
        """
        every, minutes = self._settings.every_steps, self._settings.every_minutes
        if every and step % every == 0:
            return True
        return minutes > 0 and hosts.lowest(self._last + 60 * minutes - time.monotonic()) <= 0

    def save(
        self, step: int, progress: dict[str, Any], *, last: bool, best: int | None = None, wait: bool = True
    ) -> None:
        """Commits the checkpoint ``step-{step}``, or begins to, after the checkpoint before it is committed.

        If the disk is full, a warning is printed and training continues, unless this was the last step or more than
        ``failures`` saves in a row have failed.

        Args:
            progress: the progress of the run, which the checkpoint stores.
            last: whether this is the last step of the run.
            best: the step whose checkpoint is kept besides the newest ones.
            wait: whether the run must wait for this checkpoint, even if the recipe says otherwise.

        Raises:
            DiskError: the disk is full, and training must not continue.
        """
        self.finish()
        began = time.perf_counter()
        taken = snapshot.take(self._trained, self._world)
        write = partial(self._write, step=step, progress=progress, best=best, began=began)
        if wait or last or not self._overlaps(taken):
            self._settle(partial(write, taken, self._world), step, last)
        else:
            copied = self._copied(taken)
            self._pending = step, self._thread.submit(write, copied, self._writers)
        self._last = time.monotonic()

    def poll(self, hosts: World) -> None:
        """Takes notice of the end of a save beside the run, as soon as it has ended on all ranks.

        Args:
            hosts: all ranks, in a gloo group.

        Raises:
            DiskError: see ``save``.
        """
        if self._pending is not None and hosts.lowest(float(self._pending[1].done())):
            self.finish()

    def finish(self) -> None:
        """Waits for a save beside the run, if there is one.

        Raises:
            DiskError: see ``save``.
        """
        if self._pending is not None:
            step, future = self._pending
            self._pending = None
            self._settle(future.result, step, last=False)

    def newest(self) -> Path | None:
        """The last checkpoint, after a save beside the run has ended. It is for the messages of errors."""
        if self._pending is not None:
            self._pending[1].exception()
        return self.checkpoint

    def close(self) -> None:
        """Waits for a save beside the run if the run ends with an error. That error is raised, not one of the save."""
        if self._pending is not None:
            step, future = self._pending
            if (error := future.exception()) is not None and self._world.rank == 0:
                print(f"warning: step {step} is not saved: {error}", file=sys.stderr)
        if self._settings.overlap:
            self._thread.shutdown()

    def _overlaps(self, taken: Snapshot) -> bool:
        """Whether this checkpoint is written beside the run. The first one decides whether the copies have room."""
        if self._overlap and self._copies is None:
            size = snapshot.host_bytes(taken)
            self._overlap = room_for(size, self._world)
            if self._overlap:
                self._copies = HostCopies()
            elif self._world.rank == 0:
                what = f"a copy of the state takes {size / 2**30:.2f} GiB of host memory for each process"
                print(f"warning: checkpoint.overlap: {what}, which is not free; the run waits", file=sys.stderr)
        return self._overlap

    def _copied(self, taken: Snapshot) -> Snapshot:
        """The snapshot in host memory. If a rank cannot copy, all ranks raise its error."""
        copies, found = self._copies, []
        assert copies is not None
        self._world.everywhere(lambda: found.append(snapshot.copied(taken, copies)))
        return found[0]

    def _write(
        self, taken: Snapshot, world: World, *, step: int, progress: dict[str, Any], best: int | None, began: float
    ) -> None:
        """Commits a checkpoint and deletes those that it replaces. This also runs in the thread."""
        try:
            world.on_first(self._require_room)
            self.checkpoint = checkpoints.save(
                self._folder,
                world,
                taken,
                step=step,
                identity=self._identity,
                progress=progress,
                write_model=self._write_model,
            )
        except Exception:
            world.on_first(lambda: checkpoints.remove_unfinished(self._folder))
            raise
        world.on_first(lambda: checkpoints.retain(self._folder, self._settings.keep, best))
        self.seconds = max(world.everywhere(lambda: time.perf_counter() - began))

    def _settle(self, outcome: Callable[[], None], step: int, last: bool) -> None:
        """Takes the outcome of a save, and decides whether a run whose disk is full goes on."""
        try:
            outcome()
        except Exception as error:
            full = translate(error)
            if not isinstance(full, DiskError):
                raise
            self._failed += 1
            last_one = f"the last checkpoint is {self.checkpoint}" if self.checkpoint else "there is no checkpoint yet"
            kept = f"step {step} is not saved, {last_one}"
            if last or self._failed > self._failures:
                raise DiskError(f"{full}; {kept}", full.hint) from error
            if self._world.rank == 0:
                print(f"warning: {full}; {kept}; training goes on", file=sys.stderr)
        else:
            self._failed = 0

    def _require_room(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint is None:
            return
        need, free = _ROOM * manifest.size(self.checkpoint), shutil.disk_usage(self._folder).free
        if free < need:
            raise DiskError(
                f"{self._folder}: a checkpoint needs {need / 2**30:.3g} GiB, {free / 2**30:.3g} are free",
                "free some space, then start the same command again: it goes on from the last checkpoint",
            )


def require_room(run: Path, need: int) -> None:
    """Checks before the first step that a run could keep its result.

    Args:
        run: the run directory, which need not exist.
        need: bytes of the smallest result; see ``distill.student.least_disk``.

    Raises:
        DiskError: less is free.
    """
    place = next(path for path in (run, *run.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < need:
        raise DiskError(
            f"output_dir {run}: one checkpoint and what is written at the end need {need / 2**30:.3g} GiB, "
            f"{free / 2**30:.3g} are free",
            "free some space, or choose another output_dir",
        )


def _writers(world: World) -> World:
    """The ranks of ``world`` in a gloo group that only the threads use."""
    group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if world.size > 1 else None
    return World(world.rank, world.size, torch.device("cpu"), group)
