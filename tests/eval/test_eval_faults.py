"""What must not change a score: kills at any moment, the batch size; and what must not get one."""

import gzip
import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import cast
from unittest.mock import patch

import eval_data
import hub_server
import pytest
import ranks
import tiny
from lm_eval.api.instance import Instance

from fcsd.errors import BadInputError, ConfigError
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.engines.answer_cache import AnswerCache, is_loglikelihood
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import evaluate_models
from fcsd.eval.results import are_sound
from fcsd.launch.world import World

TASKS = ["PIQA", "HS", "GSM-8K"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.model("deepseek_v2", vocab_size=400, max_position_embeddings=1024).save_pretrained(path)
    eval_data.tokenizer().save_pretrained(path)
    return path


def scores(model: Path, mirror: Path, out: Path | None = None, **engine) -> list:
    """Values and items of three tasks, answers cut at 16 tokens."""
    settings = Engine(device="cpu", batch_size=engine.pop("batch_size", 4), **engine)
    generate = HFAdapter._generate
    with patch.object(HFAdapter, "_generate", lambda self, prompts, stops, _: generate(self, prompts, stops, 16)):
        rows = evaluate_models([str(model)], tasks=TASKS, data_mirror=mirror, limit=5, engine=settings, out=out)
    return [(row["column"], row["value"], row["items"]) for row in rows]


def killed_after(answers: list[int], model: Path, mirror: Path, out: Path) -> None:
    """Evaluate in one process after the other, each killed when it has stored so many answers."""
    store = AnswerCache.add
    for most in answers:
        if os.fork() == 0:
            left = iter(range(most))

            def add(self: AnswerCache, request: list, answer: object, left=left) -> None:
                store(self, request, answer)
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            AnswerCache.add = add
            scores(model, mirror, out)
            os._exit(0)
        assert os.WIFSIGNALED(os.wait()[1]), "it ended before it was killed"


def test_a_place_where_results_cannot_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for place, reason in (
        ("file", "not a directory"),
        ("file/below", "file is not a directory"),
        ("model", "a model"),
    ):
        with pytest.raises(ConfigError, match=f"--out .*{place}: .*{reason}"):
            evaluate_models(["none"], tasks=TASKS, out=tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.rglob("*"))) == 3


def test_missing_weights_are_found_before_any_model_is_scored(tmp_path: Path) -> None:
    tiny.config("llama").save_pretrained(tmp_path / "empty")
    with pytest.raises(BadInputError, match=r"empty: has no model\.safetensors"):
        evaluate_models([tmp_path / "empty"], tasks=TASKS)


def test_another_cache_with_a_similar_name_is_not_read(tmp_path: Path) -> None:
    for name in ("a[1]", "a[1].b", "a1.1"):
        other = AnswerCache(tmp_path / f"{name}.jsonl")
        other.add(name, "stored")
        other.close()
    (tmp_path / "a[1].jsonl").rename(tmp_path / "a[1].2.jsonl")  # what rank 2 stored
    cache = AnswerCache(tmp_path / "a[1].jsonl")
    found = [cache.get(name, bool) for name in ("a[1]", "a[1].b", "a1.1")]
    cache.close()
    assert found == ["stored", None, None]


def test_answers_on_the_disks_of_all_ranks_are_known(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        of_rank = AnswerCache(tmp_path / rank / "answers.jsonl")
        of_rank.add(f"asked of {rank}", "stored")
        of_rank.close()

    class Ranks:
        rank = 0

        def everywhere(self, read: Callable[[], dict[str, str]]) -> list[dict[str, str]]:
            """Rank 1 sees its own disk in the same place."""
            own = read()
            (tmp_path / "0").rename(tmp_path / "disk of rank 0")
            (tmp_path / "1").rename(tmp_path / "0")
            other = read()
            (tmp_path / "0").rename(tmp_path / "1")
            (tmp_path / "disk of rank 0").rename(tmp_path / "0")
            return [own, other]

    cache = AnswerCache(tmp_path / "0" / "answers.jsonl", cast(World, Ranks()))
    assert [cache.get(f"asked of {rank}", bool) for rank in ("0", "1")] == ["stored", "stored"]
    cache.close()


def test_a_fifo_in_the_place_of_stored_answers_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "answers.jsonl")
    with pytest.raises(BadInputError, match="not a regular file"):
        AnswerCache(tmp_path / "answers.jsonl")


def test_an_evaluation_killed_again_and_again_repeats_no_request(model: Path, mirror: Path, tmp_path: Path) -> None:
    whole = scores(model, mirror, tmp_path / "whole")
    rng = random.Random(0)
    kills = [rng.randrange(10) for _ in range(4)]  # of 35 requests
    assert ranks.exit_code(killed_after, kills, model, mirror, tmp_path / "killed") == 0
    assert scores(model, mirror, tmp_path / "killed") == whole

    def stored(name: str) -> list[str]:
        (file,) = (tmp_path / name / "answers").iterdir()
        return sorted(json.loads(line)[0] for line in file.read_text().splitlines() if line)

    assert stored("killed") == stored("whole")
    assert len(set(stored("whole"))) == len(stored("whole")) == 5 * 2 + 5 * 4 + 5 * 2, (
        "also the length of each generated answer"
    )


def test_the_batch_size_changes_nothing_in_fp32_and_is_told_in_bf16(model: Path, mirror: Path, record_property) -> None:
    assert scores(model, mirror, batch_size=1) == scores(model, mirror, batch_size=8)
    one, eight = (scores(model, mirror, dtype="bfloat16", batch_size=size) for size in (1, 8))
    pairs = zip(one, eight, strict=True)
    record_property("bf16_flips", int(sum(a != b for x, y in pairs for a, b in zip(x[2], y[2], strict=True))))

    rows = evaluate_models([str(model)], tasks=["PIQA"], data_mirror=mirror, limit=1, engine=Engine(batch_size=8))
    assert rows[0]["engine"]["batch_size"] == 8, "compare refuses models of another"


def test_a_request_without_tokens_is_an_error() -> None:
    network = tiny.model("llama", vocab_size=400)
    lm = HFAdapter(network, eval_data.tokenizer())
    network.get_decoder().register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    for pair in (("river", ""), ("", "")):
        with pytest.raises(BadInputError, match="no tokens to score"):
            lm.loglikelihood([Instance("loglikelihood", {}, pair, 0)])
    with pytest.raises(BadInputError, match="no tokens"):
        lm.generate_until([Instance("generate_until", {}, ("", {"until": []}), 0)])


@pytest.mark.parametrize("stored", ["[NaN, true]", "[3.2, true]"])
def test_a_stored_log_probability_that_cannot_be_one_is_refused(stored: str, model: Path, mirror: Path, tmp_path: Path):
    scores(model, mirror, tmp_path)
    [path] = (tmp_path / "answers").iterdir()
    lines = path.read_text().splitlines()
    spoilt = next(i for i, line in enumerate(lines) if line and isinstance(json.loads(line)[1], list))
    key, _ = json.loads(lines[spoilt])
    path.write_text("\n".join([*lines[:spoilt], f'["{key}", {stored}]', *lines[spoilt + 1 :]]) + "\n")
    with pytest.raises(BadInputError, match="a stored answer cannot be right") as caught:
        scores(model, mirror, tmp_path)
    assert caught.value.exit_code == 3 and str(path) in str(caught.value)


def test_a_stored_text_that_is_none_is_refused(model: Path, mirror: Path, tmp_path: Path) -> None:
    scores(model, mirror, tmp_path)
    [path] = (tmp_path / "answers").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    path.write_text("".join(json.dumps([key, 5 if isinstance(value, str) else value]) + "\n" for key, value in lines))
    with pytest.raises(BadInputError, match="a stored answer cannot be right"):
        scores(model, mirror, tmp_path)


def test_stored_answers_and_results_are_checked() -> None:
    assert is_loglikelihood((-3.2, True)) and is_loglikelihood([0.0, False]) and is_loglikelihood([1e-6, False])
    for wrong in ("[-Infinity, true]", "[-1e400, true]", "[3.2, true]", "[-3.2, 1]", "[-3.2]", "[true, true]", '"a"'):
        assert not is_loglikelihood(json.loads(wrong)), wrong
    sound = {"column": "PIQA", "metric": "acc", "value": 0.5, "stderr": 0.5, "n": 2, "items": [0.0, 1.0]}
    alone = sound | {"n": 1, "items": [[1.0, 2]], "stderr": math.nan}
    assert are_sound([sound, alone])
    for change in (
        {"value": math.nan},
        {"stderr": math.inf},
        {"n": 3},
        {"items": [0.0, math.nan]},
        {"items": ["a", "b"]},
    ):
        assert not are_sound([sound | change]), change
    assert not are_sound([{}]) and not are_sound(None)


@pytest.mark.parametrize(
    "task, change, says",
    [
        ("PIQA", {"label": -1}, "the label -1, which is none of its 2 choices"),
        ("PIQA", {"label": math.nan}, "label"),
        ("PIQA", {"label": None}, "label"),
        ("PIQA", {"label": 2}, "the label 2, which is none of its 2 choices"),
        ("HS", {"label": "-1"}, "the label '-1', which is none of its 4 choices"),
        ("ARC-E", {"answerKey": "Z"}, "question 1 cannot be read"),
        ("WG", {"answer": "3"}, "question 1 "),
    ],
)
def test_a_label_that_is_no_choice_is_refused(
    task: str, change: dict, says: str, model: Path, mirror: Path, tmp_path: Path
) -> None:
    """lm-eval counts such a question as wrong and goes on."""
    folders = {
        "PIQA": "baber/piqa/default",
        "HS": "Rowan/hellaswag/default",
        "ARC-E": "allenai/ai2_arc/ARC-Easy",
        "WG": "allenai/winogrande/winogrande_xl",
    }
    shutil.copytree(mirror, tmp_path / "mirror")
    for path in (tmp_path / "mirror" / folders[task]).glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[1] |= change
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: dict = {"tasks": [task], "data_mirror": tmp_path / "mirror", "engine": Engine(device="cpu")}
    with pytest.raises(BadInputError, match=says) as caught:
        evaluate_models([str(model)], **asked)
    assert str(caught.value).startswith(task)
    if change in ({"label": -1}, {"label": 2}):  # a question that is not asked needs no label
        evaluate_models([str(model)], limit=1, **asked)


DAMAGE = [
    ("GSM-8K", "openai/gsm8k/main", {"answer": []}, "question 0 cannot be read: it has no answer"),
    ("HEval+", "evalplus/humanevalplus/default", {"prompt": None}, "question 0 cannot be read"),
    ("HEval+", "evalplus/humanevalplus/default", {"prompt": 7}, "question 0 cannot be read"),
    ("MBPP+", "evalplus/mbppplus/default", {"task_id": []}, "question 0 cannot be read"),
]


@pytest.mark.parametrize(("task", "folder", "change", "says"), DAMAGE)
def test_a_question_of_another_form_is_refused_before_the_model_answers(
    task: str, folder: str, change: dict, says: str, model: Path, mirror: Path, tmp_path: Path
) -> None:
    shutil.copytree(mirror / folder.split("/")[0], tmp_path / folder.split("/")[0])
    for path in (tmp_path / folder).iterdir():
        rows = [json.loads(line) | change for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: dict = {
        "suite": "paper",
        "tasks": [task],
        "data_mirror": tmp_path,
        "engine": Engine(device="cpu"),
        "limit": 1,
    }
    with (
        patch.object(HFAdapter, "generate_until", side_effect=AssertionError),
        pytest.raises(BadInputError, match=says),
    ):
        evaluate_models([str(model)], **asked)


CARDS = {
    "an address": "configs:\n- config_name: default\n  data_files: {address}/a.jsonl\n",
    "one of two": "configs:\n- config_name: default\n  data_files:\n  - path: [a.jsonl, '{address}/a.jsonl']\n",
    "an archive": "configs:\n- config_name: default\n  data_files: 'zip://a.jsonl::{address}/a.zip'\n",
    "an alias": "x: &x [{address}/a.jsonl]\nconfigs:\n- config_name: default\n  data_files: *x\n",
    "the disk": "configs:\n- config_name: default\n  data_files: /etc/hostname\n",
    "above": "configs:\n- config_name: default\n  data_files: default/../../../secret.jsonl\n",
    "a folder": "configs:\n- config_name: default\n  data_dir: ~/x\n",
}


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("card", CARDS)
def test_a_mirror_names_its_own_files_alone(file: str, card: str, model: Path, mirror: Path, tmp_path: Path) -> None:
    shutil.copytree(mirror / "baber", tmp_path / "baber")
    with hub_server.running() as hub:
        text = CARDS[card].format(address=hub.url)
        (tmp_path / "baber/piqa" / file).write_text(f"---\n{text}---\n" if file == "README.md" else text)
        with pytest.raises(BadInputError, match="names data outside of its folder"):
            evaluate_models([str(model)], tasks=["PIQA"], data_mirror=tmp_path, engine=Engine(device="cpu"))
    assert hub.requests == []


def test_a_row_of_a_mirror_leads_nowhere(model: Path, mirror: Path, tmp_path: Path) -> None:
    shutil.copytree(mirror / "baber", tmp_path / "baber")
    kinds = {"goal": "image", "sol1": "string", "sol2": "string", "label": "int64"}
    features = "".join(f"  - name: {name}\n    dtype: {kind}\n" for name, kind in kinds.items())
    card = (tmp_path / "baber/piqa/README.md").read_text().removeprefix("---\n")
    text = f"---\ndataset_info:\n- config_name: default\n  features:\n{features}{card}"
    (tmp_path / "baber/piqa/README.md").write_text(text)
    with hub_server.running() as hub:
        for file in (tmp_path / "baber/piqa/default").iterdir():
            row = {"goal": {"path": f"{hub.url}/a.png", "bytes": None}, "sol1": "a", "sol2": "b", "label": 0}
            file.write_text(json.dumps(row) + "\n")
        with pytest.raises(BadInputError, match="a column of files"):
            evaluate_models([str(model)], tasks=["PIQA"], data_mirror=tmp_path, engine=Engine(device="cpu"))
    assert hub.requests == []


def test_a_damaged_card_of_a_mirror_is_refused_in_one_line(model: Path, mirror: Path, tmp_path: Path) -> None:
    shutil.copytree(mirror / "baber", tmp_path / "baber")
    for text in ("configs: [", "configs: 3", "- a", "\x00", "a: &a [*a]\nconfigs: " + "[" * 5000):
        (tmp_path / "baber/piqa/README.md").write_text(f"---\n{text}\n---\n")
        with pytest.raises(BadInputError) as caught:
            evaluate_models([str(model)], tasks=["PIQA"], data_mirror=tmp_path, engine=Engine(device="cpu"))
        assert "PIQA" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["README.md", "dataset_infos.json", "default/more.jsonl", "linked/more.jsonl"])
def test_a_fifo_in_a_mirror_is_refused_at_once(name: str, model: Path, mirror: Path, tmp_path: Path) -> None:
    shutil.copytree(mirror / "baber", tmp_path / "baber")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "baber/piqa/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/up").symlink_to(tmp_path / "baber/piqa")
    (tmp_path / "baber/piqa" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "baber/piqa" / name)
    with pytest.raises(BadInputError, match="not a regular file"):
        evaluate_models([str(model)], tasks=["PIQA"], data_mirror=tmp_path, engine=Engine(device="cpu"))


@pytest.mark.parametrize("name", ["default/validation.jsonl", "default/more.json.gz"])
def test_a_very_long_line_of_a_mirror_is_refused(name: str, model: Path, mirror: Path, tmp_path: Path) -> None:
    shutil.copytree(mirror / "baber", tmp_path / "baber")
    data = b'{"goal": "' + b"x" * 10_000_000 + b'"}\n'
    (tmp_path / "baber/piqa" / name).write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    with pytest.raises(BadInputError, match=r":1: this line has over 10,000,000 bytes"):
        evaluate_models([str(model)], tasks=["PIQA"], data_mirror=tmp_path, engine=Engine(device="cpu"))
