"""Finds the files that the path of a source stands for: one file, all files below a folder, or those of a pattern."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from fcsd.checkpoint.location import ASSETS
from fcsd.config import Source
from fcsd.errors import BadInputError, ConfigError

MOST_ENTRIES = 200_000  # files and folders that a search visits before it gives up
_ENDINGS = {"jsonl": (".jsonl", ".ndjson", ".jsonl.gz"), "parquet": (".parquet",)}
_NAMED = 3  # files that are not read, in a message


class Found(NamedTuple):
    """What the path of a source stands for.

    Attributes:
        kind: the format: ``jsonl``, ``parquet`` or ``hf``.
        files: the files that are read, sorted; empty for a dataset that ``datasets`` locates itself.
        left: what lies in the folder or matches the pattern and is not read: files of another format, links to
            folders, and what is no regular file.
    """

    kind: str
    files: list[Path]
    left: list[Path]

    def __str__(self) -> str:
        """How many files are read as which format, and what is not read."""
        read = f"{len(self.files):,} {'file' if len(self.files) == 1 else 'files'} as {self.kind}"
        if not self.left:
            return read
        more = f" and {len(self.left) - _NAMED:,} more" if len(self.left) > _NAMED else ""
        return f"{read}, but not {', '.join(path.name for path in self.left[:_NAMED])}{more}"


def choose_files(source: Source) -> Found:
    """The files of a source, and what beside them is not read.

    Raises:
        BadInputError: there is no such file, or all are empty.
        ConfigError: the format cannot be told from the name.
    """
    if source.format == "hf" or (source.format == "auto" and is_saved_dataset(source.path)):
        return Found("hf", [], [])
    files = data_files(source.path)
    if not any(name.stat().st_size for name in files):
        raise BadInputError(f"{source.path}: is empty")
    aside = _not_files(source.path)
    if source.format != "auto":
        return Found(source.format, files, aside)
    for kind, endings in _ENDINGS.items():
        matching = [name for name in files if name.name.endswith(endings)]
        if matching:
            return Found(kind, matching, sorted({*files, *aside} - set(matching)))
    raise ConfigError(
        f"{source.path}: the format cannot be told from the name",
        "Set `format: jsonl` or `format: parquet` beside its path. Plain text has to be brought into one of them.",
    )


def require_apart(sources: Sequence[Source], measured: Mapping[str, Source]) -> None:
    """Refuses a file that a run would train on and measure on, also if links give it two names. Nothing is read.

    Raises:
        BadInputError: there is such a file, or both texts are the same split of a dataset.
        ConfigError: see ``choose_files``.
    """
    chosen = [(source, choose_files(source)) for source in sources]
    trained = {_place(path): path for _, found in chosen for path in found.files}
    splits = {split: source.path for source, found in chosen for split in _splits(source, found)}
    for name, source in measured.items():
        found = choose_files(source)
        for path in found.files:
            if (same := trained.get(_place(path))) is not None:
                raise measured_and_trained(name, path, same)
        for split in _splits(source, found):
            if split in splits:
                raise measured_and_trained(name, source.path, f"the split {split[-1]} of {splits[split]}")


def measured_and_trained(name: str, path: object, same: object) -> BadInputError:
    """The error for a text of the field ``data.<name>`` that the run would train on."""
    what = f"data.{name}: {path} is never to be trained on, and data.sources read it"
    other = "" if str(path) == str(same) else f" as {same}"
    return BadInputError(f"{what}{other}", "Keep it out of the folder, pattern or split of the training text.")


def _place(path: Path) -> tuple[int, int]:
    """What all names of a file have in common."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _splits(source: Source, found: Found) -> list[tuple[str | None, ...]]:
    """The splits of a dataset that are read. Of a part of a split nobody knows here which rows it has."""
    if found.kind != "hf":
        return []
    where = str(Path(source.path).resolve()) if Path(source.path).exists() else source.path
    return [(where, source.subset, source.revision, split) for split in source.split.split("+")]


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
        BadInputError: there is no such file, and the hint names a file or folder with a similar name; or it is a FIFO
            or a device.
    """
    found = find_files(path)
    if not found and os.path.exists(path) and not os.path.isdir(path):
        raise BadInputError(f"{path}: is not a regular file", "Copy what it gives into a file.")
    if not found:
        raise BadInputError(f"{path}: there is no such data file", _similar(path))
    return found


def is_saved_dataset(path: str) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote this folder."""
    return (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file()


def _not_files(path: str) -> list[Path]:
    """The links to folders below a folder, which are not followed, and what is no regular file there."""
    if not Path(path).is_dir():
        return []
    found = [Path(place, name) for place, folders, names in os.walk(path) for name in (*folders, *names)]
    return sorted(name for name in found if (name.is_symlink() if name.is_dir() else not name.is_file()))


def _similar(path: str) -> str:
    """A hint for a path that does not exist."""
    parent = Path(path).parent
    if ASSETS in Path(path).parents and not ASSETS.is_dir():
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
