"""Reads weights files by tensor or by row, and writes them in any order from any number of processes.

No memory map is used. Every touched page of a map counts as memory of the process for as long as the file is open, and
a process that reads a mapped file is killed when the file is cut short.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from fcsd.checkpoint.files import open_regular, quoted
from fcsd.checkpoint.layout import BITS, INDEX, SINGLE, Layout
from fcsd.errors import BadInputError
from fcsd.models.quantised import values
from fcsd.models.quantised.decode import checked_tensor, is_small, quantised_weights
from fcsd.models.quantised.method import Method

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_SHARD = 5_000_000_000  # bytes of tensors in one weights file

Shape = tuple[int, ...]


class Reader:
    """Reads the tensors of a checkpoint one at a time. Leaving the context closes the files.

    Args:
        layout: the result of ``read_layout``; all its shards are on this machine.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._shard = {name: shard for shard, header in layout.shards.items() for name in header}
        self._files: dict[str, BinaryIO] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def tensor(self, name: str, row: int | None = None, part: tuple[int, int] | None = None) -> Tensor:
        """A floating-point tensor in the file's dtype; with ``row``, its slice at that index of the first dimension.

        Args:
            part: a range ``(start, count)`` of the first dimension of the tensor or slice; only its bytes are read.
        """
        info = self._layout.shards[self._shard[name]][name]
        shape = info.shape if row is None else info.shape[1:]
        if part is not None:
            shape = (part[1], *shape[1:])
        return self.raw(name, row, part).view(DTYPES[info.dtype]).view(shape)

    def raw(self, name: str, row: int | None = None, part: tuple[int, int] | None = None) -> Tensor:
        """The bytes of a tensor or of one row, as uint8 ``[size]``; see ``tensor``.

        Raises:
            BadInputError: the file has become shorter than its header says.
        """
        shard = self._shard[name]
        info = self._layout.shards[shard][name]
        size = (info.end - info.start) // (1 if row is None else info.shape[0])
        start = info.start + (row or 0) * size
        if part is not None and size:  # a tensor without elements may have no rows
            width = size // info.shape[0 if row is None else 1]
            start, size = start + part[0] * width, part[1] * width
        if shard not in self._files:
            self._files[shard] = self._open.enter_context(open_regular(self._layout.files[shard]))
        data = torch.empty(size, dtype=torch.uint8)
        view, done = _bytes(data), 0
        while done < size:
            count = os.preadv(self._files[shard].fileno(), [view[done:]], start + done)
            if count == 0:
                raise BadInputError(f"{self._layout.files[shard]}: ends within {quoted(name)}", "Download it again.")
            done += count
        return data


class Writer:
    """Writes the weights files of a new checkpoint. The place of each tensor is fixed before the first byte is written.

    Therefore every process writes its own part of the model, on a disk that all processes share, without waiting for
    the others. One process calls ``describe``. The files are complete when all processes have left the context.

    Args:
        directory: the directory to write into; it must exist.
        tensors: name -> dtype as in safetensors headers, and shape; the same on every process.
        max_bytes: the most bytes of tensors in one file. A single tensor that is larger has a file of its own.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, tuple[str, Shape]], max_bytes: int = MAX_SHARD) -> None:
        self._directory = directory
        self._sizes = {name: BITS[dtype] * prod(shape) // 8 for name, (dtype, shape) in tensors.items()}
        groups: list[list[str]] = [[]]
        filled = 0
        for name in tensors:
            if groups[-1] and filled + self._sizes[name] > max_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += self._sizes[name]
        count = len(groups)
        names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] if count > 1 else [SINGLE]
        self._headers: dict[str, bytes] = {}
        self._places: dict[str, tuple[str, int]] = {}  # tensor -> file, offset of its first byte
        for file, group in zip(names, groups, strict=True):
            self._lay_out(file, {name: tensors[name] for name in group})
        self._shapes = {name: shape for name, (_, shape) in tensors.items()}
        self._files: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for descriptor in self._files.values():
            if kind is None:
                os.fsync(descriptor)
            os.close(descriptor)

    def describe(self) -> None:
        """Write the header of every file, and the index if there are several files."""
        for file, header in self._headers.items():
            self._write(file, memoryview(header), 0)
        if len(self._headers) > 1:
            weight_map = {name: file for name, (file, _) in sorted(self._places.items())}
            index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": weight_map}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, data: Tensor, row: int | None = None) -> None:
        """Write a tensor, or its bytes as uint8; with ``row``, write the slice at that index of the first dimension."""
        raw = data.detach().cpu().contiguous().view(-1).view(torch.uint8)
        file, start = self._places[name]
        size = self._sizes[name] // (1 if row is None else self._shapes[name][0])
        assert raw.numel() == size, f"{name}: {raw.numel()} bytes, not {size}"
        self._write(file, _bytes(raw), start + (row or 0) * size)

    def _lay_out(self, file: str, tensors: dict[str, tuple[str, Shape]]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        for name in sorted(tensors, key=lambda name: -BITS[tensors[name][0]]):  # so that every tensor is aligned
            starts[name], end = end, end + self._sizes[name]
            dtype, shape = tensors[name]
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self._headers[file] = len(text).to_bytes(8, "little") + text
        self._places |= {name: (file, len(self._headers[file]) + start) for name, start in starts.items()}

    def _write(self, file: str, data: memoryview, start: int) -> None:
        if file not in self._files:
            self._files[file] = os.open(self._directory / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        done = 0
        while done < len(data):
            done += os.pwrite(self._files[file], data[done:], start + done)


def check_values(layout: Layout, method: Method, parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Check scales, zero points and orders of columns, one tensor at a time. Codes are not read.

    Args:
        layout: the checkpoint. A tensor whose file is not on this machine is not checked.
        parameters: the tensors of the model without quantisation: name -> shape.

    Raises:
        BadInputError: a value cannot be right; the message names the tensor.
    """
    tensors, here = layout.tensors, layout.here
    with Reader(layout) as reader:
        for weight in quantised_weights(method, tensors):
            for suffix, name in weight.tensors.items():
                if name in here and weight.name in parameters and is_small(suffix):
                    held = reader.raw(name).view(values.DTYPES[tensors[name].dtype]).view(tensors[name].shape)
                    checked_tensor(weight, suffix, held, parameters[weight.name])


def _bytes(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)
