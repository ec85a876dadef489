"""The minutes that decide: ``fcsd bench links`` and ``fcsd bench serve`` on this machine, for ``advise --measure``."""

import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fcsd.advise import sums
from fcsd.advise.host import Host
from fcsd.advise.speed import Load, Served
from fcsd.advise.verdict import pairs_of
from fcsd.bench.serve.variants import NO_CUSTOM, PAIRS
from fcsd.errors import FcsdError
from fcsd.parallel.machine import read_machine

MINUTES = 6.0  # of `bench serve`; `bench links` takes about one
log = logging.getLogger(__name__)


def measure(model: Path, host: Host, load: Load, minutes: float = MINUTES) -> tuple[Host, dict[str, Served]]:
    """Measure all-reduces, and servers of the original, of its alternatives and of a conversion of all layers.

    Args:
        model: a directory in which config.json is enough.
        host: this machine, with two GPUs or more.

    Returns:
        The host with its own all-reduces, and by the names of ``advise``'s ways what servers were timed with.

    Raises:
        FcsdError: a command failed; its own messages say why.
    """
    with TemporaryDirectory(prefix="fcsd-advise-") as folder:
        machine, prompts, requests = Path(folder, "machine.json"), str(load.prompt_tokens), str(load.concurrency)
        _run("links", "--out", str(machine), "--gpus", str(host.gpus))
        through_host = ["--", NO_CUSTOM] if os.environ.get("NCCL_P2P_DISABLE", "0") != "0" else []
        asked = ["--prompt-tokens", prompts, "--concurrency", requests, "--batches", requests, "--loads", "none"]
        asked += ["--gpus", str(host.gpus), "--minutes", f"{minutes:g}", "--out", folder]
        _run("serve", str(model), *asked, *through_host)
        found = json.loads(Path(folder, "serve.json").read_text(encoding="utf-8"))
        table = sums.of_machine(read_machine(machine), "this machine")
    return replace(host, sums=table), served(found, host.gpus, load)


def _run(*words: str) -> None:
    log.info("fcsd bench %s", " ".join(words))
    done = subprocess.run([sys.executable, "-m", "fcsd", "bench", *words], stdout=2)
    if done.returncode:
        raise FcsdError(f"fcsd bench {words[0]} ended with exit code {done.returncode}", "Its messages above say why.")


def served(result: dict[str, Any], gpus: int, load: Load) -> dict[str, Served]:
    """The times of servers in a ``serve.json``, by the names of ``advise``'s ways; without those that lack one."""
    names = {
        "original": f"stock vLLM, TP {gpus}",
        "original, one replica a GPU": f"{gpus} replicas",
        "original, pipeline stages": f"{gpus} pipeline stages",
        f"original, {PAIRS}": pairs_of(gpus),
        "original, host sums": "sums by host",
        "original, host sums in int8": "sums by host:int8",
    }
    found = {}
    for variant, row in result["variants"].items():
        wiring = row.get("wiring")
        if row["role"] == "wired" and variant in (wiring, f"{wiring}, host sums"):
            name = f"{wiring}, all of the layers"
        else:
            name = names.get(variant)
        times = _times(row["rounds"], load)
        if name is not None and times is not None and (name not in found or times.step < found[name].step):
            found[name] = times
    return found


def _times(rounds: dict[str, Sequence[float]], load: Load) -> Served | None:
    """Seconds, the medians of the rounds; None where one is missing."""
    step, first = rounds.get(f"decode {load.concurrency}"), rounds.get(f"prefill {load.prompt_tokens}")
    return Served(statistics.median(step) / 1e3, statistics.median(first) / 1e3) if step and first else None
