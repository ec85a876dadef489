"""``benchmarks.vllm trace`` reads what the host and the GPU did in each kind of step."""

import json
from pathlib import Path
from typing import Any

from benchmarks.vllm.trace import read, text

MIXED, DECODING = "execute_context_1(512)_generation_28(28)", "execute_context_0(0)_generation_28(28)"


def step(name: str, at: float, number: int, graph: bool, slower: float) -> list[dict[str, Any]]:
    """A step that launches a product and a sum of ``slower`` µs, by two calls or by one graph; times are in µs."""

    def event(kind: str, what: str, begin: float, length: float, **args: Any) -> dict[str, Any]:
        return dict(ph="X", cat=kind, name=what, ts=at + begin, dur=length, tid=args.pop("tid", 1), args=args)

    calls = [(2 * number, "cudaGraphLaunch")] if graph else [(2 * number + n, "cudaLaunchKernel") for n in (0, 1)]
    return [
        event("user_annotation", name, 0, 100),
        event("cpu_op", "vllm::all_reduce", 10, 20),
        event("cpu_op", "vllm::all_reduce", 15, 99, tid=2),  # another thread's
        *(event("cuda_runtime", what, 20 + 10 * n, 5, correlation=call) for n, (call, what) in enumerate(calls)),
        event("kernel", "gemm", 80, 100, tid=7, correlation=calls[0][0], stream=7),
        event("kernel", "ncclDevKernel_AllReduce", 130, slower, tid=13, correlation=calls[-1][0], stream=13),
    ]


def test_a_step_is_read_by_its_own_launches(tmp_path: Path) -> None:
    events = []
    for n in range(3):
        events += step(MIXED, 2000 * n, 2 * n, False, 100 + 50 * n)
        events += step(DECODING, 2000 * n + 1000, 2 * n + 1, True, 40)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*events, *step(MIXED.replace("512", "8"), 9000, 9, False, 1)]}))
    found = read(path)
    assert found.keys() == {"512+28", "0+28"}, "a kind of fewer than three steps says nothing"
    mixed, decoding = found["512+28"], found["0+28"]
    assert [mixed[k] for k in ("steps", "launches", "kernels", "graphs", "period", "host")] == [3, 2, 2, 0, 1, 0.1]
    # The median step: its product runs from 80 to 180, its sum from 130 to 280, and the host ends at 100.
    assert [mixed[k] for k in ("gpu", "busy", "exposed", "behind")] == [0.2, 0.2, 0.1, 0.18]
    assert mixed["nccl"] == {"13": 0.15} and mixed["operators"] == {
        "vllm::all_reduce": 0.02,
        "vllm::all_reduce calls": 1,
    }
    assert mixed["named"] == [
        {"name": "ncclDevKernel_AllReduce", "calls": 1, "us": 150}, {"name": "gemm", "calls": 1, "us": 100}
    ]  # fmt: skip
    assert [decoding[k] for k in ("launches", "kernels", "graphs", "exposed")] == [1, 2, 1, 0]
    assert decoding["behind"] == 0.08 and decoding["nccl"] == {"13": 0.04}

    files = {
        "original": {"single": [{"512": 3.0}, {"512": 5.0}], "traced": {"rank-0": found}},
        "wired": {"failed": "no"},
    }
    lines = text(files).splitlines()
    assert "single 512 | 4.000 (1.00x) | -" in lines and "traced 512+28 exposed | 0.100 (1.00x) | -" in lines
    assert lines[-1] == "wired failed: no"
