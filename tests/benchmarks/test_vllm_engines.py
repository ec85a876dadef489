"""``benchmarks/vllm/engines.py`` and the programs that fork engines, with a vLLM that answers by arithmetic."""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmarks.programs import start
from benchmarks.vllm.engines import Failed, ask, forks, measure_host_sums, replies

from fcsd.bench.serve import host_ways

pytestmark = pytest.mark.lab


def doubled(before: int) -> Iterator[int]:
    """Answers numbers, ends without a word at 0, fails at 1, and does not answer 2."""
    told = before
    while True:
        match asked := (yield told):
            case 0:
                os._exit(3)
            case 1:
                raise ValueError("one")
            case 2:
                time.sleep(600)
        os.write(1, f"asked {asked}\n".encode())
        told = 2 * asked + int(os.environ["MORE"])


def test_forks_answer_in_their_own_time_and_end_with_the_block(tmp_path: Path) -> None:
    with forks() as fork:
        names = ("a", "b", "c", "d")
        group = {name: fork(doubled, n, log=tmp_path / name, environment={"MORE": "5"}) for n, name in enumerate(names)}
        assert dict(replies(group)) == dict(zip(names, range(4), strict=True))
        ask(group, 10)
        assert dict(replies(group)) == dict.fromkeys(names, 25)
        for name, request in zip(names, (0, 1, 2, 3), strict=True):
            ask({name: group[name]}, request)
        told = dict(replies({name: group[name] for name in "abd"}))
        told |= dict(replies({"c": group["c"]}, time.monotonic()))
        assert told.pop("d") == 11 and all(isinstance(one, Failed) for one in told.values())
        ends = ["it has ended without a word", "ValueError: one", "no answer in time"]
        assert [str(told[name]) for name in names[:3]] == ends
        assert "MORE" not in os.environ
    assert (tmp_path / "d").read_text() == "asked 10\nasked 3\n"
    assert not any(one.process.is_alive() for one in group.values())


class LLM:
    """In place of vLLM's engine: a token is the number of the prompt's tokens, and a converted model has another."""

    def __init__(self, path: str, **options: Any) -> None:
        self.path = Path(path)
        config = json.loads((self.path / "config.json").read_text())
        if os.environ.get("FAILS", "nothing") in config["model_type"]:
            raise RuntimeError("no kernel")
        self.token = int("fcsd" in config)
        self.llm_engine: Any = self
        compilation = SimpleNamespace(mode=0, cudagraph_mode="", max_cudagraph_capture_size=1, splitting_ops=[])
        by_host = int(os.environ.get("FCSD_ALL_REDUCE") == "host")
        scheduler = SimpleNamespace(async_scheduling=True, max_num_seqs=1 + by_host, max_num_batched_tokens=1)
        self.vllm_config = SimpleNamespace(compilation_config=compilation, scheduler_config=scheduler)
        self.begun: dict[str, int] = {}

    def generate(self, prompts: list, how: Any, use_tqdm: bool) -> list:
        return [self.answer(len(prompt["prompt_token_ids"]), how.max_tokens) for prompt in prompts]

    def answer(self, tokens: int, new: int) -> Any:
        ids = [self.token + tokens] * new
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=ids, logprobs=[{id: SimpleNamespace(logprob=-1.0)} for id in ids])]
        )

    def add_request(self, name: str, prompt: dict, how: Any) -> None:
        self.begun[name] = how.max_tokens

    def step(self) -> list:
        for name in self.begun:
            self.begun[name] -= 1
        ended = [SimpleNamespace(request_id=name, finished=left <= 0) for name, left in self.begun.items()]
        self.begun = {name: left for name, left in self.begun.items() if left > 0}
        return ended

    def abort_request(self, names: list) -> None:
        self.begun.clear()

    def has_unfinished_requests(self) -> bool:
        return bool(self.begun)

    def start_profile(self) -> None: ...

    def stop_profile(self) -> None: ...


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.LLM, module.__version__, module.SamplingParams = LLM, "0.0", lambda **given: SimpleNamespace(**given)
    utils = SimpleNamespace(initialize_single_dummy_weight=None)
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(weight_utils=utils))


def test_engines_take_turns_and_a_failed_one_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "qwen3")
    out = tmp_path / "turns.json"
    words = ["llama3-8b:1", "qwen3-32b:1:w4a16", "--seconds", "300", "--engines", "stock", "wired", "stock, stages"]
    calls = itertools.count()  # a clock that ends after some rounds
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 20 * next(calls), perf_counter=time.perf_counter)
    monkeypatch.setattr("benchmarks.vllm.turns.time", clock)
    start("benchmarks.vllm", "turns", str(out), *words)
    found = json.loads(out.read_text())
    assert found["command"] == "python -m benchmarks.vllm turns " + " ".join(["turns.json", *words])
    names = ["llama3-8b:1, stock", "llama3-8b:1, ladder", "llama3-8b:1, stock, stages"]
    assert found["started"] == names and found["milliseconds"].keys() == set(names)
    assert list(found["answers like stock"].values()) == [16, 0, 16]
    assert set(found["answers like the first time"].values()) == {16}
    assert set(found["milliseconds"][names[1]]) >= {"step of 64", "first tokens of 16 x 2048"}
    assert (tmp_path / "qwen3-32b-1-w4a16-stock.log").exists()
    assert len(found["failed"]) == 3 and set(found["failed"].values()) == {"RuntimeError: no kernel"}


def test_sums_are_compared_engine_by_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "mistral")
    out = tmp_path / "sums.json"
    start("benchmarks.vllm", "host_sums", str(out), "dense", "sliding-window", "--seconds", "300")
    found = json.loads(out.read_text())["kinds"]
    assert list(found["dense"]) == ["graphs", "eager", "compiled"]
    assert list(found["dense"]["graphs"]) == ["NCCL", "host", "NCCL again"]
    same = {"equal answers": 3, "of": 3, "largest difference": 0.0}
    assert found["dense"]["eager"]["host"]["together"] == same and "tokens" in found["dense"]["eager"]["NCCL"]
    assert found["sliding-window"]["eager"]["NCCL"]["failed"] == ["RuntimeError: no kernel"]
    assert (tmp_path / "sums" / "dense-graphs-NCCL-again.log").exists()


def test_tables_of_sums_are_measured_before_engines_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(ranks: int) -> None:
        (tmp_path / f"{ranks} {os.environ['LINK']}").touch()

    monkeypatch.setattr(host_ways, "through_host", lambda: True)
    monkeypatch.setattr(host_ways, "prepare", prepare)
    measure_host_sums({"LINK": "off"}, [4, 1, 2, 2])
    measure_host_sums({"LINK": "on"}, [])
    assert {file.name for file in tmp_path.iterdir()} == {"2 off", "4 off"} and "LINK" not in os.environ


def test_steps_are_timed_and_traced_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "fcsd")
    words = ["--ways", "original,original-by-host,wired", "--repeats", "2", "--tokens", "8,16", "--layers", "1"]
    assert start("benchmarks.vllm", "trace", "llama3-8b", *words, "--out", str(tmp_path / "steps")), "one has failed"
    files = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "steps").glob("*.json")}
    assert files.keys() == {"original", "original-by-host", "wired"}
    assert files["wired"] == {"settings": {}, "failed": "RuntimeError: no kernel"}
    first = files["original"]
    assert [len(first[name]) for name in ("single", "mixed", "decode")] == [2, 2, 2] and first["traced"] == {}
    assert first["single"][0].keys() == {"8", "16"}
    told = [files[name]["chosen"]["sequences"] for name in ("original", "original-by-host")]
    assert told == [1, 2], "the second one alone was told to sum through the host"
