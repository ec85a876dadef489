"""The manifest of a checkpoint: the size and sha256 of every file, and a hash of the manifest itself (the seal)."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fcsd.disk import file_sha256, json_sha256, read_input, sync, write_json
from fcsd.errors import CheckpointError, CheckpointVersionError

T = TypeVar("T")

MANIFEST = "MANIFEST.json"
MODEL, PARTS = "model", "parts"  # folders of a checkpoint, which has one of the two
_VERSION = 2
_CONTENT = {"step": int, "identity": dict, "progress": dict, "files": dict}  # required keys and their types


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> None:
    """Writes the manifest of a checkpoint.

    Args:
        content: ``step``, ``identity``, ``progress`` and ``files``; the last comes from ``described``.
    """
    content = {"version": _VERSION, **content}
    write_json(checkpoint / MANIFEST, {**content, "seal": json_sha256(content)})  # the seal reveals a damaged manifest


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. The files are not compared with it.

    Raises:
        CheckpointVersionError: the manifest is of another version.
        CheckpointError: the manifest is missing or damaged, or the name of the directory has another step.
    """
    try:
        manifest = json.loads(read_input(checkpoint / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is missing or unreadable") from error
    if not isinstance(manifest, dict) or manifest.pop("seal", None) != json_sha256(manifest):
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is damaged")
    if manifest.get("version") != _VERSION:
        raise CheckpointVersionError(
            f"{checkpoint}: {MANIFEST} is of version {manifest.get('version')}, not {_VERSION}",
            hint="continue the run with the fcsd that wrote it, or start anew in another output_dir",
        )
    if missing := [name for name, kind in _CONTENT.items() if not isinstance(manifest.get(name), kind)]:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} has no usable {missing[0]!r}")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or [type(entry.get(key)) for key in ("size", "sha256")] != [int, str]:
            raise CheckpointError(f"{checkpoint}: {MANIFEST} does not give size and sha256 of {name}")
    if step_of(checkpoint) not in (None, manifest["step"]):
        raise CheckpointError(
            f"{checkpoint}: was renamed, its {MANIFEST} is of step {manifest['step']}",
            hint=f"call it step-{manifest['step']} again",
        )
    return manifest


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint's directory; None if the name is not that of a checkpoint."""
    prefix, _, number = checkpoint.name.partition("step-")
    return int(number) if not prefix and number.isdecimal() else None


def size(checkpoint: Path) -> int:
    """The total size of a checkpoint's files in bytes."""
    return sum(entry["size"] for entry in read_manifest(checkpoint)["files"].values())


def verify(checkpoint: Path) -> None:
    """Compares every file of a checkpoint with the manifest.

    Raises:
        CheckpointError: a file is missing, has another size or content, or is not in the manifest.
    """
    expected = read_manifest(checkpoint)["files"]
    found = set(files(checkpoint)) - {MANIFEST}
    if strays := sorted(found ^ expected.keys()):
        state = "missing" if strays[0] in expected else "not part of it"
        raise CheckpointError(f"{checkpoint}: {strays[0]} is {state}")
    for name, entry in expected.items():
        if (checkpoint / name).stat().st_size != entry["size"]:
            raise CheckpointError(f"{checkpoint}: {name} has the wrong size")
    for name, sha256 in _each(_sha256, checkpoint, expected).items():
        if sha256 != expected[name]["sha256"]:
            raise CheckpointError(f"{checkpoint}: {name} is damaged, its sha256 differs")


def verified_model(checkpoint: Path, folder: str = MODEL) -> Path:
    """The model directory of a checkpoint, after its files were compared with the manifest.

    Args:
        folder: another folder of the checkpoint, which is verified in its place.

    Raises:
        CheckpointError: a file of the model is damaged or missing.
    """
    recorded = read_manifest(checkpoint)["files"]
    expected = {name: entry["sha256"] for name, entry in recorded.items() if name.startswith(f"{folder}/")}
    found = _each(_sha256, checkpoint, (name for name in expected if (checkpoint / name).is_file()))
    for name, sha256 in expected.items():
        if found.get(name) != sha256:
            raise CheckpointError(f"{checkpoint}: {name} is damaged or missing, its sha256 differs")
    return checkpoint / folder


def described(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """Syncs files to disk and returns their sizes and sha256 by name."""
    return _each(_record, directory, names)


def files(directory: Path) -> list[str]:
    """Names of the files in and below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _record(path: Path) -> dict[str, Any]:
    """Syncs a file to disk and returns its size and sha256."""
    sync(path)
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}


def _each(function: Callable[[Path], T], directory: Path, names: Iterable[str]) -> dict[str, T]:
    """The results of ``function`` for files, by name.

    Several threads work at the same time. This helps because hashing is slower than a disk and releases the
    interpreter lock.
    """
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: function(directory / name), names), strict=True))
