"""Stock lm-eval tasks on a mirror: right numbers, no traces, no false scores."""

import json
import os
import random
import shutil
from pathlib import Path

import datasets
import eval_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fcsd.engine import logprobs
from fcsd.errors import BadInputError, ConfigError, NonFiniteError
from fcsd.eval.compare import compare_models
from fcsd.eval.engines import adapter
from fcsd.eval.harness import Loaded, evaluate_models, named_models
from fcsd.eval.results import read_results
from fcsd.eval.suite import SUITES, select

NINE = ["PIQA", "ARC-E", "ARC-C", "HS", "CSQa", "WG", "MMLU", "OBook", "GSM-8K"]


def loaded(name: str = "tiny", seed: int = 0, longest: int = 1024) -> Loaded:
    network = tiny.model("deepseek_v2", seed=seed, vocab_size=400, max_position_embeddings=longest)
    return Loaded(name, network, eval_data.tokenizer())


@pytest.mark.usefixtures("datasets_cache")
def test_all_nine_tasks_equal_lm_eval_itself(mirror, tmp_path, caplog):
    subject = loaded()
    caplog.set_level("INFO", "fcsd.eval.harness")
    rows = evaluate_models([subject], tasks=NINE, data_mirror=mirror, limit=3, out=tmp_path / "out", log_samples=True)
    asked = {row["column"]: row["n"] for row in rows}
    said = caplog.messages[0]  # before the first question, with all of MMLU's subjects
    assert said.startswith(f"1 model, {sum(asked.values()):,} items each, with --limit 3: ")
    assert f"MMLU {asked['MMLU']:,} in 57 tasks" in said and f"PIQA {asked['PIQA']}," in said
    assert [row["column"] for row in rows] == NINE
    lm_tasks = Path(simple_evaluate.__code__.co_filename).parent / "tasks"
    folders = {row.directory for row in select("paper", NINE)}
    manager = TaskManager(include_path=[lm_tasks / f for f in folders], include_defaults=False)
    before = Path.cwd()
    try:
        os.chdir(mirror)
        theirs = {}
        single = [row["task"] for row in rows if row["task"] != "mmlu"]
        spread = {"samples": {name: [0, 2, 5] for name in single}}  # three of eight
        for names, asked in ((single, spread), (["mmlu"], {"limit": 1})):
            theirs |= simple_evaluate(
                HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=8),
                tasks=names,
                **asked,  # lm-eval counts for each subject; three questions of 57 subjects are one of each
                bootstrap_iters=1,
                task_manager=manager,
                log_samples=False,
            )["results"]
    finally:
        os.chdir(before)
    for row in rows:
        reference = theirs[row["task"]]
        assert row["value"] == pytest.approx(reference[f"{row['metric']},{row['filter']}"], abs=1e-12)
        if row["task"] != "mmlu":  # lm-eval pools the subjects' own variances
            assert row["stderr"] == pytest.approx(reference[f"{row['metric']}_stderr,{row['filter']}"], abs=1e-9)
        assert row["n"] == len(row["items"]) == (57 if row["task"] == "mmlu" else 3)
        assert row["data_files"] and row["sandbox"] is None and row["engine"]["dtype"] == "float32"
    assert json.loads((tmp_path / "out/tiny.json").read_text()) == json.loads(json.dumps(rows))
    for row in rows:
        lines = (tmp_path / f"out/samples/tiny/paper/{row['task']}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert [sample["score"] for sample in samples] == row["items"]
        assert all(sample["doc"] and sample["arguments"] and sample["resps"] for sample in samples)
    assert len({(sample["task"], sample["doc_id"]) for sample in samples}) == 3


def test_models_get_the_same_questions_and_held_out_loss_is_the_models_own(mirror, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": " ".join(eval_data.WORDS[i:])}) + "\n" for i in range(5)))
    one, two = loaded("one"), loaded("two", seed=1)
    rows = evaluate_models([two], baseline=one, tasks=["gsm8k"], data_mirror=mirror, held_out=text, limit=2)
    gsm, loss, gsm2, loss2 = rows
    assert [row["model"] for row in rows] == ["one", "one", "two", "two"]
    assert [row["baseline"] for row in rows] == [True, True, False, False]
    assert gsm["settings_sha256"] == gsm2["settings_sha256"] and gsm["data_sha256"] == gsm2["data_sha256"]
    assert loss["value"] != loss2["value"] and loss["n"] == 5
    ids = [one.tokenizer(" ".join(eval_data.WORDS[i:]))["input_ids"] for i in range(5)]
    total = 0.0
    for tokens in ids:
        batch = torch.tensor([[one.tokenizer.bos_token_id, *tokens]])
        total += one.model(input_ids=batch, labels=batch).loss.item() * len(tokens)
    assert loss["value"] == pytest.approx(total / sum(map(len, ids)), rel=1e-5)
    tokens = tmp_path / "ids.parquet"  # the same documents, of which some begin with BOS
    documents = [[one.tokenizer.bos_token_id] * (i % 2) + row for i, row in enumerate(ids)]
    pq.write_table(pa.table({"input_ids": [*documents, []]}), tokens)
    again = evaluate_models([two], baseline=one, tasks=["gsm8k"], data_mirror=mirror, held_out=tokens, limit=1)
    assert again[1]["value"] == pytest.approx(loss["value"], rel=1e-5) and again[1]["items"][0][1] == len(ids[0])
    assert compare_models(again)[0].loss.stderr > 0  # paired over the documents
    pq.write_table(pa.table({"input_ids": [[1, 10**6]]}), tokens)
    with pytest.raises(BadInputError, match="token id 1000000 is not one of"):
        evaluate_models([one], tasks=["gsm8k"], data_mirror=mirror, held_out=tokens, limit=1)


def test_a_baseline_of_another_length_is_refused_before_the_model_is_scored(mirror, caplog):
    caplog.set_level("INFO")
    with pytest.raises(ConfigError, match=r"^short and long differ in max_length 512 and 1024$") as refused:
        evaluate_models(
            [loaded("short", longest=512)], baseline=loaded("long"), tasks=["piqa"], data_mirror=mirror, limit=1
        )
    assert "--max-length 512" in refused.value.hint and "short  " not in caplog.text


def test_evaluation_leaves_no_trace(mirror, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subject = loaded()
    subject.model.train()
    subject.model.get_decoder().layers[0].eval()
    modes = [module.training for module in subject.model.modules()]
    tied = subject.model.get_output_embeddings().weight.data_ptr()
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(1), random.random()
    torch.manual_seed(7)
    random.seed(7)
    cache, bar = datasets.config.HF_DATASETS_CACHE, datasets.is_progress_bar_enabled()
    evaluate_models([subject], tasks=["piqa", "gsm8k"], data_mirror=mirror, limit=2)
    assert (torch.rand(1), random.random()) == expected
    assert [module.training for module in subject.model.modules()] == modes
    assert subject.model.get_output_embeddings().weight.data_ptr() == tied
    assert cache == datasets.config.HF_DATASETS_CACHE and datasets.is_progress_bar_enabled() == bar
    assert Path.cwd() == tmp_path and not list(tmp_path.iterdir())


def test_a_mirror_never_reaches_the_users_dataset_cache(mirror):
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = {p for p in cache.rglob("*")} if cache.exists() else set()
    evaluate_models([loaded()], tasks=["gsm8k", "hellaswag"], data_mirror=mirror, limit=1)
    assert ({p for p in cache.rglob("*")} if cache.exists() else set()) == before
    with pytest.raises(BadInputError, match="cannot load the data of gsm8k"):
        evaluate_models([loaded()], tasks=["gsm8k"], limit=1)  # offline, and nothing cached


def test_a_directory_named_like_a_dataset_is_not_taken_for_it(mirror, monkeypatch):
    monkeypatch.chdir(mirror)
    with pytest.raises(BadInputError, match="cannot load the data of piqa"):
        evaluate_models([loaded()], tasks=["piqa"], limit=1)


def test_missing_and_empty_data_are_errors(tmp_path):
    root = eval_data.write_mirror(tmp_path / "mirror", rows=2)
    with pytest.raises(BadInputError, match="ARC-C: arc_challenge has 2 examples to show, 25 are asked for"):
        evaluate_models([loaded()], suite="ladder", tasks=["ARC-C"], data_mirror=root)
    shutil.rmtree(root / "openai")
    with pytest.raises(BadInputError, match="no directory openai/gsm8k"):
        evaluate_models([loaded()], tasks=["GSM-8K"], data_mirror=root)
    for file in (root / "baber/piqa/default").iterdir():
        file.write_text("")
    with pytest.raises(BadInputError, match=r"PIQA: .*(empty|cannot load)"):
        evaluate_models([loaded()], tasks=["PIQA"], data_mirror=root)
    with pytest.raises(BadInputError, match="not a directory"):
        evaluate_models([loaded()], tasks=["PIQA"], data_mirror=tmp_path / "nowhere")


def test_no_score_for_a_broken_model_or_a_cut_prompt(mirror, tmp_path):
    broken = loaded("broken")
    with torch.no_grad():
        broken.model.get_decoder().layers[1].mlp.gate.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        evaluate_models([broken], tasks=["PIQA"], data_mirror=mirror, out=tmp_path)
    assert not list(tmp_path.glob("*.json"))
    short = loaded("short")
    short.model.config.max_position_embeddings = 64
    with pytest.raises(BadInputError, match="GSM-8K: a prompt needs"):
        evaluate_models([short], tasks=["GSM-8K"], data_mirror=mirror)


def test_refusals():
    with pytest.raises(ConfigError, match="has no task 'boolq'"):
        select("paper", ["boolq"])
    with pytest.raises(ConfigError, match="unknown suite"):
        evaluate_models([loaded()], suite="papers")
    with pytest.raises(ConfigError, match="limit"):
        evaluate_models([loaded()], tasks=["piqa"], limit=0)
    with pytest.raises(ConfigError, match="no directory is given"):
        evaluate_models([loaded()], tasks=["piqa"], log_samples=True)


def names_of(models: list[str]) -> list[str]:
    return [name for name, _ in named_models(models, None)]


def test_models_are_named_by_their_last_folders(tmp_path, monkeypatch):
    """As many as tell them apart, also if a model is named by an absolute path."""
    assert names_of(["/data/runs/a/final", "/data/runs/b/final", "org/base"]) == ["a--final", "b--final", "base"]
    assert names_of(["/x/1/final", "/y/1/final", "/y/2/final", "org/base@main"]) == [
        *("x--1--final", "y--1--final", "2--final", "base@main"),
    ]
    (tmp_path / "mine" / "comparison").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert names_of([".", "comparison", "bundled:assets/teacher"]) == ["mine", "mine--comparison", "teacher"]
    for twice in (["runs/a", "runs/a"], [".", str(tmp_path / "mine")]):
        with pytest.raises(ConfigError, match="twice"):
            names_of(twice)
    monkeypatch.chdir(tmp_path / "mine" / "comparison")
    with pytest.raises(ConfigError, match="cannot be called 'comparison'"):
        names_of(["comparison"])


def test_suites_name_tasks_that_the_installed_lm_eval_has():
    root = Path(simple_evaluate.__code__.co_filename).parent / "tasks"
    for rows in SUITES.values():
        assert len({row.column for row in rows}) == len(rows)
        for row in rows:
            if row.harness == "evalplus":
                continue
            manager = TaskManager(include_path=root / row.directory, include_defaults=False)
            assert row.task in manager.task_index, row


def test_generated_programs_are_judged_in_the_sandbox(mirror, monkeypatch):
    """Right, wrong and hostile answers; none of them runs in this process."""
    prompts = []

    def answers(self, requests):
        prompts.extend(request.args[0] for request in requests)
        right = [r.doc.get("canonical_solution") or r.doc.get("code") for r in requests]
        return [right[0], "    raise SystemExit(0)\n", "    import os; os._exit(0)\n", *right[3:]]

    monkeypatch.setattr(adapter.HFAdapter, "generate_until", answers)
    human, mbpp = evaluate_models([loaded()], tasks=["HEval+", "MBPP+"], data_mirror=mirror, limit=5)
    for row in (human, mbpp):
        assert row["items"] == [1.0, 0.0, 0.0, 1.0, 1.0] and row["value"] == pytest.approx(0.6)
        assert row["sandbox"] and row["metric"] in ("pass@1", "pass_at_1")
    assert prompts[0].startswith("def plus_0") and prompts[5].count("[BEGIN]") == 4  # three shots


def test_models_by_path_resume_after_a_kill_and_keep_other_results(mirror, tmp_path, monkeypatch):
    subject = loaded()
    for name, seed in (("teacher", 0), ("student", 1)):
        loaded(seed=seed).model.save_pretrained(tmp_path / name)
        subject.tokenizer.save_pretrained(tmp_path / name)
    teacher, student = str(tmp_path / "teacher"), str(tmp_path / "student")
    options = dict(tasks=["piqa", "arc_easy"], data_mirror=mirror, baseline=teacher)
    whole = evaluate_models([student], **options)
    assert [(row["model"], row["baseline"]) for row in whole[::2]] == [("teacher", True), ("student", False)]
    assert [row["value"] for row in whole[:2]] == [
        row["value"] for row in evaluate_models([subject], tasks=options["tasks"], data_mirror=mirror)
    ]

    out, scored = tmp_path / "out", []
    real = logprobs.continuation_logprobs

    def dies(model, requests, *, batch_size, done, team):
        def count(index, answer):
            done(index, answer)
            scored.append(index)
            if len(scored) == 21:
                raise KeyboardInterrupt

        return real(model, requests, batch_size=batch_size, done=count, team=team)

    monkeypatch.setattr(adapter, "continuation_logprobs", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate_models([student], **options, out=out)
    again = evaluate_models([student], **options, out=out)
    assert [(row["value"], row["items"]) for row in again] == [(row["value"], row["items"]) for row in whole]
    assert len(scored) == 2 * (8 * 2 + 8 * 4), "each request was scored once"

    evaluate_models([student], tasks=["piqa"], data_mirror=mirror, limit=2, out=out)
    kept = [(row["column"], row["n"]) for row in read_results(out / "student.json")]
    assert kept == [("PIQA", 8), ("ARC-E", 8), ("PIQA", 2)]


def test_names_of_models():
    named = [("one", "a/one"), ("two", "two")]
    assert named_models(["a/one", "two"], "a/one") == named_models(["a/one", "two"], None) == named
    with pytest.raises(ConfigError, match="named twice"):
        named_models(["two", "two"], None)
    with pytest.raises(ConfigError, match="--baseline a/one: is the only MODEL"):
        named_models(["a/one"], "a/one")
