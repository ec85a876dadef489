"""The teacher cache on disk: top-k log-probabilities and the probability of all other token ids, for all rows of a run.

``shard-N.safetensors`` holds a range of rows. ``shard-N.json`` beside it holds that range, the size and the sha256. It
is written after the shard, so that a writer that was killed continues where it stopped. ``KEY.json`` lists the facts on
which the cache depends. ``MANIFEST.json`` is written last and lists the shards. A reader checks the key, checks the
hash of each shard when it opens the shard, and checks for every row that its tokens are those given to the teacher.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fcsd.checkpoint.files import quoted
from fcsd.config import Recipe, TeacherCache
from fcsd.disk import left_over, read_input, write_bytes
from fcsd.distill.loss.top_k import TopK
from fcsd.distill.run.identity import differences
from fcsd.distill.teacher.original import expect_fingerprint, identify_teacher, teacher_name
from fcsd.distill.teacher.targets import Targets, TeacherSource
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of

KEY, MANIFEST = "KEY.json", "MANIFEST.json"
_PART = r"\.(?:KEY\.json|MANIFEST\.json|shard-\d+\.(?:json|safetensors))\.part-"  # of the names of unfinished files
_SHARD = re.compile(r"shard-\d+\.safetensors")
_WRITE_AGAIN = "Run fcsd cache-teacher with this recipe; it writes the files that are missing."
_ROUNDING = 1e-3  # a log-probability is at most zero, but for rounding
_POSITION = 8  # bytes of each of the k entries of a position: fp32 log-probability and int32 token id


class Shard(NamedTuple):
    """One file of the cache: its name and the numbers of its rows."""

    name: str
    rows: range


def read_teacher_cache(
    recipe: Recipe, settings: TeacherCache, identity: dict[str, object], vocab_size: int
) -> tuple[TeacherSource, dict[str, Any]]:
    """The targets of a run from its cache, and the hashes of the teacher that wrote it.

    Args:
        identity: the facts on which the run depends. Those about the data must be the same as in the cache.

    Raises:
        BadInputError: there is no cache, or it is of another teacher or text; the message names what differs.
    """
    folder = Path(settings.path)
    recorded = read_key(folder)
    teacher = {name: sha for name, sha in recorded.items() if name.startswith("teacher.")}
    if not isinstance(teacher.get("teacher.fingerprint"), str):
        raise BadInputError(f"{folder / KEY}: does not name the teacher", "Write another cache by fcsd cache-teacher.")
    if Path(teacher_name(recipe)).is_dir():
        teacher = identify_teacher(recipe)
    else:
        expect_fingerprint(recipe, teacher["teacher.fingerprint"], f"the teacher of {folder}")
    expect_key(folder, key_of(recipe, settings, identity, teacher, vocab_size))
    return CachedTeacher(folder, rows_needed(recipe)), teacher


def key_of(
    recipe: Recipe, settings: TeacherCache, identity: dict[str, object], teacher: dict[str, str], vocab_size: int
) -> dict[str, Any]:
    """The facts on which a cache depends, as a flat mapping."""
    data = {key: value for key, value in identity.items() if key.startswith("data.") or key == "seed"}
    own = {
        "objective.temperature": recipe.objective.temperature,
        "objective.teacher_cache.top_k": settings.top_k,
        "train.dtype": recipe.train.dtype,
        "vocabulary": vocab_size,
    }
    return {**data, **own, **teacher}


def rows_needed(recipe: Recipe) -> int:
    """The number of rows that the steps of a run take, starting with row 0."""
    return recipe.train.steps * recipe.rows_per_step


def plan(rows: int, seq_len: int, k: int, shard_bytes: int) -> list[Shard]:
    """Divides ``rows`` rows into shards of about ``shard_bytes`` bytes, as if every position of a row counted."""
    per_shard = max(1, shard_bytes // (seq_len * k * _POSITION))
    starts = range(0, rows, per_shard)
    return [Shard(f"shard-{n:06d}.safetensors", range(s, min(s + per_shard, rows))) for n, s in enumerate(starts)]


def begin(folder: Path, key: dict[str, Any], shards: list[Shard]) -> list[Shard]:
    """Prepares ``folder`` for a cache with ``key`` and returns the shards that are still to be written.

    Raises:
        BadInputError: the folder holds a cache with another key.
    """
    if (folder / KEY).exists():
        expect_key(folder, key)
    else:
        commit_json(folder / KEY, key)
    for part in left_over(folder, _PART, directories=False):  # what ``write_bytes`` leaves where it was killed
        part.unlink()
    return [shard for shard in shards if not _is_written(folder, shard)]


def write_shard(folder: Path, shard: Shard, digests: list[bytes], counts: list[int], kept: TopK) -> None:
    """Commits a shard.

    Args:
        digests: the digest of each row, see ``row_digest``.
        counts: for each row, the number of positions that count.
        kept: the teacher's distribution at all these positions, row after row.
    """
    tensors = {name: tensor.contiguous().cpu() for name, tensor in kept._asdict().items()}
    tensors["counts"] = torch.tensor(counts)
    tensors["digests"] = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(len(digests), -1)
    data = safetensors.torch.save(tensors)
    write_bytes(folder / shard.name, data)
    entry = {"rows": [shard.rows.start, shard.rows.stop], "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    commit_json(_record(folder, shard), entry)


def finish(folder: Path, shards: list[Shard]) -> None:
    """Writes the manifest, after which the cache can be read."""
    commit_json(folder / MANIFEST, {shard.name: _entry(_record(folder, shard)) for shard in shards})


def read_key(folder: Path) -> dict[str, Any]:
    """The facts on which the cache in ``folder`` depends.

    Raises:
        BadInputError: there is no cache.
    """
    return _read(folder / KEY)


def expect_key(folder: Path, key: dict[str, Any]) -> None:
    """Checks that the cache in ``folder`` has the key ``key``.

    Raises:
        BadInputError: the cache has another key; the message names what differs.
    """
    if changed := differences(read_key(folder), key):
        raise BadInputError(
            f"{folder} is the cache of another teacher or text: {'; '.join(changed)}",
            hint="undo the change, or write another one with fcsd cache-teacher",
        )


class CachedTeacher(TeacherSource):
    """Reads the targets from a cache of at least ``rows`` rows, whose key was checked before.

    Raises:
        BadInputError: the cache is not complete or has too few rows.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        manifest = _manifest(folder)
        held = max(entry["rows"][1] for entry in manifest.values())
        if held < rows:
            raise BadInputError(
                f"{folder} holds {held} rows, the run needs {rows}",
                "Run `fcsd cache-teacher` with this recipe; it writes the rows that are missing.",
            )
        self._folder, self._names = folder, list(manifest)
        self._starts = [entry["rows"][0] for entry in manifest.values()]
        self._load = lru_cache(maxsize=2)(lambda name: _load(folder / name, manifest[name]))

    def read(self, columns: dict[str, Tensor], rows: Sequence[int]) -> TopK:
        """See ``TeacherSource``.

        Raises:
            BadInputError: a shard is damaged, or the text of a row is not the text in the cache.
        """
        found = []
        for at, number in enumerate(rows):
            which = int(np.searchsorted(self._starts, number, side="right")) - 1
            kept, ends, digests = self._load(self._names[which])
            row = number - self._starts[which]
            if digests[row] != row_digest(columns, at):
                raise BadInputError(
                    f"{self._folder}: row {number} of the run is not the text that the teacher was given",
                    hint="the data, the tokenizer or the packing changed: write the cache again",
                )
            found.append(TopK(*(column[ends[row] : ends[row + 1]] for column in kept)))
        return TopK(*(torch.cat(column) for column in zip(*found, strict=True)))

    def get_targets(self, columns: dict[str, Tensor], stored: TopK | None = None) -> Targets:
        assert stored is not None, "a cache has targets for the rows of the run alone"
        device = columns["input_ids"].device
        return Targets(TopK(*(column.to(device, non_blocking=True) for column in stored)), {})


def row_digest(micro: dict[str, Tensor], at: int) -> bytes:
    """The SHA-256 of row ``at`` of a micro-batch, over its token ids, position ids and labels."""
    columns = [micro[name][at].cpu().numpy().tobytes() for name in ("input_ids", "position_ids", "labels")]
    return hashlib.sha256(b"".join(columns)).digest()


def _load(path: Path, entry: dict[str, Any]) -> tuple[TopK, list[int], list[bytes]]:
    """Reads a shard and checks its hash.

    Returns: the distributions at its positions; the limits of the rows, of which row ``i`` has the positions
        ``limits[i]`` to ``limits[i + 1]`` (exclusive); and the digests of the rows.

    Raises:
        BadInputError: the file is missing or damaged.
    """
    hint = f"Delete {path.stem}.json and run fcsd cache-teacher again; it writes that shard alone."
    try:
        data = read_input(path, entry["size"])
    except OSError:
        data = b""
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise BadInputError(f"{path}: is missing or damaged, its sha256 differs", hint)
    try:
        tensors = safetensors.torch.load(data)
        kept, counts = TopK(*(tensors[name] for name in TopK._fields)), tensors["counts"]
        rows, positions = entry["rows"][1] - entry["rows"][0], int(counts.sum())
        right = [(positions, kept.words.shape[-1])] * 2 + [(positions,), (rows,), (rows, 32)]
        if [tuple(each.shape) for each in (*kept, counts, tensors["digests"])] != right or bool((counts < 0).any()):
            raise ValueError("tensors of other shapes")
        if kept.words.is_floating_point() or bool((kept.words < 0).any()):
            raise ValueError("words that are no token ids")
        if not all(bool((part <= _ROUNDING).all()) for part in (kept.log_probs, kept.tail)):  # NaN is not, either
            raise ValueError("values that are no log-probabilities")
    except (safetensors.SafetensorError, KeyError, ValueError, IndexError, RuntimeError, TypeError) as error:
        raise BadInputError(f"{path}: does not hold a teacher's answers: {reason_of(error)}", hint) from error
    return kept, [0, *counts.cumsum(0).tolist()], [bytes(row) for row in tensors["digests"].numpy()]


def _is_written(folder: Path, shard: Shard) -> bool:
    """Whether an earlier call wrote this shard with the same rows. Its hash is checked when it is read."""
    record = _record(folder, shard)
    if not record.exists():
        return False
    entry, file = _entry(record), folder / shard.name
    same = entry["rows"] == [shard.rows.start, shard.rows.stop]
    return same and file.exists() and file.stat().st_size == entry["size"]


def _record(folder: Path, shard: Shard) -> Path:
    return (folder / shard.name).with_suffix(".json")


def _manifest(folder: Path) -> dict[str, Any]:
    """The shards of a complete cache by name, in the order of their rows, which follow each other.

    Raises:
        BadInputError: the manifest is missing or damaged.
    """
    manifest = _read(folder / MANIFEST)
    end = 0
    for name, entry in manifest.items():
        if not _SHARD.fullmatch(name) or not _is_entry(entry) or entry["rows"][0] != end:
            raise BadInputError(f"{folder / MANIFEST}: is damaged at {quoted(name)}", _WRITE_AGAIN)
        end = entry["rows"][1]
    if not end:
        raise BadInputError(f"{folder / MANIFEST}: names no rows", _WRITE_AGAIN)
    return manifest


def _entry(record: Path) -> dict[str, Any]:
    """The record of a shard.

    Raises:
        BadInputError: it is missing or damaged.
    """
    entry = _read(record)
    if not _is_entry(entry):
        raise BadInputError(f"{record}: is damaged", f"Delete it. {_WRITE_AGAIN}")
    return entry


def _is_entry(entry: Any) -> bool:
    """Whether a value is what ``write_shard`` records."""
    if not isinstance(entry, dict) or entry.keys() != {"rows", "size", "sha256"}:
        return False
    rows = entry["rows"]
    whole = isinstance(rows, list) and len(rows) == 2 and all(type(n) is int for n in [*rows, entry["size"]])
    return whole and 0 <= rows[0] < rows[1] and entry["size"] >= 0 and isinstance(entry["sha256"], str)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_input(path))
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError):
        raise BadInputError(f"{path}: is missing or unreadable", _WRITE_AGAIN) from None
    return found


def commit_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, so that the file exists only when it is complete."""
    write_bytes(path, json.dumps(value, indent=1).encode())
