"""The model of the training step: random weights, experts divided over all ranks, an even router, and an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.distill.loss.losses import cross_entropy
from fcsd.distill.step.engine import import_deepspeed, phase, recompute_layers
from fcsd.launch.world import World
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.weights.random_init import random_expert_parallel

Engine = TypeVar("Engine")


class Decoder(nn.Module):
    """A module that takes token ids ``[batch, seq]`` and returns the mean next-token loss."""

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
    """A model without an engine: it runs forward and backward passes, and its step only drops the gradients."""

    def __init__(self, module: Decoder) -> None:
        self.module = module

    def __call__(self, *ids: Any) -> Tensor:
        return self.module(*ids)

    def backward(self, loss: Tensor, **_: Any) -> None:
        loss.backward()

    def step(self) -> None:
        self.module.zero_grad(set_to_none=True)


def in_phases(engine: Engine) -> Engine:
    """The engine, but each of its passes is recorded as a phase, which ``account`` reads."""
    return cast(Engine, _Phases(engine))


class _Phases:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *arguments: Any) -> Any:
        with phase("student"):
            return self._engine(*arguments)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        with phase("backward"):
            return self._engine.backward(*arguments, **options)

    def step(self) -> Any:
        with phase("optimizer"):
            return self._engine.step()


def make_engine(
    config: PretrainedConfig, micro_batch: int, world: World, *, recompute: bool, optimizer: bool
) -> tuple[Any, PreTrainedModel]:
    """Builds a DeepSpeed engine and in it a model of random weights, with ZeRO-1 and AdamW, whose learning rate is 0.

    The weights do not depend on the number of ranks.

    Args:
        micro_batch: sequences per rank and step.
        recompute: whether activation checkpointing recomputes every layer.
        optimizer: whether to build the engine; without it, the result only runs forward and backward passes.
    """
    deepspeed = import_deepspeed()
    on_cuda = world.device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    model = random_expert_parallel(config, dtype=dtype, device=world.device, ep_size=world.size, seed=0).train()
    if recompute:
        recompute_layers(model)
    decoder = Decoder(model)
    if not optimizer:
        return _Bare(decoder), model
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": on_cuda},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True, "fused": True}},
    }
    parameters: Any = list(decoder.parameters())
    return deepspeed.initialize(model=decoder, model_parameters=parameters, config=settings)[0], model


@contextmanager
def evenly_routed(model: nn.Module) -> Iterator[None]:
    """Makes every router choose the experts in turn, so that all of them receive equally many tokens.

    The k-th choice of token t is the expert at place ``t + shift[k]`` of a random order of the experts. The experts of
    a token are therefore spread over the ranks as under random routing, which matters for deduplication. The routers
    still compute their scores.
    """

    def in_turn(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        scores, chosen, counts = output
        key = len(counts), len(chosen)
        if key not in choices:
            choices[key] = choose(*key, chosen.shape[1], counts.dtype)
        return scores, *choices[key]

    def choose(number: int, tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        order, shift = orders[number], shifts[number][:top_k]
        experts = order[(torch.arange(tokens, device=device).unsqueeze(1) + shift) % number]
        rounds, rest = divmod(tokens, number)
        # The counts follow from numbers that the host has. Counting on the device would make the host wait for it.
        places = torch.arange(number, device=device).unsqueeze(1)
        by_place = top_k * rounds + ((places - shift) % number < rest).sum(dim=1)
        return experts, by_place[order.argsort()].to(dtype)

    blocks = expert_blocks(model).values()
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    numbers = sorted({block.placement.experts for block in blocks})
    orders = {number: torch.randperm(number, generator=generator).to(device) for number in numbers}
    shifts = {number: torch.randperm(number, generator=generator).to(device) for number in numbers}
    # By experts and tokens: every pass makes the same choice, and to compute it again would keep the host busy.
    choices: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    hooks = [block.router.register_forward_hook(in_turn) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
