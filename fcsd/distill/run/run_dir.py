"""The run directory: one process holds it at a time, and it records how the run was started."""

import fcntl
import json
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fcsd.checkpoint.location import RUN_RECIPE
from fcsd.config import ResolvedRecipe
from fcsd.disk import append, file_sha256, left_over, naming, open_to_append, read_input, require_folder, write_text
from fcsd.distill.run.manifest import MANIFEST
from fcsd.errors import ConfigError
from fcsd.launch import environment

CHECKPOINTS = "checkpoints"
FINAL = "final"
_LOCK = ".lock"
_PUBLISHED = ".published"  # the hash of the manifest of the checkpoint that final/ was made of
_REPLACED = (FINAL, "metrics.jsonl", "samples.jsonl", "curves.png", "env.json")


def require_usable(run: Path, models: Iterable[str]) -> None:
    """Checks that a run could write to the directory ``run``. Nothing is written.

    Args:
        models: directories or hub ids of the models that the run reads.

    Raises:
        ConfigError: ``run`` is a file, it or its ``final`` is the directory of one of the models,
            or it is no run's directory and is that of a model or holds what a run would replace.
        DiskError: ``run`` may not be written.
    """
    hint = "give another output_dir"
    for model in models:
        for own in (run, run / FINAL):  # a run replaces its final/ at its end
            if Path(model).is_dir() and own.resolve() == Path(model).resolve():
                raise ConfigError(f"output_dir {run}: {own} is the directory of the model {model}", hint)
    known = (run / RUN_RECIPE).exists()
    if not known:
        for name in _REPLACED:
            if os.path.lexists(run / name):
                raise ConfigError(f"output_dir {run}: {run / name} is not of a run, and would be replaced", hint)
    require_folder(run, "output_dir", of_a_model=known)


@contextmanager
def claim(run: Path, named: str = "output_dir") -> Iterator[None]:
    """Locks the directory ``run``, which the option or key ``named`` says, for this process.

    If it is still empty at the end, it is removed again.

    Raises:
        ConfigError: another process holds the lock.
    """
    run.mkdir(parents=True, exist_ok=True)
    with open_to_append(run / _LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(
                f"{run} is in use by process {lock.read().strip()}", hint=f"wait for it, or set another {named}"
            ) from error
        try:
            with naming(run / _LOCK):
                lock.truncate(0)
                os.write(lock.fileno(), f"{os.getpid()}\n".encode())  # unbuffered: closing the file must not fail again
            for unfinished in left_over(run, rf"{FINAL}\.tmp-", directories=True):
                shutil.rmtree(unfinished)  # left by a run that was killed in `publish`
            yield
        finally:
            if [path.name for path in run.iterdir()] == [_LOCK]:
                (run / _LOCK).unlink()
                with suppress(OSError):
                    run.rmdir()


def describe(run: Path, resolved: ResolvedRecipe) -> None:
    """Writes ``config.resolved.yaml`` and ``env.json``, and appends the command to ``command.txt``."""
    write_text(run / RUN_RECIPE, resolved.to_yaml())
    write_text(run / "env.json", json.dumps(environment.snapshot(), indent=2) + "\n")
    append(run / "command.txt", shlex.join(sys.argv) + "\n")


def is_published(run: Path, checkpoint: Path) -> bool:
    """Whether ``run/final`` is there and was made of this checkpoint."""
    try:
        return (run / FINAL).is_dir() and read_input(run / _PUBLISHED, 1000) == _identified(checkpoint).encode()
    except OSError:
        return False


def _identified(checkpoint: Path) -> str:
    return file_sha256(checkpoint / MANIFEST)


def publish(model: Path, run: Path, checkpoint: Path) -> None:
    """Creates ``run/final`` from the model directory of a checkpoint.

    The files are hard links, so that the checkpoint itself may be deleted later.
    """
    part = new_final(run)
    shutil.copytree(model, part, copy_function=_link)
    finish(part, run, checkpoint)


def new_final(run: Path) -> Path:
    """A new name beside ``run/final``. What is left there under this name is deleted when the run starts again."""
    return run / f"{FINAL}.tmp-{uuid.uuid4().hex[:8]}"


def finish(part: Path, run: Path, checkpoint: Path) -> None:
    """Renames a complete directory, which was made of a checkpoint, to ``run/final``."""
    final = run / FINAL
    (run / _PUBLISHED).unlink(missing_ok=True)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    write_text(run / _PUBLISHED, _identified(checkpoint))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)
