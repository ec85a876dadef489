"""Writes docs/reference/ from the code, and the generated blocks of README and docs/ (`scripts/page_blocks.py`).

Run it after a change to `fcsd/config/`, to a command or to `fcsd/models/archs.py`, and after a new measurement.
`tests/docs/test_reference.py` fails while the pages are out of date.
"""

import json
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from scripts.page_blocks import page_blocks
from studies.blocks import between_marks

from fcsd.cli.main import app
from fcsd.cli.panels import panels
from fcsd.config import Recipe
from fcsd.models.arch import Arch
from fcsd.models.archs import ARCHS
from fcsd.models.products import PRODUCTS
from fcsd.models.wiring_block import READS

_ROOT = Path(__file__).resolve().parent.parent
_FOLDER = _ROOT / "docs" / "reference"
_GENERATED = "`scripts/write_reference.py` writes this page from the code."


def main() -> None:
    """Writes all pages."""
    _FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (_FOLDER / name).write_text(text)
    for name, blocks in page_blocks(_ROOT).items():
        (_ROOT / name).write_text(between_marks((_ROOT / name).read_text(), blocks))


def pages() -> dict[str, str]:
    """The text of every page, by file name below docs/reference."""
    return {
        "recipe.md": recipe_page(),
        "commands.md": commands_page(),
        "architectures.md": architectures_page(),
    }


def architectures_page() -> str:
    """Every architecture with its wirings, and the reason of what it cannot do."""
    intro = (
        "A row is for the types that differ in nothing but their names. Each type can have "
        f"the wirings {', '.join(f'`{name}`' for name in READS)}. "
        "[Add an architecture](../adding_an_architecture.md) says how a row is added."
    )
    head = "| `model_type` | experts | Desync | expert parallelism | vLLM |\n|---|---|---|---|---|"
    rows = [f"| {', '.join(names)} | {cells} |" for cells, names in _grouped(_cells, " (with vision)").items()]
    published: dict[bool, list[str]] = {True: [], False: []}
    for _, name, model_type in sorted(PRODUCTS, key=lambda product: product[2]):
        published[model_type in ARCHS].append(f"{name} (`{model_type}`)")
    names = ["## Names under which models are published", f"{'; '.join(published[True])}."]
    names += ["**Not supported**", f"{'; '.join(published[False])}."]
    parts = ["# Architectures", _GENERATED, intro, "\n".join([head, *rows]), *names]
    return "\n\n".join(parts) + "\n"


def _grouped(cells: Callable[[Arch], str], vision: str) -> dict[str, list[str]]:
    """The names of the architectures that have the same cells; ``vision`` follows those that read images, too."""
    groups: dict[str, list[str]] = {}
    for arch in ARCHS.values():
        name = f"`{arch.model_type}`" + (vision if arch.text_config else "")
        groups.setdefault(cells(arch), []).append(name)
        for text, differing in arch.texts.items():
            if differing:
                served = arch.no_vllm or ARCHS[text].no_vllm
                around = cells(replace(arch.around(text), no_vllm=served))
                groups.setdefault(around, []).append(f"{name} around `{text}`")
    return groups


def _cells(arch: Arch) -> str:
    experts = "none (dense)" if arch.dense else "routed and shared" if arch.blocks.shared else "routed"
    parallel = "" if arch.dense else f"no: {arch.no_ep}" if arch.no_ep else "yes"
    served = f"no: {arch.no_vllm}" if arch.no_vllm else "yes"
    desync = "yes" if arch.no_desync is None else "no"
    return " | ".join((experts, desync, parallel, served))


def recipe_page() -> str:
    """The reference of a recipe: a list for each section."""
    intro = (
        "A recipe is a YAML file. A key that this page does not list is an error. In brackets stand the type and the "
        "default. A value without a default is required, and *or null* without a default means that null is the "
        "default: the value is not given. [recipes.md](../recipes.md) explains how recipes build on each other."
    )
    parts = ["# Recipe reference", _GENERATED, intro]
    for section, keys in _sections(Recipe).items():
        heading = " and ".join(f"`{key}`" for key in keys if key) or "The recipe itself"
        rows = [_field_row(name, field) for name, field in section.model_fields.items() if not _told_below(field)]
        parts += [f"## {heading}", _sentence(section.__doc__ or ""), "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _told_below(field: FieldInfo) -> bool:
    """Whether a field is a section with defaults, of which its own heading says all."""
    return isinstance(field.get_default(call_default_factory=True), BaseModel)


def _sections(model: type[BaseModel], key: str = "") -> dict[type[BaseModel], list[str]]:
    """A section and all sections inside it, each with its dotted keys in a recipe; `[]` follows a list of sections."""
    found = {model: [key]}
    for name, field in model.model_fields.items():
        for inner, many in _models_in(field.annotation):
            for section, keys in _sections(inner, f"{key}.{name}".lstrip(".") + "[]" * many).items():
                found[section] = found.get(section, []) + keys
    return found


def _models_in(annotation: Any) -> list[tuple[type[BaseModel], bool]]:
    """The sections in a type, and whether each stands in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, False)]
    many = get_origin(annotation) is list
    return [(model, many or inner) for argument in get_args(annotation) for model, inner in _models_in(argument)]


def _field_row(name: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    default = "" if value is PydanticUndefined or value is None else f"; `{json.dumps(value)}`"
    kind = _type_of(field.annotation) + _limits(field.metadata)
    return f"- `{name}` ({kind}{default}): {_sentence(field.description or '')}"


def _type_of(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(
            f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`" for value in arguments
        )
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if argument is type(None) else _type_of(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _type_of(arguments[0]) + _limits(arguments[1:])
    if origin is list:
        return "list of " + _type_of(arguments[0]).replace("section", "sections")
    if origin is dict:
        return f"mappings from text to {_type_of(arguments[1])}"
    if annotation is Any:
        return "values of any type"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def _limits(metadata: Any) -> str:
    """The bounds of a number as `, > 0`; those that only guard against overflow are left out."""
    found = []
    for item in metadata:
        # pydantic keeps the limits of a nested `Field(...)` in its own metadata.
        for limit in getattr(item, "metadata", [item]):
            if isinstance(limit, annotated_types.Gt | annotated_types.Ge | annotated_types.Lt | annotated_types.Le):
                ((sign, value),) = _bound(limit).items()
                if abs(value) < 2**32:
                    found.append(f", {_SIGNS[sign]} {value}")
    return "".join(found)


def _bound(limit: Any) -> dict[str, Any]:
    """The name and value of the single bound of an annotated-types limit."""
    return {name: getattr(limit, name) for name in _SIGNS if hasattr(limit, name)}


def commands_page() -> str:
    """The reference of the command line: usage, arguments and options of every command."""
    intro = (
        "Results go to stdout, everything else to stderr. In brackets stand the defaults. "
        "[operations.md](../operations.md#exit-codes) lists the exit codes."
    )
    commands = dict(_commands(typer.main.get_command(app), "fcsd"))
    rows = {name: dict(_rows(command)) for name, command in commands.items()}
    counts = Counter(row for own in rows.values() for row in own.values())
    shared = {row: name for own in rows.values() for name, row in own.items() if counts[row] > 1}
    everywhere = [row for row in shared if counts[row] == len(commands)]
    several = sorted(row for row in shared if row not in everywhere)
    parts = ["# Command reference", _GENERATED, intro]
    parts += ["## Every command has", "\n".join(everywhere), "## Several commands have", "\n".join(several)]
    for name, command in commands.items():
        own = [row for row in rows[name].values() if row not in shared]
        also = [f"`{shared[row]}`" for row in rows[name].values() if row in several]
        parts += [f"## `{' '.join([name, *_usage(command)])}`", _sentence(command.help or "")]
        parts += ["\n".join(own)] if own else []
        parts += [f"It has {', '.join(also)}, too."] if also else []
    return "\n\n".join(parts) + "\n"


def _rows(command: Any) -> Iterator[tuple[str, str]]:
    """The name and the line of each argument and option, in the order of the help."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    groups = panels(parameter for parameter in command.params if parameter.name != "help")
    for parameter in chain(arguments, *groups.values()):
        named = _metavar(parameter) if parameter.param_type_name == "argument" else max(parameter.opts, key=len)
        yield named, _parameter_row(parameter)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The commands of a group and of the groups inside it, by their full names."""
    for inner, found in sorted(getattr(command, "commands", {}).items()):
        if hasattr(found, "commands"):
            yield from _commands(found, f"{name} {inner}")
        else:
            yield f"{name} {inner}", found


def _usage(command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = [_metavar(p) if p.required else f"[{_metavar(p)}]" for p in arguments]
    return shown


def _metavar(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _parameter_row(parameter: Any) -> str:
    default = _parameter_default(parameter)
    if parameter.param_type_name == "argument":
        named = _metavar(parameter)
    else:
        named = ", ".join(parameter.opts) + ("" if parameter.is_flag else f" {_value(parameter)}")
    return f"- `{named}`{default and f' ({default})'}: {_sentence(parameter.help or '')}"


_WORDS = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def _value(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    given = [kind for kind in (annotation, *get_args(annotation)) if kind in _WORDS]
    return parameter.metavar or _WORDS[given[0]]


def _parameter_default(parameter: Any) -> str:
    if parameter.required:
        return "required" if parameter.param_type_name == "option" else ""
    if parameter.default in (None, False, []) or parameter.default == ():
        return ""
    return f"`{parameter.default}`"


def _sentence(text: str) -> str:
    """A docstring or help text on one line. Its reStructuredText quotes become Markdown quotes."""
    return re.sub(r"\s+", " ", text).strip().replace("``", "`")


if __name__ == "__main__":
    main()
