"""Chooses and checks the files beside the weights that a new directory copies: tokenizer, templates, licence, card.

A directory that fcsd writes contains no code but fcsd's own. Code files and pickles of an original are not copied, and
an ``auto_map`` of an original is removed from the files that hold one.
"""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from fcsd.checkpoint.files import check_regular, contained, quoted, read_object
from fcsd.checkpoint.layout import INDEX
from fcsd.errors import BadInputError

# Files with the same weights in another format. A new directory does not copy them.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
MAX_SIDE_FILE = 256 << 20  # bytes; the longest tokenizer.json in use is below 40 MB
_TEMPLATES = "additional_chat_templates"  # the only folder whose files are copied
_CODE = (".py", ".pyc", ".so")
# Files that run code when they are loaded. The tokenizers that transformers builds need none of them.
_PICKLES = (".pkl", ".pickle", ".joblib", ".dill")

# The files that transformers reads as JSON objects, and may read an ``auto_map`` from.
_MAY_NAME_CODE = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")
_MAY_NAME_CODE += ("preprocessor_config.json", "image_processor_config.json", "video_preprocessor_config.json")
_OBJECTS = (*_MAY_NAME_CODE, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")


def side_files(path: Path, written: Set[str] = frozenset(), *, code: Set[str] = frozenset()) -> dict[str, Path]:
    """The files of a checkpoint directory that a new directory copies unchanged, and the index of its weights.

    Hidden files, weights, pickles and folders other than ``additional_chat_templates`` are left out.

    Args:
        written: names that the caller writes itself; they are left out, too.
        code: names of code files to copy; all other code files are left out.

    Returns:
        Name, relative to ``path`` -> the regular file behind it.

    Raises:
        BadInputError: a file is not a regular file, is larger than ``MAX_SIDE_FILE``, leaves the directory by a link,
            has a name that is not UTF-8, or is not the JSON object that transformers expects.
    """
    names = [entry.name for entry in path.iterdir() if not entry.is_dir()]
    names = [name for name in names if not name.startswith(".") and not name.endswith(OTHER_WEIGHTS)]
    if (path / _TEMPLATES).is_dir():
        names += [f"{_TEMPLATES}/{entry.name}" for entry in (path / _TEMPLATES).iterdir()]
    names = [name for name in names if name in code or not name.lower().endswith(_CODE + _PICKLES)]
    found = {name: contained(path, *name.split("/", 1)) for name in sorted(set(names) - written)}
    for name, file in found.items():
        size = check_regular(file)
        if size > MAX_SIDE_FILE:
            raise BadInputError(
                f"{path / name}: has {size} bytes; the limit for a file beside the weights is {MAX_SIDE_FILE >> 20} MB",
                "Move it out of the directory.",
            )
        if name in _OBJECTS:
            read_object(file, MAX_SIDE_FILE)
    if (path / INDEX).exists() and INDEX not in written:
        found[INDEX] = contained(path, INDEX)
    return found


def without_code(files: dict[str, Path]) -> dict[str, str]:
    """The files of :func:`side_files` that hold an ``auto_map`` -> their JSON text without it."""
    texts = {}
    for name, file in files.items():
        if name in _MAY_NAME_CODE:
            content = read_object(file)
            if (plain := _stripped(content)) != content:
                texts[name] = json.dumps(plain, indent=2) + "\n"
    return texts


def refuse_code(path: Path) -> None:
    """Check that an original asks for no code of its own to be run.

    Raises:
        BadInputError: a file holds an ``auto_map``.
    """
    for name in _MAY_NAME_CODE:
        if (path / name).exists() and (content := read_object(contained(path, name))) != _stripped(content):
            raise BadInputError(
                f"{path / name}: auto_map asks for code of its own to be run",
                "With --trust-remote-code fcsd accepts the checkpoint. It never runs that code: it uses the classes of "
                "transformers, and leaves the code out of what it writes.",
            )


def refuse_foreign_code(path: Path, own_map: dict[str, str], own_files: Set[str]) -> None:
    """Check that the only code of a converted directory is the code that fcsd writes.

    Args:
        own_map: the ``auto_map`` that fcsd writes into its config.json.

    Raises:
        BadInputError: a file holds another ``auto_map``, or there is another code file.
    """
    hint = "fcsd did not write this. Remove it, or convert the base model again."
    for name in _MAY_NAME_CODE:
        if not (path / name).exists():
            continue
        content = read_object(contained(path, name))
        if name == "config.json" and content.get("auto_map") == own_map:
            del content["auto_map"]
        if content != _stripped(content):
            raise BadInputError(f"{path / name}: auto_map names code that is not fcsd's", hint)
    for entry in sorted(path.iterdir()):
        if entry.name.endswith(_CODE) and entry.name not in own_files:
            raise BadInputError(f"{path}: {quoted(entry.name)} is code that is not fcsd's", hint)


def _stripped(value: Any) -> Any:
    """A JSON value without the keys ``auto_map`` that name something. Its depth was limited by the parser."""
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if key != "auto_map" or item is None}
    if isinstance(value, list):
        return [_stripped(item) for item in value]
    return value
