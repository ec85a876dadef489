"""Have the weights of a checkpoint changed? Answered from a few kilobytes of every tensor."""

import hashlib

from fcsd.checkpoint.files import open_regular
from fcsd.checkpoint.layout import Layout

_BYTES = 4096  # of each tensor; a step of any optimiser changes some of them


def sample_sha256(layout: Layout) -> str:
    """SHA-256 over the first ``_BYTES`` bytes of every tensor, by shard and by place in it."""
    digest = hashlib.sha256()
    for name, header in sorted(layout.shards.items()):
        with open_regular(layout.files[name]) as file:
            for tensor in sorted(header.values(), key=lambda tensor: tensor.start):
                file.seek(tensor.start)
                digest.update(file.read(min(_BYTES, tensor.end - tensor.start)))
    return digest.hexdigest()
