"""A checkpoint that a command has opened, each of whose files is read once, and the hashes that identify it."""

import hashlib
import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fcsd.checkpoint.config_json import CheckpointConfig, read_config
from fcsd.checkpoint.files import contained, open_regular, read_object, shown
from fcsd.checkpoint.layout import INDEX, Header, Layout, read_layout
from fcsd.checkpoint.side_files import side_files
from fcsd.checkpoint.tokenizer import OTHER_TOKENIZER, ends_without_a_row, tokens_without_a_row
from fcsd.checkpoint.verify import Comparison, verify_tensors
from fcsd.errors import BadInputError

_BASE_PATH = ".fcsd.json"
_DECIDING = (".json", ".jinja", "merges.txt", "vocab.txt", ".model", ".tiktoken")  # files beside the weights


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
            raise BadInputError(f"{self.path}: {self.size_problem}", OTHER_TOKENIZER)
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
