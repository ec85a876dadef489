"""Tiny models whose experts the ranks of the default group divide, and their training."""

from collections.abc import Callable, Iterable
from typing import Any

import tiny
import torch.distributed as dist

from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of
from fcsd.parallel.expert.autoep import allow_string_keys, expert_parallel_config, shard_experts


def sharded(arch: str, **changes: Any) -> Any:
    """A model in training mode; ``changes`` are fields of its config."""
    model = tiny.model(arch, **changes)
    shard_experts(model, arch_of(model.config), dist.get_world_size())
    return model.train()


def losses(stage: int, overlapped: Callable[[Any], None], seeds: Iterable[int], recompute: bool = False) -> list[float]:
    """The loss of each micro-batch of ``tiny.tokens``, two a step, under DeepSpeed with this stage of ZeRO."""
    import deepspeed

    model = tiny.model("deepseek_v2").train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "expert_parallel": expert_parallel_config(ARCHS["deepseek_v2"], dist.get_world_size()),
    }
    allow_string_keys()
    engine: Any = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    overlapped(engine.module)
    found = []
    for seed in seeds:
        ids = tiny.tokens(seed=seed)
        loss = engine(ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found
