"""Data files as they are found in the world: odd bytes, huge lines, compressed floods, patterns that match the disk."""

import glob
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import datasets
import pytest
import texts
import tiny
import torch

from fcsd import input_lines
from fcsd.config import Source
from fcsd.distill.data import files, raw_table
from fcsd.distill.data.corpus import Corpus, load_corpus, require_other_text
from fcsd.distill.data.files import choose_files, find_files, require_apart
from fcsd.distill.data.of_run import load_corpora
from fcsd.distill.data.raw_table import read_json_lines
from fcsd.errors import BadInputError
from fcsd.launch.world import World

LINES = [json.dumps({"text": f"document {n}"}).encode() for n in range(5)]


def corpus(path: Path) -> Corpus:
    return load_corpus(Source(path=str(path)), texts.tokenizer(), tiny.VOCAB)


def test_a_byte_order_mark_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(LINES))
    got = corpus(tmp_path / "a.jsonl")
    assert got.skipped == {}
    assert [texts.decode(got.document(n)[0].tolist()) for n in range(5)] == [f"document {n}." for n in range(5)]


def test_odd_bytes_cost_at_most_their_row(tmp_path: Path) -> None:
    replacement = json.dumps({"text": "a \ufffd b"}, ensure_ascii=False).encode()
    separator = json.dumps({"text": "a \u2028 b"}, ensure_ascii=False).encode()
    odd = [b'{"text": "\xff"}', b'{"text": "a\x00b"}', b"\x00" * 4096, replacement, separator]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b"\x00" * 4096, *odd, LINES[1]]))
    got = corpus(tmp_path / "a.jsonl")
    assert got.skipped == {"not UTF-8": 1, "not JSON": 3}
    assert got.lengths.tolist() == [0, 0, 0, 0, 6, 6, 11]


def test_a_line_without_end_needs_the_memory_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_table, "LONGEST_LINE", 1 << 20)
    long = b"x" * (30 << 20)
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\n".join([LINES[0], long, LINES[1]]) + b"\n" + long)
    packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
    del long
    for path in (plain, packed):
        tracemalloc.start()
        rows = read_json_lines([path], tmp_path / f"{path.name}.arrow", None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert rows["line"][:] == [LINES[0], None, LINES[1], None]
        assert peak < 15 << 20


def test_a_line_that_is_too_long_is_counted_and_the_limit_is_exact(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(raw_table, "LONGEST_LINE", len(LINES[0]))
    monkeypatch.setattr(input_lines, "_BLOCK", 7)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*LINES, LINES[0] + b" ", b"", LINES[0]]))
    rows = read_json_lines([tmp_path / "a.jsonl"], tmp_path / "a.arrow", None)
    assert rows["line"][:] == [*LINES, None, b"", LINES[0]]
    assert corpus(tmp_path / "a.jsonl").skipped == {"a line over 40,000,000 bytes": 1, "empty": 1}


def test_a_compressed_flood_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "_LARGE", 4 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * (3 << 20)))
    with pytest.raises(BadInputError, match=r"a\.jsonl\.gz: expands to more than 100 times its size"):
        corpus(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(LINES))[:-12])
    with pytest.raises(BadInputError, match="cannot be read as gzip"):
        corpus(tmp_path / "b.jsonl.gz")
    assert not list(tmp_path.glob("**/*.arrow"))


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    for lines in (LINES, LINES[:2], LINES):
        (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
        assert len(corpus(tmp_path / "a.jsonl").lengths) == len(lines)


def test_files_of_one_name_are_hashed_apart(tmp_path: Path) -> None:
    for n, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(LINES[n])
    assert {"one/a.jsonl", "two/a.jsonl"} <= corpus(tmp_path).sha256.keys()


def test_patterns_find_what_glob_finds(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/c.jsonl", "b/d/e.jsonl", "b/d/e.txt", ".hidden/f.jsonl", "b/.g.jsonl", "b/[1]/h.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    for pattern in ("**/*.jsonl", "b/**/e.*", "**", "**/d/**", "?/**/[a-e].jsonl", "*.jsonl", "**/.g.jsonl", "x/**/*"):
        wanted = glob.glob(f"{tmp_path}/{pattern}", recursive=True)
        found = [str(path) for path in find_files(f"{tmp_path}/{pattern}")]
        assert found == sorted(path for path in wanted if Path(path).is_file()), pattern
    assert len(find_files(str(tmp_path))) == 7  # with hidden files, each once


def test_a_search_of_the_whole_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_ENTRIES", 1000)
    for path in ("/**/*.parquet", "/"):
        with pytest.raises(BadInputError, match="more than 1,000 files and folders below /") as caught:
            corpus(Path(path))
        assert caught.value.hint == "name a folder that is nearer to the data"
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(BadInputError, match="there is no such data file"):
        corpus(tmp_path / "**" / "*.parquet")


def test_a_fifo_or_a_device_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "text.jsonl")
    for path in (tmp_path / "text.jsonl", Path("/dev/zero")):
        with pytest.raises(BadInputError, match="is not a regular file"):
            corpus(path)


@pytest.mark.parametrize("form", ["file", "folder", "stream", "saved"])
def test_another_file_of_the_same_name_and_time_is_read(tmp_path: Path, form: str) -> None:
    """As ``tar`` and ``rsync -a`` unpack: the same path, size and time of modification, and another text."""
    folder = tmp_path / "data"
    how = {
        "file": {"path": str(folder / "train.parquet")},
        "folder": {"path": str(folder), "format": "hf"},
        "stream": {"path": str(folder), "format": "hf", "streaming": True, "max_rows": 3},
        "saved": {"path": str(folder / "saved")},
    }[form]
    read, hashes = [], []
    for text in ("one text", "new text", "one text"):
        if form == "saved":
            datasets.Dataset.from_dict({"text": [text] * 3}).save_to_disk(folder / "saved")
        else:
            datasets.Dataset.from_dict({"text": [text] * 3}).to_parquet(folder / "train.parquet")
        for path in folder.rglob("*"):
            os.utime(path, (1_700_000_000, 1_700_000_000))
        got = load_corpus(Source(**how), texts.tokenizer(), tiny.VOCAB)
        read.append(texts.decode(got.document(2)[0].tolist()))
        hashes.append(got.sha256)
    assert read == ["one text.", "new text.", "one text."]
    assert hashes[0] != hashes[1]


def test_a_held_out_file_among_the_training_files_is_refused(tmp_path: Path) -> None:
    """By its name, inside of a folder or a pattern, through links of either kind, and as a copy."""
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(LINES))
    (folder / "held.jsonl").write_bytes(LINES[0])
    (tmp_path / "apart.jsonl").write_bytes(LINES[1])
    (tmp_path / "soft.jsonl").symlink_to(folder / "held.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(folder / "held.jsonl")
    (tmp_path / "linked").symlink_to(folder)
    (tmp_path / "copy.jsonl").write_bytes(LINES[0])

    def source(name: str) -> Source:
        return Source(path=str(tmp_path / name))

    for trained in ("train", "train/*.jsonl", "train/held.jsonl", "linked"):
        for held_out in ("train/held.jsonl", "soft.jsonl", "hard.jsonl", "train/h*", "linked/held.jsonl"):
            with pytest.raises(BadInputError, match=r"data\.held_out: .* is never to be trained on"):
                require_apart([source("apart.jsonl"), source(trained)], {"held_out": source(held_out)})
        require_apart([source(trained)], {"held_out": source("apart.jsonl"), "held_out_own": source("copy.jsonl")})
        mine, other, copy = (corpus(tmp_path / name) for name in (trained, "apart.jsonl", "copy.jsonl"))
        require_other_text([mine], {"held_out": other})
        with pytest.raises(BadInputError, match=r"data\.held_out_own: .*copy\.jsonl .*held\.jsonl of "):
            require_other_text([other, mine], {"held_out_own": copy})
    require_apart([source("train/a.jsonl")], {"held_out": source("train/held.jsonl")})


def test_a_split_is_not_both_trained_on_and_held_out(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": ["a text", "another"]})
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(tmp_path / "saved")

    def source(split: str) -> Source:
        return Source(path=str(tmp_path / "saved"), split=split)

    for trained, held_out in (("train", "train"), ("train+test", "test")):
        with pytest.raises(BadInputError, match=r"is never to be trained on, and data\.sources read it as the split"):
            require_apart([source(trained)], {"held_out": source(held_out)})
    require_apart([source("train")], {"held_out": source("test")})
    hub = [Source(path="a/b", format="hf", split=split) for split in ("train[:90%]", "train[90%:]")]
    require_apart(hub[:1], {"held_out": hub[1]})


def test_what_is_read_and_what_is_not_is_said(tmp_path: Path, capsys) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"\n".join(LINES))
    datasets.Dataset.from_dict({"text": ["more"]}).to_parquet(tmp_path / "c.parquet")
    for name in ("notes.txt", "d.csv", "e.arrow"):
        (tmp_path / name).write_text("hello")
    (tmp_path / "f").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "g.jsonl")
    found = choose_files(Source(path=str(tmp_path)))
    assert [path.name for path in found.files] == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in found.left] == ["c.parquet", "d.csv", "e.arrow", "g.jsonl", "link", "notes.txt"]
    sources = [Source(path=str(tmp_path)), Source(path=str(tmp_path / "c.parquet"))]
    sources += [Source(path=str(tmp_path / "a.jsonl"), max_rows=3)]
    load_corpora(sources, texts.tokenizer(), tiny.VOCAB, 32, World(0, 1, torch.device("cpu")), texts.EOS)
    assert [line for line in capsys.readouterr().err.splitlines() if ": read: " in line] == [
        f"{tmp_path}: read: 10 rows from 2 files as jsonl, but not c.parquet, d.csv, e.arrow and 3 more",
        f"{tmp_path}/c.parquet: read: 1 rows from 1 file as parquet",
        f"{tmp_path}/a.jsonl: read: 3 rows, no more by max_rows, from 1 file as jsonl",
    ]
