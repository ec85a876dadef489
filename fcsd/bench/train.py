"""Training step of an expert-parallel MoE: stock, blocking, overlapped, and the bound without communication.

    torchrun --nproc-per-node 8 -m fcsd.bench.train --layers 8 --micro-batch 4

All variants run on one model, one DeepSpeed engine and one process group, interleaved, so that clocks and memory
drift alike for all. The learning rate is zero: every variant routes the same tokens through the same weights. Before
anything is timed, the overlapped schedule must give the loss and the gradients of its eager-sync self.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV2Config, PreTrainedModel

from ..distill.losses import cross_entropy
from ..models.build import arch_of, unwired, wire
from ..models.wiring import LayerWiring, Wiring
from ..parallel.autoep import allow_string_keys, expert_parallel_config
from ..parallel.deferred import Work
from ..parallel.overlap import Schedule, overlap


def deepseek_v2_lite(layers: int) -> DeepseekV2Config:
    """DeepSeek-V2-Lite with so many layers, the first of them dense."""
    return DeepseekV2Config(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        head_dim=64,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        max_position_embeddings=163840,
    )


class _Arrived:
    """Work that is done."""

    def wait(self) -> None: ...


class NoWire:
    """A transport that sends nothing: the rows it hands out have the right shape and finite values, at no cost."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def __call__(self, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> tuple[Tensor, Work]:
        count = sum(receives)
        if self._rows is None or self._rows.shape[0] < count:
            self._rows = torch.randn(2 * count, rows.shape[1], dtype=rows.dtype, device=rows.device)
        return self._rows[:count], _Arrived()


class _Decoder(nn.Module):
    """Token ids ``[batch, seq]`` to the summed next-token loss over ``denominator``."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config  # AutoEP reads the number of experts from it

    def forward(self, ids: Tensor) -> Tensor:
        model: Any = self.model
        hidden = model.model(ids, use_cache=False).last_hidden_state
        denominator = torch.tensor(float(ids.numel()), device=ids.device)
        return cross_entropy(hidden, model.lm_head.weight, ids, denominator=denominator, chunk_tokens=4096)


def variants(model: PreTrainedModel, layers: int) -> dict[str, Callable[[], Any]]:
    """Name -> what turns the model into that variant."""
    standard, farskip = unwired(), Wiring("farskip", tuple(range(layers)))
    no_wire = NoWire()

    def without_wire(_: LayerWiring, schedule: Schedule) -> Schedule:
        return replace(schedule, transport=no_wire)

    return {
        "stock AutoEP": lambda: wire(model, standard),
        "standard": lambda: overlap(model, standard, "eager-sync"),
        "farskip blocking": lambda: overlap(model, farskip, "eager-sync"),
        "farskip overlapped": lambda: overlap(model, farskip),
        "farskip comm-free": lambda: overlap(model, farskip, choose=without_wire),
    }


def build_engine(args: argparse.Namespace) -> Any:
    """A DeepSpeed engine, ZeRO-1 and bf16, experts spread over all ranks; random weights, the same everywhere."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(deepseek_v2_lite(args.layers), dtype=torch.bfloat16)
    if args.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    experts = {
        **expert_parallel_config(arch_of(model.config), dist.get_world_size()),
        "moe_layer_pattern": r"model\.model\.layers\.\d+\.mlp",
        "use_grouped_mm": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "expert_parallel": experts,
    }
    allow_string_keys()
    decoder = _Decoder(model.train())
    parameters: Any = list(decoder.parameters())
    engine, *_ = deepspeed.initialize(model=decoder, model_parameters=parameters, config=config)
    return engine


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


def worst_difference(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest relative difference of two fingerprints, over all ranks."""
    assert one.keys() == other.keys()
    worst = max(abs(one[k] - other[k]) / max(abs(one[k]), 1e-30) for k in one)
    gathered = torch.tensor(worst, device="cuda")
    dist.all_reduce(gathered, dist.ReduceOp.MAX)
    return gathered.item()


def timed_step(engine: Any, ids: Tensor) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of the whole step."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.backward(engine(ids))
    torch.cuda.synchronize()
    middle = time.perf_counter()
    engine.step()
    torch.cuda.synchronize()
    return (middle - start) * 1e3, (time.perf_counter() - start) * 1e3


def main() -> None:
    """Print one table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each variant in each round")
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    engine = build_engine(args)
    choices = variants(engine.module.model, args.layers)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, 102400, (args.micro_batch, args.seq), generator=generator).cuda()

    choices["farskip blocking"]()
    reference, again = fingerprint(engine, ids), fingerprint(engine, ids)
    choices["farskip overlapped"]()
    spread, error = worst_difference(reference, again), worst_difference(reference, fingerprint(engine, ids))
    say(f"overlapped against eager-sync: {error:.2e} relative; eager-sync against itself: {spread:.2e}")
    if error > max(4 * spread, 1e-6):
        raise SystemExit("the overlapped schedule computes something else")

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in choices}
    peaks: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, choose in choices.items():
            choose()
            timed_step(engine, ids)
            torch.cuda.reset_peak_memory_stats()
            times[name] += [timed_step(engine, ids) for _ in range(args.steps)]
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    say(f"{'':20s} {'fwd+bwd ms':>18s} {'step ms':>18s} {'peak GiB':>9s}")
    for name, measured in times.items():
        columns = [f"{statistics.median(c):9.1f} ± {spread_of(c):6.1f}" for c in zip(*measured, strict=True)]
        say(f"{name:20s} {columns[0]:>18s} {columns[1]:>18s} {peaks[name]:9.1f}")
    dist.destroy_process_group()


def spread_of(values: tuple[float, ...]) -> float:
    """Half the distance between the quartiles."""
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
