"""Times the original, what a user would do instead, the wirings and the bound as servers of vLLM, by a client.

A variant is a server in a process of its own. As many of them as fit hold the memory of the GPUs at the same time and
are timed in turns, so that changes of the clocks affect all of them alike; a server that waits computes nothing. A
variant that fails is named with its last error and does not end the others.

The figures are those of a client of the server, so they include vLLM's scheduler and the transport between its
processes. Prefix caching is off, prompts are random, and no answer ends early.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig

from fcsd.bench.serve import figures
from fcsd.bench.serve.choice import file_of
from fcsd.bench.serve.client import ask
from fcsd.bench.serve.figures import Answer
from fcsd.bench.serve.host_ways import prepare, through_host
from fcsd.bench.serve.model import cache_bytes, config_of, prompts_of, usual_wirings, weight_bytes, wiring_for
from fcsd.bench.serve.running import Server, await_answers, error_behind, failed, left_out, start, stop, write_directory
from fcsd.bench.serve.variants import (
    IMITATED,
    NO_CUSTOM,
    ORIGINAL,
    RESERVE,
    Machine,
    Missing,
    Variant,
    alternatives,
    core,
    groups,
    room_for,
)
from fcsd.bench.serve.workload import STANDARD, Workload, tokens_at_once
from fcsd.disk import write_json
from fcsd.errors import ConfigError, FcsdError
from fcsd.kernels.bit_split.format import takes_rows
from fcsd.models.build import experts_of
from fcsd.parallel.all_reduce.backends import backend_of
from fcsd.parallel.all_reduce.ways import PLAIN, SUFFIX, Way, Ways
from fcsd.serve.server import graph_sizes
from fcsd.serve.vllm.communicator import ASKED
from fcsd.serve.vllm.support import installed_version, require_vllm

LOAD_SECONDS = 15  # of arrivals under each load
LEAST, MOST = 24, 600  # requests under a load
UNDER_LOAD = ("original", "wired")  # the roles that get them: not the bound, nor other ways to sum
PASSES = 2  # in which a variant gets them, so that what the host does meanwhile is seen
ENOUGH = 0.5  # seconds for which a round measures a figure of a variant: one short answer says little
_GRAPHED = 512  # tokens of the largest step for which vLLM makes a CUDA graph by itself
_BUSY = "the host is too busy to time its steps"
# A further form of a wiring, which the plugin does not choose by itself. Where prompts come alone, it says from how
# many tokens on the sums of a step without a graph should travel.
_ALONE = {"always in flight": {"overlap_from": 0}}
_EVEN_ROUTING = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}


def bench(
    load: Workload, config: PretrainedConfig, memory: int | None, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure all variants within ``load.minutes``.

    Args:
        memory: bytes of each GPU; None if there are none.
        write: gets what was found so far, after each variant has started and each group was timed.

    Returns:
        ``vllm``, its version; ``variants``, by name: ``role``, ``wiring``, of a wiring ``reduce`` and ``travels``
        (see ``Way``), ``rounds`` (see ``figures``), ``loads`` by the share of the peak, ``start_s``, and ``failed``
        with the last error of a variant that did; ``missing``, what was not run, by name: ``Missing``;
        ``notes``.

    Raises:
        ConfigError: vLLM or the plugin is missing, or the workload cannot be served.
    """
    require_vllm("fcsd bench serve", rewired=True)
    names, moe = usual_wirings(load, config), experts_of(config) > 0
    wirings = {name: wiring_for(name, config, load.tp) for name in (STANDARD, *names)}
    spread = moe and load.dp > 1
    if spread and not load.ep:
        raise ConfigError("under data-parallel attention the plugin serves divided experts alone", "Add --ep.")
    version, gpus = installed_version(), load.tp * load.dp
    tokens, whole = tokens_at_once(load), config if load.layers is None else config_of(load.model, None)
    cache = cache_bytes(config, tokens, load.tp)
    needed = weight_bytes(whole) + cache_bytes(whole, tokens, load.tp) // gpus + RESERVE
    fits_one = None if memory is None else needed <= 0.94 * memory
    peers = os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    if not peers and load.tp > 1 and NO_CUSTOM not in load.options:
        raise ConfigError(
            "NCCL_P2P_DISABLE=1 leaves vLLM's custom all-reduce, which uses peer access", f"Add -- {NO_CUSTOM}."
        )
    if not peers and "symmetric" in load.sums:
        raise ConfigError(
            f"--all-reduce symmetric is {backend_of('symmetric', 'plugin')[0].only}", f"{IMITATED}; leave it out."
        )
    environment = {**(_EVEN_ROUTING if moe else {}), **({} if peers else {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"})}
    machine = Machine(version, lambda module: find_spec(module) is not None, gpus, fits_one, peers)
    hidden = config.get_text_config().hidden_size
    others, missing = alternatives(machine, load, hidden=hidden, moe=moe)
    room = 1 if memory is None else room_for(memory, weight_bytes(config, load.dp, load.ep), cache, gpus)
    run = _Run(load, config, {"vllm": version, "variants": {}, "missing": missing, "notes": []}, write)
    if (note := _without_graphs(load)) is not None:
        run.found["notes"].append(note)
    if room == 1:
        run.found["notes"].append("the GPUs hold one server at a time, so that the variants ran one after the other")
    sharing = () if room == 1 else ("--gpu-memory-utilization", f"{0.94 / room:.3f}")
    if room > 1:
        sharing += ("--kv-cache-memory-bytes", str(cache // gpus))
    with TemporaryDirectory(prefix="fcsd-bench-serve-") as scratch:
        folder = Path(scratch)
        paths = {
            name: write_directory(load.model, config, wiring, folder / name, load.longest)
            for name, wiring in wirings.items()
        }
        try:
            forms = _ALONE if load.arrivals == 1 and not spread else {}
            host = load.tp > 1 and not spread and through_host()
            try:
                if host:
                    prepare(load.tp)
            except ConfigError as error:  # a server with such sums then says so itself, and all others are timed
                run.found["notes"].append(str(error))
            first = core(names, _ways(load, folder), forms, host=host)
            if odd := [one.name for one in first if not takes_rows(one.environment.get(ASKED, ""), hidden)]:
                run.found["notes"].append(
                    f"without {', '.join(odd)}: their groups do not divide rows of {hidden} values"
                )
                first = [one for one in first if one.name not in odd]
            if spread:  # what a bound leaves out is sums, and the original exchanges tokens
                first = [variant for variant in first if variant.role in ("original", "wired")]
            for group in groups(first, others, room):
                run.time(group, paths, sharing if len(group) > 1 else (), folder, environment)
        finally:
            run.end()
    return run.found


def _without_graphs(load: Workload) -> str | None:
    """What random arrivals lack with vLLM's own CUDA graphs, if they do, and what gives it to them."""
    chosen = any(option.startswith(("--compilation-config", "-cc", "--enforce-eager")) for option in load.options)
    if not load.loads or load.short < _GRAPHED or chosen:
        return None
    most = max(load.batches)
    sizes = json.dumps({"cudagraph_capture_sizes": graph_sizes(load.short, most)}, separators=(",", ":"))
    return (
        f"under arrivals a prompt of {load.short} tokens beside answers had no CUDA graph, so it waited for the host; "
        f"those of `fcsd serve --prompt-tokens {load.short} --concurrency {most}` are -- --compilation-config '{sizes}'"
    )


class _Run:
    """The servers that run, and what was found so far."""

    def __init__(
        self, load: Workload, config: PretrainedConfig, found: dict[str, Any], write: Callable[[dict[str, Any]], None]
    ) -> None:
        self.load, self.found, self.write = load, found, write
        self.vocabulary = config.get_text_config().vocab_size
        self.servers: dict[str, Server] = {}
        self.until = time.monotonic() + 60 * load.minutes
        self.starting, self.timing = 0.0, 0.0  # seconds that a variant took so far, at most

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def end(self, but: Sequence[str] = ()) -> None:
        """Stop all servers but some."""
        for name in [name for name in self.servers if name not in but]:
            stop(self.servers.pop(name))

    def time(
        self,
        group: list[Variant],
        paths: dict[str, Path],
        sharing: Sequence[str],
        logs: Path,
        environment: dict[str, str],
    ) -> None:
        """Start a group of variants, all at the same time, and time them in turns."""
        self.end(but=[variant.name for variant in group])
        waiting: dict[str, Server] = {}
        for number, variant in enumerate(group, 1):
            known = self.found["variants"].get(variant.name, {})
            if variant.name not in self.servers and "failed" not in known and self._has_time(variant, number):
                server = self._start(variant, paths[variant.wiring or STANDARD], sharing, logs, environment)
                self.servers[variant.name] = waiting[variant.name] = server
        ignored = {variant.name: variant.ignored for variant in group}
        for name, outcome in await_answers(waiting, self.until):
            if isinstance(outcome, str):
                self._failed(name, outcome)
            elif (why := left_out(waiting[name], ignored[name])) is not None:
                self._failed(name, why)
            else:
                self.found["variants"][name]["start_s"] = round(outcome, 1)
                self.starting = max(self.starting, outcome)
            self.write(self.found)
        running = [variant for variant in group if variant.name in self.servers]
        new = [variant for variant in running if not self.found["variants"][variant.name]["rounds"]]
        if not new:
            return
        begun = time.monotonic()
        self._figures(running)
        self.timing = max(self.timing, (time.monotonic() - begun) / len(running))
        self._loads([variant for variant in running if variant.name in self.servers])
        self.write(self.found)

    def _has_time(self, variant: Variant, number: int) -> bool:
        """Whether there is time to start a variant and to time it with the others before it, by what they took."""
        enough = self.left > self.starting + number * self.timing
        if not enough:
            why = f"no time was left; give it more than {self.load.minutes:g} --minutes"
            self.found["missing"][variant.name] = Missing(why, needless=variant.role != "original")
        return enough

    def _start(
        self, variant: Variant, path: Path, sharing: Sequence[str], logs: Path, environment: dict[str, str]
    ) -> Server:
        row: dict[str, Any] = {"role": variant.role, "wiring": variant.wiring, "rounds": {}, "loads": {}}
        row |= {} if variant.way is None else variant.way._asdict()
        row |= {"options": list(variant.options), "environment": dict(variant.environment)}
        self.found["variants"][variant.name] = row
        print(f"{variant.name}: starts", file=sys.stderr, flush=True)
        own = replace(variant, environment={**environment, **variant.environment})
        return start(own, path, [*_options(self.load, variant), *sharing], logs, _gpus())

    def _failed(self, name: str, why: str) -> None:
        print(f"{name} failed: {why}", file=sys.stderr, flush=True)
        self.found["variants"][name]["failed"] = why
        if name in self.servers:
            stop(self.servers.pop(name))

    def _ask(self, variant: Variant, prompts: list[list[int]], new: int, at: list[float] | None = None) -> list[Answer]:
        """The answers of a variant; empty if it failed, which is noted, or if there is no time."""
        server = self.servers.get(variant.name)
        if server is None or self.left <= 0:
            return []
        try:
            return ask(server.ports, prompts, new, at, limit=max(1.0, self.left))
        except FcsdError as error:
            if self.left > 0:
                time.sleep(0.5)  # a server that dies closes its connections first
                behind = error_behind(server)  # of a server that runs: perhaps an older one
                self._failed(variant.name, failed(server) or str(error) + (f"; its log has {behind}" if behind else ""))
            return []

    def _figures(self, running: list[Variant]) -> None:
        load = self.load
        work = [("decode", n, n, load.short, load.answer, figures.step_ms) for n in load.batches]
        work += [("prefill", tokens, load.arrivals, tokens, 1, figures.first_token_ms) for tokens in load.prompts]
        if load.loads:
            work.append((*figures.PEAK, load.peak_requests, load.short, load.answer, figures.request_ms))
        for kind, size, count, tokens, new, measure in work:
            prompts = prompts_of(count, tokens, self.vocabulary, seed=size)
            dropped: dict[str, int] = {}
            for round_ in range(-1, 1 if kind == "peak" else load.rounds):  # the first round warms up
                turn = (round_ + 1) % len(running)  # each begins once, so that none is always behind the same one
                for variant in running[turn:] + running[:turn]:
                    asked, until = [], time.monotonic() + (0 if round_ < 0 or kind == "peak" else ENOUGH)
                    while (not asked or time.monotonic() < until) and (answers := self._ask(variant, prompts, new)):
                        asked.append(measure(answers))
                    if round_ < 0:
                        continue
                    times = [time_ for time_ in asked if time_ is not None]
                    dropped[variant.name] = dropped.get(variant.name, 0) + len(asked) - len(times)
                    if times:
                        rounds = self.found["variants"][variant.name]["rounds"]
                        rounds.setdefault((kind, size), []).append(statistics.median(times))
            for variant in running:
                self._say_dropped(variant.name, kind, size, dropped.get(variant.name, 0))
            self.write(self.found)
            if self.left <= 0:
                self.found["notes"].append(f"the time ended at {kind} {size}; give it more --minutes")
                return

    def _say_dropped(self, name: str, kind: str, size: int, count: int) -> None:
        """Note that answers of a figure came in bursts and have no time, if some did."""
        if count:
            what = f"{name}: {kind} {size}"
            if (kind, size) in self.found["variants"][name]["rounds"]:
                note = f"{what}: {count} times the tokens came in bursts, and were left out; {_BUSY}"
            else:
                note = f"{what} was not measured, because its tokens came in bursts; {_BUSY}"
            self.found["notes"].append(note)

    def _loads(self, running: list[Variant]) -> None:
        """The same random arrivals for the originals and the wirings; the bound and other ways to sum have none.

        All take the same number of GPUs, and are offered the same requests a second. They take turns, in one order and
        then in the other.
        """
        original = self.found["variants"].get(ORIGINAL, {}).get("rounds", {})
        if figures.PEAK not in original:
            return
        peak = 1e3 / original[figures.PEAK][0]  # the first: with a later group it is timed again, and the load stays
        for share in self.load.loads:
            rows = {variant.name: self.found["variants"][variant.name]["loads"] for variant in running}
            asked = [v for v in running if str(share) not in rows[v.name] and v.role in UNDER_LOAD]
            count = -(-min(MOST, max(LEAST, round(share * peak * LOAD_SECONDS))) // PASSES)
            passes: dict[str, list[list[Answer]]] = {variant.name: [] for variant in asked}
            for seed in range(PASSES):
                prompts = prompts_of(count, self.load.short, self.vocabulary, seed=seed)
                at = figures.arrivals(count, share * peak, seed=seed)
                for variant in asked[:: -1 if seed % 2 else 1]:
                    if self.left < at[-1]:
                        self.found["notes"].append(f"no time was left for load {share:g} of {variant.name}")
                    elif answers := self._ask(variant, prompts, self.load.answer, at):
                        passes[variant.name].append(answers)
                if not all(len(own) > seed for name, own in passes.items() if name in self.servers):
                    break  # a load of fewer requests than those of the others would not be comparable
                for name, own in passes.items():
                    rows[name].pop(str(share), None)
                    if len(own) > seed:
                        every = list(chain(*own))
                        row = {**figures.under_load(every), "rate": share * peak, "requests": len(every)}
                        rows[name][str(share)] = row | {"passes": [figures.under_load(answers) for answers in own]}
                self.write(self.found)
            for name in passes:
                if "token_p50" not in rows[name].get(str(share), {"token_p50": None}):
                    what = f"{name}: steps under load {share:g} were not measured"
                    self.found["notes"].append(f"{what}, because most answers came in bursts; {_BUSY}")


def _ways(load: Workload, folder: Path) -> dict[Way, str | None]:
    """The ways in which a wiring is timed, and what tells the plugin so: nothing, a backend, or a table in ``folder``.

    The first is the plugin's own choice, if no other is asked for. The likeliest gain comes first, because the last
    ones are left out where the time or the memory ends.
    """
    first, *others = load.sums or (PLAIN,)
    order = [Way(first), Way(first, False), *map(Way, others), *(Way(backend, False) for backend in others)]
    found: dict[Way, str | None] = {}
    for way in order:
        found[way] = way.reduce if load.sums else None
        if not way.travels:
            path = folder / f"at-once-{way.reduce.replace(':', '-')}{SUFFIX}"
            ways = Ways(way, ((1, way),), ((1, way),))
            write_json(path, file_of(load, {"tables": {"": ways.to_rows()}}, "fcsd bench serve"))
            found[way] = str(path)
    return found


def _options(load: Workload, variant: Variant) -> list[str]:
    """The options of ``vllm serve`` that all variants have, in the form of this one's parallelism."""
    tp, dp, ep = load.tp, load.dp, load.ep
    if variant.replicas or variant.stages:
        tp, dp = tp // (variant.stages or tp), 1
        ep = ep and tp > 1
    elif variant.spread:
        tp, dp, ep = 1, tp * dp, True
    options = ["--tensor-parallel-size", str(tp), "--load-format", "dummy", "--dtype", "bfloat16"]
    options += ["--skip-tokenizer-init", "--no-enable-prefix-caching", "--max-model-len", str(load.longest)]
    options += ["--data-parallel-size", str(dp)] if dp > 1 else []
    options += ["--pipeline-parallel-size", str(variant.stages)] if variant.stages else []
    return [*options, *(["--enable-expert-parallel"] if ep else []), *load.options]


def _gpus() -> list[str]:
    """The names of the GPUs that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]

    return [str(n) for n in range(torch.cuda.device_count())]


def link() -> str | None:
    """How the first two GPUs of this run are connected, by ``nvidia-smi topo -m``; None if there are no two."""
    try:
        ran = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_link(ran.stdout, _gpus())


def read_link(matrix: str, gpus: Sequence[str]) -> str | None:
    """The entry of the first two GPUs in the matrix of ``nvidia-smi topo -m``: NV18, PIX, PHB, SYS, ..."""
    head, *lines = [line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in matrix.splitlines()] or [[]]
    first, second = [f"GPU{name}" for name in [*gpus, "", ""][:2]]
    for name, *cells in filter(None, lines):
        if name == first and second in head and head.index(second) < len(cells):
            cell = cells[head.index(second)]
            return cell if cell.isalnum() else None
    return None
