"""Reads and writes the strict subset of YAML that recipes use, and records the line of every value.

PyYAML reads YAML 1.1, where `2e-5` is a string, `no` is False, `010` is 8 and `1:30` is 90. Recipes follow
YAML 1.2's core schema with decimal numbers only. Constructs that can hide a mistake (tags, anchors, duplicate keys,
tabs, a byte-order mark) are errors that name the line.
"""

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

import yaml

from fcsd.disk import open_input
from fcsd.errors import ConfigError
from fcsd.strict_json import MAX_DEPTH, StrictJsonError, whole_number

MAX_BYTES = 256 * 1024

_SCALARS = {
    "null": re.compile(r"null|Null|NULL|~|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    "float": re.compile(
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}


def parse_file(path: Path) -> tuple[object, dict[str, int]]:
    """Reads a YAML file; see `parse`.

    Raises:
        ConfigError: the file does not exist, is not UTF-8, has a byte-order mark, is over 256 kB, or is not strict
            YAML.
    """
    if not path.is_file():
        if path.exists():
            raise ConfigError(f"{path}: not a regular file", "A recipe is a YAML file.")
        close = get_close_matches(path.name, [other.name for other in path.parent.glob("*.y*ml")], n=1)
        guess = f"Did you mean {path.parent / close[0]}? " if close else ""
        copy = f"`fcsd recipes copy NAME --out {path}` writes a packaged recipe there, for you to edit."
        raise ConfigError(f"{path}: no such file", guess + copy)
    try:
        with open_input(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} kB, which no recipe is")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text") from error
    return parse(text, str(path))


def parse(text: str, name: str) -> tuple[object, dict[str, int]]:
    """Parses one YAML document.

    Args:
        name: the document's name in error messages, usually the file's path.

    Returns:
        The value, and the 1-based line of each key and list item by dotted path (`optim.lr`,
        `data.sources.0.path`; the document itself is `""`).

    Raises:
        ConfigError: the text is not strict YAML; the message starts with `name:line`.
    """
    for line, content in enumerate(text.split("\n"), start=1):
        if "\ufeff" in content:
            raise ConfigError(f"{name}:{line}: there is a byte-order mark", hint="Save it as UTF-8 without BOM.")
        if "\t" in content:
            raise ConfigError(
                f"{name}:{line}: there is a tab character", hint=r'Use spaces; in a quoted string write "\t".'
            )
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is None:
            return None, {"": 1}
        return _value(node, "", lines), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{name}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: character U+{error.character:04X} is not allowed") from error


def dump(value: Mapping[str, object], comments: Mapping[str, str]) -> str:
    """Block-style YAML that `parse` reads back, each value followed by its comment (by dotted path)."""
    return "".join(f"{line}\n" for line in _lines(value, "", "", comments))


class _Loader(yaml.SafeLoader):
    """Composes nodes as PyYAML does, but without types, tags and anchors, and with a limited depth."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own class attribute)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if event.anchor is not None:
            raise _problem("anchors (&) and aliases (*) are not allowed; repeat the value", event)
        if event.tag is not None:
            raise _problem(f"tags are not allowed: {event.tag}", event)
        if self.depth == MAX_DEPTH:
            raise _problem(f"nested more than {MAX_DEPTH} levels deep", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _problem(text: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=at.start_mark)


def _value(node: yaml.Node, key: str, lines: dict[str, int]) -> object:
    """The Python value of a node; records the line of everything below it in `lines`."""
    lines.setdefault(key, node.start_mark.line + 1)
    prefix = f"{key}." if key else ""
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{prefix}{i}", lines) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    result: dict[str, object] = {}
    for name_node, value_node in node.value:
        name = _scalar(name_node) if isinstance(name_node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            raise _problem("a key must be a word", name_node)
        if name in result:
            raise _problem(f"duplicate key {name!r}, first on line {lines[prefix + name]}", name_node)
        lines[prefix + name] = name_node.start_mark.line + 1
        result[name] = _value(value_node, prefix + name, lines)
    return result


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    text = node.value
    kind = next((k for k, pattern in _SCALARS.items() if pattern.fullmatch(text)), "str")
    if node.style is not None or kind == "str":  # quoted and block scalars are always text
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        try:
            return whole_number(text)
        except StrictJsonError as error:
            raise _problem(str(error), node) from None
    number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(number):
        raise _problem(f"{text[:24]} is not a finite number", node)
    return number


def _lines(mapping: Mapping[str, object], key: str, indent: str, comments: Mapping[str, str]) -> Iterator[str]:
    for name, value in mapping.items():
        here = f"{key}.{name}" if key else name
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, here, f"{indent}  ", comments)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{name}:"
            for i, item in enumerate(value):
                first, *rest = _lines(item, f"{here}.{i}", f"{indent}    ", comments)
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield f"{f'{indent}{name}: {_written(value)}':<48} # {comments[here]}"


def _written(value: object) -> str:
    """The YAML text of a value: plain where `parse` reads that back as the same value, double-quoted otherwise."""
    if isinstance(value, float):
        return repr(value)
    plain = yaml.safe_dump(value, width=math.inf, allow_unicode=True, default_flow_style=True)
    plain = plain.removesuffix("\n").removesuffix("\n...")
    if parse(plain, "")[0] == value:
        return plain
    return yaml.safe_dump(value, width=math.inf, allow_unicode=True, default_style='"').removesuffix("\n")
