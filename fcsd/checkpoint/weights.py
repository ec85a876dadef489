"""Reads weights files by tensor or by row, and writes them in any order from any number of processes.

No memory map is used. Every touched page of a map counts as memory of the process for as long as the file is open, and
a process that reads a mapped file is killed when the file is cut short.

Tensors have other names and another layout in files than in their class. transformers renames, joins and divides them
while it loads files, and reverses this when it saves a model. Several names in a file can load as one tensor, and the
reversal gives only one of them, which need not be that of published files: the two kinds of layers of OLMo-Hybrid have
norms of one name in transformers and of two names in files. Where a file is known, its own names count. Everything that
reads or writes weights asks ``stored`` and ``loaded``.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.checkpoint.files import BITS, INDEX, LAYERS, SINGLE, Layout, TensorInfo, open_regular, quoted
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


Held = Mapping[str, TensorInfo]  # name in files -> what the header says
_CONVOLUTION = re.compile(r"(.+)\.[qkv]_conv1d\.weight")
_IN_LAYER = re.compile(rf"(?:^|\.){LAYERS}\d+\.")


def stored(model: PreTrainedModel, tensors: Mapping[str, Tensor], held: Held | None = None) -> dict[str, Tensor]:
    """Tensors of a model under their names on disk, and in the layout that they have there.

    Args:
        model: any model of transformers; only its classes and its config are read.
        tensors: all tensors of the model or some, by their names in it. They may be on the meta device. Those that
            files hold in one tensor must be here together.
        held: the tensors in the files from which the model was or will be loaded; without them, names and layout are
            those of ``save_pretrained``.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, dict(tensors))
    if held is None:
        return found
    own = names_like(model, found, held)
    return dict(cut_like(((own[name], tensor) for name, tensor in found.items()), held))


def cut_like(tensors: Iterable[tuple[str, Tensor]], held: Held) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model by their names on disk, in the layout in which files have them and transformers does not.

    transformers holds the convolutions of queries, keys and values of linear attention as one tensor, and cuts it into
    equal parts although values may have more channels. The parts follow one another. It loads experts whose last two
    dimensions are exchanged (Qwen3-VL), and does not exchange them again when it saves a model.
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if tensor.ndim == 3 and name in held and tensor.shape != tuple(held[name].shape) == tensor.mT.shape:
            tensor = tensor.mT.contiguous()
        block = _CONVOLUTION.fullmatch(name)
        if block is None or name not in held:
            yield name, tensor
            continue
        parts[name] = tensor
        if parts.keys() >= {f"{block[1]}.{one}_conv1d.weight" for one in "qkv"}:
            sizes = [held[part].shape[0] for part in parts]
            whole = torch.cat(list(parts.values()))
            yield from zip(parts, whole.split(sizes) if sum(sizes) == len(whole) else parts.values(), strict=True)
            parts.clear()
    yield from parts.items()


def loaded(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of ``stored``: tensors of files under the names, and in the layout, that they have in the model."""
    _, converters = _changes(model)
    found: dict[str, Any] = {}
    joined: dict[str, Any] = {}
    for on_disk, name in _renamed(model, tensors).items():
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                joined.setdefault(target, deepcopy(converter)).add_tensor(target, name, pattern, tensors[on_disk])
                break
        else:
            found[name] = tensors[on_disk]
    for target, converter in joined.items():
        found |= converter.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def rewritten(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of the tensors, by their names in the model, that files hold in another layout."""
    _, converters = _changes(model)
    back = [converter.reverse_transform() for converter in converters]
    return [name for name in names if any(c.rename_source_key(name)[1] is not None for c in back)]


def names_like(model: PreTrainedModel, names: Iterable[str], held: Held) -> dict[str, str]:
    """For each name on disk, the name that files have for what is loaded as the same tensor.

    It is the name itself if the files have it, or if they have no other one.
    """
    names = list(names)
    if not held or held.keys() >= set(names) or not _changes(model)[0]:
        return {name: name for name in names}
    theirs = _renamed(model, held)
    of = {inner: name for name, inner in theirs.items()}
    own = _renamed(model, names).items()
    return {name: name if theirs.get(name) == inner else of.get(inner, name) for name, inner in own}


def _renamed(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """What transformers makes of names on disk, before it joins or divides tensors.

    It also adds the name of the inner model to a name that lacks it. A file whose layers lack it is not such a file.
    """
    from transformers.core_model_loading import dot_natural_key

    renamings, _ = _changes(model)
    prefix, own = f"{model.base_model_prefix}.", model.state_dict().keys()
    found = {}
    for name in sorted(names, key=dot_natural_key):  # some renamings depend on the names before
        inner = name
        for renaming in renamings:
            inner, _ = renaming.rename_source_key(inner)
        outside = inner not in own and not _IN_LAYER.search(inner)
        found[name] = prefix + inner if outside and prefix + inner in own else inner
    return found


def _changes(model: PreTrainedModel) -> tuple[list[Any], list[Any]]:
    """What transformers applies to a model's files: renamings, and then for each name at most one converter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    found = get_model_conversion_mapping(model, add_legacy=False)
    return [c for c in found if isinstance(c, WeightRenaming)], [c for c in found if isinstance(c, WeightConverter)]
