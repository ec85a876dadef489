"""Which weights are these? Sums that identify a checkpoint without reading all of it."""

import hashlib

from fcsd.checkpoint.files import contained, open_regular
from fcsd.checkpoint.layout import INDEX, Layout

_BYTES = 4096  # of each tensor; a step of any optimizer changes some of them


def fingerprint(layout: Layout) -> str:
    """SHA-256 of a checkpoint's config and headers; no tensor is read.

    Hashed, in this order: the bytes of config.json; those of the index, if there is one; then for every shard, by
    name, its name, its size in decimal, and its header with the eight bytes of length before it. Two checkpoints
    that differ in tensor values alone have the same fingerprint.

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


def sample_sha256(layout: Layout) -> str:
    """SHA-256 of the first ``_BYTES`` bytes of every tensor, by shard and by place in it: changed by training."""
    digest = hashlib.sha256()
    for name, header in sorted(layout.shards.items()):
        with open_regular(layout.files[name]) as file:
            for tensor in sorted(header.values(), key=lambda tensor: tensor.start):
                file.seek(tensor.start)
                digest.update(file.read(min(_BYTES, tensor.end - tensor.start)))
    return digest.hexdigest()
