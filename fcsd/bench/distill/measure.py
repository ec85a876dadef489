"""Measures the whole distillation step, teacher included: the speed of its variants and how the time is spent.

Student and teacher have random weights. Their dimensions are those of a published model or of a checkpoint's config.
The recipe, the packed rows, the feed, the loss, the engine and the optimizer step are those of ``fcsd distill``. All
variants run in turns on the same two models and in one process group, so that changes of the GPUs' clocks and memory
affect all of them alike.
"""

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fcsd.bench.account import read_account, to_text
from fcsd.bench.distill.steps import Steps
from fcsd.bench.distill.table import table
from fcsd.bench.distill.workload import BOUND, Load
from fcsd.bench.memory import random_recipe
from fcsd.bench.training.model import evenly_routed
from fcsd.bench.training.record import record
from fcsd.config import Recipe
from fcsd.distill.experts.expert_parallel import check
from fcsd.distill.metrics import full_speed, gpu_peak
from fcsd.distill.step.engine import import_deepspeed
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, barrier, join_world
from fcsd.models.build import converted_config, register
from fcsd.models.wiring import Wiring
from fcsd.parallel.expert.formats import check_formats
from fcsd.parallel.quantised.rows import WireFormats


def bench(load: Load, out: Path | None = None, *, traced: bool = False) -> dict[str, Any]:
    """Measures all variants, prints a table to stderr on rank 0, and returns the content of ``distill.json``.

    Every process of the run must call this function.

    Args:
        out: directory for ``distill.json``.
        traced: also writes to ``out`` a Chrome trace of one step of each rank under each variant except the bound, and
            computes the account of rank 0 from it.

    Raises:
        ConfigError: the recipe is invalid for this model or this number of processes, or the rows of the model cannot
            be rounded to a format.
    """
    world = join_world()
    import_deepspeed()
    register()
    original = load.config
    layers = original.get_text_config().num_hidden_layers
    wiring = Wiring("farskip", tuple(range(layers)))
    rewired = converted_config(original, wiring.to_block(base_model="random", base_revision=None, base_sha256=None))
    with tempfile.TemporaryDirectory() as folder:
        rewired.save_pretrained(f"{folder}/student")
        original.save_pretrained(f"{folder}/teacher")
        tokens = world.size * load.micro_batch * load.accumulation * load.seq
        most = len(load.timed) * (load.rounds * (load.steps + 1) + 2)
        recipe = random_recipe(Path(folder), "bench", load.seq, load.micro_batch, tokens, most, world, load.sets)
        check(recipe, world.size)
        if load.wires and recipe.parallel.ep_size == 1:
            raise ConfigError("--wire needs experts that are divided among several processes", hint="add --gpus 2")
        for wire in load.wires:
            check_formats(WireFormats.parse(wire), rewired, load.shape)
        full = _full_speed(recipe, world)
    with ExitStack() as held:
        steps = Steps(recipe, rewired, original, world)
        if load.router == "uniform":
            for model in steps.models:
                held.enter_context(evenly_routed(model))
        result: dict[str, Any] = {
            "load": asdict(load),
            "world": world.size,
            "batch_tokens": tokens,
            "full_speed": full,
            "environment": snapshot(),
            "variants": _time(steps, load, world),
        }
        if traced and out is not None and world.device.type == "cuda":
            result["accounts"] = _accounts(steps, load, out, world)
    if world.rank == 0:
        print(table(result), file=sys.stderr, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "distill.json").write_text(json.dumps(result, indent=1))
    return result


def _full_speed(recipe: Recipe, world: World) -> float | None:
    """Tokens per second at the GPUs' peak FLOP/s, by which MFU is computed; None if the GPUs' peak is not known."""
    if world.device.type != "cuda":
        return None
    peak = gpu_peak(torch.cuda.get_device_name(world.device), recipe.train.dtype)
    return None if peak is None else full_speed(recipe, world.size, peak)


def _time(steps: Steps, load: Load, world: World) -> dict[str, dict[str, Any]]:
    """Times every variant.

    Returns: for each variant, per round the ``seconds`` of a step and the share ``data_wait`` of them spent waiting for
        data; the last ``loss``; and on GPUs the peak memory ``peak_gib``.
    """
    measured: dict[str, dict[str, Any]] = {name: {"seconds": [], "data_wait": []} for name in load.timed}
    for _ in range(load.rounds):
        for name, found in measured.items():
            steps.choose(name)
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken = steps.several(load.steps)
            found["seconds"].append(taken["seconds"])
            found["data_wait"].append(taken["data_wait"])
            found["loss"] = taken["loss"]
            if world.device.type == "cuda":
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return measured


def _accounts(steps: Steps, load: Load, out: Path, world: World) -> dict[str, Any]:
    """Traces a step of each variant except the bound on every rank; returns rank 0's account of each variant."""
    accounts: dict[str, Any] = {}
    for name in load.timed:
        if name == BOUND:
            continue
        steps.choose(name)
        steps.one()
        path = out / f"{name}-rank-{world.rank}.json.gz"
        out.mkdir(parents=True, exist_ok=True)
        barrier()
        record(steps.one, path, world)
        barrier()
        if world.rank == 0:
            account = read_account(path)
            accounts[name] = asdict(account)
            print(f"\n{name}, a traced step of rank 0\n{to_text(account)}", file=sys.stderr, flush=True)
    return accounts
