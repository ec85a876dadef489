"""Starts fcsd in further processes without taking modules from the directory in which the user calls it.

``python -m`` puts the current directory first on the path, so that a file such as ``fcsd.py`` in a data directory would
run in every process. The option ``-P`` and the variable PYTHONSAFEPATH leave the current directory out.
"""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path


def leave_out_current_directory(environment: MutableMapping[str, str]) -> None:
    """Set the variables with which processes import the fcsd of this process, and nothing by chance."""
    environment["PYTHONSAFEPATH"] = "1"
    if path := _path_of_checkout(environment):
        environment["PYTHONPATH"] = path


def command(module: str = "fcsd") -> list[str]:
    """The words of a command that runs a module of this fcsd; the arguments of the module follow them."""
    path = _path_of_checkout(os.environ)
    return [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, "-P", "-m", module]


def _path_of_checkout(environment: MutableMapping[str, str]) -> str | None:
    """PYTHONPATH with the current directory, if this fcsd is a checkout there that would not be found without it."""
    root, paths = Path(__file__).resolve().parents[2], environment.get("PYTHONPATH", "")
    if root != Path.cwd().resolve() or str(root) in paths.split(os.pathsep):
        return None
    return os.pathsep.join([str(root), paths] if paths else [str(root)])
