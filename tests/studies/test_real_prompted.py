"""``prompted``: what reverse KL counts, where the ways differ, and calls that go on."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import texts
import tiny
import torch
from benchmarks.programs import start
from studies.real import prompted
from studies.real.prompted import Document, Study, Training, padded, reverse_kl, scores, steps_of, table
from studies.real.runner import stored

from fcsd.distill.loss.losses import kl_divergence

pytestmark = pytest.mark.lab

SEQ = 32


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run on a tiny model that reads characters: 32 steps of 64 tokens, the last 16 of answers."""
    tiny.model("llama", initializer_range=0.1).save_pretrained(tmp_path / "model")
    tokenizer = texts.tokenizer()
    tokenizer.chat_template = texts.PLAIN
    tokenizer.save_pretrained(tmp_path / "model")
    for text, seed in (("own", 0), ("foreign", 1)):
        for part, rows in (("train", 16), ("held_out", 2)):
            (tmp_path / text / part).mkdir(parents=True)
            column = pa.array(tiny.tokens(rows, 64, seed=seed + rows).tolist(), pa.list_(pa.int32()))
            pq.write_table(pa.table({"input_ids": column}), tmp_path / text / part / "part-00000.parquet")
    row = {"requests": [[[1, 5, 9], [7, 9]], [[1, 5, 9], [8]]], "lengths": [4, 2], "right": 0}
    document = {"question": "2 + 2?", "answer": "it is #### 4"}
    asked = {"GSM8K": [{"ids": texts.ids("2 + 2?"), "document": document}] * 3}
    for name, content in (("questions", {"A": [row] * 2, "B": [row]}), ("asked", asked)):
        with gzip.open(tmp_path / f"{name}.json.gz", "wt") as file:
            json.dump(content, file)
    monkeypatch.setattr(prompted, "SEQ", SEQ)
    monkeypatch.setattr(prompted, "MOST_ASKED", 8)
    files = [f"--{name}={tmp_path / name}.json.gz" for name in ("questions", "asked")]
    files += [f"--text={name}={tmp_path / name}" for name in ("own", "foreign")]
    shape = ["--tokens=2048", "--written=1024", "--rounds=2", "--batch=2", "--prompts=256", "--answer=16"]
    return ["run", str(tmp_path / "model"), str(tmp_path / "out"), *files, *shape, "--at-once=64", "--held-out=2"]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    start("studies.real", "prompted", *words)
    return stored(Path(words[2]) / "results.jsonl")


def study(words: list[str]) -> Study:
    made = Study(prompted.arguments().parse_args(words))
    made.prompts = made.invented()
    return made


def test_reverse_kl_is_what_it_says_and_its_gradient_is_autograds() -> None:
    torch.manual_seed(0)
    hidden, target = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
    heads = torch.randn(11, 8, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    mask = torch.rand(2, 5) < 0.6
    mine, literal = hidden.clone().requires_grad_(True), hidden.clone().requires_grad_(True)
    found = reverse_kl(mine, heads[0], target, heads[1], mask, denominator=3.0, chunk_tokens=2)
    p, q = (literal @ heads[0].T).softmax(-1), (target @ heads[1].T).softmax(-1)
    expected = ((p * (p / q).log()).sum(-1) * mask).sum() / 3
    torch.testing.assert_close(found, expected)
    (found * 2).backward()
    (expected * 2).backward()
    torch.testing.assert_close(mine.grad, literal.grad)
    assert bool((mine.grad[~mask] == 0).all()) and not torch.equal(found, _forward(hidden, heads, target, mask))


def _forward(hidden: torch.Tensor, heads: Any, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return kl_divergence(hidden, heads[0], target, heads[1], mask, denominator=3.0)


def test_each_answers_token_counts_once_and_no_prompts_and_no_padding() -> None:
    documents = [Document(list(range(10, 10 + length)), prompt) for length, prompt in ((9, 4), (5, 4), (7, 2), (3, 1))]
    assert [[one.prompt for one in step] for step in steps_of(documents, 6)] == [[4, 4], [2, 1]]
    seen = []
    for ids, mask in padded(documents, 14):
        assert ids.numel() <= 14
        for row, counts in zip(ids, mask, strict=True):
            document = next(one for one in documents if one.ids[-1] == int(row.max()))
            assert row[: len(document.ids)].tolist() == document.ids
            predicted = row[1:][counts[:-1]].tolist()  # what the positions that count predict
            assert predicted == document.ids[document.prompt :] and not counts[-1]
            seen.append(document)
    assert sorted(seen) == sorted(documents)


def test_the_loss_of_padded_documents_is_that_of_each_alone(words: list[str]) -> None:
    made = study(words)
    student = made.student()
    documents = [
        Document(tiny.tokens(1, length, seed=length)[0].tolist(), prompt) for length, prompt in ((9, 4), (21, 6))
    ]
    ((ids, mask),) = padded(documents, 64)
    together = made.divergence(student, ids, mask, reverse_kl, 20)
    alone = torch.zeros(())
    for one in documents:  # without any of the study's ways to save time
        row = torch.tensor([one.ids])
        p, q = (model(row).logits[0, one.prompt - 1 : -1].log_softmax(-1) for model in (student, made.original))
        alone = alone + (p.exp() * (p - q)).sum() / 20
    torch.testing.assert_close(together, alone)


def test_a_round_of_answers_brings_the_student_nearer_on_other_answers(words: list[str]) -> None:
    made = study(words)
    training = Training(made.student(), made.layers)
    fixed, cut = made.answered(training, made.original, 7, 600)
    assert sum(one.answer for one in fixed) >= 600 and cut >= 0
    ((ids, mask),) = padded(fixed, 1 << 20)

    def distance() -> float:
        with torch.no_grad():
            return float(made.divergence(training.student, ids, mask, reverse_kl, int(mask.sum())))

    before, weights = distance(), [p.clone() for p in training.student.parameters()]
    losses, told = made.read_answers(training, "reverse", 0, 1024)
    assert distance() < 0.8 * before and losses[-1] < losses[0]
    assert 0 < told["ended"] < 1 and told["answers"] > 32 and 1024 <= training.counts["tokens"] < 1024 + 16
    moved = {
        n for (n, p), old in zip(training.student.named_parameters(), weights, strict=True) if not torch.equal(p, old)
    }
    assert moved and all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in moved)


def test_ways_are_one_run_up_to_the_answers_and_calls_go_on(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [*words, "--ways=base,reverse,forward,taught", "--seeds=0"]
    whole = run(ways, monkeypatch)
    rounds = [line for line in whole if "round" in line]
    assert [line["way"] for line in rounds if line["tokens"] <= 1024] == ["base"]
    forms = {line["form"]: line for line in whole if "form" in line}
    kl = [line["kl"]["own"]["kl"] for line in forms.values()]
    assert [*forms] == ["original", "base", "reverse", "forward", "taught"] and kl[0] == 0 and len({*kl}) == 5
    assert all(2048 <= line["tokens"] < 2048 + 3 * 16 for line in list(forms.values())[1:])
    assert [file.name for file in Path(words[2]).glob("*.pt")] == ["half-0.pt"]

    shutil.rmtree(words[2])
    parts: list[str] = []  # of a call, which has time for two
    late, timed = Study.is_late, Study.timed
    monkeypatch.setattr(Study, "is_late", lambda self, kind: len(parts) >= 2 or late(self, kind))
    monkeypatch.setattr(Study, "timed", lambda self, kind: parts.append(kind) or timed(self, kind))
    again = run([*words, "--seeds=0"], monkeypatch)
    stops = 0
    while "stopped" in again[-1]:
        stops += 1
        parts.clear()
        again = run([*words, "--seeds=0"], monkeypatch)
    assert stops >= 3

    def results(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        timing = ("seconds", "at", "judged_in", "trained_in", "writing")
        others = [line for line in lines if line.keys().isdisjoint({"stopped", "prompts"})]
        same = [line for line in others if {line.get("way"), line.get("form")} & {"original", "base", "reverse"}]
        return [{key: value for key, value in line.items() if key not in timing} for line in same]

    assert results(again) == results(whole)


def test_a_call_without_time_begins_nothing(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run([*words, "--seconds=0"], monkeypatch)
    assert [sorted({"prompts", "stopped"} & line.keys()) for line in lines] == [["prompts"], ["stopped"]]
    with pytest.raises(SystemExit, match="other options"):
        run([*words, "--batch=4"], monkeypatch)


def test_prompts_that_share_words_with_a_question_are_left_out(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = study(words)
    first = made.prompts[0]
    (Path(words[2]) / "prompts.json").unlink()
    monkeypatch.setattr(prompted, "SHARED", len(first))
    made.asked["GSM8K"][0]["ids"] = [5, *first, 6]
    assert first not in made.invented() and first in made.prompts


def test_answers_are_scored(tmp_path: Path) -> None:
    sums = [{"answer": "so\n#### 1,200"}] * 3
    assert scores("GSM8K", sums, ["It is $1200.", "1200, or 7", "none"]) == [1.0, 0.0, 0.0]
    words = [{"correct_answer": "Darwin"}] * 3
    assert scores("SciQ", words, ["By darwin.", "A Darwinist", "No.\nDarwin"]) == [1.0, 0.0, 0.0]


def test_the_table_has_a_row_for_a_form_and_its_seeds() -> None:
    def line(form: str, seed: int | None, right: list[float]) -> dict[str, Any]:
        judged = {"A": {"right": right, "tokens": [4, 8], "ended": [1, 0]}}
        return {
            "form": form,
            "seed": seed,
            "kl": {"own": {"kl": 0.5}},
            "chosen": {"B": {"right": right}},
            "judged": judged,
        }

    lines = [line("original", None, [1, 1]), line("base", 0, [1, 0]), line("reverse", 0, [1, 1]), {"round": "text"}]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(lines).splitlines()]
    assert [row[:2] for row in rows[2:]] == [["original", "1"], ["base", "1"], ["base", "seed 0"], ["reverse", "1"],
                                             ["reverse", "seed 0"]]  # fmt: skip
    assert rows[6][3:7] == ["100.00", "+50.00 ± 50.00", "100.00", "+50.00 ± 50.00"] and rows[6][-3:-1] == ["50.0", "6"]
