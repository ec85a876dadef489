"""``benchmarks/vllm/vllm_engines.py``: the rows of two engines side by side, and the calls that measure them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "benchmarks/vllm")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    import vllm_engines  # pyright: ignore[reportMissingImports]

    yield vllm_engines
    for name in ("vllm_engines", "vllm_report"):
        del sys.modules[name]


def row(tp: int, kind: str, decode: float | None, prefill: float | None = 8.0) -> dict[str, Any]:
    return dict(tp=tp, batch=1, reduce=kind, prefill_ms=prefill, decode_ms=decode)


def test_the_fastest_kind_of_the_own_engine_counts(script: Any) -> None:
    own = [row(1, "nccl", 4.0), row(2, "nccl", 3.0, prefill=5.0), row(2, "symmetric", 2.0, prefill=6.0)]
    own += [row(4, "nccl", None, prefill=None)]
    one, two, four = script.beside(own, [row(degree, "vllm", 3.0, prefill=10.0) for degree in (1, 2, 4, 8)])
    assert (one["decode_times_vllm"], one["prefill_times_vllm"]) == (0.75, 1.25)
    assert (two["own_decode_by"], two["own_decode_ms"], two["decode_times_vllm"]) == ("symmetric", 2.0, 1.5)
    assert (two["own_prefill_by"], two["prefill_times_vllm"]) == ("nccl", 2.0)
    assert four["own_decode_ms"] is None and four["decode_times_vllm"] is None and four["vllm_decode_ms"] == 3.0


@pytest.mark.parametrize("fails", [False, True])
def test_both_engines_get_the_same_workload(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, fails: bool
) -> None:
    calls: list[list[str]] = []

    def run(words: list[str], cwd: Path) -> Any:
        calls.append(words[3:])  # after `python -m fcsd`
        out = Path(words[words.index("--out") + 1])
        if not (fails and out.name == "vllm"):
            out.mkdir(parents=True)
            (out / "infer.json").write_text(json.dumps({"rows": [row(2, "nccl", 3.0)]}))
        return subprocess.CompletedProcess(words, int(fails and out.name == "vllm"))

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["x", str(tmp_path), "--tp", "2", "--reduce", "nccl,symmetric", "--attention", "split"]
    )
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == fails
    own, vllm = calls
    differs = {"own", "vllm", "nccl,symmetric", "--attention", "split", str(tmp_path / "own"), str(tmp_path / "vllm")}
    assert [word for word in own if word not in differs] == [word for word in vllm if word not in differs]
    assert own[0] == "llama3-70b" and own[own.index("--reduce") + 1] == "nccl,symmetric"
    assert vllm[vllm.index("--engine") + 1] == "vllm" and vllm[vllm.index("--wirings") + 1] == "standard"
    assert ('"decode_times_vllm": 1.0' in capsys.readouterr().out) is not fails
