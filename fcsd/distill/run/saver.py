"""Decides when a run saves a checkpoint, and handles a full disk."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcsd.config import Checkpoint
from fcsd.distill.run import checkpoints, manifest
from fcsd.errors import DiskError
from fcsd.foreign_errors import translate
from fcsd.launch.world import World

_ROOM = 1.1  # free space that a save needs, as a multiple of the size of the last checkpoint


class Saver:
    """Saves the checkpoints of a run in progress. Every rank has a saver, and all of them have the same state.

    Args:
        folder: the folder of the checkpoints.
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
        engine: Any,
        identity: dict[str, Any],
        write_model: Callable[[Path], None],
        *,
        settings: Checkpoint,
        failures: int,
        checkpoint: Path | None,
    ) -> None:
        self._folder, self._world, self._engine, self._identity = folder, world, engine, identity
        self._write_model, self._settings, self._failures = write_model, settings, failures
        self._failed, self._last = 0, time.monotonic()
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

    def save(self, step: int, progress: dict[str, Any], *, last: bool, best: int | None = None) -> None:
        """Commits the checkpoint ``step-{step}``.

        If the disk is full, a warning is printed and training continues, unless this was the last step or more than
        ``failures`` saves in a row have failed.

        Args:
            progress: the progress of the run, which the checkpoint stores.
            last: whether this is the last step of the run.
            best: the step whose checkpoint is kept besides the newest ones.

        Raises:
            DiskError: the disk is full, and training must not continue.
        """
        began = time.perf_counter()
        try:
            self._world.on_first(self._require_room)
            self.checkpoint = checkpoints.save(
                self._folder,
                self._world,
                self._engine,
                step=step,
                identity=self._identity,
                progress=progress,
                write_model=self._write_model,
            )
        except Exception as error:
            self._world.on_first(lambda: checkpoints.remove_unfinished(self._folder))
            full = translate(error)
            if not isinstance(full, DiskError):
                raise
            self._failed += 1
            kept = f"step {step} is not saved, the last checkpoint is {self.checkpoint or 'none yet'}"
            if last or self._failed > self._failures:
                raise DiskError(f"{full}; {kept}", full.hint) from error
            if self._world.rank == 0:
                print(f"warning: {full}; {kept}; training goes on", file=sys.stderr)
        else:
            self._failed = 0
            self._world.on_first(lambda: checkpoints.retain(self._folder, self._settings.keep, best))
            self.seconds = max(self._world.everywhere(lambda: time.perf_counter() - began))
        self._last = time.monotonic()

    def _require_room(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint is None:
            return
        need, free = _ROOM * manifest.size(self.checkpoint), shutil.disk_usage(self._folder).free
        if free < need:
            raise DiskError(
                f"{self._folder}: a checkpoint needs {need / 2**30:.2f} GiB, {free / 2**30:.2f} are free",
                "free some space; the next save tries again",
            )
