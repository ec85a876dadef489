"""Two ranks give the answers of one: scores, resume, errors, and a model that must run on all ranks in step."""

from pathlib import Path
from typing import Any

import eval_data
import pytest
import ranks
import tiny
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance

from fcsd.engine import logprobs
from fcsd.errors import NonFiniteError
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.eval.results import read_results
from fcsd.launch.shared_work import Team
from fcsd.launch.world import World

TASKS = ["PIQA", "CSQa", "GSM-8K", "HEval+"]


def model(**overrides: Any) -> torch.nn.Module:
    return tiny.model("deepseek_v2", vocab_size=400, max_position_embeddings=2048, **overrides)


def team(rank: int, size: int, lockstep: bool = False) -> Team:
    return Team(World(rank, size, torch.device("cpu")), lockstep)


def scored(rank: int, size: int, mirror: Path) -> list[dict[str, Any]]:
    """Rows of four tasks, short answers, and how many answers this rank of ``size`` generated."""
    with eval_data.short_answers() as texts:
        subject = Loaded("tiny", model(), eval_data.tokenizer())
        shared = team(rank, size) if size > 1 else None
        options = dict(data_mirror=mirror, engine=Engine(batch_size=2), team=shared)
        rows = evaluate_models([subject], tasks=TASKS, limit=5, **options)
        rows += evaluate_models([subject], tasks=["GSM-8K"], limit=1, **options)  # fewer documents than ranks
    return [*rows, {"generated": len(texts)}]


@pytest.fixture(scope="module")
def two_ranks(mirror: Path) -> list[Any]:
    return ranks.in_group(2, both, mirror)


def both(rank: int, mirror: Path) -> tuple[list[Any], list[Any]]:
    return scored(rank, 2, mirror), in_step(rank)


def test_two_ranks_score_as_one_and_halve_the_work(mirror, two_ranks):
    *alone, work = scored(0, 1, mirror)
    varying = {"seconds", "engine"}
    for (*rows, share), _ in two_ranks:
        assert 0 < share["generated"] < work["generated"]
        for row, expected in zip(rows, alone, strict=True):
            assert [(k, repr(row[k])) for k in row if k not in varying] == [  # repr: NaN is the error of one item
                (k, repr(expected[k])) for k in expected if k not in varying
            ]
            assert row["engine"] == expected["engine"] | {"ranks": 2}
        assert rows[-1]["n"] == 1


class InStep(torch.nn.Module):
    """A layer that needs all ranks, as expert parallelism does: it hangs or fails if one rank runs less often."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        counts: list[Any] = [None, None]
        dist.all_gather_object(counts, self.calls)
        assert counts[0] == counts[1], "a rank is out of step"
        return self.inner(*args, **kwargs)


def requests(kind: str) -> list[Instance]:
    if kind == "generate_until":
        texts = ["river", "stone lamp " * 9, "garden", "window " * 4, "bread"]
        settings = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
        return [Instance(kind, {}, (text, settings), 0) for text in texts]
    pairs = [(f"{a} {b}", f" {c}") for a in ("river", "stone") for b in ("lamp", "bread music") for c in ("x", "yz")]
    return [Instance(kind, {}, pair, 0) for pair in [*pairs, ("window", " paper")]]


def in_step(rank: int) -> list[Any]:
    network = model()
    lone = HFAdapter(network, eval_data.tokenizer(), batch_size=2)
    expected = [getattr(lone, kind)(requests(kind)) for kind in ("loglikelihood", "generate_until")]
    layer = network.model.layers[1]
    layer.mlp = InStep(layer.mlp)
    shared = HFAdapter(network, eval_data.tokenizer(), batch_size=2, team=team(rank, 2, lockstep=True))
    found = [getattr(shared, kind)(requests(kind)) for kind in ("loglikelihood", "generate_until")]
    assert found == expected
    errors = []
    for kind in ("loglikelihood", "generate_until"):
        broken = HFAdapter(network, eval_data.tokenizer(), batch_size=2, team=team(rank, 2, lockstep=True))
        hook = network.lm_head.register_forward_hook(lambda *a: a[2] * float("nan") if rank else a[2])
        try:
            getattr(broken, kind)(requests(kind))
        except NonFiniteError as error:
            errors.append(str(error))
        hook.remove()
    return [layer.mlp.calls, errors]


def test_a_model_spread_over_the_ranks_runs_in_step_and_fails_on_all(two_ranks):
    (_, (calls, errors)), (_, (other_calls, other_errors)) = two_ranks
    assert calls == other_calls > 0
    assert errors == other_errors and len(errors) == 2


def in_zero_3(rank: int) -> list[Any]:
    """Requests to a model whose weights lie in parts on two ranks, head included; HEAD_ROWS makes its calls uneven."""
    import deepspeed

    logprobs.HEAD_ROWS = 3
    network = model()
    expected = answered(HFAdapter(network, eval_data.tokenizer(), batch_size=2))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=network, config=config)
    shared = HFAdapter(engine.module, eval_data.tokenizer(), batch_size=2, team=team(rank, 2, lockstep=True))
    assert not engine.module.lm_head.weight.numel(), "every rank holds a part"
    return [answered(shared), expected]


def answered(lm: HFAdapter) -> list[Any]:
    return [getattr(lm, kind)(requests(kind)) for kind in ("loglikelihood", "generate_until")]


def test_a_model_in_zero_3_answers_as_on_one_rank():
    for (scores, texts), (expected_scores, expected_texts) in ranks.in_group(2, in_zero_3):
        assert texts == expected_texts
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected_scores), rtol=1e-5, atol=1e-5)


def test_the_command_divides_questions_over_ranks_and_a_second_run_repeats_no_answer(mirror, tmp_path):
    directory = tmp_path / "model"
    model().save_pretrained(directory)
    eval_data.tokenizer().save_pretrained(directory)

    def run(size: int | None = None) -> str:
        asked = ["eval", directory, "--tasks", "PIQA,ARC-E", "--device", "cpu", "--batch-size", "3"]
        done = ranks.fcsd(*asked, "--data-mirror", mirror, "--out", tmp_path / "out", size=size)
        assert done.returncode == 0, done.stderr
        return done.stdout

    two = run(size=2)
    assert two.count("PIQA") == 1, "one rank prints"
    rows = read_results(tmp_path / "out/model.json")
    assert {row["engine"]["ranks"] for row in rows} == {2}
    files = sorted((tmp_path / "out/answers").iterdir())
    assert len(files) == 2 and all("[" in file.read_text() for file in files), "both ranks worked"
    sizes = [len([line for line in file.read_text().splitlines() if line]) for file in files]
    assert run() == two
    assert sorted((tmp_path / "out/answers").iterdir()) == files
    assert [len([line for line in file.read_text().splitlines() if line]) for file in files] == sizes


@pytest.mark.parametrize("count", [3, 4, 5])
def test_ranks_in_lockstep_get_equally_many_batches(count):
    shares = [Team(World(rank, 3, torch.device("cpu")), lockstep=True).share(range(count)) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    assert {batch for share in shares for batch in share} == set(range(count))
