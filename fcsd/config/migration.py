"""The command `fcsd recipes migrate`: replaces a recipe's old keys by today's and keeps its comments and values."""

import copy
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from fcsd.config.renamed import NEW_NAME, renames
from fcsd.errors import ConfigError, DiskError
from fcsd.recipes import strict_yaml

_OLD_SECTION = "train"  # the section that held every old key of the table
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)


def migrate(path: Path, out: Path | None = None, *, force: bool = False) -> Path:
    """Rewrites a recipe with today's keys.

    Args:
        path: the recipe. Its bases are not rewritten.
        out: the file to write, or a directory to write it into; None for `path` itself.
        force: replace an existing file.

    Returns:
        The file that was written. If `path` was to be replaced and has no old keys, it is returned unchanged.

    Raises:
        ConfigError: the recipe is not strict YAML or cannot be rewritten, or the file exists and `force` is not given.
        DiskError: the file cannot be written.
    """
    strict_yaml.parse_file(path)
    before = path.read_bytes().decode("utf-8")
    after = migrated(before, str(path))
    target = path if out is None else out / path.name if out.is_dir() else out
    if target.resolve() == path.resolve() and after == before:
        return path
    if target.exists() and not force:
        raise ConfigError(f"{target} exists", hint="name another file with --out, or replace this one with --force")
    real = target.resolve()
    part = real.with_name(f".{real.name}.tmp-{uuid4().hex[:8]}")
    try:
        part.write_text(after, encoding="utf-8", newline="")
        part.replace(real)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DiskError(f"{target}: cannot be written: {error.strerror}") from error
    return target


def migrated(text: str, name: str) -> str:
    """The text of a recipe with today's keys.

    Args:
        text: the recipe, strict YAML.
        name: the recipe's name in error messages.

    Raises:
        ConfigError: the text is not a recipe, it has both an old key and the new section, or its form is too unusual to
            be rewritten with all values intact.
    """
    values, lines = strict_yaml.parse(text, name)
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: not a recipe: expected `key: value` lines")
    found = renames(values)
    if not found:
        return text
    for section in dict.fromkeys(new.partition(".")[0] for new in found.values()):
        if section in values and section != "sweep":
            raise ConfigError(
                f"{name}:{lines[section]}: the recipe has the section {section!r} and old keys of it in `train`",
                hint="move the old keys into the section by hand",
            )
    expected = _moved(values, found)
    if _is_json(text):
        return json.dumps(expected, indent=2, ensure_ascii=False) + "\n"
    plain = text.replace("\r\n", "\n")
    result = _rewritten(plain, values)
    try:
        intact = strict_yaml.parse(result, name)[0] == expected
    except ConfigError:
        intact = False
    if not intact or sorted(_COMMENT.findall(result)) != sorted(_COMMENT.findall(plain)):
        raise ConfigError(
            f"{name}: the recipe cannot be rewritten automatically",
            hint="write its `train` section as one `key: value` line for each key",
        )
    return result.replace("\n", "\r\n") if "\r\n" in text else result


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _moved(values: dict[str, Any], found: dict[str, str]) -> dict[str, Any]:
    """The recipe's values under today's keys. Sections that have become empty are left out."""
    result = copy.deepcopy(values)
    for stage in (result.get("sweep") or {}).get("stages") or []:
        renamed = {NEW_NAME.get(key, key): value for key, value in stage.items()}
        stage.clear()
        stage.update(renamed)
    for old, new in found.items():
        if old.startswith("sweep."):
            continue
        *parents, last = old.split(".")
        sections = [result]
        for parent in parents:
            sections.append(sections[-1][parent])
        section, key = new.split(".")
        result.setdefault(section, {})[key] = sections[-1].pop(last)
        for parent, (outer, inner) in reversed(list(zip(parents, pairwise(sections), strict=True))):
            if not inner:
                del outer[parent]
    return result


def _rewritten(text: str, values: dict[str, Any]) -> str:
    """The text with the keys of sweep stages renamed and the old section split into today's sections."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    edits = [
        (key.start_mark.index, key.end_mark.index, NEW_NAME[key.value])
        for stage in _stages(root)
        for key, _ in stage.value
        if key.value in NEW_NAME
    ]
    if any(old.startswith(f"{_OLD_SECTION}.") for old in renames(values)):
        key, section = next(pair for pair in root.value if pair[0].value == _OLD_SECTION)
        later = [k.start_mark.line for k, _ in root.value if k.start_mark.line > key.start_mark.line]
        edits.append(_split_section(text, key, section, min(later, default=text.count("\n") + 1)))
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _stages(root: Any) -> list[Any]:
    """The YAML mappings in `sweep.stages`."""
    sweep = next((value.value for key, value in root.value if key.value == "sweep"), [])
    return next((value.value for key, value in sweep if key.value == "stages"), [])


def _split_section(text: str, key: Any, section: Any, limit: int) -> tuple[int, int, str]:
    """The text of today's sections that replaces the old section.

    Args:
        key: the YAML node of the old section's name.
        section: the YAML node of its value.
        limit: the line of the next section, from 0.

    Returns:
        Where the old section starts and ends in the text, and what replaces it.
    """
    lines = text.split("\n")
    first = key.start_mark.line
    end = 1 + max(n for n in range(first, limit) if lines[n].strip() not in ("", "...") and lines[n][0] != "#")
    lines = lines[:end]
    title, entries, rest = _from_braces(lines, section) if section.flow_style else _from_lines(lines, first, section)
    parts: dict[str, list[str]] = {_OLD_SECTION: [title]}
    for new_key, own in entries:
        name = new_key.partition(".")[0]
        parts.setdefault(name, [f"{name}:"]).extend(own)
    if len(parts[_OLD_SECTION]) == 1:  # every key has moved, but a comment beside the section's name is kept
        parts[_OLD_SECTION] = _COMMENT.findall(title)
    parts[_OLD_SECTION] += rest
    start = key.start_mark.index
    replacement = "\n\n".join("\n".join(part) for part in parts.values() if part)
    return start, start + len("\n".join(lines[first:])), replacement


def _from_lines(lines: list[str], first: int, section: Any) -> tuple[str, list[tuple[str, list[str]]], list[str]]:
    """The title, the entries (today's key and its lines) and the closing comments of a section in block style."""
    starts = [key.start_mark.line for key, _ in section.value]
    entries, before = [], first + 1
    for (key, value), start, limit in zip(section.value, starts, [*starts[1:], len(lines)], strict=True):
        end = 1 + max(n for n in range(start, limit) if lines[n].strip() and lines[n].strip()[0] != "#")
        new, inner, held = _new_key(key, value)
        lead, own = lines[before:start], lines[start:end]
        if new is None:
            entries.append((f"{_OLD_SECTION}.{key.value}", lead + own))
        elif inner is key:
            name, mark = new.rpartition(".")[2], key.start_mark.column
            own[0] = own[0][:mark] + name + own[0][key.end_mark.column :]
            entries.append((new, [line for line in lead if line.strip()] + own))
        else:
            indent, whole = " " * key.start_mark.column, "\n".join(lines)
            past = len("\n".join(lines[:end]))
            outer = whole[key.end_mark.index : inner.start_mark.index]
            entry = _entry(indent, new, outer, _source(whole, held), whole[held.end_mark.index : past])
            entries.append((new, [line for line in lead if line.strip()] + entry))
        before = end
    return lines[first], entries, lines[before:]


def _from_braces(lines: list[str], section: Any) -> tuple[str, list[tuple[str, list[str]]], list[str]]:
    """As `_from_lines`, for a section in flow style, `train: {lr: 1e-3, steps: 10}`; the result is in block style."""
    text = "\n".join(lines)
    entries, before = [], section.start_mark.index
    followers = [key.start_mark.index for key, _ in section.value[1:]]
    for (key, value), limit in zip(section.value, [*followers, section.end_mark.index], strict=True):
        new, inner, held = _new_key(key, value)
        line_end = text.find("\n", value.end_mark.index)
        after = min(limit, line_end) if line_end >= 0 else limit  # a comment on the value's line belongs to it
        lead = text[before : inner.start_mark.index]
        trail = text[held.end_mark.index : after]
        new = new or f"{_OLD_SECTION}.{key.value}"
        entries.append((new, _entry("  ", new, lead, _source(text, held), trail)))
        before = after
    comments = _COMMENT.findall(text[section.end_mark.index :])
    closing = [f"  {comment}" for comment in _COMMENT.findall(text[before : section.end_mark.index])]
    return " ".join([f"{_OLD_SECTION}:", *comments]), entries, closing


def _new_key(key: Any, value: Any) -> tuple[str | None, Any, Any]:
    """Today's dotted key of an entry of the old section or None, and the YAML nodes of its innermost key and value."""
    old = f"{_OLD_SECTION}.{key.value}"
    nested = value.value if isinstance(value, yaml.MappingNode) else []
    if len(nested) == 1 and f"{old}.{nested[0][0].value}" in NEW_NAME:
        return NEW_NAME[f"{old}.{nested[0][0].value}"], *nested[0]
    return NEW_NAME.get(old), key, value


def _source(text: str, value: Any) -> str:
    return text[value.start_mark.index : value.end_mark.index]


def _entry(indent: str, key: str, lead: str, value: str, trail: str) -> list[str]:
    """The lines of a key: the comments before it, then the key, its value as written, and the comments after it."""
    comments = [indent + comment for comment in _COMMENT.findall(lead)]
    return [*comments, " ".join([f"{indent}{key.rpartition('.')[2]}: {value}".rstrip(), *_COMMENT.findall(trail)])]
