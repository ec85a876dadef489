"""Safe reading of untrusted files: regular files only, inside their directory, JSON without ambiguities, and headers.

The headers and the index of the weights say which shard holds a tensor, and where in it; no weight is read. The checks
of a header are stricter than those of the format's own library, which accepts a key twice. No memory map is used: a
process that reads a mapped file dies when the file is cut short. The format is 8 bytes of header length (little
endian), a JSON object ``{name: {"dtype", "shape", "data_offsets"}}``, and the data, which the tensors cover without
hole or overlap.
"""

import os
import re
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from fcsd.errors import BadInputError
from fcsd.strict_json import StrictJsonError, parse
from fcsd.terminal import bounded

INFINITE = ("time_step_limit",)  # keys of which a value may be infinite
MAX_JSON = 10 << 20  # bytes; the longest config.json or tokenizer_config.json in the wild is below 1 MB
_MAX_DIGITS = 40

# Surrogates are excluded, because Python puts them in the place of bytes that are not UTF-8.
_PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[^/\\:\0-\x1f\ud800-\udfff]{1,255}")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
}


def quoted(text: str) -> str:
    """A text from an untrusted file, safe to print on one line: it is escaped, and cut after 100 characters."""
    return bounded(repr(text), 100)


def shown(name: str) -> str:
    """A text from an untrusted file: unchanged if it is short and printable, otherwise :func:`quoted`."""
    return name if name.isprintable() and len(name) <= 200 else quoted(name)


def contained(root: Path, *parts: str) -> Path:
    """The file that ``root/parts`` leads to. Only names and links are checked; the file need not exist.

    A link may lead anywhere inside ``root``, and into the ``blobs/`` directory of a repository in a hub cache, whose
    files are named by their hashes. Any other link could put a file of the user's into what convert copies and push
    publishes.

    Raises:
        BadInputError: a part is not a plain file name, or the path leads elsewhere.
    """
    real, home = _followed(root, *parts)
    blobs = real.parent
    in_cache = blobs.name == "blobs" and blobs.parent.name.startswith("models--")
    if not (real.is_relative_to(home) or in_cache):
        where = root.joinpath(*parts)
        raise BadInputError(f"{where}: is a link that leaves the checkpoint", "Copy the file it points to there.")
    return real


def weights_file(root: Path, name: str) -> Path:
    """The file of weights that ``root/name`` leads to. A link may lead to a regular file anywhere.

    Such links are usual, because weights are large. A file that is read as weights shows nothing of another content.

    Raises:
        BadInputError: ``name`` is not a plain file name, or a link out of ``root`` does not lead to a regular file.
    """
    real, home = _followed(root, name)
    if not real.is_relative_to(home):
        try:
            check_regular(real)
        except BadInputError as error:
            raise BadInputError(f"{root / name}: is a link, and {error}", "Link or copy the weights again.") from None
    return real


def _followed(root: Path, *parts: str) -> tuple[Path, Path]:
    """The path that ``root/parts`` leads to, and that of ``root``, both without links."""
    for part in parts:
        if not _PLAIN_NAME.fullmatch(part):
            hint = "Shards must lie in the directory, and file names must be UTF-8."
            raise BadInputError(f"{root}: {quoted(part)} is not a plain file name", hint)
    home = Path(os.path.realpath(root))
    return Path(os.path.realpath(home.joinpath(*parts))), home


def check_regular(path: Path) -> int:
    """The size in bytes of a regular file, which is not opened.

    Raises:
        BadInputError: the file is missing, or it is not a regular file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise BadInputError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(f"{path}: cannot be opened ({reason})") from None
    if not stat.S_ISREG(found.st_mode):
        raise BadInputError(f"{path}: is {_KINDS.get(stat.S_IFMT(found.st_mode), 'special')}, not a regular file")
    return found.st_size


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Anything else is refused without being opened, because a FIFO would block.

    Raises:
        BadInputError: the file is missing or unreadable, or it is not a regular file.
    """
    check_regular(path)
    try:
        # O_NONBLOCK: if a FIFO replaces the file between the check and this call, the call returns at once.
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise BadInputError(f"{path}: cannot be opened ({error.strerror})") from None


def parse_object(text: bytes, where: str | Path) -> dict[str, Any]:
    """Parse a JSON object; see ``fcsd.strict_json``.

    Numbers may have the 31 digits that transformers writes for a tokenizer without a longest text, and
    ``time_step_limit`` of published models with state spaces holds ``Infinity``.

    Raises:
        BadInputError: the text is not such a JSON object.
    """
    try:
        value = parse(text, digits=_MAX_DIGITS, infinite=INFINITE)
    except StrictJsonError as error:
        raise BadInputError(
            f"{where}: is not strict JSON ({error})", "Correct the file, or download it again."
        ) from None
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_object(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """Read a JSON object from a regular file of at most ``limit`` bytes; see :func:`parse_object`."""
    with open_regular(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise BadInputError(f"{path}: is larger than {limit >> 20} MB")
    return parse_object(text, path)


def with_floats(value: Any) -> Any:
    """A value of config.json, in which transformers writes infinity as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: with_floats(inner) for key, inner in value.items()}
    return [with_floats(inner) for inner in value] if isinstance(value, list) else value


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


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 64 << 20  # bytes
MAX_TENSORS = 1_000_000
MAX_SHARDS = 10_000

Header = dict[str, TensorInfo]

# What stands before the number of a layer. transformers saves the layers of a decoder as blocks, if those of the image
# encoder beside it are called so in files.
LAYERS = r"(?:layers|(?<=language_model\.model\.)blocks)\."


@dataclass(frozen=True)
class Layout:
    """The weights of a checkpoint, as its index and headers describe them.

    Attributes:
        path: the checkpoint's directory.
        weight_map: the tensor -> shard table of the index; None without an index.
        shards: file name -> the tensors in it.
        files: file name -> the regular file behind it (links followed), for the shards that are on this machine.
        problems: file name -> why the shard cannot be used; filled only by ``read_layout(strict=False)``.
    """

    path: Path
    weight_map: dict[str, str] | None
    shards: dict[str, Header]
    files: dict[str, Path]
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def indexed(self) -> bool:
        """Whether an index names the shards."""
        return self.weight_map is not None

    @property
    def bytes(self) -> int:
        """The size of all usable shards in bytes."""
        return sum(max((tensor.end for tensor in header.values()), default=0) for header in self.shards.values())

    @property
    def here(self) -> set[str]:
        """The names of the tensors whose files are on this machine."""
        return {name for shard, file in self.files.items() if file.exists() for name in self.shards.get(shard, ())}

    @property
    def tensors(self) -> Header:
        """All tensors, by their on-disk names."""
        return {name: tensor for header in self.shards.values() for name, tensor in header.items()}


def read_layout(path: Path, *, strict: bool = True, remote: Mapping[str, Callable[[], Header]] | None = None) -> Layout:
    """Read the index and every shard's header.

    Args:
        strict: raise on the first missing, damaged or contradictory shard instead of reporting it.
        remote: for shards that need not be on this machine, file name -> a function that reads the header.

    Raises:
        BadInputError: a shard is missing, damaged or contradictory and ``strict`` is set; or, in every case, the index
            is malformed or a shard is no plain file name, or a link out of the directory to no regular file.
    """
    remote = remote or {}
    weight_map = _read_index(path) if (path / INDEX).exists() else None
    single = (path / SINGLE).exists() or SINGLE in remote
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
    if weight_map is not None and single and names != [SINGLE]:
        raise BadInputError(f"{path}: holds both {SINGLE} and {INDEX}", "Remove the one that is not the model.")

    real = {name: weights_file(path, name) for name in names}
    files = {name: file for name, file in real.items() if file.exists() or name not in remote}
    problems: dict[str, str] = {}

    def read(name: str) -> Header:
        try:
            return read_header(files[name]) if name in files else remote[name]()
        except BadInputError as error:
            if strict:
                raise BadInputError(str(error), error.hint or f"Download {name} again.") from None
            problems[name] = str(error)
            return {}

    with ThreadPoolExecutor(8) as pool:  # hundreds of small reads, slow on a network disk
        headers = dict(zip(names, pool.map(read, names), strict=True))
    shards = {name: header for name, header in headers.items() if name not in problems}
    for name, problem in _disagreements(shards, weight_map).items():
        if strict:
            raise BadInputError(f"{path}: {problem}", f"{INDEX} and the shards are not of one checkpoint.")
        problems[name] = problem
    return Layout(path, weight_map, shards, files, problems)


def _read_index(path: Path) -> dict[str, str]:
    """The ``weight_map`` of the index: tensor name -> shard. The names are checked, and no shard is opened."""
    where = path / INDEX
    index = read_object(contained(path, INDEX), MAX_INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError(f"{where}: has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise BadInputError(f"{where}: puts {quoted(tensor)} in {quoted(str(shard))}, not a .safetensors file")
    if len(weight_map) > MAX_TENSORS or len(set(weight_map.values())) > MAX_SHARDS:
        raise BadInputError(f"{where}: lists more than {MAX_TENSORS} tensors or {MAX_SHARDS} shards")
    return weight_map


def _disagreements(shards: dict[str, Header], weight_map: dict[str, str] | None) -> dict[str, str]:
    """For every shard that contradicts the index: its name -> the contradiction in words."""
    if weight_map is None:
        return {}
    problems = {}
    for name, header in shards.items():
        for tensor in header:
            owner = weight_map.get(tensor)
            if owner is None:
                problems[name] = f"{name} holds {quoted(tensor)}, which the index does not list"
            elif owner != name:
                problems[name] = f"{name} holds {quoted(tensor)}, which the index puts in {owner}"
    for tensor, name in weight_map.items():
        if name in shards and tensor not in shards[name]:
            problems[name] = f"{name} lacks {quoted(tensor)}, which the index puts there"
    return problems
