"""Times distillation steps in which converted layers alone train, sharded by tensor parallelism, beside the plan.

    torchrun --nproc-per-node 4 -m benchmarks.train.converted_layers OUT.json [--shape llama3-70b] [--layers 16]
        [--ways WIRING,OVERLAP,ALL_REDUCE ...] [--seq 4096] [--rows 4] [--rounds 2] [--steps 3] [--set KEY=VALUE ...]

The last half of the layers is ``ladder`` and trains. The teacher is the same weights under the standard wiring, and the
first half is computed once for both. A way is a wiring, ``parallel.overlap`` and ``parallel.all_reduce``; one whose
all-reduce is ``none`` sends nothing and is the bound. Weights are random. The vocabulary is cut in proportion to the
layers, so that embeddings, head and loss have the share of a step that they have in the whole model. OUT.json is
written after every way. ``NCCL_P2P_DISABLE=1`` lets NCCL send through memory of the host.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.out_file import out_file
from benchmarks.train.random_run import random_corpus, random_recipe
from benchmarks.turns import peak_gib, reset_peak

from fcsd.bench.runner import say, together, write
from fcsd.bench.shapes import SHAPES
from fcsd.checkpoint import open_checkpoint
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.experts.expert_parallel import randomise, wire_sharded
from fcsd.distill.metrics import full_speed_of
from fcsd.distill.optim import update
from fcsd.distill.step.engine import build_training, import_deepspeed
from fcsd.distill.step.one_step import train_step
from fcsd.distill.student import DTYPES, check, chosen_parts, train_parts
from fcsd.distill.teacher.shared import SharedTeacher
from fcsd.distill.teacher.targets import TeacherSource
from fcsd.distill.train_engine import make_trainable, teams_of
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world, leave
from fcsd.models.build import converted_config, register, unwired, wiring_of
from fcsd.models.wiring import Wiring
from fcsd.parallel import process_settings
from fcsd.plan import Hardware, plan_run
from fcsd.plan.setup import GIB

WAYS = ["ladder,on,nccl", "standard,own-weights,nccl", "ladder,off,none"]


def bench(options: argparse.Namespace, world: World) -> None:
    """Times all ways. All ranks call this, and the first one writes."""
    import_deepspeed()
    register()
    shape = SHAPES[options.shape]
    original = shape(options.layers)
    original.vocab_size = max(256, original.vocab_size * options.layers // shape.depth // 128 * 128)
    ladder = Wiring("ladder", tuple(range(options.layers // 2, options.layers)))
    rewired = converted_config(original, ladder.to_block(base_model="random", base_revision=None, base_sha256=None))
    sets = ["parallel.ep_size=1", f"parallel.tp_size={world.size}", "optim.train=[converted]"]
    sets += ["train.activation_checkpointing=true", *options.set]
    with tempfile.TemporaryDirectory() as folder:
        rewired.save_pretrained(f"{folder}/student")
        original.save_pretrained(f"{folder}/teacher")
        size = (options.seq, options.rows, options.rows * options.seq, 1000, world)
        recipe = random_recipe(Path(folder), options.shape, *size, sets)
        check(recipe, world.size)
        chosen = chosen_parts(recipe, open_checkpoint(recipe.model, weights=False))
        planned, full = plan_run(recipe, Hardware(world.size)), full_speed_of(recipe, world)
    assert chosen is not None
    teams = teams_of(recipe, world)
    student = randomise(
        rewired, 1, dtype=DTYPES[recipe.train.dtype], device=world.device, seed=recipe.seed, ranks=teams.ranks
    )
    make_trainable(student, teams)
    parts = train_parts(student, recipe, chosen)
    training = build_training(student, TeacherSource(), recipe, world, teams=teams, parts=parts)
    update.install(training.engine, recipe)
    rows = training_rows(recipe, [random_corpus(original.vocab_size, options.seq)])
    say(world, f"built; the plan has {planned.memory.peak.total / GIB:.2f} GiB")

    found: dict[str, Any] = {"environment": snapshot(), "world": world.size}
    found |= {name: value for name, value in vars(options).items() if name != "out"}
    found |= {"plan_gib": planned.memory.peak.total / GIB, "planned_tokens": planned.speed.tokens_per_second}
    found |= {"full_speed": full, "tokens": recipe.train.batch_tokens, "vocabulary": original.vocab_size, "ways": {}}
    taken = 0
    for number in range(options.rounds):
        for way in options.ways:
            wiring, overlap, all_reduce = way.split(",")
            parallel = recipe.parallel.model_copy(update={"overlap": overlap, "all_reduce": all_reduce})
            own = unwired() if wiring == "standard" else wiring_of(training.model.config)

            def rewire(as_: Any, parallel: Any = parallel) -> None:
                wire_sharded(training.model, 1, parallel, ranks=teams.ranks, wiring=as_)

            rewire(own)
            source = SharedTeacher(parts, recipe.objective, lambda: rewire(unwired()))
            rewire(own)
            of_way, last = replace(training, source=source), {}

            def step() -> None:
                nonlocal taken
                taken += 1
                last.update(train_step(of_way, rows, recipe, teams.data, taken))  # noqa: B023

            for _ in range(1 if number else 2):
                step()
            reset_peak(world.device)
            times = torch.tensor([together(step, world.device) for _ in range(options.steps)], device=world.device)
            peak = torch.tensor(peak_gib(world.device) or 0.0, device=world.device)
            for value in (times, peak):
                dist.all_reduce(value, dist.ReduceOp.MAX)
            figures = found["ways"].setdefault(way, {"ms": []})
            figures["ms"] += times.tolist()
            figures |= {"loss": last["loss"], "peak_gib": peak.item()}
            write(found, options.out, world.rank)
            median = statistics.median(figures["ms"])
            rate = 1e3 * found["tokens"] / median
            mfu = "" if full is None else f", MFU {rate / full:.1%}"
            peak_text = f", peak {peak.item():.2f} of planned {found['plan_gib']:.2f} GiB"
            say(world, f"{way:<28} {median:8.1f} ms, {rate:9,.0f} tokens/s{mfu}{peak_text}")


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=out_file)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-70b", help="a dense one")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WIRING,OVERLAP,ALL_REDUCE")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step, in one forward pass")
    parser.add_argument("--rounds", type=int, default=2, help="how often each way has its turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes the recipe")
    options = parser.parse_args()
    process_settings.set_defaults(os.environ)
    world = join_world()
    bench(options, world)
    leave(SystemExit(0))


if __name__ == "__main__":
    main()
