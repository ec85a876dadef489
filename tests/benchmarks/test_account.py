"""The account of a step counts every moment of the device's timeline once, under the right phase."""

import gzip
import json
from pathlib import Path

import pytest
from benchmarks.train.account import BETWEEN, STATES, read_account, to_text

from fcsd.errors import BadInputError

pytestmark = pytest.mark.lab


def write(path: Path, *events: dict) -> Path:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": list(events)}).encode()))
    return path


def on_host(name: str, ts: float, dur: float, tid: int = 1) -> dict:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def launched(correlation: int, ts: float, tid: int = 1, name: str = "cudaLaunchKernel", dur: float = 1) -> dict:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def on_device(correlation: int, ts: float, dur: float, name: str = "gemm", cat: str = "kernel") -> dict:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


STEP = [
    on_host("fcsd.phase::teacher", 0, 100),
    on_host("fcsd.phase::student", 100, 100),
    on_host("fcsd.phase::loss", 150, 20),  # nested: the innermost counts
    on_host("fcsd::combine.fwd.L0", 120, 10),
    on_host("fcsd.phase::backward", 200, 100),
    launched(1, 10),
    launched(2, 125),
    launched(3, 160),
    launched(4, 250, tid=2),  # autograd's thread, while the main thread is in backward
    launched(5, 350),
    launched(0, 280, name="cudaStreamSynchronize", dur=15_000),
    on_device(1, 1000, 2000),
    on_device(2, 2500, 2500, name="Memcpy PtoP", cat="gpu_memcpy"),  # 500 under the teacher's kernel, 2000 exposed
    on_device(3, 6000, 1000),  # after 1000 idle
    on_device(4, 7000, 3000, name="ncclDevKernel_ReduceScatter"),
    on_device(5, 8000, 500),
]


def test_every_moment_counts_once(tmp_path: Path) -> None:
    account = read_account(write(tmp_path / "rank-0.json.gz", *STEP))
    assert account.total == 9.0
    assert account.phases == {
        "teacher": {"computing": 2.0, "exposed": 0.0, "idle": 0.0},
        "student": {"computing": 0.0, "exposed": 2.0, "idle": 0.0},
        "loss": {"computing": 1.0, "exposed": 0.0, "idle": 1.0},
        "backward": {"computing": 0.0, "exposed": 2.5, "idle": 0.0},
        BETWEEN: {"computing": 0.5, "exposed": 0.0, "idle": 0.0},
    }
    assert sum(row[state] for row in account.phases.values() for state in STATES) == account.total
    assert account.communication == {"student": (2.5, 0.5), "backward": (3.0, 0.5)}
    assert "student 2.5 ms (20% hidden), backward 3.0 ms (17% hidden)" in to_text(account)
    assert account.synchronisations == {"backward": (1, 15.0)}
    assert "backward 1 (15.0 ms)" in to_text(account)


def test_a_trace_without_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="nothing ran on a device"):
        read_account(write(tmp_path / "host.json.gz", *STEP[:5]))
    (tmp_path / "no.json").write_text("[")
    with pytest.raises(BadInputError, match="is not a Chrome trace"):
        read_account(tmp_path / "no.json")
