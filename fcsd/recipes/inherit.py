"""Inheritance of recipes: with ``base: NAME`` a recipe takes every value that it does not set from another recipe."""

from pathlib import Path
from typing import Any

from fcsd import recipes
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
