"""Headers of safetensors files: the tensors of a file, read and checked without reading a weight.

The checks are stricter than those of the format's own library, which accepts a key twice. No memory map is used: a
process that reads a mapped file dies when the file is cut short. The format is 8 bytes of header length (little
endian), a JSON object ``{name: {"dtype", "shape", "data_offsets"}}``, and the data, which the tensors cover without
hole or overlap.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from fcsd.checkpoint.files import open_regular, parse_object, quoted
from fcsd.errors import BadInputError

MAX_HEADER = 32 << 20  # bytes; about 300 000 tensors in one file

# dtype -> bits per element
BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a weights file; ``start`` and ``end`` are its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the order of their data.

    Raises:
        BadInputError: the file is missing, is not a regular file, is truncated, or breaks a rule of the format.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        return parse_header(file, size, str(path))


def parse_header(file: BinaryIO, size: int, where: str) -> dict[str, TensorInfo]:
    """As :func:`read_header`, from the start of an open file of ``size`` bytes; messages call the file ``where``."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or 8 + length > size:
        raise _bad(where, f"is truncated: {size} bytes, its header alone needs {8 + length if size >= 8 else 8}")
    if length > MAX_HEADER:
        raise _bad(where, f"claims a header of {length} bytes; {MAX_HEADER} is the limit")
    text = file.read(length)
    if len(text) < length or text[:1] != b"{":
        raise _bad(where, "is not a safetensors file")
    entries = parse_object(text, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(where, "has __metadata__ that is not an object of strings")

    base = 8 + length
    tensors = sorted(
        ((name, _tensor(name, entry, base, size, where)) for name, entry in entries.items()),
        key=lambda item: (item[1].start, item[1].end),
    )
    end = base
    for name, tensor in tensors:
        if tensor.start != end:
            problem = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise _bad(where, f"tensor {quoted(name)} {problem}")
        end = tensor.end
    if end != size:
        raise _bad(where, f"has {size - end} bytes after its last tensor")
    return dict(tensors)


def _tensor(name: str, entry: Any, base: int, size: int, where: str) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(where, f"tensor {quoted(name)} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _bad(where, f"tensor {quoted(name)} has the unknown dtype {quoted(str(dtype))}")
    if not _sizes(shape) or len(shape) > 16:
        raise _bad(where, f"tensor {quoted(name)} has a shape that is not a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(where, f"tensor {quoted(name)} has data_offsets that are not a range")
    start, end = base + offsets[0], base + offsets[1]
    if end > size:
        raise _bad(where, f"is truncated: tensor {quoted(name)} ends at byte {end} of {size}")
    if prod(shape) * BITS[dtype] != (end - start) * 8:
        raise _bad(where, f"tensor {quoted(name)} has {end - start} bytes, not those of {dtype} {shape}"[:200])
    return TensorInfo(dtype, tuple(shape), start, end)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _bad(where: str, problem: str) -> BadInputError:
    return BadInputError(f"{where}: {problem}", "The file is damaged or not a weights file: download it again.")
