"""Checkpoints that exist as a whole or not at all.

``checkpoints/step-N/`` holds ``model/`` (an ordinary Hugging Face directory), ``engine/`` (DeepSpeed's files), one
``rank-R.json`` of random state for each process, and ``MANIFEST.json``: the size and sha256 of every file, the
position of the run, and what the run depends on. All of it is written to a temporary directory, synced to disk, and
renamed, so a directory without a manifest that matches it was never complete or was damaged since. Nothing in a
checkpoint, DeepSpeed's pickles above all, is loaded before its hashes match.
"""

import base64
import hashlib
import json
import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from fcsd.errors import CheckpointError, ConfigError, DiskError
from fcsd.launch import World

T = TypeVar("T")

MANIFEST = "MANIFEST.json"
MODEL = "model"
_ENGINE = "engine"
_VERSION = 1


def save(
    folder: Path,
    world: World,
    engine: Any,
    *,
    step: int,
    identity: dict[str, Any],
    progress: dict[str, Any],
    write_model: Callable[[Path], None],
) -> Path:
    """Commits ``step-{step}`` below ``folder``; called by every rank.

    Args:
        identity: what a resumed run must share, flat: see ``differences``.
        progress: where the run stands; comes back from ``load``.
        write_model: writes an ordinary model directory; called by every rank, fails on all or none.
    """
    final = folder / f"step-{step}"
    partial = world.on_first(lambda: _fresh(folder, final.name))
    _save_engine(engine, partial, world)

    world.everywhere(lambda: _write_json(partial / f"rank-{world.rank}.json", _random_state()))
    write_model(partial / MODEL)
    # Every rank hashes its share, whoever wrote it: the pages are in the cache of the host or of the shared disk.
    parts = world.everywhere(lambda: _each(_record, partial, _files(partial)[world.rank :: world.size]))
    files = {name: entry for part in parts for name, entry in sorted(part.items())}

    def commit() -> Path:
        manifest = {"version": _VERSION, "step": step, "identity": identity, "progress": progress, "files": files}
        _write_json(partial / MANIFEST, {**manifest, "seal": _seal_of(manifest)})
        for directory in [partial, *filter(Path.is_dir, partial.rglob("*"))]:
            _sync(directory)
        _rename(partial, final)
        return final

    return world.on_first(commit)


def load(checkpoint: Path, world: World, engine: Any, identity: dict[str, Any]) -> dict[str, Any]:
    """Puts a checkpoint from ``find`` into the engine and the random generators, and returns its ``progress``.

    Raises:
        CheckpointError: it belongs to another run; the message names what differs.
    """
    manifest = world.everywhere(lambda: read_manifest(checkpoint))[0]
    if changed := differences(manifest["identity"], identity):
        raise CheckpointError(
            f"{checkpoint} belongs to another run: {'; '.join(changed)}",
            hint="undo the change, or start anew in another output_dir",
        )
    engine.load_checkpoint(str(checkpoint), tag=_ENGINE)
    _set_random_state(json.loads((checkpoint / f"rank-{world.rank}.json").read_text()))
    return manifest["progress"]


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each key whose value is not the same in both."""
    absent = "nothing"
    return [
        f"{key} was {then.get(key, absent)!r} and is now {now.get(key, absent)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key, absent) != now.get(key, absent)
    ]


def find(folder: Path, resume: str, report: Callable[[str], None]) -> Path | None:
    """The checkpoint to start from, verified; None to start anew.

    Args:
        resume: ``auto`` for the newest in ``folder`` that is whole, ``never`` for none, or the path of one.

    Raises:
        CheckpointError: the one asked for is damaged, or none in ``folder`` is whole.
        ConfigError: ``never``, but ``folder`` has checkpoints that a new run would replace.
    """
    if resume == "auto":
        return _newest(folder, report)
    if resume == "never":
        if checkpoints(folder):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier run", hint="use --resume auto or another output_dir"
            )
        return None
    verify(Path(resume))
    return Path(resume)


def _newest(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint; damaged ones on the way to it are set aside, unfinished ones removed."""
    remove_unfinished(folder)
    for checkpoint in reversed(checkpoints(folder)):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            report(f"{error}; set aside")
            checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.corrupt-{uuid.uuid4().hex[:8]}"))
        else:
            return checkpoint
    if damaged := sorted(folder.glob("step-*.corrupt-*")):
        raise CheckpointError(
            f"{folder}: no checkpoint is whole, {len(damaged)} are damaged",
            hint="nothing was deleted; to start anew, use another output_dir",
        )
    return None


def remove_unfinished(folder: Path) -> None:
    """Deletes what a save that did not come to its end has left."""
    for partial in folder.glob("step-*.tmp-*"):
        shutil.rmtree(partial)


def checkpoints(folder: Path) -> list[Path]:
    """The committed checkpoints in ``folder``, oldest first; not verified."""
    names = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(names, key=lambda path: int(path.name.removeprefix("step-")))


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, not yet held against its files.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is missing or unreadable") from error
    if not isinstance(manifest, dict) or manifest.pop("seal", None) != _seal_of(manifest):
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is damaged")
    if manifest["version"] != _VERSION:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is of version {manifest['version']}, not {_VERSION}")
    return manifest


def size(checkpoint: Path) -> int:
    """Bytes of a checkpoint's files."""
    return sum(entry["size"] for entry in read_manifest(checkpoint)["files"].values())


def verify(checkpoint: Path) -> None:
    """Holds every file against the manifest.

    Raises:
        CheckpointError: a file is missing, of another size or content, or not in the manifest.
    """
    expected = read_manifest(checkpoint)["files"]
    found = set(_files(checkpoint)) - {MANIFEST}
    if strays := sorted(found ^ expected.keys()):
        state = "missing" if strays[0] in expected else "not part of it"
        raise CheckpointError(f"{checkpoint}: {strays[0]} is {state}")
    for name, entry in expected.items():
        if (checkpoint / name).stat().st_size != entry["size"]:
            raise CheckpointError(f"{checkpoint}: {name} has the wrong size")
    for name, sha256 in _each(_sha256, checkpoint, expected).items():
        if sha256 != expected[name]["sha256"]:
            raise CheckpointError(f"{checkpoint}: {name} is damaged, its sha256 differs")


def verified_model(checkpoint: Path) -> Path:
    """The model directory of a checkpoint, its files held against the manifest.

    Raises:
        CheckpointError: one is damaged or missing.
    """
    files = read_manifest(checkpoint)["files"]
    expected = {name: entry["sha256"] for name, entry in files.items() if name.startswith(f"{MODEL}/")}
    found = _each(_sha256, checkpoint, (name for name in expected if (checkpoint / name).is_file()))
    for name, sha256 in expected.items():
        if found.get(name) != sha256:
            raise CheckpointError(f"{checkpoint}: {name} is damaged or missing, its sha256 differs")
    return checkpoint / MODEL


def best(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of the best step, if that is known and still there."""
    return next((path for path in checkpoints(folder) if path.name == f"step-{step}"), None)


def retain(folder: Path, keep: int, best_step: int | None = None) -> None:
    """Deletes all but the newest ``keep`` checkpoints and the best, after a new one has been committed."""
    for old in checkpoints(folder)[:-keep]:
        if old == best(folder, best_step):
            continue
        doomed = old.with_name(f"{old.name}.tmp-{uuid.uuid4().hex[:8]}")
        old.rename(doomed)  # a half-deleted checkpoint must not look like a damaged one
        shutil.rmtree(doomed)


def _fresh(folder: Path, name: str) -> Path:
    partial = folder / f"{name}.tmp-{uuid.uuid4().hex[:8]}"
    partial.mkdir(parents=True)
    return partial


def _save_engine(engine: Any, partial: Path, world: World) -> None:
    """DeepSpeed's part. A rank that cannot write still meets the others in the barriers; then all raise its error."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    failed: list[Exception] = []

    class Writer(TorchCheckpointEngine):
        def save(self, state_dict: Any, path: str) -> None:
            try:
                torch.save(state_dict, path)
            except Exception as error:
                # torch's file writer does not say why it could not write
                writing = "iostream" in f"{error}{error.__context__}" or "unexpected pos" in str(error)
                failed.append(DiskError(f"{path} cannot be written", "is the disk full?") if writing else error)

    def report() -> None:
        for error in failed:
            raise error

    engine.checkpoint_engine = Writer()
    engine.save_checkpoint(str(partial), tag=_ENGINE, save_latest=False)
    world.everywhere(report)


def _each(function: Callable[[Path], T], directory: Path, names: Iterable[str]) -> dict[str, T]:
    """``function`` of every file by name, several at a time: hashing is slower than a disk, and releases the lock."""
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: function(directory / name), names), strict=True))


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


def _record(path: Path) -> dict[str, Any]:
    """Syncs a file to disk and describes it."""
    _sync(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(partial: Path, final: Path) -> None:
    """The moment a checkpoint comes to be."""
    partial.rename(final)
    _sync(final.parent)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal_of(manifest: dict[str, Any]) -> str:
    """sha256 of a manifest, so that damage to the manifest itself is found as well."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True))
    _sync(path)


def _random_state() -> dict[str, Any]:
    """Every global random generator of this process, as JSON."""
    version, words, position = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": [version, list(words), position],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": None if cuda is None else _text(cuda),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, words, position = state["python"]
    random.setstate((version, tuple(words), position))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping of dotted keys."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {key: value}
    return {k: v for name, item in items for k, v in flat(item, f"{key}.{name}" if key else str(name)).items()}
