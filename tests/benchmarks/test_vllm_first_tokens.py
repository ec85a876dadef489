"""``benchmarks/vllm/vllm_first_tokens.py``: what its rows say of engines whose times are known."""

import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "benchmarks/vllm")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    import vllm_first_tokens  # pyright: ignore[reportMissingImports]

    yield vllm_first_tokens
    for name in ("vllm_first_tokens", "vllm_variants", "vllm_cases", "vllm_report"):
        del sys.modules[name]


class Engine:
    """Answers after ``first`` seconds, and then each token after ``step`` seconds."""

    def __init__(self, name: str, first: float, step: float, asked: list[str]) -> None:
        self.name, self.first, self.step, self.asked = name, first, step, asked

    def ask(self, prompts: list[list[int]], arrivals: Sequence[float], new: int, deadline: float) -> Any:
        assert len(prompts) == len(arrivals) and time.perf_counter() < deadline
        self.asked.append(self.name)
        return [(self.first, self.first + self.step * (new - 1))] * len(prompts)


@pytest.fixture
def given() -> Namespace:
    return Namespace(
        lengths=[8, 16], requests=3, rounds=2, batches=[2], rates=[0.5], load_prompt=8, load_new=5, load_seconds=0.5
    )


def engines(script: Any, asked: list[str]) -> list[Engine]:
    times = {script.ORIGINAL: (0.4, 0.04), "converted": (0.25, 0.05), script.BOUND: (0.2, 0.02)}
    return [Engine(name, *both, asked) for name, both in times.items()]


def test_rows_compare_with_the_original_and_the_bound(script: Any, given: Namespace) -> None:
    asked: list[str] = []
    variants, words, deadline = engines(script, asked), random.Random(0), time.perf_counter() + 600
    rows = list(script.at_once(variants, given, words, deadline))
    assert [row["length"] for row in rows] == [8] * 3 + [16] * 3
    assert asked[:6] == [variant.name for variant in variants] * 2, "they take turns"
    converted = rows[1]
    assert (converted["mean_ms"], converted["last_ms"]) == (250, 250)
    assert converted["mean_ms_times_original"] == pytest.approx(1.6)
    assert converted["mean_ms_of_bound"] == pytest.approx(0.8)
    assert converted["mean_ms_hidden"] == pytest.approx(0.75)

    (_, step, bound) = script.decoding(variants, given, words, deadline)
    assert step["step_ms"] == pytest.approx(50) and step["step_ms_times_original"] == pytest.approx(0.8)
    assert bound["step_ms_times_original"] == pytest.approx(2)


def test_engines_apart_are_compared_like_engines_in_turns(
    script: Any, given: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    all_engines = {engine.name: engine for engine in engines(script, asked)}
    running: list[str] = []

    def start(name: str, path: Path, options: dict[str, Any]) -> Any:
        assert not running, "the engine before has ended"
        running.append(name)
        engine: Any = all_engines[name]
        engine.receive = lambda deadline: dict(runner="v2")
        return engine

    monkeypatch.setattr(script, "Variant", start)
    monkeypatch.setattr(script, "close", lambda variants, seconds: running.clear())
    todo: Any = [(name, Path(), {}) for name in all_engines]
    head: dict[str, Any] = {}
    rows = list(script.apart(todo, given, head, time.perf_counter() + 600))
    assert head == dict(runner="v2")
    assert [row["role"] for row in rows[::3]] == [script.ORIGINAL, script.BOUND, "converted"], "two lengths, one batch"
    converted, step = rows[6], rows[8]
    assert converted["length"] == 8 and converted["mean_ms_times_original"] == pytest.approx(1.6)
    assert converted["mean_ms_hidden"] == pytest.approx(0.75) and converted["last_ms_of_bound"] == pytest.approx(0.8)
    assert step["batch"] == 2 and step["step_ms_times_original"] == pytest.approx(0.8)

    def other(name: str, *rest: Any) -> Any:
        engine = start(name, *rest)
        engine.receive = lambda deadline: dict(runner="v2" if name == script.ORIGINAL else "v1")
        return engine

    monkeypatch.setattr(script, "Variant", other)
    with pytest.raises(RuntimeError, match="not run alike"):
        list(script.apart(todo, given, {}, time.perf_counter() + 600))
    assert not running


def test_every_measurement_of_the_list_is_one_that_the_script_takes(
    script: Any, repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [
        line.split() for line in (repo / "benchmarks/vllm/vllm_times.txt").read_text().splitlines() if line[0] != "#"
    ]
    assert len({name for name, *_ in lines}) == len(lines)
    asked: list[list[tuple[str, Path, dict[str, Any]]]] = []

    def noted(todo: Any, given: Namespace, head: Any, deadline: float) -> list[Any]:
        asked.append(todo)
        return []

    for how in ("apart", "in_turns"):
        monkeypatch.setattr(script, how, noted)
    for _, *options in lines:
        monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), *options])
        script.main()
        (original, path, settings), (_, converted, _), *_ = asked[-1]
        assert original == script.ORIGINAL and settings["tensor_parallel_size"] in (2, 4)
        configs = [json.loads((folder / "config.json").read_text()) for folder in (path, converted)]
        assert all(("quantization_config" in config) == ("--fp8" in options) for config in configs)
        assert configs[1]["fcsd"]["wiring"] == "farskip" and "fcsd" not in configs[0]


def test_a_load_has_every_variant_twice_and_not_the_bound(script: Any, given: Namespace) -> None:
    asked: list[str] = []
    variants = engines(script, asked)
    rows = list(script.under_load(variants, given, random.Random(0), time.perf_counter() + 600))
    assert [row["role"] for row in rows] == [script.ORIGINAL, "converted"]
    assert asked[3:] == [script.ORIGINAL, "converted", "converted", script.ORIGINAL]
    assert rows[0]["requests"] == rows[1]["requests"] > 2
    assert rows[1]["first_p50_times_original"] == pytest.approx(1.6)
    assert rows[1]["step_p99_times_original"] == pytest.approx(0.8)
    assert not list(script.under_load(variants, given, random.Random(0), time.perf_counter() + 0.9)), "no time for it"
