"""The suites besides Table 1's: every row runs on data of its schema and scores what lm-eval itself scores."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import datasets.config
import datasets.load
import eval_data
import nltk
import pytest
import tiny
from huggingface_hub import constants
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fcsd import extras
from fcsd.errors import BadInputError, ConfigError
from fcsd.eval import tasks
from fcsd.eval.compare import compare_models
from fcsd.eval.engines import adapter
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.eval.suite import DEFINITIONS, EVALPLUS, SUITES, select, select_any
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


def test_the_files_of_a_data_set_are_looked_for_once(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    search = datasets.load.dataset_module_factory

    def counted(path: str, **options: Any) -> Any:
        searched.append(path)
        return search(path, **options)

    monkeypatch.setattr(datasets.load, "dataset_module_factory", counted)
    rows = [row for row in SUITES["strict"] if row.column in ("ARC-E", "ARC-C", "MMLU")]
    with tasks.load_tasks(rows, repo / "assets/mirror") as loaded:
        found = {name: list(leaf.eval_docs) for task in loaded for name, leaf in task.lm_eval["tasks"].items()}
    assert len(found) == 59 and sorted(searched) == ["allenai/ai2_arc", "cais/mmlu"]
    for name, subject in (("mmlu_anatomy", "anatomy"), ("mmlu_world_religions", "world_religions")):
        assert {document["subject"] for document in found[name]} == {subject}


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("suite", ["ladder", "pretrain-farskip", "pretrain-ladder"])
def test_a_suite_runs_and_equals_lm_eval(suite: str, subject: Loaded, mirror: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        adapter.HFAdapter, "generate_until", lambda self, requests: ["a river, a stone" for _ in requests]
    )
    rows = evaluate_models([subject], suite=suite, data_mirror=mirror, limit=1)
    assert [row["column"] for row in rows] == [row.column for row in SUITES[suite]]
    assert all(row["n"] == len(row["items"]) == (57 if row["task"] == "mmlu" else 1) for row in rows)
    assert table_1(rows).splitlines()[0].count("|") == len(rows) + 3

    monkeypatch.chdir(mirror)
    known = {(row.task, row.shots) for row in select("paper")} | {("mmlu", 5)}  # compared in test_eval_harness
    asked = [row for row in select(suite) if row.harness != EVALPLUS and (row.task, row.shots) not in known]
    folder = Path(simple_evaluate.__code__.co_filename).parent / "tasks"
    model = HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=4, max_length=LONGEST)
    for row in asked:
        if row.metric in ("exact_match", "aggregated_acc"):
            continue  # generated: see below, and tests of the adapter
        manager = TaskManager(include_path=folder / row.directory, include_defaults=False)
        settings: Any = {"num_fewshot": row.shots, "limit": 1, "bootstrap_iters": 0, "log_samples": False}
        theirs = simple_evaluate(model, tasks=[row.task], task_manager=manager, **settings)["results"][row.task]
        (ours,) = (found for found in rows if found["column"] == row.column)
        assert ours["value"] == pytest.approx(theirs[f"{row.metric},{row.filter}"], rel=1e-5), row.column


def test_wikitext_is_a_perplexity_over_words(subject: Loaded, mirror: Path) -> None:
    (row,) = evaluate_models([subject], suite="pretrain-ladder", tasks=["wikitext"], data_mirror=mirror)
    assert row["n"] == 3 and [words for _, words in row["items"]] == [40, 40, 40]
    assert row["value"] > 40 and 0 < row["stderr"] < row["value"]
    assert table_1([row]).splitlines()[-1].split("|")[2].strip() == "-", "no part of an average of accuracies"


def test_ifeval_judges_by_its_rules(subject: Loaded, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0, 7, 15 and 22 are asked: of the even ones nothing but commas, the odd ones want lower case as well."""
    answers = [
        "The river runs past the garden.",
        "the river runs past the garden and the old stone lamp.",
        "THE RIVER RUNS PAST THE GARDEN.",
        "The river, the stone.",
    ]
    monkeypatch.setattr(adapter.HFAdapter, "generate_until", lambda self, requests: answers)
    (row,) = evaluate_models([subject], suite="ladder", tasks=["IFEval"], data_mirror=mirror, limit=4)
    # Two of four prompts are followed, strictly and loosely; and four of six instructions: 1, 2, 1 and 0.
    assert row["value"] == pytest.approx((2 / 4 + 4 / 6) / 2)
    assert row["items"] == pytest.approx([(1 + 4 / 6) / 2, (1 + 8 / 6) / 2, 4 / 6 / 2, 0])
    theirs = aggregates([subject], mirror)
    assert row["value"] == pytest.approx(sum(theirs.values()) / 4), "the mean of lm-eval's four accuracies"


def aggregates(subjects: list[Loaded], mirror: Path) -> dict[str, float]:
    """lm-eval's own four accuracies of IFEval for a model whose answers are those of the test."""
    folder = Path(simple_evaluate.__code__.co_filename).parent / "tasks/ifeval"
    manager = TaskManager(include_path=folder, include_defaults=False)
    before = Path.cwd()
    os.chdir(mirror)
    try:
        lm = adapter.HFAdapter(subjects[0].model, subjects[0].tokenizer)
        asked = {"samples": {"ifeval": [0, 7, 15, 22]}, "bootstrap_iters": 0}
        found = simple_evaluate(lm, tasks=["ifeval"], task_manager=manager, **asked)["results"]
    finally:
        os.chdir(before)
    return {name: value for name, value in found["ifeval"].items() if name.endswith("_acc,none")}


def test_suite_ladder_follows_its_section() -> None:
    """Section 4.2: accuracy on MMLU and ARC-C, normalised accuracy on OpenBookQA and HellaSwag, IFEval aggregated."""
    found = {benchmark.column: (benchmark.metric, benchmark.shots) for benchmark in SUITES["ladder"]}
    assert found["MMLU"] == ("acc", 5) and found["ARC-C"] == ("acc", 25)
    assert found["OBook"] == ("acc_norm", 0) and found["HS"] == ("acc_norm", 10)
    assert found["IFEval"] == ("aggregated_acc", 0) and found["GSM-8K"][1] == 8


@pytest.mark.usefixtures("datasets_cache")
def test_any_task_of_lm_eval_is_scored_as_lm_eval_scores_it(subject: Loaded, mirror: Path, monkeypatch) -> None:
    """Neither of these is in suite `paper`; the shots of the second are lm-eval's, those of the first are asked for."""
    folder = Path(simple_evaluate.__code__.co_filename).parent / "tasks"
    for name, directory, metric, shots, chance in (
        ("sciq", "sciq", "acc_norm", 2, 25.0),
        ("boolq", "super_glue/boolq", "acc", None, 50.0),
        ("lambada_openai", "lambada", "acc", None, None),
    ):
        row, *more = evaluate_models([subject], tasks=[name], num_fewshot=shots, data_mirror=mirror, limit=3)
        assert (row["column"], row["task"], row["metric"], row["n"]) == (name, name, metric, 3)
        assert row["settings"]["shots"] == shots and row["data_files"]
        assert row["chance"] == chance, "by the number of choices"
        with monkeypatch.context() as inside:
            inside.chdir(mirror)
            theirs = simple_evaluate(
                HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=4, max_length=LONGEST),
                tasks=[name],
                task_manager=TaskManager(include_path=folder / directory, include_defaults=False),
                num_fewshot=shots,
                samples={name: [0, 10, 20]},  # three of thirty, evenly spread
                bootstrap_iters=0,
            )["results"][name]
        assert row["value"] == pytest.approx(theirs[f"{metric},none"])
        for loss in more:
            assert (loss["column"], loss["metric"], name) == ("lambada_openai loss", "nll_per_answer", "lambada_openai")
            assert math.exp(loss["value"]) == pytest.approx(theirs["perplexity,none"], rel=1e-5)
        assert len(more) == (name == "lambada_openai")


def test_the_last_word_of_a_passage_stands_beside_the_mean(mirror: Path, tmp_path: Path, monkeypatch) -> None:
    """Greedy accuracy and the loss of the right word, paired, logged, and in no mean."""
    original, student = (Loaded(name, tiny.model("llama"), eval_data.tokenizer()) for name in ("original", "student"))

    def answers(lm: adapter.HFAdapter, requests: list[Any]) -> list[tuple[float, bool]]:
        worse = lm.model is student.model
        return [(-1 - i % 5 - worse * (i % 2), i % (3 + worse) == 0) for i in range(len(requests))]

    monkeypatch.setattr(adapter.HFAdapter, "loglikelihood", answers)
    with pytest.raises(ConfigError, match=r"no task counts in the mean.*: lambada_openai"):
        evaluate_models([student], tasks=["lambada_openai"], data_mirror=mirror, verdict=True)
    ask = {"tasks": ["lambada_openai", "piqa"], "data_mirror": mirror, "log_samples": True, "out": tmp_path}
    rows = evaluate_models([student], baseline=original, **ask)
    acc, nats, piqa = (row for row in rows if row["model"] == "student")
    assert [row["column"] for row in (acc, nats, piqa)] == ["lambada_openai", "lambada_openai loss", "PIQA"]
    assert [row["beside"] for row in (acc, nats, piqa)] == [True, True, False]
    assert acc["items"] == [float(i % 4 == 0) for i in range(30)] and nats["n"] == 30
    assert nats["items"] == [1 + i % 5 + i % 2 for i in range(30)] and nats["value"] == 3.5
    passage = json.loads((mirror / "EleutherAI/lambada_openai/default/test.jsonl").read_text().splitlines()[0])["text"]
    (line, *others) = (tmp_path / "samples/student/paper/lambada_openai.jsonl").read_text().splitlines()
    assert json.loads(line)["arguments"][0] == [passage.rsplit(" ", 1)[0], " " + passage.split()[-1]]
    assert len(others) == 29
    (compared,) = compare_models(rows)
    task = compared.tasks[0]
    assert task.beside and task.points == pytest.approx(100 * (8 - 10) / 30) and task.low < task.points < task.high
    (loss,) = compared.losses
    assert (loss.column, loss.unit, loss.nats) == ("lambada_openai loss", "answer", 0.5)
    assert loss.stderr == pytest.approx(math.sqrt(30 * 0.25 / 29 / 30)), "paired: every second answer lost one nat"
    head = [cell.strip(" *") for cell in table_1(rows).splitlines()[0].split("|")[1:-1]]
    assert head == ["Model", "PIQA", "Avg", "lambada_openai", "lambada_openai loss"]


def test_passages_that_are_missing_or_empty_are_refused(subject: Loaded, mirror: Path, tmp_path: Path) -> None:
    ask = {"tasks": ["lambada_openai"], "data_mirror": tmp_path}
    with pytest.raises(BadInputError, match="the data mirror has no directory EleutherAI/lambada_openai"):
        evaluate_models([subject], **ask)
    shutil.copytree(mirror / "EleutherAI/lambada_openai", tmp_path / "EleutherAI/lambada_openai")
    (tmp_path / "EleutherAI/lambada_openai/default/test.jsonl").write_text('{"text": "a river"}\n{"text": ""}\n')
    with pytest.raises(BadInputError, match="question 1 cannot be read"):
        evaluate_models([subject], **ask)


def test_settings_of_named_tasks(subject: Loaded, mirror: Path) -> None:
    chatty = Loaded("chatty", subject.model, eval_data.tokenizer())
    chatty.tokenizer.chat_template = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} {% endfor %}"
    ask = {"tasks": ["piqa"], "data_mirror": mirror, "limit": 2}
    (plain,) = evaluate_models([chatty], **ask)
    (chat,) = evaluate_models([chatty], apply_chat_template=True, num_fewshot=1, **ask)
    assert (plain["settings"]["chat"], plain["settings"]["shots"]) == (False, 0)
    assert (chat["settings"]["chat"], chat["settings"]["shots"]) == (True, 1)
    assert plain["settings"]["prompts_sha256"] != chat["settings"]["prompts_sha256"]
    with pytest.raises(BadInputError, match="PIQA: the model has no chat template"):
        evaluate_models([subject], apply_chat_template=True, **ask)
    with pytest.raises(ConfigError, match="settings of suite 'paper' are fixed"):
        evaluate_models([subject], num_fewshot=2, data_mirror=mirror)
    with pytest.raises(ConfigError, match="EvalPlus shows no examples"):
        evaluate_models([subject], suite="strict", tasks=["HEval+"], num_fewshot=2, data_mirror=mirror)


def test_tasks_that_cannot_be_scored_are_refused_before_the_model_runs(
    subject: Loaded, mirror: Path, tmp_path: Path
) -> None:
    subject.model.get_decoder().register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    with pytest.raises(
        ConfigError, match="neither the suite nor the installed lm-eval has a task 'hellaswagg'"
    ) as told:
        tasks.load_tasks(select_any("paper", ["hellaswagg"]), mirror).__enter__()
    assert "hellaswag" in str(told.value.hint)
    with pytest.raises(ConfigError, match="has a task 'nosuch'"):  # before the data of the first task are missed
        tasks.load_tasks(select_any("paper", ["MMLU", "nosuch"]), mirror / "..").__enter__()
    with pytest.raises(BadInputError, match="no-model: no such directory"):
        evaluate_models(["no-model"], tasks=["MMLU"], data_mirror=mirror / "..")
    (tmp_path / "config.json").write_text('{"model_type": "bitnet"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadInputError, match="model_type 'bitnet' is not supported"):
        evaluate_models([tmp_path], tasks=["MMLU"], data_mirror=mirror / "..")
    with pytest.raises(ConfigError, match="runs generated programs outside of fcsd's sandbox"):
        tasks.load_tasks(select_any("quickstart", ["humaneval_plus"]), mirror).__enter__()


def test_without_network_the_cache_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One request finds it out; the libraries would repeat every one of theirs five times."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):  # the processes of a machine say it once
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(BadInputError, match=r"PIQA: cannot load .*OfflineMode"):
            tasks.load_tasks(select_any("paper", ["PIQA"]), None).__enter__()
    said = [record for record in caplog.records if "http://127.0.0.1:9 cannot be reached" in record.getMessage()]
    assert len(said) == 1 and "Retrying" not in caplog.text
    assert constants.HF_HUB_OFFLINE is datasets.config.HF_HUB_OFFLINE is False


def test_ifeval_without_its_tools_is_refused_before_anything_runs(
    subject: Loaded, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        evaluate_models([subject], suite="ladder", tasks=["IFEval"], data_mirror=mirror)

    with monkeypatch.context() as without:
        without.setattr(nltk.data, "path", [os.devnull])
        with pytest.raises(ConfigError, match="punkt_tab"):
            ask()
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "langdetect" else name)
    with pytest.raises(ConfigError, match=r"^IFEval needs langdetect: pip install 'fcsd\[eval\]'$"):
        ask()
