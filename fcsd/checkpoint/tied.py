"""Compares tensors that config.json ties to one another but that the files hold apart, such as the output head.

transformers keeps both tensors if they differ, and other programs (vLLM, a model built without its weights) tie them
by the config. Such a checkpoint would compute different functions, so it is refused wherever tensors are verified.
"""

from collections.abc import Mapping

import torch

from fcsd.checkpoint.files import shown
from fcsd.checkpoint.layout import Layout
from fcsd.checkpoint.weights import DTYPES, Reader

_ROWS = 4096  # rows that are compared at a time, so that no tensor is in memory as a whole


def differing_copies(layout: Layout, tied: Mapping[str, str]) -> list[str]:
    """The tied tensors whose values differ in the files, in words.

    Args:
        layout: the checkpoint. A tensor whose file is not on this machine is not compared.
        tied: on-disk name of a copy -> on-disk name of the tensor that it is tied to. Either may be missing from the
            files.
    """
    here = {name for shard in layout.files for name in layout.shards.get(shard, {}) if layout.files[shard].exists()}
    with Reader(layout) as reader:
        return [
            f"{shown(copy)} differs from {shown(source)}, to which config.json ties it"
            for copy, source in tied.items()
            if {copy, source} <= here and not _equal(layout, reader, copy, source)
        ]


def _equal(layout: Layout, reader: Reader, copy: str, source: str) -> bool:
    one, other = layout.tensors[copy], layout.tensors[source]
    if one.shape != other.shape:
        return False
    for start in range(0, one.shape[0], _ROWS):
        part = (start, min(_ROWS, one.shape[0] - start))
        if one.dtype == other.dtype and torch.equal(reader.raw(copy, part=part), reader.raw(source, part=part)):
            continue
        if not {one.dtype, other.dtype} <= DTYPES.keys():
            return False
        if not torch.equal(reader.tensor(copy, part=part).double(), reader.tensor(source, part=part).double()):
            return False
    return True
