"""The directory of a run: owned by one run at a time, and saying how it came about."""

import fcntl
import json
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fcsd.config import ResolvedRecipe
from fcsd.disk import write_text
from fcsd.errors import ConfigError
from fcsd.launch import environment

CHECKPOINTS = "checkpoints"
FINAL = "final"
_LOCK = ".lock"


@contextmanager
def claim(run: Path) -> Iterator[None]:
    """Holds ``run`` for this process; a directory that is still empty at the end is removed again.

    Raises:
        ConfigError: another process holds it.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / _LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(
                f"{run} is in use by process {lock.read().strip()}", hint="wait for it, or set another output_dir"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            if [path.name for path in run.iterdir()] == [_LOCK]:
                (run / _LOCK).unlink()
                with suppress(OSError):
                    run.rmdir()


def describe(run: Path, resolved: ResolvedRecipe) -> None:
    """Writes ``config.resolved.yaml`` and ``env.json``; ``command.txt`` gets a line for each start."""
    write_text(run / "config.resolved.yaml", resolved.to_yaml())
    write_text(run / "env.json", json.dumps(environment.snapshot(), indent=2) + "\n")
    with (run / "command.txt").open("a") as file:
        file.write(shlex.join(sys.argv) + "\n")


def publish(model: Path, run: Path) -> Path:
    """``run/final``: the files of a checkpoint's model directory, linked, so that retention may delete the rest."""
    final, part = run / FINAL, run / f"{FINAL}.tmp-{uuid.uuid4().hex[:8]}"
    shutil.copytree(model, part, copy_function=_link)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    return final


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
