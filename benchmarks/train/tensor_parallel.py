"""Time tensor-parallel distillation steps: overlapped sums, blocking sums of the same code, and no sums at all.

    torchrun --nproc-per-node 2 -m benchmarks.train.tensor_parallel [--shape llama3-8b] [--layers 12]
        [--wirings standard ladder farskip] [--ways blocking own-weights overlapped by-host bound] [--tp 2] [--seq 4096]
        [--micro-batch 2] [--accumulation 1] [--rounds 3] [--steps 3] [--set KEY=VALUE ...] [--out FILE]

A step is that of ``fcsd distill`` with a teacher in memory: the teacher's forward pass, the student's passes, the loss,
ZeRO and AdamW. Student and teacher have random weights and are sharded alike; the teacher keeps the standard wiring.
All variants run in turns on the same models. ``own-weights`` hides the sum of an input's gradient under the weight
gradients of the same products, as Megatron-LM does, and blocks in the forward pass. ``by-host`` is overlapped, and its
sums go through memory of the host (``blocking-by-host`` waits for each). First the overlapped passes of each wiring,
and those by the host between two ranks, are compared with the blocking ones: the loss and the gradient of every weight
must have the same bits, or the program ends with exit code 1. The bound sends nothing and gives wrong results; its time
is what no overlap can beat. ``NCCL_P2P_DISABLE=1`` in the environment lets NCCL send through host memory, as on
machines whose GPUs have no NVLink. Over gloo the times say nothing.
"""

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.out_file import out_file
from benchmarks.train.random_run import random_corpus, random_recipe
from benchmarks.turns import peak_gib, ratio, reset_peak
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.bench.runner import say, table, together, write
from fcsd.bench.shapes import SHAPES
from fcsd.config import Recipe
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.experts import expert_parallel
from fcsd.distill.optim import update
from fcsd.distill.step.engine import build_training, import_deepspeed
from fcsd.distill.step.one_step import train_step
from fcsd.distill.student import DTYPES, check
from fcsd.distill.teacher.targets import LiveTeacher, pack_attention
from fcsd.distill.train_engine import Teams, teams_of
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world, leave
from fcsd.models.build import register, unwired
from fcsd.models.wiring_block import DESYNC, READS, Wiring
from fcsd.parallel import process_settings
from fcsd.parallel.tensor.layer import wire_training
from fcsd.parallel.tensor.shard import prepare
from fcsd.parallel.tensor.sums import Mode


class Way(NamedTuple):
    """How sums travel in a variant; see ``wire_training``."""

    mode: Mode
    backend: str = "nccl"


WAYS = {
    "blocking": Way("off"),
    "own-weights": Way("own-weights"),
    "overlapped": Way("on"),
    "blocking-by-host": Way("off", "host"),
    "by-host": Way("on", "host"),
    "bound": Way("off", "none"),
}
DEFAULT_WAYS = ["blocking", "own-weights", "overlapped", "bound"]


@dataclass(frozen=True)
class Models:
    """The models of the benchmark, and the ranks that shard them."""

    student: PreTrainedModel
    teacher: PreTrainedModel
    teams: Teams
    wirings: dict[str, Wiring]

    def choose(self, variant: str) -> None:
        """Wires both models for a variant."""
        wiring, way = variant.split(", ")
        assert self.teams.ranks is not None
        wire_training(self.student, self.wirings[wiring], self.teams.ranks, *WAYS[way])
        wire_training(self.teacher, unwired(), self.teams.ranks, *WAYS[way])


def draw(recipe: Recipe, config: Any, wirings: list[str], world: World) -> Models:
    """Random models, of which this rank has its part."""
    teams = teams_of(recipe, world)
    assert teams.ranks is not None, "the degree is above 1"
    options: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "seed": recipe.seed}
    student, teacher = (expert_parallel.randomise(config, 1, ranks=teams.ranks, **options) for _ in range(2))
    every = tuple(range(config.num_hidden_layers))
    named = {
        name: Wiring(name, () if name == "standard" else every, tp_degree=teams.ranks.degree if name in DESYNC else 1)
        for name in wirings
    }
    models = Models(student, teacher.requires_grad_(False), teams, named)
    pack_attention(teacher, recipe)
    for model in (student, teacher):
        expert_parallel.wire_sharded(model, 1, recipe.parallel, ranks=teams.ranks)
    return models


def gradients(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The loss of a batch ``[batch, seq]``, and the gradient of every weight."""
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def same_bits(models: Models, wiring: str, ids: Tensor, ways: list[str]) -> bool | None:
    """Whether passes by these ways give all ranks the loss and the gradients of blocking ones.

    Returns: None if blocking passes do not give their own bits again, so that their kernels or collectives cannot tell.
    """

    def passes(way: str) -> list[Tensor]:
        models.choose(f"{wiring}, {way}")
        return gradients(models.student, ids)

    def differ(one: list[Tensor], other: list[Tensor]) -> bool:
        found = torch.tensor(int(not all(map(torch.equal, one, other))), device=ids.device)
        dist.all_reduce(found)
        return bool(found.item())

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(action="ignore"):  # kernels without a deterministic form say so
            blocking = passes("blocking")
            if differ(blocking, passes("blocking")):
                return None
            return not any([differ(blocking, passes(way)) for way in ways])
    finally:
        torch.use_deterministic_algorithms(False)


def bench(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Check and time all variants. All ranks call this.

    Returns: ``equal`` by wiring, see ``same_bits``, and ``variants``: by name the ``ms`` of each step on the slowest
        rank, the last ``loss``, and ``peak_gib`` on GPUs.
    """
    import_deepspeed()
    register()
    degree = arguments.tp or world.size
    if degree == 1 or world.size % degree:
        raise ConfigError(f"a degree of {degree} does not divide the {world.size} processes, or shards nothing")
    sets = ["parallel.ep_size=1", f"parallel.tp_size={degree}", *arguments.set]
    config = SHAPES[arguments.shape](arguments.layers)
    tokens = world.size // degree * arguments.micro_batch * arguments.accumulation * arguments.seq
    variants = [f"{wiring}, {way}" for wiring in arguments.wirings for way in arguments.ways]
    most = len(variants) * arguments.rounds * (arguments.steps + 1)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(f"{folder}/student")
        config.save_pretrained(f"{folder}/teacher")
        size = (arguments.seq, arguments.micro_batch, tokens, most, world)
        recipe = random_recipe(Path(folder), "tensor-parallel", *size, sets)
        check(recipe, world.size)
    models = draw(recipe, config, arguments.wirings, world)
    ranks = models.teams.ranks
    assert ranks is not None
    prepare(models.student.train(), ranks, models.teams.small)
    torch.manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, arguments.seq), device=world.device)
    compared = ["overlapped", *(way for way in arguments.ways if way == "by-host" and degree == 2)]
    result: dict[str, Any] = {"equal": {name: same_bits(models, name, ids, compared) for name in arguments.wirings}}
    source = LiveTeacher(models.teacher, recipe.objective)
    training = build_training(models.student, source, recipe, world, teams=models.teams)
    update.install(training.engine, recipe)
    rows = training_rows(recipe, [random_corpus(config.vocab_size, recipe.data.seq_len)])
    measured: dict[str, dict[str, Any]] = {name: {"ms": []} for name in variants}
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        found.update(train_step(training, rows, recipe, models.teams.data, taken))

    for _ in range(arguments.rounds):
        for name, figures in measured.items():
            found: dict[str, float] = {}
            models.choose(name)
            reset_peak(world.device)
            step()  # is not timed
            times = torch.tensor([together(step, world.device) for _ in range(arguments.steps)], device=world.device)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            figures["ms"] += times.tolist()
            figures |= {"loss": found["loss"], "peak_gib": peak_gib(world.device)}
    return {**result, "tokens": tokens, "variants": measured}


def to_text(found: dict[str, Any]) -> str:
    """A line for each variant: its median step, its ratios to baselines, and its share of the wiring's bound."""
    medians = {name: statistics.median(one["ms"]) for name, one in found["variants"].items()}
    rows = {}
    for name, median in medians.items():
        wiring, way = name.split(", ")
        bound, peak = medians.get(f"{wiring}, bound"), found["variants"][name]["peak_gib"]
        rows[f"{name} (wrong results)" if way == "bound" else name] = {
            "step ms": f"{median:.1f}",
            "x blocking": ratio(medians.get(f"{wiring}, blocking"), median, ".3f"),
            "x standard own-weights": ratio(medians.get("standard, own-weights"), median, ".3f"),
            "of bound": None if way == "bound" else ratio(bound, median),
            "tokens/s": f"{found['tokens'] / median * 1e3:,.0f}",
            "peak GiB": None if peak is None else f"{peak:.2f}",
        }
    return table(rows, "wiring, sums")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b", help="a dense one")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--wirings", nargs="+", choices=[*READS, "desync-2x", "desync-4x"], default=["standard", "ladder", "farskip"]
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=DEFAULT_WAYS)
    parser.add_argument("--tp", type=int, help="ranks that shard the models; default: all")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of a forward pass")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant has its turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes the recipe")
    parser.add_argument("--out", type=out_file, help="JSON file")
    arguments = parser.parse_args(words)
    process_settings.set_defaults(os.environ)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may differ from itself
    world = join_world()
    found = bench(arguments, world)
    given = {name: value for name, value in vars(arguments).items() if name != "out"}
    write({"environment": snapshot(), "world": world.size, **given, **found}, arguments.out, world.rank)
    say(world, to_text(found))
    unknown = [name for name, equal in found["equal"].items() if equal is None]
    if unknown:
        say(world, f"{', '.join(unknown)}: blocking passes differ from one another, so no bits were compared")
    wrong = [name for name, equal in found["equal"].items() if equal is False]
    if wrong and world.rank == 0:
        print(f"{', '.join(wrong)}: overlapped sums compute something else than blocking ones", file=sys.stderr)
    leave(SystemExit(int(bool(wrong))))


if __name__ == "__main__":
    main()
