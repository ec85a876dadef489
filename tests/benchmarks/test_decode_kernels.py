"""The benchmark of the kernels of decoding steps compares ways that compute the same."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from benchmarks.kernels import decode as decode_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def test_both_ways_compute_the_same() -> None:
    config: Any = tiny.config("deepseek_v3")
    ways, read = decode_kernels.experts(config, 3, device=DEVICE, dtype=torch.float32)
    for number in range(decode_kernels.SETS):
        torch.testing.assert_close(ways["kernels"](number), ways["replaced"](number), rtol=1e-4, atol=1e-4)
    expert = 3 * config.moe_intermediate_size * config.hidden_size * 4
    least, most = config.num_experts_per_tok, 3 * config.num_experts_per_tok
    assert least * expert <= read <= most * expert


@pytest.mark.parametrize("words", [["llama3-8b"], ["--out", "/nowhere/kernels.json"]])
def test_what_it_cannot_do_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_kernels", *words])
    with pytest.raises(SystemExit) as ended:
        decode_kernels.main()
    assert ended.value.code == 2


@pytest.mark.gpu
def test_it_times_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(decode_kernels, "COPIED", 2**20)
    monkeypatch.setattr(sys, "argv", ["decode_kernels", "deepseek-v2-lite", "--tokens", "2", "--out", str(out)])
    decode_kernels.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["kernel"] for row in rows] == ["experts"]
    assert all(row[way] > 0 for row in rows for way in ("kernels", "replaced", "bound"))
