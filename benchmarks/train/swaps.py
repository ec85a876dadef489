"""Training steps before and after experts have changed places, under the routing of a trained model.

    benchmarks/as_nodes.sh 2 2 benchmarks.train.swaps --node-size 2 --set parallel.transport=nccl --out FILE

The step is that of ``fcsd distill`` without a teacher, and its experts move as those of a run do (``ExpertSwaps``). The
weights are random, so the routers replay recorded choices instead of making their own: those of a model that was
trained here with as many experts as DeepSeek-V2-Lite (``studies/placement/study.py`` counts them). Searches see the
first half of the recorded tokens, and the timed steps take the other half. Each rank draws its tokens at random from a
half.

For each of ``--ways``, a value of ``parallel.dedup`` and perhaps a format of the rows, the program searches twice and
moves the experts. The second search says what later ones cost, after the first has found the places. Then steps with
both placements take turns. The loss of a step before and after the moves is compared, beside that of the same step
taken twice; the learning rate is too small to change a weight.

The rule, decided before any step was timed: swaps keep their place in fcsd if over a slow network the fastest step with
swaps is at least 2 % (``KEEP``) shorter than the fastest step without them, rows in bf16, with the later searches
counted in.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from benchmarks.out_file import out_file
from torch import Tensor

from fcsd.bench.random_run import draw_models, random_corpus, random_run
from fcsd.bench.runner import finished, peak_gib, say, spread, table, write
from fcsd.bench.shapes import SHAPES
from fcsd.config import Recipe
from fcsd.config.parallel import Quantised
from fcsd.distill.experts.expert_parallel import quantiser_of, wire_sharded
from fcsd.distill.experts.swaps import ExpertSwaps
from fcsd.distill.optim import update
from fcsd.distill.prepare import hosts_of, training_rows
from fcsd.distill.step.engine import Training, build_training
from fcsd.distill.step.feed import gather_step, to_device
from fcsd.distill.step.one_step import launch_step
from fcsd.distill.teacher.targets import TeacherSource
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, barrier, join_world, leave
from fcsd.parallel.expert.block import expert_blocks
from fcsd.parallel.expert.choice import arrangements, node_size_for, rows_by_link, told
from fcsd.parallel.placement.placement import Placement

ROUTING = Path(__file__).parents[1] / "results/routing_moe_64.npz"
KEEP = 0.02  # the share of a step that swaps must save, decided before any step was timed
SEEN, HELD_OUT = 0, 1  # the halves of the recorded tokens
SETS = ("objective.kl=0", "objective.sft=1", "optim.lr=1e-30", "optim.weight_decay=0")


class Replay:
    """The recorded choices of every layer, and which of them the routers make now.

    Args:
        file: ``chosen`` ``[layers, tokens, top_k]`` and ``experts``, as the study writes them.
        micro: the tokens of a forward pass of a rank.
    """

    def __init__(self, file: Path, training: Training, world: World, micro: int) -> None:
        with numpy.load(file) as stored:
            self._chosen, experts = torch.from_numpy(stored["chosen"].astype(numpy.int64)), int(stored["experts"])
        self._world, self._micro, self.half, self.draw = world, micro, HELD_OUT, 0
        self._blocks = expert_blocks(training.model)
        for layer, (path, block) in enumerate(self._blocks.items()):
            here, there = (block.placement.experts, block.top_k), (experts, self._chosen.shape[2])
            if here != there or layer >= len(self._chosen):
                raise ConfigError(
                    f"{path} chooses {here[1]} of {here[0]} experts, and layer {layer} of {file} is not like that",
                    hint="choose another --routing, or fewer --layers",
                )
            block.router.register_forward_hook(self._hook(layer, experts))

    def choices(self, rank: int, layer: int) -> Tensor:
        """What the tokens of a rank choose in a layer, ``[micro, top_k]``."""
        generator = torch.Generator().manual_seed(1000 * self.draw + rank)
        half = self._chosen[layer].chunk(2)[self.half]
        return half[torch.randint(len(half), (self._micro,), generator=generator)]

    def _hook(self, layer: int, experts: int) -> Callable[..., Any]:
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

        def replay(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            scores, chosen, counts = output
            if (self.half, self.draw) not in kept:  # a copy to the device in each pass would make the host wait
                own = self.choices(self._world.rank, layer)
                kept[self.half, self.draw] = own.to(chosen), own.flatten().bincount(minlength=experts).to(counts)
            return scores, *kept[self.half, self.draw]

        return replay

    def rows(self, placements: Sequence[Placement], dedup: Any, node_size: int) -> dict[str, float]:
        """The rows of the busiest rank inside of a node and between nodes for each of its tokens, mean of layers."""
        found = []
        for layer, placed in enumerate(placements):
            offered = arrangements(placed.ranks, node_size_for(placed.ranks, node_size))
            levels: Any = {dedup: offered[dedup]}
            everyone = [placed.positions(self.choices(rank, layer)) for rank in range(placed.ranks)]
            counts = torch.stack([told(one, placed.experts, levels) for one in everyone])
            found.append(rows_by_link(counts, levels, node_size)[dedup])
        near, far = (statistics.mean(column) / self._micro for column in zip(*found, strict=True))
        return {"inside": near, "between": far}


class Steps:
    """The student in training, one batch of it, and its steps."""

    def __init__(self, arguments: argparse.Namespace, world: World) -> None:
        original = SHAPES[arguments.shape](arguments.layers)
        size: Any = {"seq": arguments.seq, "micro_batch": arguments.micro_batch, "accumulation": 1, "world": world}
        sets = [*SETS, f"parallel.placement.every={arguments.every}", *arguments.sets]
        with random_run(original, "swaps", **size, steps=10**6, sets=sets) as (recipe, rewired):
            student, _ = draw_models(recipe, rewired, original, world)
        self.recipe, self.world = recipe, world
        self.training = build_training(student, TeacherSource(), recipe, world)
        update.install(self.training.engine, recipe)
        rows = training_rows(recipe, [random_corpus(student.config.vocab_size, recipe.data.seq_len)])
        micros = gather_step(rows, recipe, world, 1, self.training.source)
        self._micros = [to_device(micro, world.device) for micro in micros]

    def wire(self, dedup: str, format: str, node_size: int) -> Recipe:
        """Wires the model for a value of ``parallel.dedup`` and a format of all rows; returns the recipe with both."""
        changes: dict[str, Any] = {"dedup": dedup, "node_size": node_size if dedup == "node" else None}
        if format:
            directions = ("dispatch", "combine", "dispatch_grad", "combine_grad")
            changes["quantised"] = Quantised(**dict.fromkeys(directions, format))
        recipe = self.recipe.model_copy(update={"parallel": self.recipe.parallel.model_copy(update=changes)})
        quantiser = quantiser_of(recipe)
        wire_sharded(self.training.model, recipe.parallel.ep_size, recipe.parallel, quantiser)
        self.training = replace(self.training, quantiser=quantiser)
        return recipe

    def one(self) -> float:
        """Takes a step, and returns its loss."""
        return launch_step(self.training, self._micros, self.recipe, self.world, 1).metrics()["loss"]

    def timed(self, count: int) -> list[float]:
        """The milliseconds of ``count`` steps, after one that does not count."""
        self.one()
        found = []
        for _ in range(count):
            barrier()
            start = finished(self.world.device)
            self.one()
            found.append(1e3 * (finished(self.world.device) - start))
        return found

    def place(self, placements: Sequence[Placement]) -> None:
        """Sends rows by these placements. No weight moves, which changes what is computed and not how long it takes."""
        for block, placed in zip(expert_blocks(self.training.model).values(), placements, strict=True):
            block.place(placed)


def measure(steps: Steps, replay: Replay, way: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Searches and moves in one of ``--ways``, and times steps before and after it."""
    dedup, _, format = way.partition("+")
    blocks = expert_blocks(steps.training.model)
    before = [Placement(block.placement.experts, block.placement.ranks) for block in blocks.values()]
    steps.place(before)
    recipe = steps.wire(dedup, format, arguments.node_size)
    swaps = ExpertSwaps(folder, recipe, steps.world, hosts_of(steps.world), steps.training, {})
    replay.half, replay.draw = HELD_OUT, 0
    losses, searches = {"before": steps.one(), "before, again": steps.one()}, []
    for draw in (1, 2):
        replay.half, replay.draw = SEEN, draw
        known = swaps.metrics()
        with swaps.step(arguments.every):
            steps.one()
        searches.append({name: value - known[name] for name, value in swaps.metrics().items()})
    replay.half, replay.draw = HELD_OUT, 0
    losses["after"] = steps.one()
    placed = {"before": before, "after": [block.placement for block in blocks.values()]}
    found: dict[str, Any] = {"losses": losses, "searches": searches, "step": {name: [] for name in placed}}
    found["rows"] = {name: replay.rows(one, dedup, arguments.node_size) for name, one in placed.items()}
    for _ in range(arguments.rounds):
        for name, one in placed.items():
            steps.place(one)
            found["step"][name] += steps.timed(arguments.steps)
    found["ms"] = {name: statistics.median(of) for name, of in found["step"].items()}
    # What a later search and its moves add to each of the steps until the next one.
    found["ms"]["later search"] = 1e3 * searches[1]["swap_seconds"] / arguments.every
    found["peak_gib"] = peak_gib(steps.world.device)
    return found


def judged(ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The share of the fastest step in bf16 that swaps save, and whether it is enough by the rule above."""
    plain = [one["ms"] for way, one in ways.items() if "+" not in way]
    before, after = (min(ms["before"] for ms in plain), min(ms["after"] + ms["later search"] for ms in plain))
    return {"saved": 1 - after / before, "kept": 1 - after / before >= KEEP}


def to_text(way: str, found: dict[str, Any]) -> str:
    """A line before the swaps, one after them, and the losses."""
    lines: dict[str, dict[str, str | None]] = {}
    for name, times in found["step"].items():
        lines[name] = {"step ms": f"{statistics.median(times):.1f} ± {spread(times):.1f}"}
        lines[name] |= {f"rows {where}": f"{rows:.3f}" for where, rows in found["rows"][name].items()}
    ms, searches = found["ms"], found["searches"]
    lines["after"] |= {"saved": f"{1 - ms['after'] / ms['before']:.1%}"}
    lines["after"] |= {"later searches": f"{ms['later search'] / ms['after']:.2%}"}
    lines["after"] |= {"swaps, s": ", then ".join(f"{one['swaps']} {one['swap_seconds']:.2f}" for one in searches)}
    losses = ", ".join(f"{name} {loss!r}" for name, loss in found["losses"].items())
    return f"{table(lines, way)}\nlosses: {losses}"


def main() -> None:
    """Prints what was found, and writes it to ``--out``, after each of the ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="deepseek-v2-lite", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of a GPU")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--ways", nargs="+", default=["rank", "node"], help="off, rank, node, rank+int8, ...")
    parser.add_argument("--node-size", type=int, required=True, help="GPUs of a node")
    parser.add_argument("--every", type=int, default=100, help="steps between two searches, by which a swap has to pay")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two placements take turns")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each in a round")
    parser.add_argument("--routing", type=Path, default=ROUTING, help="file of recorded choices")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="recipe values")
    parser.add_argument("--out", type=out_file)
    arguments = parser.parse_args()
    world = join_world()
    steps = Steps(arguments, world)
    replay = Replay(arguments.routing, steps.training, world, arguments.micro_batch * arguments.seq)
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    found: dict[str, Any] = {"environment": snapshot(), "world": world.size, "workload": given, "ways": {}}
    with tempfile.TemporaryDirectory() as folder:
        for way in arguments.ways:
            found["ways"][way] = measure(steps, replay, way, arguments, Path(folder))
            say(world, to_text(way, found["ways"][way]))
            write(found, arguments.out, world.rank)
    found["rule"] = judged(found["ways"])
    say(world, f"swaps save {found['rule']['saved']:.1%} of the fastest step, and {KEEP:.0%} were asked for")
    write(found, arguments.out, world.rank)
    leave(SystemExit(0))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
