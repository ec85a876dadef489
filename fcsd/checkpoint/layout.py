"""Finds out which tensor lies in which shard: in the single ``model.safetensors``, or in the shards of an index."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fcsd.checkpoint.files import contained, quoted, read_object, weights_file
from fcsd.checkpoint.headers import TensorInfo, read_header
from fcsd.errors import BadInputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 64 << 20  # bytes
MAX_TENSORS = 1_000_000
MAX_SHARDS = 10_000

Header = dict[str, TensorInfo]


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
