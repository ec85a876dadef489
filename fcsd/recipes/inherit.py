"""Inheritance of recipes: with ``base: NAME`` a recipe takes every value that it does not set from another recipe.

A copy of a packaged recipe is complete: what it takes from a base is written out, comments included.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fcsd import recipes
from fcsd.disk import require_folder, write_text
from fcsd.errors import ConfigError
from fcsd.recipes import strict_yaml

Place = tuple[Path, int]


def read(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Place]]:
    """The values of a recipe and of its bases, and by dotted key the file and line that each was taken from.

    Sections are merged key by key. Any other value, lists included, replaces the value of the base. ``base`` is a path
    or the name of a packaged recipe, as on the command line.

    Args:
        above: the recipes that are based on this one.

    Raises:
        ConfigError: a file cannot be read or is not a recipe, or a recipe is based on itself.
    """
    values, lines = strict_yaml.parse_file(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a recipe: expected `key: value` lines")
    places = {key: (path, line) for key, line in lines.items()}
    if "base" not in values:
        return values, places
    base, where = values.pop("base"), f"{path}:{lines['base']}"
    if not isinstance(base, str):
        raise ConfigError(f"{where}: base: should be the name of a recipe or a path, got {base!r:.100}")
    below, chain = recipes.find(base), (*above, path.resolve())
    if below.resolve() in chain:
        raise ConfigError(f"{where}: {base} is based on this recipe")
    inherited, inherited_places = read(below, chain)
    replaced: list[str] = []
    merged = _overlay(inherited, values, "", replaced)
    kept = {
        key: place
        for key, place in inherited_places.items()
        if not any(key == own or key.startswith(f"{own}.") for own in replaced)
    }
    return merged, {**kept, **places}


def _overlay(below: Any, above: Any, key: str, replaced: list[str]) -> Any:
    """``below`` with the values of ``above`` merged into it; keys whose value is replaced are added to ``replaced``."""
    if isinstance(below, dict) and isinstance(above, dict):
        prefix = f"{key}." if key else ""
        return below | {
            name: _overlay(below.get(name), value, prefix + name, replaced) for name, value in above.items()
        }
    replaced.append(key)
    return above


def copy_recipe(name: str, out: Path) -> Path:
    """Writes a packaged recipe to `out`, which is a file or an existing directory, so that the user can edit it.

    What the recipe takes from a base is written out, so that the file is complete.

    Raises:
        ConfigError: there is no such recipe, the file exists, or its folder does not. Nothing is overwritten.
        DiskError: the folder may not be written.
        OSError: the file cannot be written.
    """
    text = complete(recipes.packaged(name))
    target = out / f"{name}.yaml" if out.is_dir() else out
    require_folder(target.parent, "--out", of_a_model=True)
    if not os.path.isdir(target.parent):
        raise ConfigError(f"{target}: the folder {target.parent} does not exist", hint="Make it, or name another one.")
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists", hint="Choose another --out. Nothing was overwritten.")
    write_text(target, text)  # a full disk leaves no part of it
    return target


def complete(path: Path) -> str:
    """The text of a recipe in which every value of its bases is written out.

    The comments at its top are the recipe's own. Every value stands in the line in which the recipe or a base gives it,
    with that line's comment. The recipes must be in block style, in which a key stands alone in its line; all packaged
    ones are, and a text that has no base is returned as it is.
    """
    text = path.read_text(encoding="utf-8")
    if not any(line.startswith("base:") for line in text.splitlines()):
        return text
    values, places = read(path)
    top = [line for line in text.splitlines() if line.startswith("#")]
    return "\n".join([*top, *_entries(values, "", places)]) + "\n"


def _entries(values: dict[str, Any], above: str, places: dict[str, Place]) -> Iterator[str]:
    """The lines of a mapping's keys and values; a blank line is before each section of the recipe."""
    for name, value in values.items():
        key = f"{above}.{name}" if above else name
        file, number = places[key]
        line, *below = file.read_text(encoding="utf-8").splitlines()[number - 1 :]
        if isinstance(value, dict) and not above:
            yield ""
        yield line
        if isinstance(value, dict):
            yield from _entries(value, key, places)
        else:
            yield from _deeper(below, len(line) - len(line.lstrip()))


def _deeper(lines: list[str], indent: int) -> Iterator[str]:
    """The first of the lines that are indented deeper: the items of a list."""
    for line in lines:
        if not line.startswith(" " * (indent + 1)):
            return
        yield line
