"""``benchmarks/as_nodes.sh``: several nodes on one host."""

import os
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab
SCRIPT = Path(__file__).parents[2] / "benchmarks/as_nodes.sh"


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
