"""Training step of an expert-parallel MoE: stock, standard, blocking, overlapped, and the bound without communication.

All variants run on one model, one DeepSpeed engine and one process group, interleaved, so that clocks and memory
drift alike for all. The learning rate is zero: every variant routes the same tokens through the same weights. Before
anything is timed, the overlapped schedule must give the loss and the gradients of its eager-sync self.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from fcsd.bench import ceilings, trace
from fcsd.bench.ceilings import Meter, NoWire
from fcsd.bench.shapes import SHAPES
from fcsd.distill.engine import import_deepspeed
from fcsd.distill.losses import cross_entropy
from fcsd.errors import ConfigError, FcsdError
from fcsd.launch import World, join_world
from fcsd.models.build import unwired, wire
from fcsd.models.wiring import LayerWiring, Wiring
from fcsd.parallel.overlap import Schedule, overlap
from fcsd.parallel.random_init import random_expert_parallel

STOCK, OVERLAPPED, BOUND = "stock AutoEP", "farskip overlapped", "farskip comm-free"


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        shape: a name in ``fcsd.bench.shapes``.
        micro_batch: sequences of ``seq`` tokens per rank and step.
        router: ``initialised`` as the random weights have it, or ``uniform``: every expert gets as many tokens.
        recompute: activation checkpointing of every layer.
        optimizer: the whole step with AdamW under ZeRO-1; else forward and backward alone, without an engine.
        rounds, steps: timed steps of each variant are ``rounds`` times ``steps``, interleaved by round.
    """

    shape: str
    layers: int
    micro_batch: int
    seq: int
    router: str = "initialised"
    recompute: bool = False
    optimizer: bool = True
    rounds: int = 5
    steps: int = 3


def bench(load: Workload, out: Path | None = None, *, traced: bool = False) -> None:
    """Measures and prints on rank 0; every process of the run calls it.

    Args:
        out: directory for ``train.json`` and, with ``traced``, a Chrome trace of one overlapped step per rank.

    Raises:
        ConfigError: no such shape or router.
        FcsdError: the overlapped schedule computes something else than its eager-sync self.
    """
    if load.shape not in SHAPES or load.router not in ("initialised", "uniform"):
        raise ConfigError(f"{load.shape}, {load.router}: shapes are {', '.join(SHAPES)}; routers initialised, uniform")
    world = join_world()
    engine = _engine(load, world)
    model = engine.module.model
    choices = variants(model, load.layers)
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(0, model.config.vocab_size, (load.micro_batch, load.seq), generator=generator).to(world.device)

    meter = Meter()
    overlap(model, Wiring("farskip", tuple(range(load.layers))), choose=meter.choose)
    engine.backward(engine(ids))  # the first pass allocates and tunes
    engine.step()
    windows = meter.measure(lambda: engine.backward(engine(ids)))
    engine.step()
    _say(world, ceilings.to_text(windows))

    choices["farskip blocking"]()
    reference, again = fingerprint(engine, ids), fingerprint(engine, ids)
    choices[OVERLAPPED]()
    spread = worst_difference(reference, again, world)
    error = worst_difference(reference, fingerprint(engine, ids), world)
    _say(world, f"overlapped against eager-sync: {error:.2e} relative; eager-sync against itself: {spread:.2e}")
    if error > max(4 * spread, 1e-6):
        raise FcsdError("the overlapped schedule computes something else")

    measured = _time(engine, ids, choices, load, world)
    _say(world, table(measured))
    result = {"workload": asdict(load), "world": world.size, "variants": measured}
    result |= {"windows": [asdict(window) for window in windows], "difference": error, "spread": spread}
    if out is not None and traced:
        result["trace"] = _trace(engine, ids, choices[OVERLAPPED], out, world)
    if out is not None and world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "train.json").write_text(json.dumps(result, indent=1))


def variants(model: PreTrainedModel, layers: int) -> dict[str, Callable[[], Any]]:
    """Name -> what turns the model into that variant."""
    standard, farskip = unwired(), Wiring("farskip", tuple(range(layers)))
    no_wire = NoWire()

    def without_wire(_: LayerWiring, schedule: Schedule) -> Schedule:
        return replace(schedule, transport=no_wire)

    return {
        STOCK: lambda: wire(model, standard),
        "standard": lambda: overlap(model, standard, "eager-sync"),
        "farskip blocking": lambda: overlap(model, farskip, "eager-sync"),
        OVERLAPPED: lambda: overlap(model, farskip),
        BOUND: lambda: overlap(model, farskip, choose=without_wire),
    }


class _Decoder(nn.Module):
    """Token ids ``[batch, seq]`` to the mean next-token loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, ids: Tensor) -> Tensor:
        model: Any = self.model
        hidden = model.model(ids, use_cache=False).last_hidden_state
        denominator = torch.tensor(float(ids.numel()), device=ids.device)
        return cross_entropy(hidden, model.lm_head.weight, ids, denominator=denominator, chunk_tokens=4096)


class _Bare:
    """A model without an engine: forward and backward, and a step that only drops the gradients."""

    def __init__(self, module: _Decoder) -> None:
        self.module = module

    def __call__(self, ids: Tensor) -> Tensor:
        return self.module(ids)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.module.zero_grad(set_to_none=True)


def _engine(load: Workload, world: World) -> Any:
    """Random weights, the same for any number of ranks, with the experts spread over all of them."""
    deepspeed = import_deepspeed()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    on_cuda = world.device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    config = SHAPES[load.shape](load.layers)
    model = random_expert_parallel(config, dtype=dtype, device=world.device, ep_size=world.size, seed=0).train()
    if load.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if load.router == "uniform":
        spread_evenly(model)
    decoder = _Decoder(model)
    if not load.optimizer:
        return _Bare(decoder)
    settings = {
        "train_micro_batch_size_per_gpu": load.micro_batch,
        "bf16": {"enabled": on_cuda},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
    }
    parameters: Any = list(decoder.parameters())
    return deepspeed.initialize(model=decoder, model_parameters=parameters, config=settings)[0]


def spread_evenly(model: nn.Module) -> None:
    """Let every router choose experts in turn, so that all get as many tokens; scores and their cost stay."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, RouterOutput

    def in_turn(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        scores, chosen, counts = output
        experts = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % len(counts)
        return RouterOutput(scores, experts, torch.bincount(experts.flatten(), minlength=len(counts)).to(counts.dtype))

    for module in model.modules():
        if isinstance(module, AutoEPMoELayer):
            module.router.register_forward_hook(in_turn)


def fingerprint(engine: Any, ids: Tensor) -> dict[str, float]:
    """The loss and the norm of every gradient of this rank, before ranks are averaged."""
    seen: dict[str, Tensor] = {}
    hooks = [
        parameter.register_hook(lambda grad, name=name: seen.update({name: grad.double().norm()}))
        for name, parameter in engine.module.named_parameters()
    ]
    loss = engine(ids)
    engine.backward(loss)
    engine.step()
    for hook in hooks:
        hook.remove()
    return {"loss": loss.item(), **{name: norm.item() for name, norm in seen.items()}}


def worst_difference(one: dict[str, float], other: dict[str, float], world: World) -> float:
    """The largest relative difference of two fingerprints, over all ranks."""
    assert one.keys() == other.keys()
    worst = max(abs(one[k] - other[k]) / max(abs(one[k]), 1e-30) for k in one)
    gathered = torch.tensor(worst, device=world.device)
    dist.all_reduce(gathered, dist.ReduceOp.MAX)
    return gathered.item()


def _time(
    engine: Any, ids: Tensor, choices: dict[str, Callable[[], Any]], load: Workload, world: World
) -> dict[str, dict[str, Any]]:
    """By variant: ms of forward and backward and of the whole step, of every timed step; peak memory in GiB."""
    on_cuda = world.device.type == "cuda"
    measured: dict[str, dict[str, Any]] = {
        name: {"forward_backward": [], "step": [], "peak_gib": 0.0} for name in choices
    }
    for _ in range(load.rounds):
        for name, choose in choices.items():
            choose()
            _timed_step(engine, ids, world)
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(load.steps):
                both, whole = _timed_step(engine, ids, world)
                measured[name]["forward_backward"].append(both)
                measured[name]["step"].append(whole)
            if on_cuda:
                measured[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return measured


def _timed_step(engine: Any, ids: Tensor, world: World) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of the whole step."""

    def moment() -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    dist.barrier()
    start = moment()
    engine.backward(engine(ids))
    middle = moment()
    engine.step()
    return (middle - start) * 1e3, (moment() - start) * 1e3


def _trace(engine: Any, ids: Tensor, choose: Callable[[], Any], out: Path, world: World) -> dict[str, Any] | None:
    """Traces one step on every rank into ``out`` and says on rank 0 what it hides."""
    choose()
    engine.backward(engine(ids))
    engine.step()
    out.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])]
    dist.barrier()
    with profile(activities=activities) as profiler:
        engine.backward(engine(ids))
        engine.step()
    profiler.export_chrome_trace(str(out / f"rank-{world.rank}.json.gz"))
    dist.barrier()
    if world.rank or world.device.type != "cuda":
        return None
    traces = [trace.read(out / f"rank-{rank}.json.gz") for rank in range(world.size)]
    _say(world, trace.to_text(traces))
    return trace.to_json(traces)


def table(measured: dict[str, dict[str, Any]]) -> str:
    """A line per variant: medians ± half the distance between the quartiles, against stock and against the bound."""
    bound = statistics.median(measured[BOUND]["step"])
    stock = statistics.median(measured[STOCK]["step"])
    lines = [f"{'':20s} {'fwd+bwd ms':>18s} {'step ms':>18s} {'x stock':>8s} {'of bound':>9s} {'peak GiB':>9s}"]
    for name, found in measured.items():
        columns = [
            f"{statistics.median(found[k]):9.1f} ± {_spread(found[k]):6.1f}" for k in ("forward_backward", "step")
        ]
        step = statistics.median(found["step"])
        ratios = f"{stock / step:8.3f} {bound / step:9.1%}"
        lines.append(f"{name:20s} {columns[0]:>18s} {columns[1]:>18s} {ratios} {found['peak_gib']:9.1f}")
    return "\n".join(lines)


def _spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
