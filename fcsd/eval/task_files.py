"""Finds the files in which lm-eval defines a task, and hashes these files and the task's data in a mirror."""

import difflib
import hashlib
import re
from pathlib import Path
from typing import Any

from fcsd.disk import file_sha256
from fcsd.errors import BadInputError, ConfigError


def task_manager(task: str, directory: str) -> tuple[Any, Path]:
    """An lm-eval ``TaskManager`` that knows ``task``, and the directory of the file that defines it.

    Args:
        task: the name of a task or a group of tasks.
        directory: where it is defined, below lm-eval's ``tasks``; empty to search for it.

    Raises:
        ConfigError: the installed lm-eval has no such task.
    """
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folder = root / directory if directory else _folder_of(task, root)
    # Only this directory is read, which is fast; reading all of lm-eval's 14 000 files takes ten seconds.
    manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
    entry = manager.task_index.get(task)
    if entry is None:
        raise ConfigError(f"the installed lm-eval has no task {task!r} in {folder.relative_to(root.parent)}")
    members = (entry.cfg or {}).get("task", []) if entry.kind.name == "GROUP" else []
    if any(isinstance(member, str) and member not in manager.task_index for member in members):
        manager = lm_eval.tasks.TaskManager()  # members of the group are defined elsewhere
    return manager, folder


def _folder_of(task: str, root: Path) -> Path:
    """The directory of the YAML file that defines a task or group."""
    files = sorted(root.rglob("*.yaml"))
    named = re.compile(rf"^(task|group):\s*[\"']?{re.escape(task)}[\"']?\s*(#.*)?$", re.MULTILINE)
    for file in sorted(files, key=lambda file: task not in file.stem):  # most files are called after their task
        if named.search(file.read_text(encoding="utf-8", errors="replace")):
            return file.parent
    close = difflib.get_close_matches(task, {file.stem for file in files}, 3)
    hint = f"similar names: {', '.join(close)}" if close else "lm_eval ls tasks prints the names"
    raise ConfigError(f"neither the suite nor the installed lm-eval has a task {task!r}", hint)


def definition_sha256(directory: Path) -> str:
    """One hash over the YAML and Python files of a directory, which define a task and its siblings."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".yaml", ".py") or path.name.endswith("_yaml"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def mirror_files(column: str, mirror: Path, data_sets: set[str]) -> dict[str, str]:
    """SHA-256 of every file of the data sets, by its path in the mirror.

    Raises:
        BadInputError: the mirror lacks a data set. It must not be looked for on the hub instead.
    """
    files = {}
    for name in sorted(data_sets):
        root = mirror / name
        if not root.is_dir():
            raise BadInputError(f"{column}: the data mirror has no directory {name}")
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            files[path.relative_to(mirror).as_posix()] = file_sha256(path)
    return files
