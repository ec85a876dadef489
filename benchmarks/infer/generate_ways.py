"""Times the ways to write text with a model in memory, as ``fcsd write`` does: fcsd's engine beside transformers' own.

    python -m benchmarks.infer.generate_ways [SHAPE ...] [--limit SECONDS] [--out FILE]

The sides take turns on two copies of one random model, of which one has the engine's fused parts:

- ``engine``: fcsd's slots and CUDA graphs;
- ``engine, batches``: the same, batch after batch, without a second answer in a slot;
- ``engine, eager batches``: transformers' ordinary cache, without graphs;
- ``transformers``: ``model.generate_batch``, continuous batching with a paged cache.

``transformers, fused`` is the latter with the engine's fused parts. ``engine`` and ``transformers`` are also timed with
every layer rewired to ladder.

Prompts are as long as the user's turns of ``fcsd write``, in random tokens. Tokens are drawn at temperature 1, and an
answer ends with one of so many tokens that a model without knowledge writes half of the longest answer on average. A
turn is a whole call, with its captures, as each shard of text pays for it; tokens per second count new tokens alone.
"""

import argparse
import gc
import logging
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.out_file import out_file
from benchmarks.turns import reset_peak
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from fcsd.bench.runner import finished, table, write
from fcsd.bench.shapes import SHAPES
from fcsd.engine.decode import GRAIN, generate_in_slots, plan_slots
from fcsd.engine.fused import fuse
from fcsd.engine.generate import BATCHES, generate
from fcsd.launch.environment import snapshot
from fcsd.models.build import arch_of, wire
from fcsd.models.fused import fuse_parts
from fcsd.models.wiring_block import Wiring

log = logging.getLogger(__name__)

# The dimensions of SmolLM2-135M, with an output head of its own: a tied one makes a random model repeat its last token.
_SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "tie_word_embeddings": False,
}
_CHOICES = ("smollm2-135m", *SHAPES)


class Load(NamedTuple):
    """What is written.

    Attributes:
        prompts: how many prompts are continued.
        longest: tokens of the longest prompt; the shortest has an eighth.
        new: the most new tokens of an answer.
        batch: how many answers are written at a time.
        keep: whether transformers keeps the memory and the graphs of its first call, which is not timed.
    """

    prompts: int
    longest: int
    new: int
    batch: int
    keep: bool


class Models(NamedTuple):
    """One random model twice: as transformers made it, and with the engine's fused parts."""

    plain: PreTrainedModel
    fused: PreTrainedModel


class Side(NamedTuple):
    """One way to write: the model it takes, whether it is rewired, and what continues all prompts with it."""

    fused: bool
    rewired: bool
    run: Callable[..., list[list[int]]]


def config_of(shape: str, layers: int | None) -> PretrainedConfig:
    """The config of a shape, with its own depth or another one."""
    if shape == "smollm2-135m":
        return LlamaConfig(num_hidden_layers=layers or 30, **_SMOLLM2)
    return SHAPES[shape](layers or SHAPES[shape].depth)


def models_of(config: PretrainedConfig, device: torch.device) -> Models:
    """The two copies, in bf16 on a GPU and in fp32 on a CPU."""
    on_gpu = device.type == "cuda"
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16 if on_gpu else torch.float32, attn_implementation="sdpa"
            )
        made.append(model.eval().requires_grad_(False))
    fuse(made[1], on_gpu)
    return Models(*made)


def prompts_of(load: Load, vocabulary: int, ends: int) -> list[list[int]]:
    """Prompts of random token ids, none of which ends an answer; the ids below ``ends`` do."""
    draws = random.Random(0)
    sizes = [draws.randint(max(1, load.longest // 8), load.longest) for _ in range(load.prompts)]
    return [[draws.randrange(ends, vocabulary) for _ in range(size)] for size in sizes]


def in_slots(model: PreTrainedModel, prompts: Sequence[Sequence[int]], load: Load, ends: int) -> list[list[int]]:
    """The new tokens of each prompt, by the engine's slots."""
    sizes = [len(prompt) + load.new for prompt in prompts]
    count, length, groups = plan_slots(
        sizes, [*map(len, prompts)], load.batch, load.batch * (load.longest + load.new + GRAIN)
    )
    found = generate_in_slots(
        model,
        prompts,
        groups,
        count=count,
        length=length,
        max_new_tokens=load.new,
        ended=partial(_ended, ends),
        graphs=model.device.type == "cuda",
        temperatures=[1.0] * len(prompts),
    )
    return [answer for _, answer in sorted(found)]


def batch_after_batch(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], load: Load, ends: int
) -> list[list[int]]:
    """The same without a second answer in a slot: every batch runs until its last answer has ended."""
    found = []
    for first in range(0, len(prompts), load.batch):
        found += in_slots(model, prompts[first : first + load.batch], load, ends)
    return found


def in_eager_batches(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], load: Load, ends: int
) -> list[list[int]]:
    """The same by the engine's batches over transformers' ordinary cache."""
    found = generate(
        model,
        prompts,
        max_new_tokens=load.new,
        ended=partial(_ended, ends),
        way=BATCHES,
        batch_size=load.batch,
        cache_tokens=load.batch * (load.longest + load.new),
        temperatures=[1.0] * len(prompts),
    )
    return [answer for _, answer in sorted(found)]


def by_transformers(model: PreTrainedModel, prompts: Sequence[Sequence[int]], load: Load, ends: int) -> list[list[int]]:
    """The same by continuous batching. If it is kept, the next turns have its cache and its graphs."""
    settings = GenerationConfig(
        max_new_tokens=load.new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(range(ends)),
        pad_token_id=0,
    )
    options: dict[str, Any] = {"max_requests_per_batch": load.batch}
    if "auto_switch_to_flash" in {field.name for field in fields(ContinuousBatchingConfig)}:
        # Without flash-attn it asks the hub for a kernel, and machines that measure are offline.
        options["auto_switch_to_flash"] = find_spec("flash_attn") is not None
    found = model.generate_batch(  # pyright: ignore[reportCallIssue]
        inputs=[list(prompt) for prompt in prompts],
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(**options),
        persistent_manager=load.keep,
    )
    failed = [one.error for one in found.values() if one.error]
    if failed or len(found) != len(prompts):
        raise RuntimeError(f"{len(found)} of {len(prompts)} prompts were answered: {failed[:1]}")
    return [one.generated_tokens for one in found.values()]


def _ended(ends: int, answer: list[int], seen: int) -> int | None:
    return next((place + 1 for place in range(seen, len(answer)) if answer[place] < ends), None)


def sides() -> dict[str, Side]:
    """All sides by name."""
    return {
        "engine": Side(True, False, in_slots),
        "engine, batches": Side(True, False, batch_after_batch),
        "engine, eager batches": Side(True, False, in_eager_batches),
        "transformers": Side(False, False, by_transformers),
        "transformers, fused": Side(True, False, by_transformers),
        "engine, ladder": Side(True, True, in_slots),
        "transformers, ladder": Side(False, True, by_transformers),
    }


def turn(models: Models, side: Side, prompts: Sequence[Sequence[int]], load: Load, ends: int) -> dict[str, float]:
    """One turn: its seconds, new tokens, mean length of an answer, and peak memory in GiB on a GPU."""
    model = models.fused if side.fused else models.plain
    device = model.device
    layers = tuple(range(model.config.num_hidden_layers)) if side.rewired else ()
    wire(model, Wiring("ladder", layers))
    if side.fused:  # wiring restores the parts of transformers' layers
        fuse_parts(model, arch_of(model.config), device.type == "cuda")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        reset_peak(device)
    start = finished(device)
    answers = side.run(model, prompts, load, ends)
    seconds = finished(device) - start
    new = sum(map(len, answers))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"seconds": seconds, "tokens": new, "mean": new / len(answers), "peak_gib": peak}


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """A block that ends with a ``TimeoutError`` if it takes longer."""

    def late(*given: Any) -> None:
        raise TimeoutError(f"a turn took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(
    shape: str,
    load: Load,
    names: Sequence[str],
    layers: int | None,
    rounds: int,
    until: float,
    most: float,
    out: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All sides of one shape in turns, until all rounds are done or the time is up. The first turns only warm up.

    Args:
        until: on the clock ``time.monotonic``; a turn starts only if one as long as its last would end before.
        most: the seconds after which a turn is given up, and its side with it.
        out: called after each turn with what is found so far.

    Returns:
        ``load``, and by the name of a side its ``turns``, ``warm_up`` in seconds, ``tokens_per_s`` at the median, and
        ``error`` if it failed.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(shape, layers)
    models = models_of(config, device)
    ends = max(1, 2 * config.vocab_size // load.new)
    prompts = prompts_of(load, config.vocab_size, ends)
    found: dict[str, Any] = {name: {"turns": []} for name in names}
    result = {"load": load._asdict(), "layers": config.num_hidden_layers, "sides": found}
    known = sides()
    for round_ in range(-1, rounds):
        for name in names:
            side = found[name]
            spent = side["turns"][-1]["seconds"] if side["turns"] else side.get("warm_up", 0.0)
            left = until - time.monotonic()
            if "error" in side or left < max(spent, 1.0):
                continue
            try:
                # A short turn compiles kernels; graphs are captured anew in every call.
                some = prompts[: max(4, load.batch // 8)] if round_ < 0 else prompts
                with at_most(min(most, left)):
                    took = turn(models, known[name], some, load, ends)
            except Exception as error:  # one side that fails leaves the others their turns
                log.exception("%s, %s", shape, name)
                side["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                out(result)
                continue
            if round_ < 0:
                side["warm_up"] = took["seconds"]
            else:
                side["turns"].append(took)
                side["tokens_per_s"] = statistics.median(one["tokens"] / one["seconds"] for one in side["turns"])
            log.warning("%s, %s: %.1f s, %d tokens", shape, name, took["seconds"], took["tokens"])
            out(result)
    return result


def rows_of(shape: str, sides: dict[str, Any]) -> dict[str, dict[str, str | None]]:
    """The lines of the table for one shape; ``of engine`` is the speed beside today's engine with the same wiring."""
    rows: dict[str, dict[str, str | None]] = {}
    for name, side in sides.items():
        base = sides.get("engine, ladder" if "ladder" in name else "engine", {}).get("tokens_per_s")
        speed = side.get("tokens_per_s")
        cells = {"tokens/s": side.get("error", "-")}
        if speed is not None:
            peak = max(one["peak_gib"] for one in side["turns"])
            mean = statistics.mean(one["mean"] for one in side["turns"])
            cells = {"tokens/s": f"{speed:.0f}", "of engine": f"{speed / base:.2f}" if base else None}
            cells |= {"mean answer": f"{mean:.0f}", "GiB": f"{peak:.1f}", "turns": str(len(side["turns"]))}
        rows[f"{shape}: {name}"] = cells
    return rows


def main() -> None:
    """Parses the command line, measures, prints a table and writes the JSON file after each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"from {', '.join(_CHOICES)}")
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="of all turns of all shapes")
    parser.add_argument("--turn", type=float, default=60.0, metavar="SECONDS", help="after which a turn is given up")
    parser.add_argument("--out", type=out_file, help="write all figures as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="of every shape; its own depth by default")
    parser.add_argument("--sides", nargs="+", choices=list(sides()), default=list(sides()), metavar="SIDE")
    parser.add_argument("--prompts", type=int, default=1536, help="prompts of a turn")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=512, help="the most new tokens of an answer")
    parser.add_argument("--batch", type=int, default=512, help="answers at a time")
    parser.add_argument("--keep", action="store_true", help="keep transformers' batching between turns; with one SIDE")
    given = parser.parse_args()
    shapes = given.shapes or ["smollm2-135m", "llama3-8b"]
    for shape in shapes:
        if shape not in _CHOICES:
            parser.error(f"no shape {shape}: {', '.join(_CHOICES)}")
    if given.keep and len(given.sides) > 1:
        parser.error("--keep holds the memory of a GPU between turns, so it needs one of --sides")
    load = Load(given.prompts, given.longest, given.new, given.batch, given.keep)
    start = time.monotonic()
    result: dict[str, Any] = {"environment": snapshot(), "shapes": {}}
    rows: dict[str, dict[str, str | None]] = {}
    out: Path | None = given.out
    for place, shape in enumerate(shapes, 1):
        until = start + given.limit * place / len(shapes)  # a shape that was fast leaves its time to those after it

        def keep(found: dict[str, Any], shape: str = shape) -> None:
            result["shapes"][shape] = found
            write(result, out)

        found = measure(shape, load, given.sides, given.layers, given.rounds, until, given.turn, keep)
        keep(found)
        rows |= rows_of(shape, found["sides"])
    print(table(rows, "way to write"))


if __name__ == "__main__":
    main()
