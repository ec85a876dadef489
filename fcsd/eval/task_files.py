"""Finds the files in which lm-eval defines a task, and hashes these files and the task's data in a mirror.

The files are found without importing lm-eval, which takes seconds.
"""

import difflib
import hashlib
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from fcsd.checkpoint.files import quoted
from fcsd.disk import file_sha256, read_input_text
from fcsd.errors import BadInputError, ConfigError
from fcsd.foreign_errors import reason_of
from fcsd.input_lines import LONGEST_TEXT, blocks, lines_of

# Where ``datasets`` looks for the names of a data set's files.
_CARDS = ("README.md", ".huggingface.yaml")
_MOST_CARD = 16 << 20  # bytes
# A reader that needs a whole line takes many times its size.
_LINES = tuple(
    f".{kind}{packed}" for kind in ("jsonl", "ndjson", "json", "csv", "tsv", "txt") for packed in ("", ".gz")
)


def tasks_folder() -> Path:
    """The directory ``lm_eval/tasks`` of the installed lm-eval.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ConfigError("lm-eval is not installed", "pip install 'fcsd[eval]'")
    return Path(spec.origin).parent / "tasks"


def folders_of(tasks: Sequence[str]) -> dict[str, Path]:
    """The directory of the YAML file that defines each task or group. All of lm-eval's files are read at most once.

    Raises:
        ConfigError: no file defines one of them.
    """
    root, found = tasks_folder(), dict[str, Path]()
    files = sorted(Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(".yaml"))
    named = {
        task: re.compile(rf"^(task|group):\s*[\"']?{re.escape(task)}[\"']?\s*(#.*)?$", re.MULTILINE) for task in tasks
    }
    # Most files are called after their task.
    for file in sorted(files, key=lambda file: not any(task in file.stem for task in tasks)):
        if not (left := [task for task in tasks if task not in found]):
            break
        raw = file.read_bytes()
        for task in left:
            if task.encode() in raw and named[task].search(raw.decode("utf-8", errors="replace")):
                found[task] = file.parent
    if unknown := [task for task in tasks if task not in found]:
        close = difflib.get_close_matches(unknown[0], {file.stem for file in files}, 3)
        hint = f"similar names: {', '.join(close)}" if close else "lm_eval ls tasks prints the names"
        raise ConfigError(f"neither the suite nor the installed lm-eval has a task {unknown[0]!r}", hint)
    return found


def task_manager(task: str, directory: str) -> tuple[Any, Path]:
    """An lm-eval ``TaskManager`` that knows ``task``, and the directory of the file that defines it.

    Args:
        task: the name of a task or a group of tasks.
        directory: where it is defined, below lm-eval's ``tasks``; empty to search for it.

    Raises:
        ConfigError: the installed lm-eval has no such task.
    """
    import lm_eval.tasks

    root = tasks_folder()
    folder = root / directory if directory else folders_of([task])[task]
    # Only this directory is read, which is fast; reading all of lm-eval's 14 000 files takes ten seconds.
    manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
    entry = manager.task_index.get(task)
    if entry is None:
        raise ConfigError(f"the installed lm-eval has no task {task!r} in {folder.relative_to(root.parent)}")
    members = (entry.cfg or {}).get("task", []) if entry.kind.name == "GROUP" else []
    if any(isinstance(member, str) and member not in manager.task_index for member in members):
        manager = lm_eval.tasks.TaskManager()  # members of the group are defined elsewhere
    return manager, folder


def definition_sha256(directory: Path) -> str:
    """One hash over the YAML and Python files of a directory, which define a task and its siblings."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".yaml", ".py") or path.name.endswith("_yaml"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def mirror_files(column: str, mirror: Path, data_sets: set[str]) -> dict[str, str]:
    """SHA-256 of every file of the data sets, by its path in the mirror. Each is checked before anything opens it.

    Raises:
        BadInputError: the mirror lacks a data set, which must not be looked for on the hub instead; a file of it is not
            a regular file, or has a line that is too long; or it names data outside of its folder.
    """
    files = {}
    for name in sorted(data_sets):
        root = mirror / name
        if not root.is_dir():
            raise BadInputError(f"{column}: the data mirror has no directory {name}")
        try:
            for path in _files_below(root):
                if path.parent == root and path.name in _CARDS:
                    _refuse_outside(path)
                files[path.relative_to(mirror).as_posix()] = file_sha256(path)
                if path.name.endswith(_LINES):
                    _refuse_long_lines(path)
        except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError, RecursionError) as error:
            raise BadInputError(f"{column}: the data mirror cannot be read: {reason_of(error)}") from error
    return files


def _files_below(root: Path) -> list[Path]:
    """Every file below a folder, sorted; folders that are links are followed, each once."""
    found, seen = [], set()
    for folder, folders, names in os.walk(root, followlinks=True):
        seen.add(os.path.realpath(folder))
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(folder, name)) not in seen]
        found += [Path(folder, name) for name in names]
    return sorted(found)


def _refuse_outside(card: Path) -> None:
    """Refuse a data set's card whose ``configs``, by which ``datasets`` finds the files, lead out of its folder.

    ``datasets`` would fetch what an address names, also with ``HF_HUB_OFFLINE``.
    """
    from huggingface_hub import DatasetCard

    text = read_input_text(card, _MOST_CARD)
    # Both are read by what ``datasets`` itself reads them with, so that nothing is found there alone.
    fields = DatasetCard.load(card).data if card.name == "README.md" else yaml.safe_load(text) or {}
    waiting = [fields.get("configs")]
    seen = set()  # an alias of YAML is the same object, which may even hold itself
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, str) and (
            "://" in value or "::" in value or value.startswith(("/", "~")) or ".." in re.split(r"[/\\]", value)
        ):
            raise BadInputError(
                f"{card}: names data outside of its folder: {quoted(value)}",
                "The card of a data set in a mirror may name its own files alone.",
            )


def _refuse_long_lines(path: Path) -> None:
    for number, line in enumerate(lines_of(blocks(path), LONGEST_TEXT), 1):
        if line is None:
            raise BadInputError(f"{path}:{number}: this line has over {LONGEST_TEXT:,} bytes")
