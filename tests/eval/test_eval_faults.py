"""What must not change a score: kills at any moment, the batch size; and what must not get one."""

import json
import os
import random
import signal
from pathlib import Path
from unittest.mock import patch

import eval_data
import pytest
import ranks
import tiny
from lm_eval.api.instance import Instance

from fcsd.errors import BadInputError
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.engines.answer_cache import AnswerCache
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import evaluate_models

TASKS = ["PIQA", "HS", "GSM-8K"]


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eval_data.write_mirror(tmp_path_factory.mktemp("mirror"))


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
    assert len(set(stored("whole"))) == len(stored("whole")) == 5 * 2 + 5 * 4 + 5


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
