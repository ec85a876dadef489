"""Measures untrained conversions with and without a solved start (``init.solve``): the loss on a text, and KL.

    python scripts/solved_start.py --out docs/results/solved_start_cpu.json

For each choice of layers the model is converted and corrected on calibration text. Then the loss and the divergence
from the original, both in nats per token, are measured on other text. Texts are packed into rows; a standard error is
that over rows. Differences from the uncorrected conversion are paired by row.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from fcsd.bench.out_file import out_file
from fcsd.disk import write_text
from fcsd.eval.perplexity import read_texts
from fcsd.eval.statistics import estimate, paired_difference
from fcsd.models.build import decoder_layers, decoder_of, load_model, wire
from fcsd.models.selection import select_layers
from fcsd.models.solved import solve_start
from fcsd.models.wiring import Wiring

ROW, BATCH = 512, 8
HOW = ("none", "norms", "linear")


def packed(path: Path, tokenizer: Any, tokens: int) -> Tensor:
    """Rows of token ids ``[rows, ROW]`` from the first documents of a text, at most ``tokens`` in all."""
    ids: list[int] = []
    for text in read_texts(path):
        ids += [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= tokens:
            break
    rows = min(tokens, len(ids)) // ROW
    return torch.tensor(ids[: rows * ROW]).view(rows, ROW)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """``[rows, ROW, vocab]`` on the CPU."""
    return torch.cat([model(ids, use_cache=False).logits.float().log_softmax(-1).cpu() for ids in rows.split(BATCH)])


def losses(found: Tensor, original: Tensor, rows: Tensor) -> tuple[list[float], list[float]]:
    """The mean loss and the mean KL(original ‖ found) of each row."""
    nll = -found[:, :-1].gather(-1, rows[:, 1:, None].cpu()).squeeze(-1).mean(1)
    kl = (original.exp() * (original - found)).sum(-1).mean(1)
    return nll.tolist(), kl.tolist()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What the file ``--out`` holds."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    calibration, text = (packed(path, tokenizer, args.tokens) for path in (args.calibration, args.text))
    calibration, text = calibration.to(args.device), text.to(args.device)
    original = load_model(args.model, dtype=torch.float32, device=args.device)
    reference = log_probabilities(original, text)
    batches = [({"ids": ids}, torch.ones_like(ids, dtype=torch.bool)) for ids in calibration.split(BATCH)]
    lines: list[dict[str, Any]] = []
    for layers in args.layers:
        wiring = Wiring(args.wiring, select_layers(layers, len(decoder_layers(original))))
        plain: dict[str, list[float]] = {}
        for how in HOW:
            model = wire(load_model(args.model, dtype=torch.float32, device=args.device), wiring)
            began = time.perf_counter()
            if how != "none":
                forward = lambda m, batch: decoder_of(m)(batch["ids"], use_cache=False)  # noqa: E731
                solve_start(model, original, batches, how, forward)
            seconds = time.perf_counter() - began
            nll, kl = losses(log_probabilities(model, text), reference, text)
            found = {"loss": nll, "kl": kl}
            plain = plain or found
            line: dict[str, Any] = {"layers": layers, "solve": how, "seconds": round(seconds, 1)}
            for name, items in found.items():
                line[name] = estimate(items)
                line[f"{name}_change"] = paired_difference(items, plain[name])
            lines.append(line)
            print(json.dumps(line), flush=True)
    return {
        "model": str(args.model),
        "wiring": args.wiring,
        "original_loss": estimate(losses(reference, reference, text)[0]),
        "calibration": {"text": str(args.calibration), "tokens": calibration.numel()},
        "text": {"text": str(args.text), "tokens": text.numel()},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "lines": lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("assets/teacher"))
    parser.add_argument("--wiring", default="farskip")
    parser.add_argument("--layers", nargs="+", default=["all", "50%"], help="as `fcsd convert --layers` takes them")
    parser.add_argument("--calibration", type=Path, default=Path("assets/corpus/train.parquet"))
    parser.add_argument("--text", type=Path, default=Path("assets/corpus/held_out.jsonl"))
    parser.add_argument("--tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=out_file, required=True)
    args = parser.parse_args()
    write_text(args.out, json.dumps(measure(args), indent=1) + "\n")


if __name__ == "__main__":
    main()
