"""Trains tiny models with the layers of deepseek_v4, rewires them by every choice, and heals each from its original.

    python -m studies.hyper_connections.measure --out benchmarks/results/hyper_connections_cpu.json

For each seed a standard model is trained on the bundled text, byte by byte. Every wiring with every choice is then
compared with it on held-out text: before any training, and after the same steps on the same batches, each by the KL
divergence from the standard model. A model of one seed that was not trained at all is compared as well.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
import transformers
from studies.hyper_connections.wired import CHOICES, wire
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from fcsd.models.wiring_block import Wiring

LAYERS, STREAMS, SEQ, BATCH = 4, 4, 128, 8
TRAIN, HEAL, SEEDS, HELD_OUT = 600, 150, 3, 64  # steps, steps, seeds, rows of SEQ bytes
WIRINGS = ("ladder", "farskip")


def config(streams: int, layers: int = LAYERS, **changes: Any) -> DeepseekV4Config:
    """A tiny deepseek_v4 with all of its kinds of attention, in turns."""
    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    fields = dict(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=8,
        layer_types=[kinds[i % 3] for i in range(layers)],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        mlp_layer_types=["moe"] * layers,
        hc_mult=streams,
        hc_sinkhorn_iters=6,  # of 20, which would be half of the time
        sliding_window=32,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        partial_rotary_factor=0.5,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    return DeepseekV4Config(**(fields | changes))


def start_as_residual(model: Any) -> None:
    """Let streams start nearly apart, each read mostly by every n-th sub-block, as hyper-connections are published.

    transformers sets the constant part of all weights to zero, which averages the streams in every sub-block.
    """
    n = model.config.hc_mult
    for k, layer in enumerate(model.model.layers):
        for j, hc in enumerate((layer.attn_hc, layer.ffn_hc)):
            base = torch.cat([torch.full((n,), -2.0), torch.zeros(n), 4 * torch.eye(n).flatten()])
            base[(2 * k + j) % n] = 2.0
            hc.base.data.copy_(base)


def batches(text: Tensor, steps: int, seed: int) -> Any:
    """Random pieces of a text ``[bytes]``, each batch ``[BATCH, SEQ]``; the same for the same seed."""
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SEQ, (BATCH,), generator=order)
        yield torch.stack([text[i : i + SEQ] for i in starts.tolist()])


def train(model: Any, text: Tensor, steps: int, seed: int, rate: float, teacher: Any = None) -> None:
    """Train by the next byte, or by the KL divergence from a teacher's next bytes."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    ease = lambda step: min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, ease)
    for ids in batches(text, steps, seed):
        logits = model(ids, use_cache=False).logits
        if teacher is None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        else:
            with torch.no_grad():
                known = teacher(ids, use_cache=False).logits
            loss = divergence(known, logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean KL divergence in nats per byte of logits ``[batch, seq, vocab]``."""
    known, own = (logits.flatten(0, 1).log_softmax(-1) for logits in (teacher, student))
    return F.kl_div(own, known, reduction="batchmean", log_target=True)


@torch.no_grad()
def logits_of(model: Any, rows: Tensor) -> Tensor:
    """Logits of rows ``[rows, seq]``, a batch at a time."""
    return torch.cat([model(ids, use_cache=False).logits for ids in rows.split(BATCH)])


def moved(model: Any, rows: Tensor) -> float:
    """The share of a stream that H_res moves to other streams, on average over sub-blocks and tokens."""
    found: list[Tensor] = []
    hooks = [
        hc.register_forward_hook(lambda _, __, out: found.append(1 - out[1].diagonal(dim1=-2, dim2=-1).mean()))
        for layer in model.model.layers
        for hc in (layer.attn_hc, layer.ffn_hc)
    ]
    logits_of(model, rows)
    for hook in hooks:
        hook.remove()
    return float(torch.stack(found).mean())


def measure(streams: int, seed: int, text: Tensor, rows: Tensor, steps: int, heal: int) -> list[dict[str, Any]]:
    """One seed: the standard model, and each wiring with each choice."""
    torch.manual_seed(seed)
    trained = steps > 0
    model: Any = DeepseekV4ForCausalLM(config(streams, initializer_range=0.02 if trained else 0.1)).eval()
    start_as_residual(model)
    if trained:
        train(model, text, steps, seed, 3e-3)
    known = logits_of(model, rows)
    loss = float(F.cross_entropy(known[:, :-1].flatten(0, 1), rows[:, 1:].flatten()))
    own = {"streams": streams, "seed": seed, "steps": steps, "loss": loss, "moved": moved(model, rows[:BATCH])}
    runs = []
    for wiring in WIRINGS:
        for name, choice in CHOICES.items():
            student = deepcopy(model)
            wire(student, Wiring(wiring, tuple(range(LAYERS))), choice)
            run = {**own, "wiring": wiring, "choice": name, "kl": float(divergence(known, logits_of(student, rows)))}
            if trained:
                train(student, text, heal, 1000 + seed, 1e-3, model)
                run["kl_healed"] = float(divergence(known, logits_of(student, rows)))
            runs.append(run)
            print({key: round(v, 4) if isinstance(v, float) else v for key, v in run.items()}, flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    assets = Path(__file__).resolve().parents[2] / "assets/corpus"
    train_text = "\n\n".join(pyarrow.parquet.read_table(assets / "train.parquet")["text"].to_pylist())
    lines = (assets / "held_out.jsonl").read_text().splitlines()
    text, held = (as_bytes(t) for t in (train_text, "\n\n".join(json.loads(line)["text"] for line in lines)))
    rows = held[: len(held) // SEQ * SEQ].view(-1, SEQ)
    rows = rows[:: len(rows) // HELD_OUT][:HELD_OUT]
    start, runs = time.time(), []
    result = {
        "command": "python -m studies.hyper_connections.measure --out benchmarks/results/hyper_connections_cpu.json",
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} thread",
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {
            "layers": LAYERS,
            "bytes_a_step": SEQ * BATCH,
            "heal": HEAL,
            "train": TRAIN,
            "held_out_bytes": rows.numel(),
        },
        "runs": runs,
    }
    for seed in range(SEEDS):
        for steps in (0, TRAIN):
            runs += measure(STREAMS, seed, text, rows, steps, HEAL)
            result["seconds"] = round(time.time() - start)
            out.write_text(json.dumps(result, indent=1) + "\n")


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.long)


if __name__ == "__main__":
    sys.exit(main())
