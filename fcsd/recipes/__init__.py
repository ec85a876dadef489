"""Finds, lists and reads the packaged recipes."""

import difflib
import os
import re
from pathlib import Path

from fcsd.errors import ConfigError

# In a wheel the YAML lies beside this file; in a checkout, at the root of the repository.
_PACKAGED = Path(__file__).parent / "_data"
_FOLDER = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "recipes"
_HARDWARE = re.compile(r"^# Hardware: ((?:planned for|run on) [^.:\n]+)", re.MULTILINE)
_FIRST = re.compile(r"^#.*\bFirst: (fcsd convert \S+ (\S+).*)$", re.MULTILINE)


def names() -> list[str]:
    """The names of the packaged recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def find(path_or_name: str) -> Path:
    """The file of a recipe. A text with a `/` or a YAML ending is a path; any other text is the name of a packaged one.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    if "/" in path_or_name or path_or_name.endswith((".yaml", ".yml")):
        return Path(path_or_name)
    return packaged(path_or_name)


def read(name: str) -> str:
    """The text of a packaged recipe, comments included."""
    return packaged(name).read_text(encoding="utf-8")


def packaged(name: str) -> Path:
    """The file of a packaged recipe.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1)
        meant = f"Did you mean {close[0]!r}? " if close else ""
        if os.path.isfile(f"{name}.yaml"):
            meant = f"Did you mean the file ./{name}.yaml? "
        elif os.path.isdir(name):
            meant = f"For the model in the directory {name}, add --set model={name} to a recipe. "
        raise ConfigError(
            f"no packaged recipe is named {name!r}",
            f"{meant}`fcsd recipes list` shows the names. A file of your own needs a path, such as ./NAME.yaml.",
        )
    return _FOLDER / f"{name}.yaml"


def conversion(text: str, model: str) -> str | None:
    """The command by which a recipe says to make its model.

    Args:
        text: the recipe's file. A comment ``First: fcsd convert ORIGINAL MODEL ...`` holds the command.
        model: the model that the recipe asks for.

    Returns:
        The command; None if there is none that makes ``model``.
    """
    for command, made in _FIRST.findall(text):
        if made == model:
            return command
    return None


def summary(name: str) -> str:
    """What the comments of a packaged recipe say it is for, and on which hardware it was run or is planned."""
    text = read(name)
    [hardware] = _HARDWARE.findall(text)
    first = text.partition("\n")[0].removeprefix("# ")
    return f"{first} {hardware[0].upper()}{hardware[1:]}."
