"""Reads a recipe, applies its overrides, and records where each value came from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fcsd import recipes
from fcsd.config.explain import explain, nearest
from fcsd.config.recipe import Recipe
from fcsd.errors import ConfigError
from fcsd.recipes import inherit, strict_yaml


@dataclass(frozen=True)
class ResolvedRecipe:
    """A complete recipe and, by dotted key, the origin of each value.

    An origin is `default`, `recipe:LINE`, `BASE.yaml:LINE`, `--set` or `flag`. A number of steps that follows from a
    budget of tokens has the origin `train.tokens`.
    """

    recipe: Recipe
    origins: dict[str, str]

    def to_yaml(self) -> str:
        """The whole recipe as YAML, with the origin of each value as a comment. The text loads to the same recipe."""
        return strict_yaml.dump(self.recipe.model_dump(), self.origins)


def load_recipe(
    path_or_name: str | Path, overrides: list[str] | None = None, flags: Mapping[str, object] | None = None
) -> ResolvedRecipe:
    """Reads a recipe and resolves every value.

    Args:
        path_or_name: a YAML file, or the name of a packaged recipe.
        overrides: `--set` arguments such as `optim.lr=1e-4`; values follow the recipe's YAML rules.
        flags: values of command-line flags by dotted key; they override all other values.

    Raises:
        ConfigError: the file is unreadable or not valid YAML, or it has an unknown key, a wrong type or a
            contradiction. The message names the place.
    """
    path = recipes.find(str(path_or_name))
    raw, found = inherit.read(path)
    places = {key: f"{file}:{line}" for key, (file, line) in found.items()}
    origins = {key: f"{'recipe' if file == path else file.name}:{line}" for key, (file, line) in found.items()}
    assignments = [("--set", *_split_override(text)) for text in overrides or []]
    assignments += [("flag", key, value) for key, value in (flags or {}).items()]
    for origin, key, value in assignments:
        raw = _assign(raw, key.split("."), value)
        for known in [k for k in origins if k == key or k.startswith(f"{key}.")]:
            del origins[known], places[known]
        origins[key], places[key] = origin, _written(origin, key)
    raw = _one_length(raw, {key: value for _, key, value in assignments})
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        problems = [explain(problem, places, Recipe) for problem in error.errors()]
        raise ConfigError("\n".join(problems)) from error
    given = {key for key, _ in _leaves(raw)}
    leaves = [key for key, _ in _leaves(recipe.model_dump())]
    resolved = {k: nearest(k, origins) if k in given else "default" for k in leaves}
    if recipe.train.tokens is not None and "train.steps" not in given:
        resolved["train.steps"] = "train.tokens"
    return ResolvedRecipe(recipe, resolved)


def vary(resolved: ResolvedRecipe, values: Mapping[str, object]) -> ResolvedRecipe:
    """The recipe with some values replaced. `values` maps dotted keys to new values, whose origin is `sweep`.

    Raises:
        ConfigError: there is an unknown key, a wrong type or a contradiction.
    """
    raw: object = resolved.recipe.model_dump()
    if resolved.recipe.train.tokens is not None:
        raw = _assign(raw, ["train", "steps"], None)
    for key, value in values.items():
        raw = _assign(raw, key.split("."), value)
    raw = _one_length(raw, values)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        places = {"": "sweep", **{key: f"sweep, {key} {value!r:.100}" for key, value in values.items()}}
        raise ConfigError("\n".join(explain(problem, places, Recipe) for problem in error.errors())) from error
    origins = {"": "default", **resolved.origins, **dict.fromkeys(values, "sweep")}
    return ResolvedRecipe(recipe, {key: nearest(key, origins) for key, _ in _leaves(recipe.model_dump())})


def value_of(recipe: Recipe, key: str) -> object:
    """The value of a dotted key, in which a number selects a list item; None where the recipe has no such value."""
    found: Any = recipe.model_dump()
    for part in key.split("."):
        if isinstance(found, list):
            found = {str(number): item for number, item in enumerate(found)}
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _one_length(raw: object, given: Mapping[str, object]) -> object:
    """Remove `train.steps` from `raw` if the overrides give only `train.tokens`, and vice versa.

    Both keys set the length of the run. An override of one key therefore replaces either key of the recipe.
    """
    chosen = {name for name in ("steps", "tokens") if given.get(f"train.{name}") is not None}
    if len(chosen) != 1 or not isinstance(raw, dict) or not isinstance(raw.get("train"), dict):
        return raw
    kept = {key: value for key, value in raw["train"].items() if key in chosen or key not in ("steps", "tokens")}
    return {**raw, "train": kept}


def _written(origin: str, key: str) -> str:
    """An assignment as the user wrote it, for messages."""
    return f"--set {key}" if origin == "--set" else f"--{key.rpartition('.')[2].replace('_', '-')}"


def _split_override(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") > strict_yaml.MAX_DEPTH:
        raise ConfigError(f"--set {text}: expected KEY=VALUE", hint="for example --set optim.lr=1e-4")
    return key, strict_yaml.parse(value, f"--set {key}")[0]


def _assign(current: object, parts: list[str], value: object) -> object:
    """`current` with `value` at the dotted key `parts`. A number selects a list item; missing mappings are created."""
    if not parts:
        return value
    head, *rest = parts
    if isinstance(current, list) and head in map(str, range(len(current))):
        return [_assign(item, rest, value) if str(i) == head else item for i, item in enumerate(current)]
    if current is None or isinstance(current, dict):
        known = current or {}
        return {**known, head: _assign(known.get(head), rest, value)}
    raise ConfigError(f"--set: there is no key {'.'.join(parts)!r} inside {current!r:.100}")


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """The dotted key and value of every value that is not a mapping or a list of mappings."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(i): item for i, item in enumerate(value)}
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    else:
        yield key, value
