"""Which way to divide a dense model heals 70B's width faster: ZeRO-3, or tensor parallelism with ladder.

    OUT=FOLDER python benchmarks/carried/divide.py [GROUP ...]     (all groups, the most telling first)

A step is that of ``fcsd distill`` with ``optim.train: [converted]``: the last half of the layers is converted to ladder
and trained, the teacher shares the frozen weights, and the first half is computed once for both. Every way takes the
same number of tokens in a step and trains the same layers. Weights are random and drawn on the GPU.

The vocabulary is cut in proportion to the layers, so that embeddings, head and loss have the share of a step that they
have in the whole model. Otherwise a few layers beside a whole head, which tensor-parallel ranks compute twice, would
speak for ZeRO-3.

Each group of ways is a pair of processes with a limit of its own, and writes ``FOLDER/GROUP.json`` after each way. All
groups import their packages at once, beside each other, and then wait for their turn without touching a GPU. The time
of a step is that of the slowest rank. Settings are environment variables, see ``SETTINGS``.
"""

import importlib
import inspect
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SETTINGS = {
    "SHAPE": "llama3-70b",
    "LAYERS": "6",  # the last half of them trains
    "SEQ": "4096",
    "ROWS": "4",  # rows of a step, over both processes; one forward pass of all of them
    "STEPS": "3",  # timed steps of a way
    "LIMIT": "165",  # seconds for everything
    "TRACE": "",  # a way of which a step is traced, too: "as set", for example
}
OFF = {"NCCL_P2P_DISABLE": "1"}
TP, ZERO_3, ZERO_1 = ["parallel.tp_size=2"], ["parallel.zero_stage=3"], ["parallel.zero_stage=1"]

# Ways of a tensor-parallel group: wiring, parallel.overlap, parallel.all_reduce. The bound sends nothing.
LADDER, BY_HOST, BOUND = ("ladder", "on", "nccl"), ("ladder", "on", "host"), ("ladder", "off", "none")
STANDARD, MEGATRON = ("standard", "on", "nccl"), ("standard", "own-weights", "nccl")

# Ways of a ZeRO group. What stands beside a name is set in DeepSpeed's coordinator, in elements per largest layer. The
# bound fills what it would have received with copies of its own part.
AS_SET = ("as set", {})
NO_WAITS = ("host does not wait", {"max_ongoing_fetch_events": 10**6})
AHEAD = ("two layers ahead", {"prefetch_bucket_sz": 2.0, "max_n_available_params": 4.5, **NO_WAITS[1]})
KEPT = ("two ahead, kept at the turn", {**AHEAD[1], "max_reuse_dist_in_numel": 2.5, "max_n_available_params": 6.0})
DOUBLE, ALONE = ("as set, twice the rows", {}), ("bound", {})

# name -> environment, settings of the recipe, ways, seconds
GROUPS: dict[str, tuple[dict[str, str], list[str], list[Any], int]] = {
    "tp-off": (OFF, TP, [BY_HOST, LADDER, MEGATRON], 60),
    "zero3-off": (OFF, ZERO_3, [AS_SET, DOUBLE], 70),
    "tp-on": ({}, TP, [LADDER, MEGATRON, STANDARD, BOUND], 50),
    "zero3-on": ({}, ZERO_3, [AS_SET, NO_WAITS, AHEAD, KEPT, ALONE], 60),
    "zero1-on": ({}, ZERO_1, [AS_SET, ALONE], 40),
    "tp-8bit": ({}, [*TP, "optim.moments=8bit"], [LADDER], 35),
    "zero3-bucket": ({"BUCKET": "2000000000"}, ZERO_3, [AS_SET, NO_WAITS], 40),
    "zero1-off": (OFF, ZERO_1, [AS_SET], 40),
}


def drive(names: list[str], out: Path) -> None:
    """Runs groups in turns, and prints their figures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` ends the processes of the groups, too
    began, limit = time.monotonic(), float(setting("LIMIT"))
    turns = Path(tempfile.mkdtemp())
    started: dict[str, list[subprocess.Popen[bytes]]] = {}
    try:
        for name in names:
            if "8bit" in name and find_spec("bitsandbytes") is None:
                print(f"{name}: skipped, bitsandbytes is not installed", flush=True)
                continue
            started[name] = [start(name, rank, turns, out) for rank in range(2)]
        for number, (name, processes) in enumerate(started.items()):
            left = limit - (time.monotonic() - began)
            if left < 12:
                print(f"{name}: skipped, {left:.0f} s are left", flush=True)
                stop(processes)
                continue
            ready(processes, turns / name, began + limit)
            turn, longest = time.monotonic(), GROUPS[name][3] + (30 if number == 0 else 0)  # the first compiles kernels
            (turns / name).touch()
            end = min(turn + longest, began + limit)
            codes = wait(processes, end)
            took, whole = time.monotonic() - turn, time.monotonic() - began
            print(f"\n{name}: exit codes {codes} after {took:.0f} s, {whole:.0f} s in all", flush=True)
            show(out / f"{name}.json")
            if any(codes):
                log = "\n".join((out / f"{name}.{rank}.log").read_text(errors="replace")[-1500:] for rank in range(2))
                print(log, flush=True)
    finally:
        for processes in started.values():
            stop(processes)


def start(name: str, rank: int, turns: Path, out: Path) -> "subprocess.Popen[bytes]":
    """One of the two processes of a group."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port(turns, name)), "TURN": str(turns / name)}
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_HIGH_PRIORITY": "1", "OMP_NUM_THREADS": "4"}
    environment = {**settings, **os.environ, **GROUPS[name][0], **own}
    with open(out / f"{name}.{rank}.log", "wb") as log:
        command = [sys.executable, __file__, "--rank-of", name]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def port(turns: Path, name: str) -> int:
    """A free port, which both ranks of a group are told."""
    file = turns / f"{name}.port"
    if not file.exists():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            file.write_text(str(free.getsockname()[1]))
    return int(file.read_text())


def ready(processes: "list[subprocess.Popen[bytes]]", turn: Path, end: float) -> None:
    """Waits until both ranks of a group have imported their packages, one of them has failed, or the time is over."""
    while time.monotonic() < end and not any(process.poll() for process in processes):
        if all(Path(f"{turn}.{rank}.ready").exists() for rank in range(2)):
            break
        time.sleep(0.1)


def wait(processes: "list[subprocess.Popen[bytes]]", end: float) -> list[int | None]:
    """The exit codes; where one has failed or the time is over, the rest is killed."""
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(1)  # the other one may have something to say, too
            break
        time.sleep(0.1)
    stop(processes)
    return [process.wait() for process in processes]


def stop(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Kills what still runs, and waits for its end, with which its memory on the GPU is free again."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def show(path: Path) -> None:
    """Prints a line for each way of a group."""
    if not path.exists():
        print("  nothing was measured")
        return
    found = json.loads(path.read_text())
    full = found["full_speed"]
    for name, one in found["ways"].items():
        median = statistics.median(one["ms"])
        rate = 1e3 * one["tokens"] / median
        mfu = "" if full is None else f", MFU {rate / full:.1%}"
        peak = "" if one["peak_gib"] is None else f", peak {one['peak_gib']:.2f} GiB of planned {found['plan_gib']:.2f}"
        spread = f"{min(one['ms']):.0f} to {max(one['ms']):.0f}"
        print(f"  {name:<34} {median:8.1f} ms ({spread}), {rate / 2:9,.0f} tokens/s per GPU{mfu}{peak}")
    sys.stdout.flush()


def setting(name: str) -> str:
    """A setting of the run, from the environment."""
    return os.environ.get(name, SETTINGS[name])


def rank_of(group: str, out: Path) -> None:
    """What one process of a group does."""
    for module in (  # nearly all of the imports, none of which touches a GPU
        "benchmarks.train.random_run",
        "benchmarks.train.step.record",
        "deepspeed",
        "fcsd.distill.step.one_step",
        "fcsd.plan",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(module)

    turn = Path(os.environ["TURN"])
    Path(f"{turn}.{os.environ['RANK']}.ready").touch()
    while not turn.exists():
        time.sleep(0.1)
    measure(group, out)


def measure(group: str, out: Path) -> None:
    """Measures the ways of a group, and writes after each of them. Both ranks call this."""
    import torch
    import torch.distributed as dist
    from benchmarks.train.random_run import random_corpus
    from benchmarks.turns import peak_gib, reset_peak

    from fcsd.bench.runner import together
    from fcsd.distill.data.of_run import training_rows
    from fcsd.distill.step.one_step import train_step
    from fcsd.errors import ConfigError
    from fcsd.launch.environment import snapshot
    from fcsd.launch.world import join_world

    began = time.monotonic()

    def told(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    world = join_world()
    told("joined")
    built = Built(group, world, told)
    found: dict[str, Any] = {"group": group, "settings": {name: setting(name) for name in SETTINGS}, **built.facts}
    found |= {"environment": snapshot(), "bucket": os.environ.get("BUCKET"), "ways": {}}
    step, device = 0, world.device
    last: dict[str, float] = {}
    for way in GROUPS[group][2]:
        try:
            name, recipe = built.choose(way)
        except ConfigError as error:  # on both ranks, as without GPUs for sums through the host
            told(f"{way}: {error}")
            continue
        rows = training_rows(recipe, [random_corpus(built.vocabulary, recipe.data.seq_len)])

        def one(recipe: Any = recipe, rows: Any = rows) -> None:
            nonlocal step
            step += 1
            last.update(train_step(built.training, rows, recipe, built.teams.data, step))

        for _ in range(1 if found["ways"] else 3):  # ZeRO-3 gathers ahead from the third pass on
            one()
        told(f"{name}: warm")
        reset_peak(device)
        times = torch.tensor([together(one, device) for _ in range(int(setting("STEPS")))], device=device)
        peak = torch.tensor(peak_gib(device) or 0.0, device=device)
        for value in (times, peak):
            dist.all_reduce(value, dist.ReduceOp.MAX)
        figures = {"ms": times.tolist(), "tokens": recipe.train.batch_tokens, "loss": last["loss"]}
        found["ways"][name] = {**figures, "peak_gib": peak.item() if device.type == "cuda" else None}
        told(f"{name}: {times.tolist()} ms, loss {last['loss']:.4g}")
        if world.rank == 0:
            file = out / f"{group}.json"
            Path(f"{file}.new").write_text(json.dumps(found, indent=1))
            os.replace(f"{file}.new", file)
        if setting("TRACE") == name:
            trace(one, out / f"{group}.{world.rank}.trace.json.gz", world)
    dist.barrier()
    os._exit(0)


def trace(one: Any, path: Path, world: Any) -> None:
    """Traces a step of this rank, and says where the time goes."""
    from benchmarks.train.account import read_account, to_text
    from benchmarks.train.step.record import record

    record(one, path, world)
    if world.device.type == "cuda":
        print(to_text(read_account(path)), flush=True)


class Built:
    """A student in training, wired for one way after the other.

    Attributes:
        training: what ``train_step`` takes; ``choose`` may replace it.
        teams: how the two processes work together.
        vocabulary: the tokens of the model.
        facts: what the plan says, and the tokens per second at the GPUs' peak.
    """

    def __init__(self, group: str, world: Any, told: Any) -> None:
        from benchmarks.train.random_run import random_recipe

        from fcsd.bench.shapes import SHAPES
        from fcsd.checkpoint import open_checkpoint
        from fcsd.distill.experts.expert_parallel import randomise
        from fcsd.distill.metrics import full_speed_of
        from fcsd.distill.optim import update
        from fcsd.distill.step import engine
        from fcsd.distill.student import DTYPES, check, chosen_parts, train_parts
        from fcsd.distill.teacher.targets import TeacherSource
        from fcsd.distill.train_engine import make_trainable, teams_of
        from fcsd.models.build import converted_config, register
        from fcsd.models.wiring import Wiring
        from fcsd.plan import Hardware, plan_run
        from fcsd.plan.setup import GIB

        engine.import_deepspeed()
        register()
        layers, seq, rows = (int(setting(name)) for name in ("LAYERS", "SEQ", "ROWS"))
        shape = SHAPES[setting("SHAPE")]
        original = shape(layers)
        original.vocab_size = max(256, original.vocab_size * layers // shape.depth // 128 * 128)
        self.vocabulary, self._group, self._world = original.vocab_size, group, world
        ladder = Wiring("ladder", tuple(range(layers // 2, layers)))
        rewired = converted_config(original, ladder.to_block(base_model="random", base_revision=None, base_sha256=None))
        sets = ["parallel.ep_size=1", "optim.train=[converted]", "train.activation_checkpointing=true"]
        sets += GROUPS[group][1]
        micro = rows if sets[3:4] == TP else rows // 2
        with tempfile.TemporaryDirectory() as folder:
            rewired.save_pretrained(f"{folder}/student")
            original.save_pretrained(f"{folder}/teacher")
            recipe = random_recipe(Path(folder), group, seq, micro, rows * seq, 1000, world, sets)
            check(recipe, 2)
            chosen = chosen_parts(recipe, open_checkpoint(recipe.model, weights=False))
            planned = plan_run(recipe, Hardware(2))
            full = full_speed_of(recipe, world)
        assert chosen is not None
        self.facts = {"plan_gib": planned.memory.peak.total / GIB, "planned_tokens": planned.speed.tokens_per_second}
        self.facts |= {"full_speed": full, "vocabulary": self.vocabulary, "sets": sets}
        self._recipe, self.teams = recipe, teams_of(recipe, world)
        how: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "seed": recipe.seed}
        how |= {"partitioned": recipe.parallel.zero_stage == 3, "ranks": self.teams.ranks}
        student = randomise(rewired, 1, **how)
        told("drawn")
        make_trainable(student, self.teams)
        self._parts = train_parts(student, recipe, chosen)
        told(f"{len(self._parts.trained)} weights train")
        if "BUCKET" in os.environ:
            settings, bucket = engine.ahead_of_layers, int(os.environ["BUCKET"])
            engine.ahead_of_layers = lambda *words: settings(*words) | {"reduce_bucket_size": bucket}
        more: Any = {"teams": self.teams, "parts": self._parts}
        self.training = engine.build_training(student, TeacherSource(), recipe, world, **more)
        update.install(self.training.engine, recipe)
        self._layer = max(sum(p.numel() for p in layer.parameters()) for layer in meta_layers(original))
        told("engine built")

    def choose(self, way: Any) -> tuple[str, Any]:
        """Prepares a way of the group, and returns its name and the recipe of its steps."""
        from dataclasses import replace

        from fcsd.distill.step.engine import share_weights
        from fcsd.distill.teacher.shared import WithinPass

        if self.teams.ranks is not None:
            return ", ".join(way), self._wire(*way)
        name, settings = way
        recipe = self._recipe
        shared = share_weights(self._parts, recipe)
        divided = recipe.parallel.zero_stage == 3
        source = WithinPass(shared, self.training.engine.module) if divided else shared
        self.training = replace(self.training, source=source)
        if divided:
            self._set(settings)
        if way is ALONE:
            send_nothing(self._world)
        if way is DOUBLE:
            train = recipe.train
            more = {"micro_batch_size": 2 * train.micro_batch_size, "batch_tokens": 2 * train.batch_tokens}
            recipe = recipe.model_copy(update={"train": train.model_copy(update=more)})
        return name, recipe

    def _wire(self, wiring: str, overlap: str, all_reduce: str) -> Any:
        """Wires the student, and its own passes as the teacher, for a way of tensor parallelism."""
        from dataclasses import replace

        from fcsd.distill.experts.expert_parallel import wire_sharded
        from fcsd.distill.teacher.shared import SharedTeacher
        from fcsd.models.build import unwired, wiring_of

        model = self.training.model
        parallel = self._recipe.parallel.model_copy(update={"overlap": overlap, "all_reduce": all_reduce})
        own = unwired() if wiring == "standard" else wiring_of(model.config)

        def rewire(as_: Any) -> None:
            wire_sharded(model, 1, parallel, ranks=self.teams.ranks, wiring=as_)

        rewire(own)
        shared = SharedTeacher(self._parts, self._recipe.objective, lambda: rewire(unwired()))
        rewire(own)
        self.training = replace(self.training, source=shared)
        return self._recipe

    def _set(self, settings: dict[str, float]) -> None:
        """Sets what DeepSpeed's coordinator of gathered weights reads in every pass."""
        coordinator = self.training.engine.optimizer.parameter_offload.get_param_coordinator()
        prefix = f"_{type(coordinator).__name__}__"
        kept = self.__dict__.setdefault("_kept", {})
        for name, value in {**kept, **settings}.items():
            assert hasattr(coordinator, prefix + name), name
            kept.setdefault(name, getattr(coordinator, prefix + name))
            size = value if isinstance(value, int) else int(value * self._layer)
            setattr(coordinator, prefix + name, size)
        released = getattr(type(coordinator), f"{prefix}params_to_release")
        inspect.getclosurevars(released).nonlocals["func"].cache_clear()  # computed by the settings before


def meta_layers(config: Any) -> Any:
    """The decoder layers of a model without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from fcsd.models.build import decoder_layers

    with torch.device("meta"):
        return decoder_layers(AutoModelForCausalLM.from_config(config))


def send_nothing(world: Any) -> None:
    """Lets DeepSpeed's collectives copy a rank's own part, for the time of a step without communication."""
    from deepspeed.comm import comm

    class Done:
        def wait(self) -> None:
            """Nothing is in flight."""

    def gather(output_tensor: Any, input_tensor: Any, **_: Any) -> Done:
        output_tensor.view(world.size, -1).copy_(input_tensor.view(1, -1).expand(world.size, -1))
        return Done()

    def scatter(output_tensor: Any, input_tensor: Any, **_: Any) -> Done:
        output_tensor.copy_(input_tensor.view(world.size, -1)[world.rank].view_as(output_tensor))
        return Done()

    backend: Any = comm.cdb
    backend.all_gather_into_tensor, backend.reduce_scatter_tensor = gather, scatter
    for name in ("all_reduce", "reduce", "broadcast"):
        setattr(backend, name, lambda *_, **__: Done())


if __name__ == "__main__":
    folder = Path(os.environ["OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[1:2] == ["--rank-of"]:
        rank_of(sys.argv[2], folder)
    else:
        drive(sys.argv[1:] or list(GROUPS), folder)
