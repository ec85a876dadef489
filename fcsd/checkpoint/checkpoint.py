"""A checkpoint that a command has opened, whether its tokenizer fits it, and the hashes that identify it.

Each of its files is read once.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.checkpoint.config_json import CheckpointConfig, read_config
from fcsd.checkpoint.files import (
    INDEX,
    MAX_JSON,
    Header,
    Layout,
    contained,
    open_regular,
    quoted,
    read_layout,
    read_object,
    shown,
)
from fcsd.checkpoint.staging import MAX_SIDE_FILE, side_files
from fcsd.checkpoint.verify import Comparison, verify_tensors
from fcsd.errors import BadInputError

_BASE_PATH = ".fcsd.json"
_DECIDING = (".json", ".jinja", "merges.txt", "vocab.txt", ".model", ".tiktoken")  # files beside the weights
# What to do about a tokenizer of another model.
_OTHER_TOKENIZER = (
    "Copy the tokenizer of this model here, or give the model these rows (resize_token_embeddings of transformers)."
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine. What its files say is read when it is first asked for, and then kept.

    Every property raises BadInputError if the files that it reads are missing or malformed. A command asks in the order
    in which it refuses what is wrong.

    Attributes:
        path: its directory.
        repo_id: ``org/name``, if it comes from the hub.
        revision: the commit on the hub.
        gated: whether the hub asks for terms to be accepted.
        trust_remote_code: whether an original may ask for code of its own to be run. It is never run.
        remote: gives functions that read the headers of those shards that need not be on this machine.
    """

    path: Path
    repo_id: str | None = None
    revision: str | None = None
    gated: bool = False
    trust_remote_code: bool = False
    remote: Callable[[], Mapping[str, Callable[[], Header]]] = dict

    @property
    def name(self) -> str:
        """The hub id or, for a directory, its path."""
        return self.repo_id or str(self.path)

    @cached_property
    def config(self) -> CheckpointConfig:
        """The content of config.json; see ``read_config``."""
        return read_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def layout(self) -> Layout:
        """The tensors and shards; see ``read_layout``."""
        return read_layout(self.path, remote=self.remote())

    @cached_property
    def _comparison(self) -> Comparison:
        return verify_tensors(self.layout, self.config)

    def verify(self) -> Comparison:
        """Check that config.json, the tokenizer and the headers agree; see ``verify_tensors``."""
        self.require_usable()
        return self._comparison

    @cached_property
    def size_problem(self) -> str | None:
        """What disagrees with the rows of the embedding, in words: tokens of the tokenizer, or the ends of texts."""
        rows = self.config.text.get("vocab_size")
        return tokens_without_a_row(self.path, rows) or ends_without_a_row(self.path, self.config.text, rows)

    def require_usable(self, *, headers: bool = True) -> None:
        """Check what can be checked without transformers: config.json, the tokenizer's size, and headers.

        Args:
            headers: whether the weights are on this machine.
        """
        if self.size_problem:
            raise BadInputError(f"{self.path}: {self.size_problem}", _OTHER_TOKENIZER)
        if headers:
            _ = self.layout

    @cached_property
    def fingerprint(self) -> str:
        """See :func:`fingerprint`."""
        return fingerprint(self.layout)

    def side_files(self, written: Set[str]) -> dict[str, Path]:
        """The files that a new directory copies, but for the weights and the names ``written``; see ``side_files``."""
        return side_files(self.path, written | self.layout.shards.keys())

    @cached_property
    def original(self) -> str | None:
        """What a converted model records of its original: its hub id with the commit, its path here, or only its name.

        It is None if the model names none.
        """
        block = self.config.raw.get("fcsd") or {}
        if block.get("base_model") and (revision := block.get("base_revision")):
            return f"{block['base_model']}@{revision}"
        return block.get("base_model") and (self._base_path() or block["base_model"])

    def _base_path(self) -> str | None:
        """The path in the file of :meth:`base_path_file`; None if there is no such file."""
        if not (self.path / _BASE_PATH).exists():
            return None
        path = read_object(contained(self.path, _BASE_PATH)).get("base_path")
        if not isinstance(path, str):
            hint = "Delete it, and set `teacher:` in recipes."
            raise BadInputError(f"{self.path / _BASE_PATH}: has no base_path", hint)
        return path

    def base_path_file(self) -> dict[str, str]:
        """The file of a conversion that records the path of this original on this machine, as name -> text.

        The file is hidden, so neither ``fcsd export`` nor ``fcsd push`` copies it. For an original on the hub the
        result is empty.
        """
        if self.repo_id is not None:
            return {}
        return {_BASE_PATH: json.dumps({"base_path": str(self.path.resolve())}) + "\n"}

    def origin(self, *, hashed: bool = True) -> dict[str, str | None]:
        """The fields of the ``fcsd`` block that describe this original. A directory is recorded by its name alone.

        Args:
            hashed: whether the fingerprint is among them.
        """
        return {
            "base_model": self.repo_id or self.path.resolve().name,
            "base_revision": self.revision,
            "base_sha256": self.fingerprint if hashed else None,
        }

    def require_original(self) -> None:
        """Check that the checkpoint has the standard wiring.

        Raises:
            BadInputError: it is rewired already.
        """
        if self.config.rewired is None:
            return
        if self.config.foreign:
            raise BadInputError(
                f"{self.path}: is rewired already, by AMD's farskip keys",
                "Only an original can be rewired, and this model has none; `fcsd convert` takes Instella-MoE as it is.",
            )
        original = shown(self.original or "it is not recorded")
        raise BadInputError(f"{self.path}: is converted already", f"Convert its original instead: {original}")


def fingerprint(layout: Layout) -> str:
    """SHA-256 of a checkpoint's config and headers; no tensor is read.

    The hash covers, in this order: the bytes of config.json; the bytes of the index, if there is one; then for every
    shard, sorted by name, its name, its size in decimal, and its header with the eight bytes of length before it. Two
    checkpoints that differ only in tensor values have the same fingerprint.

    Raises:
        BadInputError: a file is missing or not a regular file.
    """
    digest = hashlib.sha256()
    for name in ("config.json", *([INDEX] if layout.indexed else [])):
        with open_regular(contained(layout.path, name)) as file:
            digest.update(file.read())
    for name, path in sorted(layout.files.items()):
        with open_regular(path) as file:
            length = file.read(8)
            digest.update(f"{name} {path.stat().st_size} ".encode() + length)
            digest.update(file.read(int.from_bytes(length, "little")))
    return digest.hexdigest()


def content_sha256(layout: Layout, *beside: str) -> str:
    """SHA-256 of all bytes of a checkpoint's weights, of its config with fcsd's block in it, and of its headers.

    Args:
        beside: names of other files in its directory, whose bytes are hashed, too, where they exist.

    Raises:
        BadInputError: a file is missing or not a regular file.
    """
    digest = hashlib.sha256(fingerprint(layout).encode())
    others = {name: contained(layout.path, *name.split("/")) for name in beside}
    files = layout.files | {name: path for name, path in others.items() if path.exists()}
    for name, path in sorted(files.items()):
        digest.update(f" {name} {path.stat().st_size} ".encode())
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def whole_sha256(layout: Layout) -> str:
    """``content_sha256`` with every file that decides what a model computes and reads, its tokenizer and templates.

    A conversion of the same weights to another wiring changes this hash. The card, the licence and files of code do
    not: fcsd runs no code of a directory, not even its own, and so no code decides what it computes.

    Raises:
        BadInputError: see ``content_sha256`` and ``side_files``.
    """
    return content_sha256(layout, *(name for name in side_files(layout.path) if name.endswith(_DECIDING)))


class _Token(NamedTuple):
    """A token of a vocabulary; ``special`` if only a text that spells it out can hold it."""

    text: str
    special: bool


def tokens_without_a_row(path: Path, rows: int | None) -> str | None:
    """What is wrong, in words, if a text can have tokens for which an embedding of ``rows`` rows has none; else None.

    A special token counts if texts begin or end with it, or if the chat template writes it. Published models have
    others, such as Gemma 3's for images. The tokenizer is not loaded, because it may hold anything: files that are
    damaged or of another form are left to what reads them.

    Args:
        path: a model directory.
        rows: None if config.json does not say it.
    """
    if rows is None:
        return None
    beyond = {number: token for number, token in _vocabulary(path).items() if number >= rows}
    written = _written_specials(path) if beyond else ""
    lacking = {number: token.text for number, token in beyond.items() if not token.special or token.text in written}
    if not lacking:
        return None
    number = min(lacking)
    text = f"the tokenizer has {len(lacking)} tokens more than the {rows} rows of the embedding"
    return f"{text} ({quoted(lacking[number])} is number {number})"


def ends_without_a_row(path: Path, text: Mapping[str, Any], rows: int | None) -> str | None:
    """What is wrong, in words, if no token at which a model is to end a text is one that it can choose; else None.

    Args:
        text: the decoder's part of config.json; the other arguments are those of ``tokens_without_a_row``.
    """
    for name, content in (("generation_config.json", _content(path, "generation_config.json")), ("config.json", text)):
        ends = content.get("eos_token_id")
        numbers = ends if isinstance(ends, list) else [ends]
        if rows is not None and numbers and all(type(number) is int and number >= rows for number in numbers):
            return f"eos_token_id of {name} is {ends}, and the embedding has {rows} rows: no text would end"
    return None


def _vocabulary(path: Path) -> dict[int, _Token]:
    """The tokens of tokenizer.json, or of the tables in place of it, and those added by tokenizer_config.json."""
    whole = _content(path, "tokenizer.json")
    model, listed = whole.get("model"), whole.get("added_tokens")
    table = model.get("vocab") if isinstance(model, dict) else _content(path, "vocab.json")
    if isinstance(table, list):  # pairs of a token and its score
        table = {str(pair[0]): number for number, pair in enumerate(table) if isinstance(pair, list) and pair}
    pairs = (table if isinstance(table, dict) else {}) | ({} if whole else _content(path, "added_tokens.json"))
    found = {number: _Token(text, False) for text, number in pairs.items() if type(number) is int}
    added = _content(path, "tokenizer_config.json").get("added_tokens_decoder")
    numbered = added.items() if isinstance(added, dict) else ()
    entries = [{**e, "id": int(number)} for number, e in numbered if isinstance(e, dict) and number.isdecimal()]
    for entry in [*entries, *(listed if isinstance(listed, list) else [])]:
        if isinstance(entry, dict) and type(entry.get("id")) is int:
            found[entry["id"]] = _Token(str(entry.get("content")), entry.get("special") is True)
    return found


def _written_specials(path: Path) -> str:
    """A text that holds every special token which begins or ends texts, and the chat templates."""
    config, parts = _content(path, "tokenizer_config.json"), []
    for content in (config, _content(path, "special_tokens_map.json")):
        parts += [content.get(name) for name in ("bos_token", "eos_token")]
    parts += [config.get("chat_template"), _content(path, "chat_template.json").get("chat_template")]
    with suppress(BadInputError, UnicodeDecodeError), open_regular(contained(path, "chat_template.jinja")) as file:
        parts.append(file.read(MAX_JSON).decode())
    return " ".join(map(str, parts))


def _content(path: Path, name: str) -> dict[str, Any]:
    """A JSON object beside the weights; empty if the file is missing or damaged."""
    try:
        return read_object(contained(path, name), MAX_SIDE_FILE)
    except BadInputError:
        return {}
