"""The folder of ``fcsd write``: its record with the settings, which files it has, and what may be in them.

The number and the size of a file, and the settings, decide its text. ``write.json`` records them before a file is
written. A call that goes on believes none of the files that it finds: those that are not whole, or not of this text,
are refused by name, and those that are gone are written again.
"""

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.disk import json_sha256, left_over, open_input, require_folder, write_bytes, write_text
from fcsd.distill.run import run_dir
from fcsd.errors import BadInputError, ConfigError
from fcsd.foreign_errors import reason_of
from fcsd.strict_json import read_file

RECORD = "write.json"
TRAIN, HELD_OUT = "train", "held_out"
_LOCK = ".lock"
_MOST_FILES, _MOST_TOKENS = 1_000_000, 10**12  # of a text, and of one of its files
_COUNTS = ("loops", "repeats")  # what was dropped, in the metadata of a file
_DELETE = "Delete it; the same command writes it again."
_ELSEWHERE = "Choose another directory."
# Settings that are not options of the command.
_NAMES = {
    "model_sha256": "model",
    "tokenizer_sha256": "tokenizer",
    "chat_template_sha256": "chat template",
    "prompts_sha256": "file of --prompts",
}


@dataclass(frozen=True)
class Writing:
    """How text is written; ``write.json`` records it, and a call that goes on needs the same values.

    Attributes:
        temperature: of the distribution from which tokens are drawn.
        greedy: the share of answers that are written with the most likely tokens. Users' turns are always drawn.
        form: ``chat``, a user's turn and its answer in the chat template, or ``document``.
        max_tokens: the most tokens of a user's turn, of an answer and of a document.
        seed: of the random numbers.

    Raises:
        ConfigError: a setting has no meaning.
    """

    temperature: float = 1.0
    greedy: float = 0.0
    form: str = "chat"
    max_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.form not in ("chat", "document"):
            raise ConfigError(f"--form: {self.form!r} is not a form", "write chat or document")
        for option, value, possible, need in (
            ("--temperature", self.temperature, 0 < self.temperature < math.inf, "a number above 0"),
            ("--greedy", self.greedy, 0 <= self.greedy <= 1, "a share from 0 to 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens > 0, "at least 1"),
        ):
            if not possible:
                raise ConfigError(f"{option} must be {need}, not {value:g}")
        if self.greedy and self.form == "document":
            raise ConfigError("--greedy is a share of answers; a document written greedily is always the same one")


def name_of(part: str, number: int) -> str:
    """The name of a file in the folder."""
    return f"{part}/part-{number:05d}.parquet"


@contextmanager
def hold(out: Path) -> Iterator[None]:
    """Locks the folder for this call, and removes what killed calls left in it.

    Raises:
        ConfigError: another call writes to it, or it holds something else.
    """
    if not (out / RECORD).exists():
        require_folder(out, "--out")
        if out.exists() and any(path.name != _LOCK for path in out.iterdir()):
            raise ConfigError(f"{out}: is not empty and holds no text of fcsd write", _ELSEWHERE)
    with run_dir.claim(out, "--out"):
        for part in (TRAIN, HELD_OUT):
            for unfinished in left_over(out / part, r"\.part-\d+\.parquet\.part-", directories=False):
                unfinished.unlink()
        yield


def plan_files(out: Path, settings: dict[str, Any], tokens: int, most: int, processes: int) -> list[list[int]]:
    """Compares the settings with those that ``out`` records, and records them and the files before any is written.

    Args:
        most: the most tokens of a file that is added.

    Returns:
        The files, as ``write.json`` has them. They hold at least ``tokens`` together, and those that were planned once
        stay as they are.

    Raises:
        BadInputError: the record is damaged.
        ConfigError: the text was written with other settings, or the files would be too many.
    """
    file, record = out / RECORD, {"settings": settings, "files": []}
    if file.exists():
        record = _read_record(file)
        known = record["settings"]
        for key, value in settings.items():
            name = _NAMES.get(key) or f"--{key.replace('_', '-')}"
            if key not in known:
                raise ConfigError(f"{out}: does not record with which {name} its text was written", _ELSEWHERE)
            if known[key] != value:
                was = "" if key in _NAMES else f": {known[key]!r}"
                raise ConfigError(f"{out}: holds text that was written with another {name}{was}", _ELSEWHERE)
    files = record["files"]
    lacking = tokens - sum(count * size for count, size in files)
    if lacking > 0:
        count = processes * -(-lacking // (processes * most))
        files.append([count, -(-lacking // count)])
        if sum(count for count, _ in files) > _MOST_FILES or files[-1][1] > _MOST_TOKENS:
            raise ConfigError(f"--tokens: {tokens} tokens need more than {_MOST_FILES:,} files", "Ask for fewer.")
        # It is written before the files, so that a call that ends here can be started again.
        write_text(file, json.dumps({**record, "files": files}, indent=1) + "\n")
    return files


def _read_record(file: Path) -> dict[str, Any]:
    """The record of a folder, whose settings and files were checked."""
    try:
        record = read_file(file)
        if not isinstance(record, dict) or not isinstance(record.get("settings"), dict):
            raise ValueError("has no settings")
        files = record.get("files")
        if not isinstance(files, list):
            raise ValueError("has no list of files")
        for entry in files:
            if not isinstance(entry, list) or len(entry) != 2 or not all(type(number) is int for number in entry):
                raise ValueError("its files are not pairs of whole numbers")
            if not (1 <= entry[0] <= _MOST_FILES and 1 <= entry[1] <= _MOST_TOKENS):
                raise ValueError("its files are too many, too large, or none")
        if sum(count for count, _ in files) > _MOST_FILES:
            raise ValueError(f"it names more than {_MOST_FILES:,} files")
    except (OSError, ValueError) as error:
        raise BadInputError(f"{file}: is damaged: {reason_of(error)}", _ELSEWHERE) from error
    return record


def text_of(settings: dict[str, Any], number: int, size: int) -> str:
    """What decides the text of a file, as one hash, which the file itself holds."""
    return json_sha256([settings, number, size])


def files_to_write(out: Path, texts: Sequence[str], count: int) -> list[int]:
    """The numbers of the files that are to be written. Every file that is there is opened; its documents are not read.

    Args:
        texts: ``text_of`` every file that was planned.
        count: how many of them this call needs.

    Raises:
        BadInputError: a file is damaged or does not belong to this text.
    """
    there = {
        part: {number for number in range(len(texts)) if _is_there(out, part, number)} for part in (TRAIN, HELD_OUT)
    }
    for part, numbers in there.items():
        named = {name_of(part, number) for number in numbers}
        for file in sorted((out / part).glob("*.parquet")):
            if f"{part}/{file.name}" not in named:
                what = f"{file}: is none of the files of this text, and a recipe would read it"
                raise BadInputError(what, "Delete it or move it away.")
        for number in sorted(numbers):
            with _opened(out / name_of(part, number), texts[number]):
                pass
    # The file to train on comes last. Without it, nothing of a number counts.
    both = there[TRAIN] & there[HELD_OUT]
    return sorted((set(range(count)) | there[TRAIN]) - both)


def _is_there(out: Path, part: str, number: int) -> bool:
    return os.path.lexists(out / name_of(part, number))


def make_folders(out: Path) -> None:
    """Makes the folders of the files.

    Raises:
        BadInputError: one of them is something else.
    """
    for part in (TRAIN, HELD_OUT):
        folder = out / part
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise BadInputError(f"{folder}: is not a folder", _DELETE)
        folder.mkdir(exist_ok=True)


def write_file(out: Path, number: int, text: str, kept: dict[str, list[list[int]]], dropped: dict[str, int]) -> None:
    """Writes a file of each part. The one to train on comes last, and says that both are whole.

    Args:
        text: the file's ``text_of``.
        kept: the documents, as token ids, by part.
        dropped: how many documents were dropped, by ``_COUNTS``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in (HELD_OUT, TRAIN):
        table = pa.table({"input_ids": pa.array(kept[part], pa.list_(pa.int32()))})
        buffer = io.BytesIO()
        about = {"fcsd": json.dumps({**dropped, "text": text})}
        pq.write_table(table.replace_schema_metadata(about), buffer, compression="zstd")
        write_bytes(out / name_of(part, number), buffer.getvalue())


def count_files(out: Path, texts: Sequence[str]) -> tuple[dict[str, int], list[int]]:
    """What all files hold that a recipe reads, those of an earlier and larger call too, and the first document.

    Args:
        texts: ``text_of`` every file that was planned.

    Raises:
        BadInputError: a file is damaged.
    """
    totals = {"documents": 0, "tokens": 0, "held_out_documents": 0, **dict.fromkeys(_COUNTS, 0)}
    first: list[int] = []
    for number in (number for number in range(len(texts)) if _is_there(out, TRAIN, number)):
        with _opened(out / name_of(TRAIN, number), texts[number]) as opened:
            column = opened.read()["input_ids"]
            if column.null_count or any(chunk.flatten().null_count for chunk in column.chunks):
                raise ValueError("it has documents that are null")
        totals["documents"] += len(column)
        totals["tokens"] += sum(len(chunk.flatten()) for chunk in column.chunks)
        first = first or column[0].as_py()
        with _opened(out / name_of(HELD_OUT, number), texts[number]) as opened:
            totals["held_out_documents"] += len(opened.read())
            dropped = json.loads(opened.schema_arrow.metadata[b"fcsd"])
        for key in _COUNTS:
            totals[key] += dropped[key]
    return totals, first


@contextmanager
def _opened(file: Path, text: str) -> Iterator[Any]:
    """A file of the text, whose columns and metadata were checked. What fails in the block is its damage."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if not stat.S_ISREG(file.lstat().st_mode):  # a link is none either
            raise OSError(errno.EINVAL, "not a regular file")
        with open_input(file) as stream:
            opened = pq.ParquetFile(stream)
            schema = opened.schema_arrow
            kind = schema.field(0).type if schema.names == ["input_ids"] else None
            if kind is None or not pa.types.is_list(kind) or kind.value_type != pa.int32():
                raise ValueError("it has no column of token ids")
            about = json.loads((schema.metadata or {}).get(b"fcsd", b"null"))
            if not isinstance(about, dict) or about.get("text") != text:
                raise ValueError("it is of another text")
            if not all(type(about.get(key)) is int and about[key] >= 0 for key in _COUNTS):
                raise ValueError("it does not say what was dropped")
            if opened.metadata.num_rows < 1:
                raise ValueError("it has no document")
            yield opened
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise BadInputError(f"{file}: is damaged or of another text: {reason_of(error)}", _DELETE) from error
