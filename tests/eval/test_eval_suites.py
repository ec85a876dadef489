"""The suites besides Table 1's: every row runs on data of its schema and scores what lm-eval itself scores."""

import os
import shutil
from pathlib import Path
from typing import Any

import eval_data
import nltk
import pytest
import tiny
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fcsd.errors import ConfigError
from fcsd.eval import tasks
from fcsd.eval.engines import adapter
from fcsd.eval.harness import Loaded, evaluate
from fcsd.eval.suite import DEFINITIONS, EVALPLUS, SUITES, select
from fcsd.eval.tables import table_1

LONGEST = 8192  # the tests' tokenizer needs several tokens a word, and these suites show up to 25 examples


@pytest.fixture(scope="module")
def mirror(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = eval_data.write_mirror(tmp_path_factory.mktemp("mirror"), rows=30)  # ARC shows 25 and asks another
    shutil.copy(repo / "assets/mirror/evalplus/HumanEvalPlus.jsonl", root / "evalplus")
    return root


@pytest.fixture(autouse=True)
def punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NLTK's data where IFEval looks for them; no rule used here counts sentences."""
    (tmp_path / "nltk/tokenizers/punkt_tab").mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])


@pytest.fixture
def subject() -> Loaded:
    network = tiny.model("deepseek_v2", vocab_size=400, max_position_embeddings=LONGEST)
    return Loaded("tiny", network, eval_data.tokenizer())


def test_a_task_defined_otherwise_than_the_suite_knows_is_said(mirror: Path, monkeypatch, caplog) -> None:
    rows = [row for suite in SUITES.values() for row in suite if row.task in ("piqa", "arc_easy", "wikitext", "sciq")]
    with tasks.load_tasks(rows, mirror) as loaded:
        assert {task.definition_sha256 for task in loaded} <= set(DEFINITIONS.values())
    assert "defines" not in caplog.text
    monkeypatch.setitem(DEFINITIONS, "sciq", "0" * 64)
    with tasks.load_tasks(rows, mirror):
        assert "the installed lm-eval defines sciq otherwise" in caplog.text


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("suite", ["ladder", "pretrain-farskip", "pretrain-ladder"])
def test_a_suite_runs_and_equals_lm_eval(suite: str, subject: Loaded, mirror: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        adapter.HFAdapter, "generate_until", lambda self, requests: ["a river, a stone" for _ in requests]
    )
    rows = evaluate([subject], suite=suite, data_mirror=mirror, limit=1)
    assert [row["column"] for row in rows] == [row.column for row in SUITES[suite]]
    assert all(row["n"] == len(row["items"]) == (57 if row["task"] == "mmlu" else 1) for row in rows)
    assert table_1(rows).splitlines()[0].count("|") == len(rows) + 3

    monkeypatch.chdir(mirror)
    known = {(row.task, row.shots) for row in select("paper")} | {("mmlu", 5)}  # compared in test_eval_harness
    asked = [row for row in select(suite) if row.harness != EVALPLUS and (row.task, row.shots) not in known]
    folder = Path(simple_evaluate.__code__.co_filename).parent / "tasks"
    model = HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=4, max_length=LONGEST)
    for row in asked:
        if row.metric in ("exact_match", "prompt_level_strict_acc"):
            continue  # generated: see below, and tests of the adapter
        manager = TaskManager(include_path=folder / row.directory, include_defaults=False)
        settings: Any = {"num_fewshot": row.shots, "limit": 1, "bootstrap_iters": 0, "log_samples": False}
        theirs = simple_evaluate(model, tasks=[row.task], task_manager=manager, **settings)["results"][row.task]
        (ours,) = (found for found in rows if found["column"] == row.column)
        assert ours["value"] == pytest.approx(theirs[f"{row.metric},{row.filter}"], rel=1e-5), row.column


def test_wikitext_is_a_perplexity_over_words(subject: Loaded, mirror: Path) -> None:
    (row,) = evaluate([subject], suite="pretrain-ladder", tasks=["wikitext"], data_mirror=mirror)
    assert row["n"] == 3 and [words for _, words in row["items"]] == [40, 40, 40]
    assert row["value"] > 40 and 0 < row["stderr"] < row["value"]
    assert table_1([row]).splitlines()[-1].split("|")[3].strip() == "-", "no part of an average of accuracies"


def test_ifeval_judges_by_its_rules(subject: Loaded, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the even rows nothing but commas is asked, the odd ones want lower case as well."""
    answers = [
        "The river runs past the garden.",
        "the river runs past the garden and the old stone lamp.",
        "The river, the stone.",
        "THE RIVER RUNS PAST THE GARDEN.",
    ]
    monkeypatch.setattr(adapter.HFAdapter, "generate_until", lambda self, requests: answers)
    (row,) = evaluate([subject], suite="ladder", tasks=["IFEval"], data_mirror=mirror, limit=4)
    assert row["items"] == [True, True, False, False] and row["value"] == 0.5


def test_ifeval_without_its_tools_is_refused_before_anything_runs(
    subject: Loaded, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        evaluate([subject], suite="ladder", tasks=["IFEval"], data_mirror=mirror)

    with monkeypatch.context() as without:
        without.setattr(nltk.data, "path", [os.devnull])
        with pytest.raises(ConfigError, match="punkt_tab"):
            ask()
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if name == "langdetect" else name)
    with pytest.raises(ConfigError, match="IFEval needs langdetect"):
        ask()
