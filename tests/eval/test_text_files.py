"""A text file that cannot be read is refused in one line that names it."""

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcsd import input_lines
from fcsd.errors import BadInputError
from fcsd.eval import perplexity
from fcsd.eval.perplexity import read_texts

_LINES = b"".join(json.dumps({"text": f"document {n}"}).encode() + b"\n" for n in range(200))


def test_a_folder_of_held_out_documents_is_its_files_in_order(tmp_path):
    """As `fcsd write` leaves them: token ids in several files."""
    for number in (1, 0):
        pq.write_table(pa.table({"input_ids": [[number], [number, number]]}), tmp_path / f"part-{number}.parquet")
    (tmp_path / "notes.txt").write_text("no text file")
    text = perplexity.HeldOut(tmp_path)
    assert text.texts == [[0], [0, 0], [1], [1, 1]] and [file.name[5] for file in text.files] == ["0", "1"]
    (tmp_path / "a.jsonl").write_bytes(_LINES)
    with pytest.raises(BadInputError, match="some files of this folder have texts, and others token ids"):
        perplexity.HeldOut(tmp_path)
    for number in (0, 1):
        (tmp_path / f"part-{number}.parquet").unlink()
    assert len(perplexity.HeldOut(tmp_path).texts) == 200
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(BadInputError, match="has no file that ends with"):
        perplexity.HeldOut(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("missing.jsonl", None, "no such text file"),
        ("a.txt", b"text", "must be .jsonl"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("a.jsonl", b'{"txt": "a"}', "'text'"),
        ("a.jsonl", b'{"text": ""}', "has no text"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz:1: not a JSON object"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, "a.jsonl:1: not a JSON object"),
        ("a.jsonl", _LINES + b'{"text": "' + b"x" * 10_000_000, "a.jsonl:201: this line has over 10,000,000 bytes"),
        ("a.jsonl.gz", gzip.compress(b"x" * 10_000_001), "a.jsonl.gz:1: this line has over 10,000,000 bytes"),
        ("a.jsonl.gz", gzip.compress(_LINES, mtime=0)[:60], "cannot be read"),
        ("a.parquet", b"not parquet", "cannot be read"),
    ],
)
def test_an_unreadable_text_file_is_refused_in_one_line(tmp_path, name, data, says):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInputError, match=says) as caught:
        read_texts(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_file_is_regular_and_bounded(tmp_path, monkeypatch):
    for name in ("a.jsonl", "a.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(BadInputError, match="not a regular file"):
            read_texts(tmp_path / name)
    (tmp_path / "b.jsonl").write_bytes(_LINES)
    pq.write_table(pa.table({"text": ["x" * 1000] * 5}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": [None, "", "a", "x" * 500]}), tmp_path / "d.parquet")
    assert read_texts(tmp_path / "b.parquet") == ["x" * 1000] * 5
    assert read_texts(tmp_path / "d.parquet") == ["a", "x" * 500]
    with pytest.raises(BadInputError, match="'text' of row 1 is not a text"):
        read_texts(tmp_path / "c.parquet")
    for limit, says in (("MOST_TEXT", "more than 0 MB of text"), ("LONGEST_TEXT", "row 1 has over 999 bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(perplexity, limit, 999)
            with pytest.raises(BadInputError, match=says):
                read_texts(tmp_path / "b.parquet")
    assert len(list(input_lines.read_lines(tmp_path / "b.jsonl", most=len(_LINES)))) == 200
    with pytest.raises(BadInputError, match="more than 0 MB of text"):
        list(input_lines.read_lines(tmp_path / "b.jsonl", most=len(_LINES) - 2))


def test_lines_are_read_compressed_or_not(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(_LINES))
    assert read_texts(tmp_path / "a.jsonl") == read_texts(tmp_path / "a.jsonl.gz")
    assert len(read_texts(tmp_path / "a.jsonl")) == 200


def test_only_a_newline_ends_a_line(tmp_path):
    texts = ["one\u2028two", "three\u0085four", "five"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert read_texts(tmp_path / "a.jsonl") == texts
