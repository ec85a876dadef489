"""``fcsd write``: documents are the model's own draws, files resume, and loops and repeats are dropped."""

import errno
import json
import math
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from ranks import on_ranks
from transformers import GenerationConfig
from typer.testing import CliRunner

from fcsd.checkpoint.tokenizer import load_tokenizer, tokens_before
from fcsd.cli.main import app
from fcsd.convert import convert_checkpoint
from fcsd.distill import own_text
from fcsd.distill.own_text import loops, repeats, write_own_text
from fcsd.distill.own_text_files import hold
from fcsd.distill.writer import Turns, Writer, Writing, turns_of
from fcsd.engine import generate as generating
from fcsd.engine.decode import drawn, generate_in_slots, plan_slots
from fcsd.engine.generate import SLOTS, generate
from fcsd.errors import BadInputError, ConfigError
from fcsd.serve.generation_settings import NOT_IN_WRITING, WITHOUT_EFFECT


@pytest.fixture(scope="module")
def teacher(repo: Path) -> Path:
    return repo / "assets" / "teacher"


def documents(out: Path, part: str) -> list[list[int]]:
    return [
        ids for file in sorted((out / part).glob("*.parquet")) for ids in pq.read_table(file)["input_ids"].to_pylist()
    ]


def test_draws_follow_the_softmax_and_temperature_0_is_greedy() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    rows = logits.expand(20000, -1)
    for heat in (1.0, 0.5):
        ids, finite = drawn(rows, torch.full((20000,), heat))
        shares = torch.bincount(ids[:, 0], minlength=4) / 20000
        assert bool(finite.all()) and (shares - (logits[0] / heat).softmax(-1)).abs().max() < 0.015
    assert set(drawn(rows, torch.zeros(20000))[0][:, 0].tolist()) == {2}
    assert not bool(drawn(torch.tensor([[0.0, float("nan")]]), torch.ones(1))[1])


def test_prompts_of_temperature_0_are_continued_greedily_beside_drawn_ones() -> None:
    model = tiny.model("llama")
    prompts = [[5, 6, 7], [9, 8], [5, 6, 7], [9, 8]]
    count, length, groups = plan_slots([len(p) + 6 for p in prompts], list(map(len, prompts)), 4)
    how = dict(count=count, length=length, max_new_tokens=6, ended=lambda ids, seen: None, graphs=False)
    greedy = dict(generate_in_slots(model, prompts, groups, **how))
    torch.manual_seed(1)
    mixed = dict(generate_in_slots(model, prompts, groups, temperatures=[0, 0, 1.0, 1.0], **how))
    assert [mixed[0], mixed[1]] == [greedy[0], greedy[1]]
    assert mixed[2] != greedy[2] and mixed[3] != greedy[3]


def test_a_model_that_has_no_slots_writes_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    prompts = [[5, 6, 7], [9, 8], [5, 6, 7], [9, 8]]
    how = dict(max_new_tokens=6, ended=lambda ids, seen: None, way=SLOTS)
    in_slots = dict(generate(model, prompts, **how))
    monkeypatch.setattr(generating, "why_no_slots", lambda *_: "of a test")
    assert dict(generate(model, prompts, **how)) == in_slots
    torch.manual_seed(1)
    mixed = dict(generate(model, prompts, temperatures=[0, 0, 1.0, 1.0], **how))
    assert [mixed[0], mixed[1]] == [in_slots[0], in_slots[1]]
    assert mixed[2] != in_slots[2] and mixed[3] != in_slots[3]


def test_a_model_writes_documents_and_a_killed_call_goes_on(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = dict(tokens=500, shard_tokens=200, form="document", max_tokens=40)
    whole = write_own_text(str(teacher), tmp_path / "whole", **how)
    train, held_out = (documents(tmp_path / "whole", part) for part in ("train", "held_out"))
    before = tokens_before(load_tokenizer(teacher))
    assert whole["rewired"] is None
    assert whole["written"]["tokens"] == sum(map(len, train)) and len(held_out) == 3
    assert whole["files"] == [[3, 167]], "three files of one size hold what was asked for"
    assert sum(map(len, train + held_out)) >= 500 and all(ids[: len(before)] == before for ids in train)

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr("fcsd.distill.own_text_files.write_text", full_disk)
        write_own_text(str(teacher), tmp_path / "again", **how)
    write = own_text._write_shard

    def killed(out: Path, number: int, *arguments: object) -> None:
        if number == 1:
            raise KeyboardInterrupt
        write(out, number, *arguments)

    monkeypatch.setattr(own_text, "_write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        write_own_text(str(teacher), tmp_path / "again", **how)
    monkeypatch.setattr(own_text, "_write_shard", write)
    first = (tmp_path / "again/train/part-00000.parquet").stat()
    write_own_text(str(teacher), tmp_path / "again", **how)
    assert (tmp_path / "again/train/part-00000.parquet").stat().st_ino == first.st_ino
    assert Counter(map(tuple, documents(tmp_path / "again", "train"))) == Counter(map(tuple, train))
    with pytest.raises(ConfigError, match="another --max-tokens: 40"):
        write_own_text(str(teacher), tmp_path / "again", **{**how, "max_tokens": 41})
    more = {**how, "tokens": 700, "shard_tokens": None}
    grown, other = on_ranks(2, partial(write_own_text, str(teacher), tmp_path / "again", **more))
    assert grown == other, "any number of processes goes on"
    assert grown["settings"] == whole["settings"] and grown["files"] == [[3, 167], [2, 100]], "as of a new text"
    assert grown["written"]["documents"] > len(train)
    assert (tmp_path / "again/train/part-00000.parquet").stat().st_ino == first.st_ino
    assert len(list((tmp_path / "again/train").iterdir())) == 5
    shutil.copytree(tmp_path / "again", tmp_path / "planned")
    (tmp_path / "planned/train/part-00004.parquet").unlink()
    write_own_text(str(teacher), tmp_path / "planned", **{**more, "tokens": 650})
    write_own_text(str(teacher), tmp_path / "planned", **more)
    assert documents(tmp_path / "planned", "train") == documents(tmp_path / "again", "train"), "a plan stays"
    less = write_own_text(str(teacher), tmp_path / "again", **{**how, "tokens": 100})
    assert less == grown, "the record counts all files that a recipe reads"


def test_a_file_has_a_document_to_train_on_or_is_refused(tmp_path: Path) -> None:
    """The first document of a file is held out. A model that only repeats itself would write for ever."""
    (tmp_path / "train").mkdir()
    (tmp_path / "held_out").mkdir()
    writer = SimpleNamespace(writing=Writing())
    writer.documents = lambda number, asked, count: [[*range(asked, asked + 40)]] * count
    own_text._write_shard(tmp_path, 0, 9, "text", writer, lambda tokens: None)
    assert [len(documents(tmp_path, part)) for part in ("held_out", "train")] == [1, 1]
    writer.documents = lambda number, asked, count: [[*range(40)]] * count
    with pytest.raises(BadInputError, match="all loop or nearly repeat"):
        own_text._write_shard(tmp_path, 1, 9, "text", writer, lambda tokens: None)
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


def test_the_share_of_greedy_answers_holds_over_small_calls() -> None:
    writer = object.__new__(Writer)
    writer.writing = Writing(greedy=0.25)
    writer._turns, writer._questions, heats = Turns([1], [2]), [[3]], []
    writer._generate = lambda prompts, heat: heats.extend(heat) or []
    for first in range(0, 12, 3):
        list(writer.documents(0, first, 3))
    assert len(heats) == 12 and heats.count(0.0) == 3


@pytest.mark.parametrize("questions", [40, 1000, 4096, 100_000, 1_000_003])
def test_shards_begin_evenly_apart_in_a_file_of_prompts(questions: int) -> None:
    """Round numbers of prompts are usual; shards that begin near each other answer the same ones."""
    writer = object.__new__(Writer)
    writer.writing = Writing()
    writer._turns, writer._questions = Turns([], []), [[number] for number in range(questions)]
    writer._generate = lambda prompts, heat: ((n, []) for n in range(len(prompts)))
    begun = [[ids[0] for ids in writer.documents(shard, first, 2)] for shard in range(8) for first in (0, 2)]
    starts = [one[0] for one in begun[::2]]
    for start, (first, then) in zip(starts, zip(begun[::2], begun[1::2], strict=True), strict=True):
        assert [*first, *then] == [(start + n) % questions for n in range(4)], "a shard answers them in turn"
    apart = [min((a - b) % questions, (b - a) % questions) for n, a in enumerate(starts) for b in starts[:n]]
    assert min(apart) >= questions // 16


def test_a_chat_model_invents_the_users_turn_and_answers(teacher: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(teacher)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    folder = shutil.copytree(teacher, tmp_path / "chat")
    tokenizer.save_pretrained(folder)
    turns = turns_of(tokenizer)
    assert tokenizer.decode(turns.before) == "<user>" and tokenizer.decode(turns.after).endswith("<assistant>")
    record = write_own_text(str(folder), tmp_path / "out", tokens=300, max_tokens=24)
    assert record["settings"]["form"] == "chat"
    for ids in documents(tmp_path / "out", "train"):
        assert ids[: len(turns.before)] == turns.before
        assert any(ids[n : n + len(turns.after)] == turns.after for n in range(len(ids)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "What is a whisk?"}) + "\n")
    write_own_text(str(folder), tmp_path / "asked", tokens=300, max_tokens=24, prompts=prompts)
    asked = tokenizer("What is a whisk?", add_special_tokens=False)["input_ids"]
    start = [*turns.before, *asked, *turns.after]
    assert all(ids[: len(start)] == start for ids in documents(tmp_path / "asked", "train"))


def test_settings_of_generation_that_writing_does_not_apply_are_named(teacher: Path, tmp_path: Path, caplog) -> None:
    known = {
        *NOT_IN_WRITING,
        *WITHOUT_EFFECT,
        "do_sample",
        "eos_token_id",
        "renormalize_logits",
        "remove_invalid_values",
    }
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= known
    folder = shutil.copytree(teacher, tmp_path / "model")
    settings = GenerationConfig.from_pretrained(folder)
    settings.update(do_sample=True, temperature=0.6, top_p=0.8, repetition_penalty=1.05, max_new_tokens=7)
    settings.save_pretrained(folder)
    for out in ("one", "two"):
        write_own_text(str(folder), tmp_path / out, tokens=60, form="document", max_tokens=20)
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"{folder}: not applied of its generation_config.json: ")
    named = set(said.split(": ")[-1].split(", "))
    assert named == {"temperature 0.6", "top_p 0.8", "repetition_penalty 1.05", "max_new_tokens 7"}


def test_loops_and_near_repeats_are_found() -> None:
    text = torch.randint(1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    assert loops([1, 2, 3] * 40) and not loops(text) and not loops([1, 2, 3] * 5)
    seen: set[tuple[int, ...]] = set()
    assert not repeats(text, seen) and repeats([*text[:190], *range(10)], seen)
    assert not repeats(text[::-1], seen)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"form": "chat"}, "needs a chat template"),
        ({"form": "poem"}, "'poem' is not a form"),
        ({"temperature": 0.0}, "--temperature must be a number above 0, not 0"),
        ({"temperature": math.inf}, "--temperature must be a number above 0, not inf"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, not 0"),
        ({"greedy": 0.5}, "--greedy is a share of answers"),
        ({"prompts": Path("none.jsonl")}, "no chat template to put them in"),
    ],
)
def test_what_has_no_meaning_is_refused_before_anything_is_written(
    teacher: Path, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        write_own_text(str(teacher), tmp_path / "out", **{"tokens": 100, "form": "document", **changes})
    assert not (tmp_path / "out").exists()


def test_a_rewired_model_writes_and_the_record_says_so(teacher: Path, tmp_path: Path, caplog) -> None:
    convert_checkpoint(teacher, tmp_path / "rewired", wiring="farskip", layers="1-2", check=False)
    caplog.set_level("INFO", "fcsd")
    write_own_text(str(tmp_path / "rewired"), tmp_path / "out", tokens=60, form="document", max_tokens=20)
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{tmp_path}/rewired is rewired (farskip, layers 1-2, by fcsd)" in said and f"({teacher})" in said
    assert json.loads((tmp_path / "out/write.json").read_text())["rewired"] == "farskip, layers 1-2, by fcsd"


def test_foreign_directories_and_wrong_numbers_are_refused(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a file")
    for out, reason in (("", "is not empty and holds no text"), ("mine", "--out .* is not a directory")):
        with pytest.raises(ConfigError, match=reason):
            write_own_text(str(teacher), tmp_path / out, tokens=100, form="document")
    (tmp_path / "write.json").write_text("{")
    with pytest.raises(BadInputError, match="is damaged"):
        write_own_text(str(teacher), tmp_path, tokens=100, form="document")
    found = CliRunner().invoke(app, ["write", str(teacher), "--out", str(tmp_path / "new"), "--tokens", "many"])
    assert found.exit_code == 2 or isinstance(found.exception, ConfigError)
    assert not (tmp_path / "new").exists()


SHORT = dict(tokens=300, shard_tokens=150, form="document", max_tokens=30)


@pytest.fixture(scope="module")
def written(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of two files."""
    out = tmp_path_factory.mktemp("written") / "out"
    write_own_text(str(teacher), out, **SHORT)
    return out


@pytest.mark.parametrize("lost", ["held_out/part-00000", "train/part-00001", "both", "everything"])
def test_a_file_that_is_gone_is_written_again(teacher: Path, written: Path, tmp_path: Path, lost: str) -> None:
    shutil.copytree(written, tmp_path / "out")
    gone = {"both": ["held_out/part-00001", "train/part-00001"], "everything": ["held_out", "train"]}.get(lost, [lost])
    for name in gone:
        path = tmp_path / "out" / name
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".parquet").unlink()
    (tmp_path / "out" / "train").mkdir(exist_ok=True)
    (tmp_path / "out" / "train" / ".part-00000.parquet.part-0123abcd").write_text("of a killed call")
    write_own_text(str(teacher), tmp_path / "out", **SHORT)
    for part in ("train", "held_out"):
        assert documents(tmp_path / "out", part) == documents(written, part)
        assert {path.name for path in (tmp_path / "out" / part).iterdir()} == {
            "part-00000.parquet",
            "part-00001.parquet",
        }
    assert (tmp_path / "out/write.json").read_text() == (written / "write.json").read_text()


def _another_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _another_ending(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))


def _other_values(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01\x02")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_another_tokenizer, "another tokenizer"),
        (_another_ending, "another model"),
        (_other_values, "another model"),
        (lambda folder: {"batch_size": 7}, "another --batch-size: 32"),
    ],
)
def test_what_changes_the_text_is_refused(
    teacher: Path, written: Path, tmp_path: Path, change: Any, named: str
) -> None:
    folder = shutil.copytree(teacher, tmp_path / "model")
    options = change(folder) or {}
    shutil.copytree(written, tmp_path / "out")
    with pytest.raises(ConfigError, match=f"holds text that was written with {named}"):
        write_own_text(str(folder), tmp_path / "out", **SHORT, **options)


def test_a_text_that_does_not_say_how_it_was_written_is_refused(teacher: Path, written: Path, tmp_path: Path) -> None:
    out = shutil.copytree(written, tmp_path / "out")
    record = json.loads((out / "write.json").read_text())
    del record["settings"]["batch_size"]
    (out / "write.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="does not record with which --batch-size its text was written"):
        write_own_text(str(teacher), out, **SHORT)


def test_another_chat_template_is_refused(teacher: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(teacher)
    folder = shutil.copytree(teacher, tmp_path / "chat")
    for number, template in enumerate(("<{{ m.role }}>", "[{{ m.role }}]")):
        tokenizer.chat_template = (
            "{% for m in messages %}" + template + "{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        tokenizer.save_pretrained(folder)
        if number == 0:
            write_own_text(str(folder), tmp_path / "out", tokens=60, max_tokens=10)
    with pytest.raises(ConfigError, match="another chat template"):
        write_own_text(str(folder), tmp_path / "out", tokens=60, max_tokens=10)


@pytest.mark.parametrize(
    "files",
    [
        "[[1000000000, 5]]",
        "[[600000, 5], [600000, 5]]",
        "[[1, Infinity]]",
        "[[1, NaN]]",
        "[[1, 1e400]]",
        "[[1, 1.5]]",
        "[[1, null]]",
        "[[true, 5]]",
        "[[1, 0]]",
        "[[-1, 5]]",
        "[[1, " + "9" * 5000 + "]]",
        "[[1, 2, 3]]",
        '["12"]',
        "[5]",
        "{}",
        "null",
        "[" * 100_000,
    ],
)
def test_a_record_of_absurd_files_is_refused(teacher: Path, written: Path, tmp_path: Path, files: str) -> None:
    (tmp_path / "out").mkdir()
    record = json.loads((written / "write.json").read_text())
    (tmp_path / "out" / "write.json").write_text(f'{{"settings": {json.dumps(record["settings"])}, "files": {files}}}')
    with pytest.raises(BadInputError, match=r"write\.json: is damaged: ") as caught:
        write_own_text(str(teacher), tmp_path / "out", **SHORT)
    assert "\n" not in str(caught.value)


def test_a_text_of_too_many_files_is_refused(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need more than 1,000,000 files"):
        write_own_text(str(teacher), tmp_path / "out", **{**SHORT, "tokens": 10**18})
    assert not (tmp_path / "out").exists()


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def _hole(file: Path) -> None:
    """Whole at both ends, and damaged between them."""
    data = bytearray(file.read_bytes())
    data[4:60] = bytes(56)
    file.write_bytes(data)


def _of_another_number(file: Path) -> None:
    file.write_bytes(file.with_name("part-00001.parquet").read_bytes())


def _foreign(file: Path) -> None:
    pq.write_table(pa.table({"text": ["hello"]}), file)


def _without_metadata(file: Path) -> None:
    pq.write_table(pa.table({"input_ids": pa.array([[5]], pa.list_(pa.int32()))}), file)


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


@pytest.mark.parametrize("part", ["train", pytest.param("held_out", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "damage",
    [
        _truncated,
        _hole,
        _of_another_number,
        _foreign,
        _without_metadata,
        _directory,
        _fifo,
        _link,
        lambda file: file.write_bytes(b""),
    ],
)
def test_a_damaged_file_is_named_and_can_be_deleted(
    teacher: Path, written: Path, tmp_path: Path, part: str, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(written, tmp_path / "out")
    file = out / part / "part-00000.parquet"
    damage(file)
    with monkeypatch.context() as quick, pytest.raises(BadInputError) as caught:
        quick.setattr(own_text, "_load", lambda *_: pytest.fail("a model was loaded"))
        write_own_text(str(teacher), out, **SHORT)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.hint == "Delete it; the same command writes it again."
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    write_own_text(str(teacher), out, **SHORT)
    assert documents(out, part) == documents(written, part)


def test_files_of_nobody_are_named(teacher: Path, written: Path, tmp_path: Path) -> None:
    out = shutil.copytree(written, tmp_path / "out")
    shutil.copy(out / "train/part-00000.parquet", out / "train/part-00002.parquet")
    with pytest.raises(BadInputError, match=r"part-00002\.parquet: is none of the files of this text"):
        write_own_text(str(teacher), out, **SHORT)
    shutil.rmtree(out / "train")
    (out / "train").write_text("a file")
    with pytest.raises(BadInputError, match="train: is not a folder"):
        write_own_text(str(teacher), out, **SHORT)


def test_two_calls_do_not_write_at_once(teacher: Path, written: Path, tmp_path: Path) -> None:
    out = shutil.copytree(written, tmp_path / "out")
    before = sorted(path.name for path in out.rglob("*"))
    with hold(out), pytest.raises(ConfigError, match="is in use by process") as caught:
        write_own_text(str(teacher), out, **{**SHORT, "tokens": 500})
    assert caught.value.hint == "wait for it, or set another --out"
    assert sorted(path.name for path in out.rglob("*")) == before
