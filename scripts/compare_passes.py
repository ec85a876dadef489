"""Compares the passes of ``train.graph`` with ordinary ones, on the bundled teacher and its farskip conversion.

    python scripts/compare_passes.py OUT.json [--device cuda] [--rows 2] [--seq 128] [--steps 3] [--lr 0.05]

A step sums the gradients of three micro-batches and is taken by SGD. Each loop begins with the same weights:

    ordinary  bf16, the loss at the positions that count
    fixed     bf16, the passes on fixed buffers, without capture
    captured  the same passes as CUDA graphs, on a GPU
    fp32      ordinary passes in fp32

OUT.json holds, for pairs of loops and each step, how many tensors have equal bits, the largest difference of a loss
relative to it, and the median and the largest difference of a gradient relative to its norm.
"""

import argparse
import json
import statistics
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fcsd.bench.out_file import out_file
from fcsd.config import Objective
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.step.engine import Student
from fcsd.distill.step.graphs import FixedPasses
from fcsd.distill.teacher.targets import live_teacher
from fcsd.kernels.packed_attention import document_borders, use_packed_attention
from fcsd.launch.environment import snapshot
from fcsd.models.build import decoder_layers, load_model, wire
from fcsd.models.wiring import Wiring

TERMS = {"kl": 1.0, "sft": 0.5}
MICRO_BATCHES = 3  # the number of each is also about the number of borders inside of its rows


def micro_batch(number: int, options: argparse.Namespace) -> dict[str, Tensor]:
    """Random token ids and documents; every fifth position does not count."""
    generator = torch.Generator().manual_seed(number)
    rows = []
    for _ in range(options.rows):
        cuts = sorted(torch.randint(1, options.seq, (number,), generator=generator).unique().tolist())
        edges = [0, *cuts, options.seq]
        rows.append(torch.cat([torch.arange(end - start) for start, end in pairwise(edges)]))
    positions = torch.stack(rows)
    ids, labels = (torch.randint(3, 2000, positions.shape, generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE
    columns = {"input_ids": ids, "position_ids": positions, "labels": labels, "borders": document_borders(positions)}
    columns["kept"] = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    return {name: column.to(options.device) for name, column in columns.items()}


def loop(kind: str, options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """The losses and the summed gradients of each step, by name."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    model, original = (load_model("assets/teacher", dtype=dtype, device=options.device) for _ in range(2))
    for each in (model, original):
        assert use_packed_attention(each)
    wire(model, Wiring("farskip", tuple(range(len(decoder_layers(model))))))
    objective = Objective(kl=TERMS["kl"], sft=TERMS["sft"])
    student, teacher = Student(model, objective).train(), live_teacher(original.requires_grad_(False), objective)
    held: list[Any] = [p.view_as(p).grad_fn for p in model.parameters()]  # DeepSpeed's hooks hold these nodes, too
    if kind in ("fixed", "captured"):
        student.fixed = FixedPasses(student, teacher, capture=kind == "captured")
    denominator = torch.tensor(options.rows * options.seq, device=options.device)
    steps = []
    for _ in range(options.steps):
        found = {}
        for number in range(MICRO_BATCHES):
            batch = micro_batch(number, options)
            terms = student(batch, None if student.fixed else teacher(batch, ()), denominator, tuple(TERMS))
            torch.stack([weight * terms[name] for name, weight in TERMS.items()]).sum().backward()
            found |= {f"loss {number} {name}": terms[name].detach().clone() for name in TERMS}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= options.lr * parameter.grad
            parameter.grad = None
        steps.append(found)
    del held
    return steps


def compared(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    """How far ``left`` is from ``right`` in each step."""
    lines = []
    for found, expected in zip(left, right, strict=True):
        apart = {n: ((found[n].double() - x.double()).norm() / x.double().norm()).item() for n, x in expected.items()}
        gradients = {name: value for name, value in apart.items() if not name.startswith("loss")}
        largest = max(gradients, key=lambda name: gradients[name])
        lines.append(
            {
                "equal": sum(torch.equal(found[name], tensor) for name, tensor in expected.items()),
                "tensors": len(expected),
                "largest_loss": max(value for name, value in apart.items() if name.startswith("loss")),
                "median_gradient": statistics.median(gradients.values()),
                "largest_gradient": [largest, gradients[largest]],
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=out_file)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    kinds = ["ordinary", "fixed", "fp32", *(["captured"] if options.device == "cuda" else [])]
    loops = {kind: loop(kind, options) for kind in kinds}
    pairs = [("fixed", "ordinary"), ("ordinary", "fp32"), ("fixed", "fp32"), ("captured", "fixed")]
    results = {f"{a} and {b}": compared(loops[a], loops[b]) for a, b in pairs if a in loops}
    losses = [{name: x.item() for name, x in step.items() if name.startswith("loss")} for step in loops["fp32"]]
    given = vars(options) | {"out": options.out.name}
    text = {"environment": snapshot(), "options": given, "losses_fp32": losses, "pairs": results}
    options.out.write_text(json.dumps(text, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
