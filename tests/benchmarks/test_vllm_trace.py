"""``vllm_trace.py``: on which stream the reductions of a trace ran, and how many the plan of a model has."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fcsd.models.wiring_block import Wiring

SCRIPTS = str(Path(__file__).parents[2] / "benchmarks/vllm")
MAIN, SIDE = 7, 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    import vllm_trace  # pyright: ignore[reportMissingImports]

    yield vllm_trace
    for name in ("vllm_trace", "vllm_parity", "vllm_cases", "vllm_report"):
        del sys.modules[name]


def kernel(name: str, stream: int, start: float, duration: float) -> dict[str, Any]:
    return dict(cat="kernel", name=name, ts=start, dur=duration, args=dict(stream=stream))


def step(at: float, exposed: int = 1) -> list[dict[str, Any]]:
    """A step: one reduction on the side, of which a product hides three quarters, and some on the main stream."""
    reductions = [kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", MAIN, at + 80 + n, 1) for n in range(exposed)]
    return [
        kernel("nvjet_gemm", MAIN, at, 30),
        kernel("void vllm::cross_device_reduce_1stage<bfloat16, 2>", SIDE, at + 15, 20),
        dict(cat="gpu_memcpy", name="Memcpy DtoD", ts=at + 14, dur=1, args=dict(stream=SIDE)),
        *reductions,
    ]


def test_reductions_are_counted_by_their_stream(script: Any) -> None:
    events = [*step(0), *step(100), dict(cat="cpu_op", name="fcsd::all_reduce", ts=0, dur=5, args={})]
    assert script.streams(events) == dict(main=2, side=2, hidden=pytest.approx(0.75))
    assert script.judged(events, 1, 1) == dict(main=2, side=2, hidden=pytest.approx(0.75), steps=2, right=True)
    assert not script.judged([*step(0), *step(100, exposed=2)], 1, 1)["right"], "one more on the main stream"
    assert not script.judged([event for event in step(0) if event["args"]["stream"] == MAIN], 1, 1)["right"]
    with pytest.raises(ValueError, match="no kernel"):
        script.streams([dict(cat="cpu_op", name="gemm", ts=0, dur=1)])


def test_a_step_has_the_reductions_of_its_plan(script: Any, tmp_path: Path) -> None:
    def planned(wiring: Wiring) -> tuple[int, int]:
        config = dict(num_hidden_layers=4, fcsd=wiring.to_block())
        (tmp_path / "config.json").write_text(script.json.dumps(config))
        return script.planned(tmp_path)

    # Two in each layer, but that the last converted layer sums all of its outputs at once; and the embedding's.
    assert planned(Wiring("farskip", (0, 1, 2, 3))) == (2, 6)
    assert planned(Wiring("farskip", (1, 2, 3))) == (4, 4)
    assert planned(Wiring("parallel", (0, 1, 2, 3))) == (5, 0)
