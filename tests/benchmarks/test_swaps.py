"""The benchmark of expert swaps: what it replays, and the rule by which it decides; and the nodes that it runs on."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from benchmarks.train import swaps
from torch import nn

from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.parallel.placement.placement import Placement

pytestmark = pytest.mark.lab
SCRIPT = Path(__file__).parents[2] / "benchmarks/as_nodes.sh"


class Router(nn.Module):
    """Sends every token to expert 0."""

    def forward(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.ones(tokens, 2), torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(8)


def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: int = 8) -> tuple[swaps.Replay, Router]:
    """A recording in which tokens of the first half choose experts 0 and 1, and the others 6 and 7."""
    chosen = numpy.repeat(numpy.array([[[0, 1]], [[6, 7]]], dtype=numpy.uint8), 10, axis=0).reshape(1, 20, 2)
    numpy.savez(tmp_path / "routing.npz", chosen=chosen, experts=8)
    router = Router()
    block = SimpleNamespace(placement=Placement(experts, 4), top_k=2, router=router)
    monkeypatch.setattr(swaps, "expert_blocks", lambda model: {"layer": block})
    training: Any = SimpleNamespace(model=None)
    return swaps.Replay(tmp_path / "routing.npz", training, World(1, 4, torch.device("cpu")), 5), router


def test_routers_replay_the_half_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, router = replay(tmp_path, monkeypatch)
    for half, pair in ((swaps.SEEN, [0, 1]), (swaps.HELD_OUT, [6, 7])):
        found.half = half
        scores, chosen, counts = router(5)
        assert scores.shape == (5, 2) and chosen.tolist() == [pair] * 5 and chosen.dtype == torch.int32
        assert counts.tolist() == [5.0 if expert in pair else 0.0 for expert in range(8)]
    # Experts 6 and 7 are on the last of four ranks, to which one rank of its node and two others send a row per token.
    assert found.rows([Placement(8, 4)], "rank", 2) == {"inside": 1.0, "between": 2.0}
    with pytest.raises(ConfigError, match=r"2 of 16 experts, and layer 0 of .* is not like that"):
        replay(tmp_path, monkeypatch, experts=16)


def test_the_rule_compares_the_fastest_steps_in_bf16() -> None:
    ways = {
        "rank": {"ms": {"before": 100.0, "after": 90.0, "later search": 1.0}},
        "node": {"ms": {"before": 92.0, "after": 92.0, "later search": 0.5}},
        "node+int8": {"ms": {"before": 50.0, "after": 20.0, "later search": 0.5}},
    }
    assert swaps.judged(ways) == {"saved": pytest.approx(1 / 92), "kept": False}
    ways["rank"]["ms"]["after"] = 89.0
    assert swaps.judged(ways) == {"saved": pytest.approx(2 / 92), "kept": True}


def nodes(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a stand-in for python3."""
    stand_in = tmp_path / "python3"
    stand_in.write_text(f"#!/bin/bash\n{body}\n")
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [SCRIPT, "2", "2", "fcsd", "bench", "links"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_every_node_has_its_own_gpus_and_its_own_name(tmp_path: Path) -> None:
    done = nodes(tmp_path, 'echo "$NCCL_HOSTID $CUDA_VISIBLE_DEVICES $5 $6 ${@: -4}"')
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "node-0 0,1 --node-rank 0 -- fcsd bench links",
        "node-1 2,3 --node-rank 1 -- fcsd bench links",
    ]


def test_a_node_that_fails_ends_the_others(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = nodes(tmp_path, '[ "$NCCL_HOSTID" = node-0 ] || exit 3\nexec sleep 50')
    assert done.returncode == 3 and time.monotonic() - begun < 40
