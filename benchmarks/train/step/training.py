"""The training step of an expert-parallel MoE of random weights: forward, backward, and AdamW under ZeRO-1.

The learning rate is zero, so every variant routes the same tokens through the same weights. Before the variants are
timed under a router,

- the rows that dispatch sends with and without deduplication are counted and printed,
- the loss and the gradients of each overlapped variant are compared with those of the same computation under the
  eager-sync schedule. Fused variants are compared with fused ones, and variants in quantised communication or with
  another deduplication with the same.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.train.step import row_counts
from benchmarks.train.step.model import in_phases, make_engine
from benchmarks.train.step.variants import eager_name, variants
from benchmarks.train.step.workload import COPIES, Workload
from benchmarks.turns import reset_peak
from studies.formats.directions import parse_formats
from torch import Tensor

from fcsd.bench.runner import finished, say
from fcsd.distill.train_engine import TrainEngine
from fcsd.errors import ConfigError
from fcsd.launch.world import World, barrier
from fcsd.parallel.expert.dispatcher import check_formats
from fcsd.parallel.expert.hierarchical import dispatcher_of
from fcsd.parallel.quantised import Quantiser
from fcsd.parallel.transports.transport import Traffic


class Training:
    """The ``Steps`` of training; see ``measure.Steps``.

    Raises:
        ConfigError: a variant copies rows into the memory of other processes, and there are no GPUs; the ranks are not
            several whole nodes of ``load.node_size``; or the rows of the model cannot be rounded to a format.
    """

    full_speed: float | None = None

    def __init__(self, load: Workload, world: World) -> None:
        if world.device.type != "cuda" and any(COPIES in name for name in load.variants):
            hint = "leave out the variants named copies"
            raise ConfigError("only GPUs copy rows into each other's memory", hint)
        dedups = (load.dedup, *load.more_dedups)
        dispatchers = {dedup: dispatcher_of(dedup, world.size, load.node_size) for dedup in dedups}
        config = load.config
        formats_by_name = {name: parse_formats(name) for name in load.formats}
        for formats in formats_by_name.values():
            check_formats(formats, config, load.shape)
        choices: Any = {"recompute": load.recompute, "optimizer": load.optimizer}
        engine, model = make_engine(config, load.micro_batch, world, **choices)
        self._load, self._world, self._engine, self.models = load, world, in_phases(engine), [model]
        self.batch_tokens = world.size * load.micro_batch * load.seq
        generator = torch.Generator().manual_seed(world.rank)
        size, vocabulary = (load.micro_batch, load.seq), self.models[0].config.vocab_size
        self._ids = torch.randint(0, vocabulary, size, generator=generator).to(world.device)
        self._traffic = Traffic()
        self._choices = variants(self.models[0], load, dispatchers[load.dedup], self._traffic)
        for name, (base, dedup, format) in load.changed.items():
            changes: dict[str, Any] = {} if dedup is None else {"dispatcher": dispatchers[dedup]}
            changes |= {} if format is None else {"quantiser": Quantiser(formats_by_name[format])}
            self._choices[name] = partial(self._choices[base], **changes)
            self._choices[eager_name(name)] = partial(self._choices[eager_name(base)], **changes)

    def check(self) -> dict[str, Any]:
        """The ``rows`` that dispatch sends, and the ``equality`` of overlapped variants with eager-sync ones."""
        self.choose(self._load.variants[0])
        rows = row_counts.measure(self._engine, self.models[0], self._ids, self._load.node_size)
        say(self._world, row_counts.to_text(rows))
        equality = {name: self._held(name) for name in (*self._load.overlapped, *self._load.changed)}
        for name, held in equality.items():
            own = f"eager-sync against itself: {held['spread']:.2e}"
            say(self._world, f"{name} against eager-sync: {held['difference']:.2e} relative; {own}")
        for formats in self._load.formats:
            say(self._world, f"{formats}: {parse_formats(formats)}")
        return {"rows": rows, "equality": equality}

    def _held(self, name: str) -> dict[str, Any]:
        """Compares a variant with the same computation under the eager-sync schedule.

        Returns: the largest relative ``difference`` of loss and gradient norms; the ``spread``, which is the difference
            of two runs under the eager-sync schedule; and whether they count as ``equal``.
        """
        engine, ids = self._engine, self._ids
        self.choose(eager_name(name))
        reference, again = loss_and_norms(engine, ids), loss_and_norms(engine, ids)
        self.choose(name)
        spread = worst_difference(reference, again, self._world)
        error = worst_difference(reference, loss_and_norms(engine, ids), self._world)
        return {"difference": error, "spread": spread, "equal": error <= max(4 * spread, 1e-6)}

    def choose(self, variant: str) -> None:
        """Wires the model for a variant."""
        self._choices[variant]()

    def one(self) -> None:
        """Runs one step."""
        self._engine.backward(self._engine(self._ids))
        self._engine.step()

    def several(self, count: int) -> dict[str, Any]:
        """Runs a step that is not timed, then ``count`` timed ones.

        Returns: the ms of ``forward_backward`` and of the whole ``step``, and ``sent_bytes``, what this rank sends to
            others in dispatch and combine of a step (0 for variants that do not count it).
        """
        self._traffic.reset()
        self._timed()
        sent = self._traffic.sent
        reset_peak(self._world.device)
        passes, steps = zip(*(self._timed() for _ in range(count)), strict=True)
        return {"forward_backward": list(passes), "step": list(steps), "sent_bytes": sent}

    def _timed(self) -> tuple[float, float]:
        """Milliseconds of forward and backward, and of the whole step."""
        device = self._world.device
        barrier()
        start = finished(device)
        self._engine.backward(self._engine(self._ids))
        middle = finished(device)
        self._engine.step()
        return (middle - start) * 1e3, (finished(device) - start) * 1e3


def loss_and_norms(engine: TrainEngine, ids: Tensor) -> dict[str, float]:
    """Runs a step; returns its loss and the norm of every gradient on this rank, before averaging over the ranks.

    Args:
        ids: token ids ``[batch, seq]``.
    """
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
    """The largest relative difference of two results of ``loss_and_norms``, over all ranks."""
    assert one.keys() == other.keys()
    worst = max(abs(one[k] - other[k]) / max(abs(one[k]), 1e-30) for k in one)
    gathered = torch.tensor(worst, device=world.device)
    dist.all_reduce(gathered, dist.ReduceOp.MAX)
    return gathered.item()
