"""fcsd's engine on two ranks answers, scores and is timed as the reference on one; wrong results are refused."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import eval_data
import pytest
import tiny
import torch
from benchmarks.infer.table import table
from ranks import results
from typer.testing import CliRunner

from fcsd.cli.main import app
from fcsd.convert import convert_checkpoint
from fcsd.engine.batches import generate_in_batch, left_padded
from fcsd.engine.decode import generate_in_slots, plan_slots
from fcsd.engine.slots import why_no_slots
from fcsd.errors import ConfigError
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import evaluate_models
from fcsd.launch.world import join_world
from fcsd.models.build import load_model, wire
from fcsd.models.wiring import Wiring
from fcsd.serve.chat import chat

NEW = 6
# Grouped-query attention, latent attention, sinks with a sliding window, norms over the heads of all ranks, and
# residuals that differ between ranks.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"wiring": "ladder"},
    "deepseek_v2": {"wiring": "farskip"},
    "gpt_oss": {"wiring": "farskip"},
    "olmoe": {"wiring": "farskip"},
    "qwen3": {"wiring": "desync-2x", "tp_degree": 2},
}
ASKED = {"output_router_logits": True, "output_hidden_states": True, "output_attentions": True, "return_dict": False}
TASKS: dict[str, Any] = {"tasks": ["PIQA", "GSM-8K", "lambada_openai"], "limit": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Converted checkpoints, one of which chats and is evaluated."""
    root = tmp_path_factory.mktemp("models")
    for arch, wiring in MODELS.items():
        model = tiny.model(arch, vocab_size=400, max_position_embeddings=1024, initializer_range=0.1)
        model.save_pretrained(root / "original" / arch)
        config = root / "original" / arch / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | ASKED))  # what no answer needs
        eval_data.tokenizer().save_pretrained(root / "original" / arch)
        convert_checkpoint(str(root / "original" / arch), root / arch, check=False, **wiring)
    return {arch: root / arch for arch in MODELS}


def _prompts(vocabulary: int) -> list[list[int]]:
    ids = tiny.tokens(batch=3, length=40).tolist()
    return [row[:length] for row, length in zip(ids, (40, 7, 23), strict=True)]


def _greedy(model: Any) -> list[list[int]]:
    return generate_in_batch(model, _prompts(400), max_new_tokens=NEW, ended=lambda *_: None)


def _in_slots(model: Any, graphs: bool = False) -> list[list[int]]:
    prompts = _prompts(400)
    count, length, groups = plan_slots([len(prompt) + NEW for prompt in prompts], [len(p) for p in prompts], None)
    options: dict[str, Any] = {"count": count, "length": length, "max_new_tokens": NEW, "graphs": graphs}
    found = dict(generate_in_slots(model, prompts, groups, ended=lambda *_: None, **options))
    return [found[index] for index in range(len(prompts))]


def _step_by_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a prefill and single steps over its keys and values."""
    with torch.no_grad():
        first = model(ids[:, :-3], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for place in range(ids.shape[1] - 3, ids.shape[1]):
            logits.append(model(ids[:, place : place + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


def _everything(models: dict[str, Path], mirror: Path, prompts: Path, out: Path) -> dict[str, Any]:
    from fcsd.engine.fused import First
    from fcsd.engine.open import open_engine

    world, found = join_world(), {}
    for arch, path in models.items():
        model: Any = open_engine(path, world, dtype=torch.float32)
        assert any(isinstance(module, First) for module in model.modules()), "projections are merged"
        found[arch] = {"greedy": _greedy(model), "steps": _step_by_step(model, tiny.tokens(length=30))}
        found[arch]["slots"] = _in_slots(model)
    found["chat"] = [answers[0].text for answers in chat(str(models["llama"]), prompts=prompts, divided=True)]
    quantised = chat(str(models["llama"]), prompts=prompts, divided=True, reduce="quantised:int4")
    found["quantised"] = [answers[0].text for answers in quantised]
    engine = Engine(backend="own", gpus=2)
    found["scores"] = evaluate_models([models["llama"]], data_mirror=mirror, engine=engine, out=out, **TASKS)
    return found


def _bench(out: Path) -> list[list[dict[str, Any]]]:
    """Rows of two runs. In the first one, ladder with two prompts does not fit; in the second one, the weights."""
    from benchmarks.infer import own_engine as infer

    rank = join_world().rank
    wired = [""]
    wire, prefill, weights = infer.wire_tensor_parallel, infer.Stepper.prefill, infer.random_tensor_parallel

    def noted(model: Any, wiring: Any, *rest: Any, **options: Any) -> Any:
        wired[0] = wiring.name
        return wire(model, wiring, *rest, **options)

    def small_memory(stepper: Any, prompts: Any, slots: Any) -> Any:
        if wired[0] == "ladder" and len(prompts) == 2:
            raise torch.OutOfMemoryError("no memory for keys and values")
        return prefill(stepper, prompts, slots)

    def smaller_memory(*arguments: Any, **options: Any) -> Any:
        if rank == 1:
            raise torch.OutOfMemoryError("no memory for weights")
        return weights(*arguments, **options)

    load = infer.Workload("tiny-dense", layers=2, degrees=(1, 2), batches=(1, 2), prompt=8, new=3, dtype="float32",
                          wirings=("standard", "ladder", "desync-2x"), rounds=1)  # fmt: skip
    infer.wire_tensor_parallel, infer.Stepper.prefill = noted, small_memory
    rows = [infer.bench(load, out)["rows"]]
    infer.random_tensor_parallel = smaller_memory
    return [*rows, infer.bench(replace(load, degrees=(2,), batches=(1,), bounds=("standard",)))["rows"]]


def test_two_ranks_answer_and_score_as_one(models: dict[str, Path], tmp_path: Path) -> None:
    mirror = eval_data.write_mirror(tmp_path / "mirror")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("river and stone\nthe lamp\n")
    ranks = results(2, _everything, models, mirror, prompts, tmp_path / "out")
    for arch, path in models.items():
        reference: Any = load_model(path, dtype=torch.float32)
        expected = _greedy(reference)
        assert [found[arch]["greedy"] for found in ranks] == [expected, expected]
        assert [found[arch]["slots"] for found in ranks] == [expected, expected]
        with torch.no_grad():
            whole = reference(tiny.tokens(length=30), use_cache=False).logits
        assert max(float((found[arch]["steps"] - whole).abs().max()) for found in ranks) < 2e-5

    chatted = [answers[0].text for answers in chat(str(models["llama"]), prompts=prompts)]
    assert [found["chat"] for found in ranks] == [chatted, chatted] and any(chatted)

    assert ranks[0]["quantised"] == ranks[1]["quantised"] and any(ranks[0]["quantised"])

    expected = evaluate_models([models["llama"]], data_mirror=mirror, **TASKS)
    for found in ranks:
        *points, loss = [(r["value"], r["items"]) for r in found["scores"]]
        *same, nats = [(r["value"], r["items"]) for r in expected]
        assert points == same and loss[0] == pytest.approx(nats[0], rel=1e-5)
    engine = ranks[0]["scores"][0]["engine"]
    assert (engine["name"], engine["tensor_parallel"], engine["generation"]) == ("own", 2, "slots")
    assert len(list((tmp_path / "out" / "answers").glob("*.jsonl"))) >= 1


@pytest.mark.lab
def test_two_ranks_are_timed_as_one(tmp_path: Path) -> None:
    found = results(2, _bench, tmp_path)
    rows, without_weights = found[0]
    written = json.loads((tmp_path / "infer.json").read_text())
    assert written["rows"] == rows
    assert (tmp_path / "infer.png").stat().st_size > 1000
    assert [(row["tp"], row["batch"], row["wiring"], row["reduce"]) for row in rows] == [
        (tp, batch, wiring, kind)
        for tp, wirings in ((1, ("standard", "ladder")), (2, ("standard", "ladder", "desync-2x")))
        for batch in (1, 2)
        for wiring in wirings
        for kind in ("nccl", "none")
    ]
    for row in rows:
        assert row["exact"] == (row["reduce"] == "nccl")
        assert row["out_of_memory"] == (row["wiring"] == "ladder" and row["batch"] == 2)
        if row["out_of_memory"]:
            assert {row[key] for key in ("prefill_ms", "decode_ms", "tokens_per_s", "drift", "decode_of_bound")} == {
                None
            }
            continue
        same = [r for r in rows if (r["tp"], r["batch"]) == (row["tp"], row["batch"])]
        bound = next(r for r in same if (r["wiring"], r["exact"]) == (row["wiring"], False))
        assert row["decode_of_bound"] == pytest.approx(bound["decode_ms"] / row["decode_ms"])
        assert row["decode_times_standard"] == pytest.approx(same[0]["decode_ms"] / row["decode_ms"])
        whole = row["prefill_ms"] + 2 * row["decode_ms"]
        assert row["tokens_per_s"] == pytest.approx(3 * row["batch"] / whole * 1e3)
    assert [line.count("OOM") for line in table(rows).splitlines()[1:]] == [2 * row["out_of_memory"] for row in rows]

    assert all(row["out_of_memory"] for row in without_weights)
    assert [row["wiring"] for row in without_weights if not row["exact"]] == ["standard"]
    assert len(without_weights) == 4
    assert found[1][1] == without_weights


def _by_graphs(path: Path, *kinds: str) -> dict[str, tuple[list[list[int]], list[list[int]], list[str]]]:
    """Answers step by step and by CUDA graphs, and what was logged, for each all-reduce backend."""
    from fcsd.engine.open import open_engine

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fcsd").addHandler(handler)
    world, found = join_world(), {}
    for kind in kinds:
        model: Any = open_engine(path, world, dtype=torch.float32, reduce=kind)
        found[kind] = _in_slots(model), _in_slots(model, graphs=True), list(said)
    return found


@pytest.mark.multi_gpu
def test_two_gpus_decode_by_graphs_as_step_by_step(models: dict[str, Path]) -> None:
    expected = _greedy(load_model(models["llama"], dtype=torch.float32))
    kinds = ("nccl", "symmetric")
    for found in results(2, _by_graphs, models["llama"], *kinds):
        assert found == dict.fromkeys(kinds, (expected, expected, []))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "{model}", "--backend", "own", "--all-reduce", "none"], "gives wrong results"),
        (["eval", "{model}", "--backend", "own", "--all-reduce", "t.json"], "unknown all-reduce backend"),
        (["eval", "{model}", "--all-reduce", "none"], "--all-reduce is for --backend own"),
        (["eval", "{model}", "--backend", "own", "--ep-size", "2"], "--ep-size is for --backend hf"),
        (["chat", "{model}", "--gpus", "1", "--all-reduce", "none"], "gives wrong results"),
        (["chat", "{model}", "--all-reduce", "none"], "add --gpus"),
        (["chat", "{model}", "--gpus", "1", "--device", "cpu"], "leave it out with --gpus"),
    ],
)
def test_what_gives_wrong_results_is_refused(models: dict[str, Path], words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [word.format(model=models["llama"]) for word in words])
    assert done.exit_code == 2 and message in done.stderr


@torch.no_grad()
def test_a_slot_holds_the_keys_and_values_of_every_rank_that_desync_simulates() -> None:
    model = tiny.model("qwen3", vocab_size=400, initializer_range=0.1)
    wire(model, Wiring("desync-2x", (0, 1, 2, 3), tp_degree=2))
    assert _in_slots(model) == _greedy(model)


def test_a_row_that_is_padded_on_the_left_counts_its_own_tokens() -> None:
    """Rotary angles alone would not show it: they depend on the distance of two tokens."""
    ids, mask, positions = left_padded([[5, 6, 7], [8]], torch.device("cpu"))
    assert (ids.tolist(), mask.tolist()) == ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])
    assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_a_slot_that_is_too_long_for_llama4_is_refused() -> None:
    model = tiny.model("llama4_text")
    assert why_no_slots(model, 64) is None
    assert why_no_slots(model, 65) == "a layer attends to chunks of 64 tokens, and 65 are needed"
    model.config.floor_scale = 64
    assert why_no_slots(model, 63) is None
    assert why_no_slots(model, 64) == "layers scale queries by their position from token 64 on, and 64 are needed"


def test_more_processes_than_the_engine_was_told_of_are_refused() -> None:
    with pytest.raises(ConfigError, match="over all 2 processes, not over 1"):
        Engine(backend="own").check(2)
