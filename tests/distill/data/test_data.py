"""Packed rows: nothing lost, the same from anywhere, boundaries respected; bad rows counted."""

import errno
import gzip
from itertools import chain, groupby
from pathlib import Path

import datasets
import numpy as np
import pytest
import texts
import tiny
import torch

from fcsd.config import Source
from fcsd.distill.data.corpus import Corpus, TokenSlices, load_corpus
from fcsd.distill.data.rows import Mixture, Rows, batch
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.teacher.targets import final_hidden
from fcsd.errors import BadInputError, ConfigError, DiskError
from fcsd.foreign_errors import translate
from fcsd.models.build import logits_factor

TEXTS = [f"document {n}: " + "abc " * (n % 7) for n in range(40)]


def corpus(path: Path, rows: list[object] | None = None, **source) -> Corpus:
    texts.write_jsonl(path, list(TEXTS) if rows is None else rows)
    return load_corpus(Source(path=str(path), **source), texts.tokenizer(), tiny.VOCAB)


def documents(rows: Rows, count: int) -> list[list[int]]:
    """The documents that the first ``count`` rows lay end to end."""
    stream = list(chain.from_iterable(rows[n][0].tolist() for n in range(count)))
    return [list(group) for is_eos, group in groupby(stream, lambda t: t == texts.EOS) if not is_eos]


def test_rows_hold_every_document_once_an_epoch(tmp_path: Path) -> None:
    rows = Rows(corpus(tmp_path / "a.jsonl"), seq_len=1, seed=[0])
    expected = sorted(texts.ids(t) for t in TEXTS)
    assert sorted(documents(rows, rows.per_epoch)) == expected
    first, second = ([rows[e * rows.per_epoch + n][0].item() for n in range(rows.per_epoch)] for e in (0, 1))
    assert sorted(first) == sorted(second) and first != second


def test_slices_of_the_buffers_are_what_datasets_formats() -> None:
    """Documents of all lengths, an empty one among them, in several chunks that begin anywhere in their buffers."""
    lists = [list(range(100 * n, 100 * n + n % 23)) for n in range(200)]
    columns = {"ids": lists, "counts": [[bool(i % 3) for i in ids] for ids in lists]}
    features = datasets.Features(
        ids=datasets.List(datasets.Value("int32")), counts=datasets.List(datasets.Value("bool"))
    )
    parts = [
        datasets.Dataset.from_dict(columns, features).select(range(*span)) for span in ((0, 70), (70, 71), (71, 200))
    ]
    table = datasets.concatenate_datasets([*parts, datasets.Dataset.from_dict(columns, features)])
    found, reference = TokenSlices(table), table.with_format("numpy")
    assert found.counted() == 2 * sum(map(sum, columns["counts"]))
    assert len(table.data.column("ids").chunks) > 2
    for number in range(len(table)):
        for first, last in ((0, None), (0, 5), (3, 4), (9, None)):
            ids, counts = found.piece(number, first, last)
            if first <= len(reference[number]["ids"]) >= (last or 0):
                assert ids.dtype == np.int32 and ids.tolist() == reference[number]["ids"][first:last].tolist()
                assert counts.dtype == np.bool_ and counts.tolist() == reference[number]["counts"][first:last].tolist()


def test_held_out_rows_keep_the_order_of_the_file(tmp_path: Path) -> None:
    rows = Rows(corpus(tmp_path / "a.jsonl"), seq_len=16)
    assert documents(rows, 4)[0] == texts.ids(TEXTS[0])
    assert documents(rows, 4)[1] == texts.ids(TEXTS[1])


def test_positions_restart_and_labels_stop_at_document_boundaries(tmp_path: Path) -> None:
    rows = Rows(corpus(tmp_path / "a.jsonl", ["abc", "de", "fghij"]), seq_len=6)
    got = batch(rows, [0, 1])
    assert got["input_ids"].tolist() == [
        [*texts.ids("abc"), texts.EOS, *texts.ids("de")],
        [texts.EOS, *texts.ids("fghij")],
    ]
    assert got["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert got["labels"].tolist() == [
        [*texts.ids("bc"), texts.EOS, IGNORE, texts.ids("e")[0], IGNORE],
        [IGNORE, *texts.ids("ghij"), IGNORE],
    ]


# ``tests/models/test_guard.py`` packs documents for every family; here the rows of a run are packed.
@pytest.mark.parametrize("arch", ["llama", "gpt_oss", "qwen3_next"])
def test_a_packed_document_reads_nothing_of_its_neighbours(tmp_path: Path, arch: str) -> None:
    rows = Rows(corpus(tmp_path / "a.jsonl", ["hello there", "general", "kenobi!"]), seq_len=28)
    packed = batch(rows, [0])
    model = tiny.model(arch)
    decoder, together = model.model, final_hidden(model, packed)[0]
    for start, stop in ((0, 12), (12, 20), (20, 28)):
        alone = decoder(input_ids=packed["input_ids"][:, start:stop], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(together[start:stop], alone * logits_factor(model.config), rtol=1e-5, atol=2e-5)


def test_a_row_is_the_same_from_anywhere(tmp_path: Path) -> None:
    one, other = corpus(tmp_path / "a.jsonl"), corpus(tmp_path / "b.jsonl", [t.upper() for t in TEXTS])

    def mixture(rows: int) -> Mixture:
        return Mixture([Rows(one, 8, [0, 0]), Rows(other, 8, [0, 1])], [3.0, 1.0], rows, seed=0)

    late = mixture(500)[437]
    walked = [mixture(900)[n] for n in range(438)][-1]
    assert late[0].tolist() == walked[0].tolist() and late[1].tolist() == walked[1].tolist()


def test_a_mixture_keeps_its_weights_and_skips_no_row(tmp_path: Path) -> None:
    one = Rows(corpus(tmp_path / "a.jsonl", ["a" * 99] * 9), 10, [0, 0])
    other = Rows(corpus(tmp_path / "b.jsonl", ["b" * 99] * 9), 10, [0, 1])
    drawn = [chr(int(Mixture([one, other], [3.0, 1.0], 400, seed=1)[n][0][0]) + 29) for n in range(400)]
    assert 0.68 < drawn.count("a") / 400 < 0.82


def test_weights_are_shares_of_what_the_recipe_says(tmp_path: Path) -> None:
    """Text fills its rows; a row of chats ends with padding, and of a chat only the response counts."""
    text = Rows(corpus(tmp_path / "a.jsonl", ["a" * 999] * 9), 40, [0, 0])
    (tmp_path / "t.jinja").write_text(texts.PLAIN)
    chats = texts.write_jsonl(tmp_path / "b.jsonl", [texts.chat("b" * 12, "b" * 5)] * 40, "messages")
    source = Source(path=str(chats), messages="messages", chat_template=str(tmp_path / "t.jinja"))
    chat = Rows(load_corpus(source, texts.tokenizer(), tiny.VOCAB), 40, [0, 1])  # 23 tokens, of which 6 count
    assert (text.filled, text.counted) == (1.0, 1.0)
    assert (chat.filled, chat.counted) == (23 / 40, 6 / 40)

    def shares(weight_by: str) -> dict[str, float]:
        """How much of a run is text, by rows, by tokens that are no padding, and by tokens that count."""
        mixture = Mixture([text, chat], [1.0, 1.0], 600, seed=1, weight_by=weight_by)
        drawn = ["a" if texts.ids("U")[0] not in mixture[n][0] else "b" for n in range(600)]
        counted = {kind: sum(int(mixture[n][2].sum()) for n in range(600) if drawn[n] == kind) for kind in "ab"}
        rows = {kind: drawn.count(kind) for kind in "ab"}
        tokens = {"a": 40 * rows["a"], "b": 23 * rows["b"]}
        return {
            name: of["a"] / sum(of.values())
            for name, of in {"rows": rows, "tokens": tokens, "counted": counted}.items()
        }

    for weight_by in ("rows", "tokens", "counted"):
        assert abs(shares(weight_by)[weight_by] - 0.5) < 0.05, weight_by
    assert shares("rows")["counted"] > 0.8


def test_full_rows_are_drawn_alike_whatever_weights_are_shares_of(tmp_path: Path) -> None:
    packed = [Rows(corpus(tmp_path / f"{n}.jsonl", [letter * 99] * 9), 10, [0, n]) for n, letter in enumerate("ab")]
    tokens, rows = (Mixture(packed, [0.7, 0.1], 500, seed=3, weight_by=by) for by in ("tokens", "rows"))
    assert all((tokens[n][0] == rows[n][0]).all() for n in range(500))


def test_bad_rows_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [b'{"text": "good"}', b'{"text": ""}', b'{"text": 5}', b'{"text": null}', b'{"other": "x"}']
    lines += [b"{broken", b"[1]", b"", b'{"text": "\xff\xfe"}', b'{"text": "fine \\ud83d\\ude00"}']
    path.write_bytes(b"\n".join(lines))
    got = load_corpus(Source(path=str(path)), texts.tokenizer(), tiny.VOCAB)
    assert got.skipped == {
        "empty": 2,
        "not text": 2,
        "without 'text'": 2,
        "not JSON": 1,
        "not UTF-8": 1,
    }
    assert got.lengths.tolist() == [5, 0, 0, 0, 0, 0, 0, 0, 0, 7]
    assert load_corpus(Source(path=str(path)), texts.tokenizer(), 82).skipped["outside the vocabulary"] == 1


def test_token_ids_are_documents_as_they_are(tmp_path: Path) -> None:
    lists = [[5, 6, 7], [8], list(range(40))]
    table = datasets.Dataset.from_dict({"ids": lists}, datasets.Features(ids=datasets.List(datasets.Value("uint16"))))
    table.to_parquet(tmp_path / "a.parquet")
    texts.write_jsonl(tmp_path / "a.jsonl", list(lists), "ids")
    for name in ("a.parquet", "a.jsonl"):
        got = load_corpus(Source(path=str(tmp_path / name), token_ids="ids"), texts.tokenizer(), tiny.VOCAB)
        assert [got.document(n)[0].tolist() for n in range(3)] == lists
        assert got.counted() == got.tokens == 44
    assert Rows(got, 11)[0][0].tolist() == [5, 6, 7, 8, *range(7)]  # a long document is split, as text is


def test_what_is_no_list_of_token_ids_is_counted_and_left_out(tmp_path: Path) -> None:
    bad = ["text", [], [1, "2"], [[1], [2]], [[1], [2, 3]], [1.5], [True], None, [-1], [tiny.VOCAB], [1 << 70]]
    texts.write_jsonl(tmp_path / "a.jsonl", [[1, 2], *bad])
    with pytest.raises(BadInputError, match="no usable row"):
        load_corpus(Source(path=str(tmp_path / "a.jsonl"), token_ids="ids"), texts.tokenizer(), tiny.VOCAB)
    got = load_corpus(Source(path=str(tmp_path / "a.jsonl"), token_ids="text"), texts.tokenizer(), tiny.VOCAB)
    assert got.lengths.tolist() == [2, *[0] * len(bad)]
    assert got.skipped == {"not a list of token ids": 8, "empty": 1, "outside the vocabulary": 2}
    with pytest.raises(ValueError, match="give one of column"):
        Source(path="a.jsonl", token_ids="ids", messages="chat")


def test_a_source_without_a_usable_row_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no usable row: 40 without 'body'"):
        corpus(tmp_path / "a.jsonl", column="body")
    with pytest.raises(BadInputError, match="is empty"):
        corpus(tmp_path / "none.jsonl", [])
    with pytest.raises(BadInputError, match="do not fill one row"):
        Rows(corpus(tmp_path / "a.jsonl", ["abc"]), 100)


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    plain = corpus(tmp_path / "a.jsonl")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    table = datasets.Dataset.from_dict({"text": TEXTS, "other": list(range(len(TEXTS)))})
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "splits")
    for name in ("a.jsonl.gz", "a.parquet", "plain", "splits", "*.jsonl"):
        got = load_corpus(Source(path=str(tmp_path / name)), texts.tokenizer(), tiny.VOCAB)
        assert [got.document(n)[0].tolist() for n in range(len(TEXTS))] == [
            plain.document(n)[0].tolist() for n in range(len(TEXTS))
        ]
        assert len(got.sha256) > 1 and all(len(sha) == 64 for sha in got.sha256.values())


def test_unreadable_sources_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "notes.xyz").write_text("hello")
    datasets.Dataset.from_dict({"body": TEXTS}).to_parquet(tmp_path / "body.parquet")
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS})).save_to_disk(tmp_path / "splits")
    for error, match, source in [
        (BadInputError, "there is no such data file", {"path": "missing.jsonl"}),
        (BadInputError, "cannot be read as parquet", {"path": "broken.parquet"}),
        (ConfigError, "format cannot be told", {"path": "notes.xyz"}),
        (BadInputError, "no column 'text'; the columns are body", {"path": "body.parquet"}),
        (BadInputError, "no split 'test'; the splits are train", {"path": "splits", "split": "test"}),
    ]:
        with pytest.raises(error, match=match) as caught:
            load_corpus(Source(**{**source, "path": str(tmp_path / source["path"])}), texts.tokenizer(), tiny.VOCAB)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("called", "error"),
    [
        ("fcsd.distill.data.raw_table._open", OSError(errno.ENOSPC, "No space left on device")),
        ("fcsd.distill.data.raw_table._open", OSError("Not enough disk space. Needed: 1")),
        ("datasets.Dataset.map", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_a_cache_that_cannot_be_written_is_named_and_not_the_file(
    tmp_path: Path, monkeypatch, called: str, error: OSError
) -> None:
    def full(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(called, full)
    source = Source(path=str(texts.write_jsonl(tmp_path / "a.jsonl", ["text"])))
    with pytest.raises((DiskError, OSError)) as caught:
        load_corpus(source, texts.tokenizer(), tiny.VOCAB)
    assert str(translate(caught.value)).startswith(f"the disk is full: {tmp_path / 'cache'}")


def test_a_stream_is_read_once_and_never_beyond_its_bound(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    table = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    table.to_parquet(folder / "train-0.parquet")
    (folder / "train-1.parquet").write_bytes(b"never read")
    source = Source(path=str(folder), format="hf", streaming=True, max_rows=30)
    first = load_corpus(source, texts.tokenizer(), tiny.VOCAB)
    assert [texts.decode(first.document(n)[0].tolist()) for n in range(30)] == [f"{text}." for text in TEXTS[:30]]
    assert len(first.lengths) == 30 and len(first.sha256[str(folder)]) == 64
    with monkeypatch.context() as offline:  # from here on the cache alone answers

        def away(*_: object, **__: object) -> None:
            raise ConnectionError("the stream was opened again")

        offline.setattr(datasets, "load_dataset", away)
        again = load_corpus(source, texts.tokenizer(), tiny.VOCAB)
        assert again.sha256 == first.sha256
        assert again.document(7)[0].tolist() == first.document(7)[0].tolist()
    (folder / "train-0.parquet").unlink()
    with pytest.raises(BadInputError, match="cannot be read as hf"):
        load_corpus(source.model_copy(update={"max_rows": 31}), texts.tokenizer(), tiny.VOCAB)


def test_a_missing_column_is_named_with_those_present(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"texts": TEXTS, "id": list(range(len(TEXTS)))})
    table.to_parquet(tmp_path / "a.parquet")
    table.to_json(tmp_path / "a.jsonl")
    (tmp_path / "hub").mkdir()
    table.to_parquet(tmp_path / "hub" / "a.parquet")
    stream = {"path": "hub", "format": "hf", "streaming": True, "max_rows": 5}
    for source in ({"path": "a.parquet"}, {"path": "hub", "format": "hf"}, stream):
        with pytest.raises(BadInputError, match="no column 'text'; the columns are texts, id") as caught:
            load_corpus(Source(**{**source, "path": str(tmp_path / source["path"])}), texts.tokenizer(), tiny.VOCAB)
        assert caught.value.hint == "Did you mean 'texts'?"
    with pytest.raises(BadInputError, match="no usable row: 40 without 'text'") as caught:
        load_corpus(Source(path=str(tmp_path / "a.jsonl")), texts.tokenizer(), tiny.VOCAB)
    assert caught.value.hint == "the first row has 'texts', 'id'; did you mean 'texts'?"


def test_the_first_rows_of_a_file_can_be_taken_alone(tmp_path: Path) -> None:
    assert len(corpus(tmp_path / "a.jsonl", max_rows=7).lengths) == 7
    assert len(corpus(tmp_path / "a.jsonl", max_rows=700).lengths) == len(TEXTS)


def test_several_processes_tokenise_to_the_same_corpus(tmp_path: Path, monkeypatch) -> None:
    one = corpus(tmp_path / "a.jsonl")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("fcsd.distill.data.corpus._ROWS_PER_PROCESS", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    several = corpus(tmp_path / "a.jsonl")
    assert len(list((tmp_path / "elsewhere" / "fcsd").glob("*_of_*.arrow"))) == 3
    assert several.skipped == one.skipped and several.lengths.tolist() == one.lengths.tolist()
    for number in range(len(TEXTS)):
        assert several.document(number)[0].tolist() == one.document(number)[0].tolist()


def test_a_huge_row_is_left_out(tmp_path: Path) -> None:
    path = texts.write_jsonl(tmp_path / "a.jsonl", ["fine", "x" * 40_000_001, "fine too"])
    got = load_corpus(Source(path=str(path)), texts.tokenizer(), tiny.VOCAB)
    assert got.lengths.tolist() == [5, 0, 9]
    assert got.skipped == {"a line over 40,000,000 bytes": 1}


def test_nothing_is_written_beside_the_data(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    before = sorted(path.name for path in (tmp_path / "saved").iterdir())
    load_corpus(Source(path=str(tmp_path / "saved")), texts.tokenizer(), tiny.VOCAB)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before


def test_text_can_be_kept_whole(tmp_path: Path) -> None:
    got = corpus(tmp_path / "a.jsonl", ["abcd", "ef", "ghij"], overlong="truncate")
    rows = Rows(got, seq_len=7)
    assert [texts.decode(rows[n][0].tolist()) for n in range(3)] == ["abcd...", "ef.....", "ghij..."]
    assert texts.decode(Rows(got, seq_len=3)[0][0].tolist()) == "abc"
