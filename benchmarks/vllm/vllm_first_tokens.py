"""How long requests wait for their first token in vLLM: the original, the converted model, and the bound.

    python benchmarks/vllm/vllm_first_tokens.py FOLDER --shape deepseek-v2-lite --layers 27 --tp 2 --ep --seconds 240

The models are shapes of ``fcsd.bench.shapes`` with random weights. Every variant is an engine of its own, on the same
GPUs, and the engines take turns: one engine at a time answers prompts of the same length. The bound is the converted
model whose ranks send nothing (``reduce: none``), so its results are wrong. Random weights route unevenly, so all
variants route each token to experts that are drawn at random, evenly (vLLM's routing simulation). Prefix caching is
off, and no prompt is used twice.

With ``--apart`` the engines do not take turns: each one starts when the one before has ended. This is for models of
which three do not fit into the memory of the GPUs. Changes of the clocks between two engines are not seen then.

At once: ``--requests`` distinct prompts arrive together; a row has the mean and the last time to first token. Decoding:
a row has the time of a step of a whole batch. Under load: requests arrive at random (Poisson), at rates that are
fractions of the original's own throughput; a row has the medians and the 99th percentiles of the time to first token
and of the time per token after it. All variants get the same arrivals. vLLM's model runner, graphs, token budget and
attention must be the same for all variants, or nothing is measured. ``benchmarks/vllm/vllm_gpu.sh time`` runs this on a
GPU machine, and ``benchmarks/vllm/vllm_times.txt`` has the measurements of FarSkip section 4.2.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks/vllm")]

from vllm_report import Row, begin, ended  # noqa: E402
from vllm_variants import Times, Variant, close, make  # noqa: E402

ORIGINAL, BOUND = "original", "bound, wrong results"
Todo = tuple[str, Path, Row]  # of a variant: its name, its directory, and the arguments of its engine
SAMPLE = 64  # requests at once by which the original's throughput is measured


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies; the largest one if there are few."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def compared(rows: list[Row], *keys: str) -> list[Row]:
    """Add to each row how its ``keys`` compare: ``times_original``, ``of_bound``, and the share of the wait hidden."""
    for key in keys:
        by_role = {row["role"]: row[key] for row in rows}
        original, bound = by_role.get(ORIGINAL), by_role.get(BOUND)
        for row in rows:
            if original:
                row[f"{key}_times_original"] = original / row[key]
            if bound and row["role"] != BOUND:
                row[f"{key}_of_bound"] = bound / row[key]
                if original and original > bound:
                    row[f"{key}_hidden"] = (original - row[key]) / (original - bound)
    return rows


def at_once(variants: list[Variant], given: argparse.Namespace, words: random.Random, deadline: float) -> Iterator[Row]:
    """Rows of ``mean_ms`` and ``last_ms``, medians over the rounds, for each length and variant."""
    for length in given.lengths:
        measured: dict[str, list[Times]] = {variant.name: [] for variant in variants}
        round_s = 0.0
        for round_ in range(given.rounds + 1):
            start = time.perf_counter()
            if round_ > 1 and start + 1.5 * round_s > deadline:
                break
            for variant in variants:
                answers = variant.ask(prompts(words, length, given.requests), [0.0] * given.requests, 1, deadline)
                waits = [1e3 * first for first, _ in answers]
                if round_:  # the first round warms up
                    measured[variant.name].append((statistics.mean(waits), max(waits)))
            round_s = time.perf_counter() - start
        rows = []
        for name, found in measured.items():
            means, lasts = zip(*found, strict=True)
            row: Row = dict(role=name, requests=given.requests, length=length, raw=means)
            rows.append(row | dict(mean_ms=statistics.median(means), last_ms=statistics.median(lasts)))
        yield from compared(rows, "mean_ms", "last_ms")


def decoding(
    variants: list[Variant], given: argparse.Namespace, words: random.Random, deadline: float
) -> Iterator[Row]:
    """Rows of ``step_ms``, the time of a decoding step of a whole batch, for each batch and variant.

    A step's time is the mean over the tokens of a batch that all decode; the row has the median over the rounds.
    """
    for batch in given.batches:
        measured: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for round_ in range(given.rounds + 1):
            for variant in variants:
                asked = prompts(words, given.load_prompt, batch)
                answers = variant.ask(asked, [0.0] * batch, given.load_new, deadline)
                # From the last prompt's first token on, every step decodes the whole batch.
                last, begun = max(end for _, end in answers), max(first for first, _ in answers)
                if round_:  # the first round warms up
                    measured[variant.name].append(1e3 * (last - begun) / (given.load_new - 1))
        rows: list[Row] = [
            dict(role=name, batch=batch, prompt=given.load_prompt, step_ms=statistics.median(steps), raw=steps)
            for name, steps in measured.items()
        ]
        yield from compared(rows, "step_ms")


def under_load(
    variants: list[Variant], given: argparse.Namespace, words: random.Random, deadline: float
) -> Iterator[Row]:
    """Rows of medians and 99th percentiles for each rate and variant but the bound; ``right`` is not judged.

    All variants answer the same arrivals twice, the second time in the opposite order.
    """
    takes_part = [variant for variant in variants if variant.name != BOUND]
    for variant in takes_part:
        variant.ask(prompts(words, given.load_prompt, SAMPLE), [0.0] * SAMPLE, given.load_new, deadline)  # warms up
    answers = takes_part[0].ask(prompts(words, given.load_prompt, SAMPLE), [0.0] * SAMPLE, given.load_new, deadline)
    capacity = SAMPLE / max(last for _, last in answers)  # requests per second
    for share in given.rates:
        rate, arrivals, now = share * capacity, [], 0.0
        while (now := now + words.expovariate(rate)) < given.load_seconds or not arrivals:
            arrivals.append(now)
        measured: dict[str, list[Times]] = {variant.name: [] for variant in takes_part}
        for variant in [*takes_part, *reversed(takes_part)]:
            if time.perf_counter() + 2 * given.load_seconds > deadline:
                return
            asked = prompts(words, given.load_prompt, len(arrivals))
            measured[variant.name] += variant.ask(asked, arrivals, given.load_new, deadline)
        rows = []
        for name, found in measured.items():
            firsts = [1e3 * first for first, _ in found]
            steps = [1e3 * (last - first) / (given.load_new - 1) for first, last in found]
            row: Row = dict(role=name, share=share, per_s=rate, requests=len(found))
            for key, values in (("first", firsts), ("step", steps)):
                row |= {f"{key}_p50": percentile(values, 0.5), f"{key}_p99": percentile(values, 0.99)}
            rows.append(row)
        yield from compared(rows, "first_p50", "first_p99", "step_p50", "step_p99")


def prompts(words: random.Random, length: int, count: int) -> list[list[int]]:
    """So many prompts of random token ids."""
    return [words.choices(range(100, 200), k=length) for _ in range(count)]


def measure(given: argparse.Namespace) -> None:
    """Start the variants, check that they are alike, and print the rows."""
    deadline = time.perf_counter() + given.seconds
    head: Row = dict(shape=given.shape, layers=given.layers, ranks=given.tp, experts=given.ep, wiring=given.wiring)
    head |= dict(fp8=given.fp8, apart=given.apart)
    begin(head)
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    os.environ.pop("VLLM_MLA_DISABLE", None)
    longest = max([*given.lengths, given.load_prompt + given.load_new]) + 16
    options: Row = dict(
        dtype=given.dtype, tensor_parallel_size=given.tp, enable_expert_parallel=given.ep, load_format="dummy",
        skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=longest, max_num_seqs=SAMPLE,
        gpu_memory_utilization=0.25, kv_cache_memory_bytes=given.kv_gib << 30, enforce_eager=given.eager,
    )  # fmt: skip
    if not given.eager:
        options["compilation_config"] = dict(cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64])
    if given.budget:
        options["max_num_batched_tokens"] = given.budget
    original, converted = make(given.folder, given.shape, given.layers, given.wiring, given.fp8)
    todo: list[Todo] = [(ORIGINAL, original, options)]
    settings: Row = {"converted": {}}
    settings |= {f"converted, {kind}": {"reduce": kind} for kind in given.reduce}
    settings |= {f"converted, overlap from {tokens}": {"overlap_from": tokens} for tokens in given.overlap_from}
    settings |= {BOUND: {"reduce": "none"}} if given.tp > 1 and (given.lengths or given.batches) else {}
    todo += [
        (name, converted, options | dict(additional_config={"fcsd": own}) if own else options)
        for name, own in settings.items()
    ]
    for row in (apart if given.apart else in_turns)(todo, given, head, deadline):
        ended(head | row)


def in_turns(todo: list[Todo], given: argparse.Namespace, head: Row, deadline: float) -> Iterator[Row]:
    """The rows of engines that all run at once; ``head`` gets what vLLM has chosen."""
    begun = time.perf_counter()
    variants = [Variant(*one) for one in todo]
    try:
        facts = {variant.name: variant.receive(deadline) for variant in variants}
        head |= facts[ORIGINAL]
        print(f"all engines answer after {time.perf_counter() - begun:.0f} s: {facts}", flush=True)
        require_alike(list(facts.values()))
        words = random.Random(0)
        for part, wanted in ((at_once, given.lengths), (decoding, given.batches), (under_load, given.rates)):
            yield from part(variants, given, words, deadline) if wanted else []
    finally:
        close(variants, 5.0)


def apart(todo: list[Todo], given: argparse.Namespace, head: Row, deadline: float) -> Iterator[Row]:
    """The same of engines that run one after the other, all with the same prompts.

    The bound is measured before the converted models, so that their rows compare with it.
    """
    facts: list[Row] = []
    rows: list[Row] = []
    for one in sorted(todo, key=lambda one: (one[0] != ORIGINAL, one[0] != BOUND)):
        begun = time.perf_counter()
        variant = Variant(*one)
        try:
            facts.append(variant.receive(deadline))
            head |= facts[0]
            print(f"{variant.name} answers after {time.perf_counter() - begun:.0f} s: {facts[-1]}", flush=True)
            require_alike(facts)
            words = random.Random(0)
            for part, wanted, key in ((at_once, given.lengths, "mean_ms"), (decoding, given.batches, "step_ms")):
                for row in part([variant], given, words, deadline) if wanted else []:
                    rows.append(row)
                    same = [other for other in rows if alike(other, row, "length", "batch")]
                    yield compared(same, *(name for name in (key, "last_ms") if name in row))[-1]
        finally:
            close([variant], 30.0)


def require_alike(facts: list[Row]) -> None:
    """Stop unless vLLM has chosen the same for all variants.

    Raises:
        RuntimeError: it has not.
    """
    if len({json.dumps(found, sort_keys=True) for found in facts}) > 1:
        raise RuntimeError("the variants are not run alike, so nothing was measured")


def alike(one: Row, other: Row, *keys: str) -> bool:
    """Whether two rows have the same values."""
    return all(one.get(key) == other.get(key) for key in keys)


def main() -> None:
    """Read the options and measure."""

    def numbers(kind: type) -> Any:
        return lambda text: [kind(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the configs are written")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--wiring", default="farskip")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true", help="whole experts on each rank")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fp8", action="store_true", help="weights in fp8, with scales for blocks of 128 x 128")
    parser.add_argument("--apart", action="store_true", help="one engine after the other; does not go with --rates")
    parser.add_argument("--reduce", type=numbers(str), default=[], help="all-reduce backends besides vLLM's own")
    parser.add_argument(
        "--overlap-from", type=numbers(int), default=[], help="values of overlap_from besides the default"
    )
    parser.add_argument("--lengths", type=numbers(int), default=[512, 1024, 2048])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, help="tokens of one step; vLLM's own choice by default")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture")
    parser.add_argument("--batches", type=numbers(int), default=[], help="whose decoding steps are timed, as 1,64")
    parser.add_argument("--rates", type=numbers(float), default=[], help="of the original's throughput, as 0.3,0.6,0.9")
    parser.add_argument("--load-prompt", type=int, default=1024)
    parser.add_argument("--load-new", type=int, default=64)
    parser.add_argument("--load-seconds", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=600.0, help="when everything has to have ended")
    given = parser.parse_args()
    if given.apart and given.rates:
        parser.error("--apart does not go with --rates: the load is a share of the throughput of another engine")
    measure(given)


if __name__ == "__main__":
    main()
