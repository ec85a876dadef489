"""Finds the files that the path of a source stands for: one file, all files below a folder, or those of a pattern."""

import glob
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from fcsd import bundled
from fcsd.errors import BadInputError

MOST_ENTRIES = 200_000  # files and folders that a search visits before it gives up


def find_files(path: str) -> list[Path]:
    """The existing files that ``path`` stands for, sorted. The list is empty if there is no such file.

    ``**`` in a pattern stands for any number of folders. As in a shell, a pattern finds hidden files and folders only
    if it names them with their dot. The search for a pattern follows links to folders, as ``glob`` does. The search of
    a folder finds hidden files. It follows no link to a folder, so that it finds no file twice.

    Raises:
        BadInputError: the search would visit more than ``MOST_ENTRIES`` files and folders.
    """
    parts = Path(path).parts
    if Path(path).is_dir():
        found: Iterator[str] = _below(path, path, links=False)
    elif "**" in parts:
        fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
        base = str(Path(*parts[:fixed]))
        below = _below(base, path, links=True)
        found = (name for name in below if _matches(Path(name).relative_to(base).parts, parts[fixed:]))
    else:
        found = glob.iglob(path)
    return sorted(Path(name) for name in found if os.path.isfile(name))


def data_files(path: str) -> list[Path]:
    """The files of :func:`find_files`, of which there must be at least one.

    Raises:
        BadInputError: there is no such file; the hint names a file or folder with a similar name.
    """
    found = find_files(path)
    if not found:
        raise BadInputError(f"{path}: there is no such data file", _similar(path))
    return found


def is_saved_dataset(path: str) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote this folder."""
    return (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file()


def _similar(path: str) -> str:
    """A hint for a path that does not exist."""
    parent = Path(path).parent
    if bundled.FOLDER in Path(path).parents and not bundled.FOLDER.is_dir():
        return "Only a clone of the fcsd repository has the bundled files; the installed package does not."
    if not parent.is_dir():
        return f"The folder {parent} does not exist. A dataset of the hub needs `format: hf` beside its path."
    close = get_close_matches(Path(path).name, os.listdir(parent), n=1)
    guess = f"Did you mean {parent / close[0]}? " if close else ""
    return f"{guess}A dataset of the hub needs `format: hf` beside its path."


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match the parts of a pattern."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    visible = pattern[0].startswith(".") or not names[0].startswith(".")
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or (visible and _matches(names[1:], pattern))
    return visible and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _below(folder: str, path: str, links: bool) -> Iterator[str]:
    """All files below a folder; ``links`` says whether links to folders are followed."""
    visited = 0
    for place, folders, names in os.walk(folder, followlinks=links):
        visited += len(folders) + len(names)
        if visited > MOST_ENTRIES:
            raise BadInputError(
                f"{path}: there are more than {MOST_ENTRIES:,} files and folders below {folder}",
                hint="name a folder that is nearer to the data",
            )
        yield from (os.path.join(place, name) for name in names)
