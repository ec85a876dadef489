"""Train the bundled teacher: a mixture-of-experts model in the deepseek_v2 layout, on one GPU.

    python scripts/teacher/train.py --out OUT --minutes 7

reads assets/teacher (tokenizer) and runs/teacher/*.jsonl (see corpus.py); writes a HF directory.
The learning rate follows the clock, so the run ends on time with the rate at zero.
"""

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy
import torch
from items import documents
from torch.nn import functional
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

ROW = 1024  # tokens per training row
ANSWER_WEIGHT = 4.0  # loss weight of answer tokens; every other token has weight 1
AUX_WEIGHT = 0.01  # load balancing
TEXT_SHARE = 0.25  # rows of real text, the others are generated documents
Stream = tuple[numpy.ndarray, numpy.ndarray]  # token ids (uint16), answer flags (bool), both [tokens]


def config(tokenizer: PreTrainedTokenizerFast) -> DeepseekV2Config:
    """Ten layers, the first dense, the others with 8 routed experts (2 used) and 2 shared ones."""
    return DeepseekV2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        head_dim=16,
        v_head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def dense_experts(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every expert for every token ``[tokens, hidden]``, weighted by zero where not chosen.

    This computes the same function as routing. At this size it is faster, because it needs two matrix products and no
    gathering.
    """
    gates = torch.zeros(len(hidden), self.num_experts, device=hidden.device, dtype=weight.dtype)
    gates = gates.scatter(1, index, weight)
    gate, up = (
        functional.linear(hidden, self.gate_up_proj.flatten(0, 1)).unflatten(1, (self.num_experts, -1)).chunk(2, -1)
    )
    inner = self.act_fn(gate) * up * gates.unsqueeze(-1).to(up.dtype)
    return functional.linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


def encode(tokenizer_file: str, seed: int, count: int) -> Stream:
    """``count`` generated documents as one stream. Their pieces are encoded separately, as lm-eval does."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file)
    pieces: list[tuple[str, bool]] = []
    for document in documents("train", seed, count):
        pieces += [("<s>", False), *document, ("</s>", True)]
    return _stream(tokenizer, pieces)


def _stream(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> Stream:
    encoded = tokenizer([text for text, _ in pieces], add_special_tokens=False, return_attention_mask=False)[
        "input_ids"
    ]
    ids = numpy.concatenate([numpy.array(e, dtype=numpy.uint16) for e in encoded])
    flags = numpy.repeat([answer for _, answer in pieces], [len(e) for e in encoded])
    return ids, flags


def encode_text(tokenizer: PreTrainedTokenizerFast, path: Path) -> Stream:
    """Every text of a jsonl file as one stream without answers."""
    texts = [json.loads(line)["text"] for line in path.open()]
    return _stream(tokenizer, [(f"<s>{text}</s>", False) for text in texts])


def generate(tokenizer_file: str, count: int, workers: int) -> Stream:
    """``count`` generated documents, made by ``workers`` processes."""
    jobs = workers * 4
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(encode, repeat(tokenizer_file, jobs), range(100, 100 + jobs), repeat(count // jobs)))
    return numpy.concatenate([p[0] for p in parts]), numpy.concatenate([p[1] for p in parts])


class Rows:
    """Random rows of a stream on the device: ids ``[rows, ROW + 1]``, loss weights ``[rows, ROW]``."""

    def __init__(self, stream: Stream, device: str):
        self.ids = torch.from_numpy(stream[0].astype(numpy.int16)).to(device)  # the vocabulary is below 2**15
        self.flags = torch.from_numpy(stream[1]).to(device)

    def draw(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.randint(len(self.ids) - ROW, (rows, 1), device=self.ids.device)
        at = start + torch.arange(ROW + 1, device=self.ids.device)
        return self.ids[at].long(), 1 + (ANSWER_WEIGHT - 1) * self.flags[at[:, 1:]]


def balance_loss(routed: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Mean over layers of experts * sum(share of tokens * mean probability); 1 when all experts are used equally."""
    losses = []
    for logits, index in routed:
        share = functional.one_hot(index, logits.shape[-1]).float().mean((0, 1))
        losses.append(logits.shape[-1] * (share * logits.float().softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


def loss_of(model: torch.nn.Module, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross-entropy of the next token, in nats."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / weights.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("assets/teacher"))
    parser.add_argument("--text", type=Path, default=Path("runs/teacher"))
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--rows", type=int, default=128, help=f"rows of {ROW} tokens per step")
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    began = time.time()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    made = generate(str(args.tokenizer / "tokenizer.json"), args.documents, args.workers)
    text = encode_text(tokenizer, args.text / "train.jsonl")
    held_out = encode_text(tokenizer, args.text / "held_out.jsonl")
    print(f"tokens: {len(made[0])} generated, {len(text[0])} text; {time.time() - began:.0f} s", flush=True)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    streams = {name: Rows(s, args.device) for name, s in {"made": made, "text": text, "held_out": held_out}.items()}
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    model = DeepseekV2ForCausalLM(config(tokenizer)).to(args.device)
    model.set_experts_implementation("dense")
    print(f"parameters: {sum(p.numel() for p in model.parameters())}", flush=True)
    routed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _m, _in, out: routed.append((out[0], out[2])))
    train(model, streams, routed, args)
    save(model, tokenizer, args.out)


def train(model, streams: dict[str, Rows], routed: list, args: argparse.Namespace) -> None:
    """Train until the time is over; print one JSON object every 100 steps."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")

    def objective(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed.clear()
        loss = loss_of(model, ids, weights)
        return loss, balance_loss(routed)

    step_loss = torch.compile(objective) if args.compile else objective
    text_rows = max(1, round(TEXT_SHARE * args.rows))
    began, step, progress = time.time(), 0, 0.0
    while progress < 1:
        drawn = [streams["made"].draw(args.rows - text_rows), streams["text"].draw(text_rows)]
        ids, weights = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        rate = args.lr * min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss, balance = step_loss(ids, weights)
        (loss + AUX_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 1:
            began = time.time()  # compilation is not training time
        progress = (time.time() - began) / (60 * args.minutes)
        if step % 100 == 0 or progress >= 1:
            seconds = time.time() - began
            record = {"step": step, "tokens": step * args.rows * ROW, "seconds": round(seconds, 1)}
            record |= {
                "loss": loss.item(),
                "balance": balance.item(),
                "held_out": measure(model, streams, args),
            }
            print(json.dumps(record), flush=True)


@torch.no_grad()
def measure(model, streams: dict[str, Rows], args: argparse.Namespace) -> float:
    """Loss on rows of held-out text, in nats per token."""
    with torch.autocast(args.device, dtype=torch.bfloat16):
        ids, weights = streams["held_out"].draw(min(args.rows, 32))
        return loss_of(model, ids, weights).item()


def save(model, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """An ordinary HF directory in bf16: config.json, model.safetensors and the tokenizer."""
    model.config._experts_implementation = None
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
