"""The code benchmarks inside a suite, and all eleven tasks on the bundled data."""

import gzip
import json
import shutil
from pathlib import Path

import eval_data
import pytest
import tiny
from evalplus.provider.utility import EOS, extra_eos_for_direct_completion, make_raw_chat_prompt

from fcsd.errors import BadInputError, FcsdError
from fcsd.eval.code import evalplus_tasks
from fcsd.eval.code.judge import pass_at_1, score
from fcsd.eval.code.problems import load_evalplus
from fcsd.eval.engines import adapter
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.eval.statistics import spread
from fcsd.eval.suite import SUITES

CODE = ["HEval+", "MBPP+"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def loaded(chat: bool = False) -> Loaded:
    tokenizer = eval_data.tokenizer()
    if chat:
        tokenizer.chat_template = TEMPLATE
    return Loaded("tiny", tiny.model("deepseek_v2", vocab_size=400, max_position_embeddings=2048), tokenizer)


@pytest.fixture
def mirror(repo) -> Path:
    return repo / "assets/mirror"


def test_all_eleven_run_on_the_bundled_teacher_and_data(repo, mirror, tmp_path):
    teacher = str(repo / "assets/teacher")
    rows = evaluate_models([teacher], data_mirror=mirror, limit=3, out=tmp_path)
    assert [row["column"] for row in rows] == [row.column for row in SUITES["paper"]]
    assert [row["n"] for row in rows] == [57 if row["column"] == "MMLU" else 3 for row in rows]
    assert all(0 <= row["value"] <= 1 and row["data_files"] for row in rows)
    assert {row["column"]: bool(row["sandbox"]) for row in rows} == {
        row["column"]: row["column"] in CODE for row in rows
    }
    assert sum(row["value"] for row in rows) > 11 * 0.85, "the trained teacher knows its world"
    assert evaluate_models([teacher], data_mirror=mirror, limit=3, out=tmp_path, tasks=["HEval+"])[0]["items"] == next(
        row["items"] for row in rows if row["column"] == "HEval+"
    )


def test_strict_scores_the_teachers_programs_by_evalplus(repo, mirror, monkeypatch, tmp_path):
    monkeypatch.setattr(evalplus_tasks, "MAX_NEW_TOKENS", 64)  # enough for the bundled solutions
    options = {"tasks": CODE, "data_mirror": mirror, "limit": 3, "out": tmp_path, "log_samples": True}
    human, mbpp = evaluate_models([str(repo / "assets/teacher")], suite="strict", **options)
    assert human["value"] == human["base_value"] == 1.0 and human["items"] == [1.0] * 3
    assert human["settings"]["harness"] == "evalplus" and human["settings"]["chat"] is False
    assert human["filter"] == "plus" and human["sandbox"] and list(human["data_files"]) == ["HumanEvalPlus.jsonl"]
    assert mbpp["value"] == mbpp["base_value"] == 1.0 and mbpp["n"] == 3, "the teacher knows EvalPlus's form"
    written = [json.loads(line) for line in (tmp_path / "samples/teacher/strict/humaneval.jsonl").open()]
    assert [(sample["base"], sample["plus"]) for sample in written] == [("pass", "pass")] * 3
    assert all("def " in sample["solution"] and "return" in sample["solution"] for sample in written)


@pytest.mark.parametrize("chat", [False, True])
def test_strict_asks_as_evalplus_does_and_sanitizes(chat, mirror, monkeypatch):
    asked = []
    problems = {}
    for task, (name, _) in FILES.items():
        whole = load_evalplus(mirror / f"evalplus/{name}.jsonl")
        problems[task] = [whole[i] for i in spread(len(whole), 4)]

    def answers(self, requests):
        asked.append([request.args for request in requests])
        task = list(FILES)[len(asked) - 1]
        right = [p.reference if chat else p.reference[len(p.prefix.strip()) + 1 :] for p in problems[task]]
        right = [text + "\n```\nThat is all." if chat else text for text in right]
        base_only = _wrong_on_plus(problems[task][1], chat)
        return [right[0], base_only, "I do not know.", right[3]]

    monkeypatch.setattr(adapter.HFAdapter, "generate_until", answers)
    subject = loaded(chat)
    rows = evaluate_models([subject], suite="strict", tasks=CODE, data_mirror=mirror, limit=4)
    for row, (task, own), requests in zip(rows, problems.items(), asked, strict=True):
        assert row["items"] == [1.0, 0.0, 0.0, 1.0] and row["value"] == 0.5 and row["base_value"] == 0.75
        assert row["settings"]["chat"] is chat
        for problem, (prompt, settings) in zip(own, requests, strict=True):
            bare = problem.prefix.strip() + "\n"
            wanted = make_raw_chat_prompt(bare, evalplus_tasks.INSTRUCTION, evalplus_tasks.RESPONSE, subject.tokenizer)
            assert prompt == wanted and (prompt == bare) is not chat
            stops = EOS + (["\n```\n"] if chat else extra_eos_for_direct_completion(task))
            assert settings == {"until": stops, "max_gen_toks": 768, "do_sample": False}


FILES = evalplus_tasks.FILES


def _wrong_on_plus(problem, chat: bool) -> str:
    """A program that knows the base tests by heart and nothing else."""
    scope: dict = {}
    exec(problem.reference, scope)
    known = [(case.call[0], scope[problem.entry_point](*case.call)) for case in problem.base]
    body = f"    return dict([(str(k), v) for k, v in {known!r}]).get(str(x))\n"
    if chat:
        return f"def {problem.entry_point}(x):\n{body}"
    if problem.prefix.startswith('"""'):
        return f"def {problem.entry_point}(x):\n{body}"
    argument = problem.prefix.split("(")[1].split(":")[0]
    return f"    x = {argument}\n{body}"


def test_the_bundled_evalplus_files_hold_the_mirrors_problems(mirror):
    for task, directory in (("humaneval", "humanevalplus"), ("mbpp", "mbppplus")):
        problems = load_evalplus(mirror / f"evalplus/{FILES[task][0]}.jsonl")
        rows = [json.loads(line) for line in (mirror / f"evalplus/{directory}/default/test.jsonl").open()]
        assert len(problems) == len(rows) >= 150
        for problem, row in zip(problems, rows, strict=True):
            assert (len(problem.base), len(problem.plus)) == (3, 5)
            assert row["prompt"] in problem.prefix and (row.get("code") or row["canonical_solution"]) in (
                problem.reference or ""
            )
        few = problems[::8]  # test_bundled_data.py runs every solution against lm-eval's tests
        verdicts = score(few, [problem.reference or "" for problem in few])
        assert pass_at_1(verdicts, "base") == pass_at_1(verdicts, "plus") == 1.0


def test_where_evalplus_keeps_its_files(mirror, tmp_path, monkeypatch):
    row = SUITES["strict"][6]
    assert row.column == "HEval+"
    source = mirror / "evalplus/HumanEvalPlus.jsonl"
    packed = tmp_path / "evalplus/HumanEvalPlus.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert evalplus_tasks.load_evalplus_task(row, tmp_path).problems == load_evalplus(source)

    other = shutil.copy(source, tmp_path / "mine.jsonl")
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(other))
    assert list(evalplus_tasks.load_evalplus_task(row, None).data_files) == ["mine.jsonl"]
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BadInputError, match="does not exist"):
        evalplus_tasks.load_evalplus_task(row, None)
    packed.unlink()
    with pytest.raises(BadInputError, match=r"no file evalplus/HumanEvalPlus.jsonl"):
        evalplus_tasks.load_evalplus_task(row, tmp_path)


def test_no_generated_program_runs_without_a_sandbox_unless_that_is_accepted(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(evalplus_tasks, "MAX_NEW_TOKENS", 4)
    monkeypatch.setenv("PATH", str(tmp_path))  # without bwrap
    options = dict(suite="strict", tasks=["HEval+"], data_mirror=mirror, limit=1)
    generated = []
    real = adapter.HFAdapter.generate_until
    monkeypatch.setattr(adapter.HFAdapter, "generate_until", lambda *a: generated.append(1) or real(*a))
    with pytest.raises(FcsdError, match="no sandbox for generated code"):
        evaluate_models([loaded()], **options)
    assert not generated, "refused before the model was run"
    (row,) = evaluate_models([loaded()], **options, accept_unsafe_exec=True)
    assert (row["sandbox"], row["value"]) == ("none", 0.0)
