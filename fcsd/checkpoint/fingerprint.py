"""Hashes that identify a checkpoint: by its config and headers, by samples of its weights, or by all of its bytes."""

import hashlib

from fcsd.checkpoint.files import contained, open_regular
from fcsd.checkpoint.layout import INDEX, Layout

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
    for name, path in sorted(layout.files.items()):
        with open_regular(path) as file:
            digest.update(f" {name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    for name in sorted(beside):
        if (path := contained(layout.path, *name.split("/"))).exists():
            with open_regular(path) as file:
                digest.update(f" {name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


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
