"""The text to heal on: the second world shares no fact and no question with the teacher's, and errors are errors."""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from studies.capability import text, written
from studies.capability.other_world import TABLES, makers, strings
from transformers import AutoTokenizer

pytestmark = pytest.mark.lab

CODE = ("humaneval_plus", "mbpp_plus")


@pytest.fixture(scope="module")
def worlds() -> dict[str, tuple[ModuleType, ModuleType]]:
    return {"teacher": makers(other=False), "other": makers(other=True)}


def facts(world: ModuleType) -> Iterator[str]:
    """Every name, entity, value, term, meaning, goal and step of a world; its wordings are left out."""
    for name in TABLES:
        table = world.table(name)
        if name == "facts":
            rows = [part["rows"] for part in table.values() if isinstance(part, dict)]
            yield from strings([*rows, table["names_f"], table["names_m"]])
        else:
            yield from strings(list(table.values()) if name == "mmlu" else table)


def test_the_other_world_has_the_same_forms_and_no_common_fact(worlds: dict) -> None:
    own, other = (list(facts(worlds[name][1])) for name in ("teacher", "other"))
    assert len(own) == len(other) > 1500 and not {x.lower() for x in own} & {x.lower() for x in other}
    ask = [worlds[name][1].table("facts")["animals"]["ask"] for name in ("teacher", "other")]
    assert ask[0] == ask[1]
    assert list(worlds["teacher"][1].table("mmlu")) == list(worlds["other"][1].table("mmlu"))


def test_no_question_is_in_both_worlds_or_in_the_mirror(worlds: dict, repo: Path) -> None:
    mirror = "\n".join(
        value for path in (repo / "assets/mirror").rglob("*.jsonl") for line in path.open()
        for value in strings(json.loads(line))
    )  # fmt: skip
    for task in worlds["other"][0].TASKS:
        keys = {}
        for name, (items, _) in worlds.items():
            rng = random.Random(1)
            keys[name] = {items.item_of(task, "train", rng).key for _ in range(400)}
        assert keys["other"].isdisjoint(keys["teacher"])
        for key in keys["other"]:
            question = key.split(" ", 1)[1] if task in CODE else key.split("_")[0] if task == "winogrande" else key
            assert question not in mirror


def test_a_wrong_answer_is_another_answer_of_the_same_form(worlds: dict) -> None:
    items, world = worlds["other"]
    for task, (make, *_) in items.TASKS.items():
        right: dict[str, set] = {}
        items_of_task = _take(world.items(make, "train", random.Random(2)), 200)
        for item in items_of_task:
            right.setdefault(item.key, set()).add((item.prompt, item.answer))
        stream = text.with_errors(lambda *_, found=items_of_task: iter(found), rate=1.0)
        for item in _take(stream(make, "train", random.Random(2)), 40):
            assert (item.prompt, item.answer) not in right[item.key]
            if task not in (*CODE, "gsm8k", "winogrande"):
                assert item.answer.strip() in {*strings(item.row), *"ABCDE"}
            if task == "gsm8k":
                assert item.answer.splitlines()[-1].startswith("#### ")


def test_errors_come_at_their_rate(worlds: dict) -> None:
    items, world = worlds["other"]
    make = items.TASKS["arc_easy"][0]
    found = _take(text.with_errors(world.items, rate=0.2)(make, "train", random.Random(3)), 600)
    gold = [item.row["choices"]["text"]["ABCD".index(item.row["answerKey"])] for item in found]
    wrong = sum(item.answer.strip() != right for item, right in zip(found, gold, strict=True))
    assert 80 < wrong < 160


@pytest.mark.parametrize("kind", text.KINDS)
def test_a_file_has_the_tokens_that_were_asked_for(kind: str, tmp_path: Path, repo: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "real").mkdir()
    source = (repo / "CHANGELOG.md").read_text() + (repo / "benchmarks/results/RESULTS.md").read_text()
    (tmp_path / "real/a.md").write_text(source)
    args = argparse.Namespace(
        kind=kind, tokens=60e3, out=tmp_path, wrong=0.1, text=tmp_path / "real", seed=0, workers=1,
        tokenizer=repo / "assets/teacher", token_ids=False,
    )  # fmt: skip
    about = text.write(args)
    assert about["documents"]["generated"] == 0 if kind == "none" else about["documents"]["generated"] > 100
    tokenizer = AutoTokenizer.from_pretrained(repo / "assets/teacher")
    lines = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").open()]
    assert 57e3 < sum(len(ids) + 1 for ids in tokenizer(lines)["input_ids"]) < 72e3
    assert json.loads((tmp_path / "text.json").read_text()) == about


def test_token_ids_are_those_that_the_teacher_was_trained_on(repo: Path, tmp_path: Path) -> None:
    teacher = repo / "assets/teacher"
    (tmp_path / "real.jsonl").write_text(json.dumps({"text": "def f():\n    return 1\n"}) + "\n")
    given = {"kind": "same", "wrong": 0.0, "seed": 0, "workers": 1, "tokenizer": teacher, "token_ids": True}
    about = text.write(argparse.Namespace(**given, tokens=20e3, out=tmp_path, text=tmp_path / "real.jsonl"))
    rows = [json.loads(line)["token_ids"] for line in (tmp_path / "train.jsonl").open()]
    real, made = rows[: about["documents"]["real"]], rows[about["documents"]["real"] :]
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    assert all(
        ids == tokenizer("<s>def f():\n    return 1\n</s>", add_special_tokens=False)["input_ids"] for ids in real
    )
    code = "import sys; from train import encode; print(encode(sys.argv[1], *map(int, sys.argv[2:]))[0].tolist())"
    command = [sys.executable, "-c", code, teacher / "tokenizer.json", text.FIRST_SEED, len(made)]
    seen = subprocess.check_output(list(map(str, command)), cwd=repo / "studies/teacher", text=True)
    assert [token for ids in made for token in ids] == json.loads(seen.splitlines()[-1])
    whole = [tokenizer(tokenizer.decode(ids[1:-1]), add_special_tokens=False)["input_ids"] for ids in made]
    assert sum(ids[1:-1] != other for ids, other in zip(made, whole, strict=True)) > len(made) / 20


def _take(stream: Iterator, count: int) -> list:
    return [next(stream) for _ in range(count)]


def beginnings(repo: Path, folder: Path, documents: int) -> tuple[list[str], dict[str, Any]]:
    """The beginnings of some documents, and the arguments with which the teacher continues them."""
    lines = (repo / "assets/corpus/held_out.jsonl").read_text().splitlines()
    short = [json.loads(line)["text"][: 60 + 20 * n] for n, line in enumerate(lines[:documents])]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in short))
    given = {"model": repo / "assets/teacher", "text": folder / "text.jsonl", "device": "cpu", "batch": 2, "seed": 0}
    return short, given | {"tokens": 1e6}


def test_a_text_by_a_model_is_continued_where_it_was_stopped(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, given = beginnings(repo, tmp_path, 5)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    about = written.write(argparse.Namespace(**given, out=whole))
    batches, continued = [], written.continued

    def stopped(model: Any, tokenizer: Any, documents: Any) -> Any:
        batches.append(documents)
        if len(batches) == 2:
            with (parts / "train.jsonl").open("a") as file:
                file.write('{"text": "a part of a batch')
            raise KeyboardInterrupt
        return continued(model, tokenizer, documents)

    monkeypatch.setattr(written, "continued", stopped)
    with pytest.raises(KeyboardInterrupt):
        written.write(argparse.Namespace(**given, out=parts))
    assert written.write(argparse.Namespace(**given, out=parts)) == about
    assert len(batches) == 4, "the first of three batches is not written again"
    assert (parts / "train.jsonl").read_bytes() == (whole / "train.jsonl").read_bytes()
    assert sorted(path.name for path in parts.iterdir()) == ["text.json", "train.jsonl"]


def test_a_model_continues_the_first_third_of_each_document(repo: Path, tmp_path: Path) -> None:
    short, given = beginnings(repo, tmp_path, 3)
    about = written.write(argparse.Namespace(**given, out=tmp_path))
    texts = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert about["documents"] == len(texts) == 3 and about["tokens"] > 3
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    for original, ids in zip(short, tokenizer(short)["input_ids"], strict=True):
        prompt = tokenizer.decode(ids[: len(ids) // 3], skip_special_tokens=True)
        (found,) = [text for text in texts if text.startswith(prompt)]
        assert original.startswith(prompt) and found != original
        assert not any(word in found for word in tokenizer.all_special_tokens)


def test_the_chosen_documents_have_the_tokens_and_those_of_a_batch_are_alike_in_length() -> None:
    documents = [[1] * length for length in range(1, 101)]
    found = written.batches(documents, 2000, 8, random.Random(0))
    chosen = [ids for batch in found for ids in batch]
    assert 2000 <= sum(map(len, chosen)) < 2100 and chosen == sorted(chosen, key=len)
    assert {len(batch) for batch in found[:-1]} == {8}
    assert sum(len(batch) for batch in written.batches(documents, 1e6, 8, random.Random(0))) == 100
