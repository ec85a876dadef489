"""Turns a pydantic error into one line with its place, the key, the error, and the value that was probably meant."""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping

from pydantic import BaseModel
from pydantic_core import ErrorDetails

# What earlier versions had, by its key, and what to do instead. The key of a value has the value behind it.
_CHANGED = {
    "init.tp_degree": "it is called init.gpus, as --gpus of fcsd convert",
    **{f"report: {name}": f"write report: {{to: {name}}}" for name in ("none", "wandb", "trackio", "tensorboard")},
    "train.anneal_share": "annealed wiring was removed, because no gain was shown; delete the line",
    "objective.teacher_cache": "caches were removed; train.adapter or optim.train share one copy of the weights",
    "optim.moments: bf16": "moments in bf16 were removed; set optim.moments: 8bit, or optim.offload: host",
    "optim.offload: moments": "it was removed; set optim.offload: host, or parallel.zero_stage: 2",
    "parallel.zero_stage: 3": "3 was removed; set parallel.tp_size, or where that cannot divide the model or adapters "
    "train: train.adapter.base: nf4, optim.moments: 8bit or optim.offload: host",
    "parallel.dedup: auto": "the choice by layer was removed; set off, rank or node, see docs/slow_links.md",
    "parallel.machine": "parallel.dedup auto alone read it, and was removed; delete the line",
    "train.graph": "captured passes were removed; use train.compile, or a larger train.micro_batch_size",
}


def explain(problem: ErrorDetails, places: Mapping[str, str], schema: type[BaseModel]) -> str:
    """The message for one problem, on one line.

    Args:
        problem: an entry of `ValidationError.errors()`. The message of a validator that compares several
            keys starts with the full name of one of them.
        places: where keys were written, such as `recipe.yaml:12`, by dotted key; `""` is the whole file.
    """
    kind, loc, message = problem["type"], problem["loc"], problem["msg"].replace("Input should", "should")
    key = ".".join(str(part) for part in loc)
    place = nearest(key, places)
    changed = _CHANGED.get(key if kind == "extra_forbidden" else f"{key}: {problem['input']}"[:100])
    if changed:
        return f"{place}: {key!r}: {changed}"
    if kind == "extra_forbidden":
        return f"{place}: unknown key {key!r}; {_suggestion(loc, schema)}"
    if kind == "missing":
        return f"{place}: {key!r} is missing"
    if kind == "model_type":
        return f"{place}: {key!r} is a section: expected `key: value` lines below it"
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        known = set(_keys(schema))
        named = [word for word in re.findall(r"[\w.]+", message) if word in known]
        if message.split(" ")[0] in known:  # several keys contradict each other, and the place of one of them is shown
            written = next((name for name in named if name in places), named[0])
            return f"{nearest(written, places)}: {message}"
    given = problem["input"]
    shown = "" if isinstance(given, dict | list) else f", got {given!r:.200}"
    meant = _meant_value(problem)
    where = place if place == f"--set {key}" else f"{place}: {key}"
    return f"{where}: {message}{shown}{meant}"


def nearest(key: str, known: Mapping[str, str]) -> str:
    """The entry of `known` for a key, else for the first key below it, else for the closest key above it."""
    if key in known:
        return known[key]
    below = next((k for k in known if k.startswith(f"{key}.")), None)
    return known[below] if below else nearest(key.rpartition(".")[0], known)


def _meant_value(problem: ErrorDetails) -> str:
    """The end of a message that suggests how to write what was meant; empty if nothing is near."""
    given = problem["input"]
    if problem["type"] == "list_type" and isinstance(given, str):
        return f"; did you mean [{given}]?"
    if problem["type"] == "string_type" and type(given) in (int, float):
        return f"; did you mean '{given}', in quotes?"
    if problem["type"] == "int_type" and (unit := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmbt])", str(given).lower())):
        return f"; did you mean {unit[1]}e{ {'k': 3, 'm': 6, 'b': 9, 't': 12}[unit[2]] }?"
    allowed = re.findall(r"'([^']*)'", problem.get("ctx", {}).get("expected", ""))
    close = difflib.get_close_matches(str(problem["input"]).lower(), allowed, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _suggestion(loc: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    word = str(loc[-1])
    if word == "trust_remote_code":
        return "it is only a command-line flag, --trust-remote-code"
    parent = ".".join(part for part in loc[:-1] if isinstance(part, str))
    siblings = [key.rpartition(".")[2] for key in _keys(schema) if key.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(word, siblings, n=1)
    if close:
        return f"did you mean {'.'.join([*map(str, loc[:-1]), close[0]])!r}?"
    last_parts = [key.rpartition(".")[2] for key in _keys(schema)]
    close = difflib.get_close_matches(word, last_parts, n=1, cutoff=0.8)
    elsewhere = [key for key in _keys(schema) if close and key.rpartition(".")[2] == close[0]]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else f"known here: {', '.join(siblings)}"


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, without list positions."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        section = _section(field.annotation)
        if section:
            yield from _keys(section, f"{prefix}{name}.")


def _section(annotation: object) -> type[BaseModel] | None:
    """The model in an annotation: `Data`, `Data | None`, `list[Data]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section, typing.get_args(annotation))), None)
