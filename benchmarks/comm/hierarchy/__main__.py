"""Time dispatch and combine over nodes that are imitated on one host (HierMoE).

    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 4 -m benchmarks.comm.hierarchy --node-size 2 --out hierarchy.json

Rows travel by copies inside of a node and by NCCL between nodes; ``NCCL_P2P_DISABLE=1`` makes NCCL slow. Every way is
compared with a computation without any exchange, bit for bit, before it is timed. The parts are

    table       each way for 6, 8 and 10 experts per token, with the wire alone
    sweep       32 points: predicted and measured times, and whether the model chose the best way
    near-sweep  the same over NVLink only, where all ranks are one node for the transport
    moves       how long moves of experts take
    placement   what swaps of experts change: their period, the objective of the search

The file is written after each part. Without GPUs everything runs over gloo, where the times say nothing about GPUs.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.comm.hierarchy import measure, placements, tables
from benchmarks.comm.hierarchy.model import Model, machine_of
from benchmarks.comm.hierarchy.routing import Routing
from benchmarks.out_file import out_file

from fcsd.disk import write_text
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world, leave
from fcsd.parallel import process_settings
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.symmetric_memory import open_buffers
from fcsd.parallel.transports.transport import Transport, all_to_all

PARTS = ("table", "sweep", "near-sweep", "moves", "placement")
EXPERT = {"experts": 64, "size": 3 * 2048 * 1408}  # DeepSeek-V2-Lite
SMALL = measure.Sizes(
    width=64,
    tokens=64,
    sweep_tokens=(16, 64),
    few=4,
    lines=(8, 32, 128),
    repeats=2,
    placed=(Routing(16, 3, True), Routing(16, 4, True)),
    steps=2,
)  # of a machine without GPUs


def benches(world: World, node_size: int, sizes: measure.Sizes) -> dict[str, measure.Bench]:
    """``slow`` sends rows between nodes by NCCL, ``near`` copies all rows. Without GPUs both use gloo."""
    side = torch.cuda.Stream() if world.device.type == "cuda" else None
    transports: dict[str, Transport] = {"slow": all_to_all, "near": all_to_all}
    if world.device.type == "cuda":
        opened = partial(open_buffers, beside_slow_nccl=True)
        transports = {"slow": CopiesTransport(opened, node_size=node_size), "near": CopiesTransport(opened)}
    return {name: measure.Bench(world, node_size, one, name == "near", side, sizes) for name, one in transports.items()}


def model_to_json(model: Model) -> dict[str, Any]:
    """The parameters of a model, with the points of its lines."""
    links = model.links
    lines = {"near": links.near, "far": links.far, "direct": links.direct}
    return {
        "lines": {name: {"alpha": one.alpha, "beta": one.beta} for name, one in lines.items() if one is not None},
        "copy": links.copy,
        "fixed": model.fixed,
        "one_link": model.one_link,
        "points": {name: {"measured": of, "worst_error": error} for name, (of, error) in model.points.items()},
    }


def run(
    world: World,
    node_size: int,
    sizes: measure.Sizes,
    parts: list[str],
    write: Callable[[Any], None],
    machine: Path | None = None,
) -> Any:
    """Measures ``parts``, and calls ``write`` with all results so far after each of them. Every rank calls this.

    Args:
        machine: the file to which rank 0 writes the links and the fixed times of the slow transport, if they are
            measured.

    Raises:
        ConfigError: the ranks are not two or more nodes of this size.
    """
    if node_size < 1 or world.size % node_size or world.size == node_size:
        raise ConfigError(
            f"{world.size} ranks are not two or more nodes of {node_size}",
            hint=f"start torchrun with --nproc-per-node {2 * max(1, node_size)} --node-size {max(1, node_size)}",
        )
    group: Any = dist.new_group(backend="gloo")
    hosts = World(world.rank, world.size, torch.device("cpu"), group)
    made = benches(world, node_size, sizes)
    found: dict[str, Any] = {"environment": snapshot(), "ranks": world.size, "node_size": node_size, "models": {}}
    models: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in models:
            models[name] = measure.model_of(made[name])
            found["models"][name] = model_to_json(models[name])
            write(found)
            if name == "slow" and machine is not None and world.rank == 0:
                gpu = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
                described = machine_of(models[name], gpu, {"ranks": world.size, "environment": found["environment"]})
                machine.write_text(described.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")
        return models[name]

    for part in parts:
        if part == "table":
            points = [
                measure.one_point(made["slow"], model("slow"), routing, sizes.tokens, wire_alone=True)
                for routing in sizes.table
            ]
            found[part], text = points, tables.of_table(points)
        elif part in ("sweep", "near-sweep"):
            name = "slow" if part == "sweep" else "near"
            found[part] = points = measure.swept(made[name], model(name))
            text = tables.of_sweep(points)
        elif part == "placement":
            bench, found[part] = made["slow"], {}
            placements.study(bench, model("slow"), hosts, found[part], lambda: write(found))
            text = tables.of_study(found[part])
        else:
            numbers = EXPERT if world.device.type == "cuda" else {"experts": 8, "size": 64}
            found[part] = placements.moves(made["slow"], numbers)
            text = f"seconds of moves: {found[part]['seconds']}"
        if world.rank == 0:
            print(f"{part}\n{text}\n", file=sys.stderr, flush=True)
        write(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--node-size", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=out_file)
    parser.add_argument("--machine", type=out_file, help="write a machine file, for parallel.machine and fcsd plan")
    arguments = parser.parse_args()
    process_settings.set_defaults(os.environ)
    world = join_world()
    sizes = measure.Sizes() if world.device.type == "cuda" else SMALL

    def write(found: Any) -> None:
        if world.rank == 0 and arguments.out is not None:
            write_text(arguments.out, json.dumps(found, indent=1))  # a run that is cut off leaves a whole file

    try:
        run(world, arguments.node_size, sizes, arguments.parts, write, arguments.machine)
    except ConfigError as error:
        if world.rank == 0:
            print(f"error: {error}; {error.hint}", file=sys.stderr)
        leave(SystemExit(error.exit_code))
    except Exception:
        traceback.print_exc()
        leave(SystemExit(1))
    leave(SystemExit(0))


if __name__ == "__main__":
    main()
