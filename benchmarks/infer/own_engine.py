"""Times prefill and decoding in fcsd's own engine: wirings, all-reduce backends, batches and tensor-parallel degrees.

All variants of one degree and batch run in turns, on one model and one key-value cache, so that changes of the clocks
affect all of them alike. The bound of a wiring is the same computation with reductions of kind ``none``: it sends
nothing inside the layers, and its results are wrong. The sum of the embedding and the exchange of logits remain in
every row, the bound's too.

The sizes are those of Ladder-Residual §3: a prompt of 1024 tokens and 512 new ones. Here every prompt of a batch is
another one, and every new token is the most likely one.

What does not fit into a GPU's memory gets a row that says so, and the run goes on.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.infer.table import draw, table
from benchmarks.infer.workload import Workload, compare, row
from transformers import PreTrainedModel

from fcsd.bench.runner import write
from fcsd.bench.serve.model import wiring_for
from fcsd.bench.serve.own import PATIENCE, Times, Variant, if_it_fits, random_model, turns
from fcsd.bench.shapes import SHAPES
from fcsd.engine.fused import fuse
from fcsd.engine.weights import load_tensor_parallel
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world
from fcsd.models.wiring_block import DESYNC
from fcsd.parallel.all_reduce.reduce import Reduction
from fcsd.parallel.all_reduce.ways import Way
from fcsd.parallel.tensor.tp_plan import TensorGroup


def bench(load: Workload, out: Path | None = None) -> dict[str, Any]:
    """Measure all variants, print a table to stderr on rank 0, and return what ``infer.json`` holds.

    Every process of the run must call this function.

    Args:
        load: the workload; there are as many processes as its largest degree.
        out: directory for ``infer.json``, which is written again after each degree and batch, and for ``infer.png``.

    Returns:
        ``workload``, ``environment`` and ``rows``, one for each degree, batch, wiring and kind. Times are medians over
        the rounds: ``prefill_ms`` of the whole batch, ``decode_ms`` of one step, ``tokens_per_s`` of all new tokens
        including the prefill. ``times_standard`` is the speed relative to the standard wiring with its fastest right
        kind, ``of_bound`` the share of the bound's speed; both for prefill and decode, null where nothing was measured
        to compare with. ``drift`` is the last round's decode time relative to the first round's. A row that is
        ``out_of_memory`` has no times.

    Raises:
        ConfigError: an all-reduce backend is unknown, or a wiring, or a degree does not fit the model,
            the processes or the device.
        BadInputError: the checkpoint cannot be loaded.
    """
    world = join_world()
    if max(load.degrees) > world.size:
        raise ConfigError(f"degree {max(load.degrees)} needs as many processes, and there are {world.size}")
    for kind in load.reduce:
        Reduction(dist.group.WORLD, kind, 0)  # a kind that these ranks cannot have is refused here
    world = replace(world, group=dist.new_group(backend="gloo", timeout=PATIENCE))
    workload = asdict(load)
    result: dict[str, Any] = {"workload": workload, "environment": snapshot(), "rows": []}
    for degree in load.degrees:
        group = dist.new_group(list(range(degree)))
        talk = dist.new_group(list(range(degree)), backend="gloo", timeout=PATIENCE)
        if world.rank < degree:
            ranks, team = TensorGroup(group, degree, world.rank), replace(world, size=degree, group=talk)
            model = if_it_fits(lambda ranks=ranks: _model(load, ranks, world), team)
            for batch in load.batches:
                result["rows"] += _rows(model, load, ranks, batch, team)
                write(result, out and out / "infer.json", world.rank)
            del model
        world.everywhere(lambda: None)  # a barrier whose timeout is long enough
    if world.rank == 0:
        print(table(result["rows"]), file=sys.stderr, flush=True)
        if out is not None:
            draw(result["rows"], f"{load.model}, prompts of {load.prompt} tokens, {load.new} new", out / "infer.png")
    return result


def _model(load: Workload, ranks: TensorGroup, world: World) -> PreTrainedModel:
    dtype = getattr(torch, load.dtype)
    if load.model in SHAPES:
        return random_model(SHAPES[load.model](load.layers), ranks, world, dtype)
    model = load_tensor_parallel(load.model, dtype=dtype, device=world.device, ranks=ranks)
    fuse(model, world.device.type == "cuda")
    return model


def _rows(
    model: PreTrainedModel | None, load: Workload, ranks: TensorGroup, batch: int, team: World
) -> list[dict[str, Any]]:
    """The results of all variants under one degree and batch. ``model`` is None if it does not fit."""
    # Nothing can be dropped on one rank, so Desync has no row there.
    names = [name for name in load.wirings if ranks.degree > 1 or name not in DESYNC]
    times: dict[Variant, Times | None] = {
        Variant(name, Way(kind)): None for name in names for kind in load.reduce if load.times(name, kind)
    }
    if model is not None:
        on_gpu = model.device.type == "cuda"
        times |= turns(
            model,
            ranks,
            team,
            list(times),
            {name: wiring_for(name, model.config, ranks.degree) for name in names},
            load.prompts(batch, model.config.get_text_config().vocab_size),
            load.new,
            rounds=load.rounds,
            graphs=load.graphs and on_gpu,
        )
    rows = [row(load, ranks.degree, batch, key.wiring, key.way.reduce, found) for key, found in times.items()]
    for own in rows:
        compare(own, rows)
    return rows
