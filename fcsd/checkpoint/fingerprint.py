"""Hashes that identify a checkpoint: by its config and headers, by samples of its weights, or by all of its bytes."""

import hashlib

from fcsd.checkpoint.files import contained, open_regular
from fcsd.checkpoint.layout import INDEX, Layout
from fcsd.checkpoint.side_files import side_files

_DECIDING = (".json", ".jinja", "merges.txt", "vocab.txt", ".model", ".tiktoken")  # files beside the weights
_BYTES = 4096  # bytes of each tensor that are hashed; a step of any optimizer changes some of them


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

    A conversion of the same weights to another wiring changes this hash. The card and the licence do not.

    Raises:
        BadInputError: see ``content_sha256`` and ``side_files``.
    """
    return content_sha256(layout, *(name for name in side_files(layout.path) if name.endswith(_DECIDING)))


def sample_sha256(layout: Layout) -> str:
    """SHA-256 of the first ``_BYTES`` bytes of every tensor, in the order of shards and of places in a shard.

    Training changes this hash.
    """
    digest = hashlib.sha256()
    for name, header in sorted(layout.shards.items()):
        with open_regular(layout.files[name]) as file:
            for tensor in sorted(header.values(), key=lambda tensor: tensor.start):
                file.seek(tensor.start)
                digest.update(file.read(min(_BYTES, tensor.end - tensor.start)))
    return digest.hexdigest()
