"""A text file that cannot be read is refused in one line that names it."""

import gzip
import json

import pytest

from fcsd.errors import BadInputError
from fcsd.eval.perplexity import read_texts

_LINES = b"".join(json.dumps({"text": f"document {n}"}).encode() + b"\n" for n in range(200))


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("missing.jsonl", None, "no such text file"),
        ("a.txt", b"text", "must be .jsonl"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("a.jsonl", b'{"txt": "a"}', "'text'"),
        ("a.jsonl", b'{"text": ""}', "has no text"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
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
