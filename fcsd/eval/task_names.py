"""Finds the files in which the installed lm-eval defines tasks, without importing lm-eval, which takes seconds."""

import difflib
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fcsd.errors import ConfigError


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
