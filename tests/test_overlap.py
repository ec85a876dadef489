"""Overlapped expert parallelism is the blocking one to the last bit, leaks nothing, and runs in the paper's order."""

import gc
import random
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import on_ranks

from fcsd.errors import ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, decoder_layers, unwired, wire
from fcsd.models.wiring import Wiring
from fcsd.parallel import overlap as overlap_module
from fcsd.parallel.autoep import shard_experts
from fcsd.parallel.overlap import Schedule, overlap

MOE = [a for a in tiny.CONFIGS if ARCHS[a].autoep is not None]
ALL = (0, 1, 2, 3)
FARSKIP = Wiring("farskip", ALL)
WIRINGS = [
    FARSKIP,
    Wiring("farskip", (2, 3)),
    Wiring("farskip", ALL, variant="attn-only"),
    Wiring("farskip", ALL, variant="mlp-only"),
    Wiring("ladder", ALL),
    Wiring("ladder", (1, 3)),
    Wiring("ladder", ALL, variant="attn-only"),
    Wiring("parallel", ALL),
    Wiring("standard", ()),
]


class _LateWork:
    """A collective whose result shows only once it is awaited: until then the receive buffer holds NaN."""

    def __init__(self, work, arrived, received, sent):
        self.work, self.arrived, self.received, self.sent = work, arrived, received, sent
        self.copy = sent.clone()

    def wait(self):
        time.sleep(random.random() * 2e-3)
        self.work.wait()
        assert torch.equal(self.sent, self.copy), "rows were overwritten while they were sent"
        self.received.copy_(self.arrived)


@contextmanager
def _late_collectives():
    real = dist.all_to_all_single

    def late(*args, async_op=False, **kwargs):
        if not async_op:
            return real(*args, **kwargs)
        received, sent, *sizes = args
        arrived = torch.empty_like(received)
        received.fill_(float("nan"))
        return _LateWork(real(arrived, sent, *sizes, async_op=True, **kwargs), arrived, received, sent)

    dist.all_to_all_single = late
    try:
        yield
    finally:
        dist.all_to_all_single = real


def _sharded(arch: str, **changes):
    model = tiny.model(arch, **changes)
    shard_experts(model, arch_of(model.config), dist.get_world_size())
    return model.train()


def _run(model, batches, **forward):
    """Logits and gradients of every parameter after one backward pass per batch."""
    model.zero_grad()
    logits = []
    for ids in batches:
        out = model(ids, labels=ids, use_cache=False, **forward)
        out.loss.backward()
        logits.append(out.logits.detach().clone())
    return logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _difference(one, other) -> str | None:
    if not all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)):
        return "logits"
    if one[1].keys() != other[1].keys():
        return f"gradients of {sorted(one[1].keys() ^ other[1].keys())}"
    return next((name for name in one[1] if not torch.equal(one[1][name], other[1][name])), None)


def _compare(model, wiring, batches, case, problems, choose=None):
    """Overlapped and eager-sync against blocking, collectives arriving as late as they may."""
    overlap(model, wiring, "off")
    blocking = _run(model, batches)
    for mode in ("on", "eager-sync"):
        overlap(model, wiring, mode, *([] if choose is None else [choose]))
        with _late_collectives():
            difference = _difference(blocking, _run(model, batches))
        if difference:
            problems.append(f"{case} {wiring.name} {wiring.variant} {wiring.layers} {mode}: {difference}")


def _every_architecture(rank: int, arches: list[str]) -> list[str]:
    random.seed(rank)
    problems: list[str] = []
    batch = tiny.tokens(seed=10 + rank, length=8 + 4 * rank)  # ranks hold different numbers of tokens
    for arch in arches:
        model = _sharded(arch)
        for wiring in WIRINGS if arch in THOROUGH else WIRINGS[:1]:
            _compare(model, wiring, [batch], arch, problems)
    return problems


def _every_situation(rank: int, arches: list[str]) -> list[str]:
    """Recompute, accumulation, one token, no token for most ranks, top-1, other schedules."""
    random.seed(rank)
    problems: list[str] = []
    batches = [tiny.tokens(seed=10 * i + rank, length=6 + 4 * rank + i) for i in range(3)]
    for arch in arches:
        model = _sharded(arch)
        for wiring in WIRINGS[:1] + WIRINGS[4:5]:
            _compare(model, wiring, batches, f"{arch} accumulated", problems)
            _compare(model, wiring, [tiny.tokens(1, 1, seed=rank)], f"{arch} one token", problems)
        for place in ("before_attn", "after_core", "after_attn"):
            for covers in ("dispatch", "combine"):
                choose = lambda plan, default, p=place, c=covers: Schedule(p if plan.mlp else "after_attn", c)  # noqa: E731
                _compare(model, FARSKIP, batches[:1], f"{arch} {place} {covers}", problems, choose)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for wiring in WIRINGS:
            _compare(model, wiring, batches[:1], f"{arch} recomputed", problems)
        model.gradient_checkpointing_disable()
        for layer in decoder_layers(model):
            for name, parameter in layer.named_parameters():
                if "router.gate.weight" in name:
                    parameter.data.zero_()  # all scores alike: every token goes to the first experts, on rank 0
        _compare(model, FARSKIP, batches[:1], f"{arch} all on rank 0", problems)
        if arch != "llama4_text":
            _compare(_sharded(arch, num_experts_per_tok=1), FARSKIP, batches[:1], f"{arch} top-1", problems)
    return problems


THOROUGH = ("deepseek_v2", "qwen3_moe")


def test_every_architecture_and_wiring_is_blocking_to_the_last_bit():
    assert [p for rank in on_ranks(2, _every_architecture, MOE) for p in rank] == []


@pytest.mark.parametrize("world", [2, 4])
def test_every_situation_is_blocking_to_the_last_bit(world):
    arches = ["deepseek_v2", "qwen3_moe"] if world == 2 else ["deepseek_v2"]
    assert [p for rank in on_ranks(world, _every_situation, arches) for p in rank] == []
