"""How far converted models with INT4 weights are from their original, beside INT4 alone, and where adapters should go.

    python -m studies.real quantised ORIGINAL OUT --text own=DIR [--text foreign=DIR] [--layers 50% last:27]
        [--ways layers,adapters,int4,int4-bf16-teacher] [--seeds 3] [--first-seed 0] [--questions FILE] [--tokens 3e6]
        [--group 64] [--rank 64] [--seconds 400]
    python -m studies.real quantised ORIGINAL OUT --table

The layers are converted to ladder and healed to the original on the text `own`, in four ways: `layers` trains the
converted layers themselves, `adapters` trains adapters beside them, `int4` trains adapters beside INT4 weights of the
original, whose teacher are the same INT4 weights in the standard wiring, and `int4-bf16-teacher` is `int4` with the
original as its teacher. INT4 weights are those of GPTQ (llm-compressor, in the wiring of the model that is quantised)
or rounded to nearest (`rtn`), both symmetric in groups of `--group` inputs.

`OUT/results.jsonl` receives a line for each form: KL(original || form) in nats per token on the held-out part of every
text, and the bytes of the whole model. A form that ends with `+gptq` or `+rtn` was healed first and quantised then.
`int4+beside` keeps its adapters beside the INT4 weights. With `--questions` (those of `questions`) every form that
is not rounded to nearest answers them. Seeds draw the order of the rows and the adapters. A training that would not end
within `--seconds` from the start of the program is not begun, and the last line says so.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.programs import TEXTS
from studies.real.questions import answers, gap, points, read, right_shares
from studies.real.rounded import to_int4
from studies.real.runner import divergences, loaded, store, stored, token_rows
from torch import Tensor, nn

from fcsd.distill.loss.losses import kl_divergence
from fcsd.errors import unknown_value
from fcsd.models.adapters.lora import add_adapters, merged_weight
from fcsd.models.build import arch_of, decoder_layers, decoder_of, wire
from fcsd.models.fused import fuse_parts
from fcsd.models.selection import select_layers
from fcsd.models.wiring import Wiring

WARMUP, LEAST = 0.1, 0.02  # shares of the steps and of the learning rate
RATES = {"layers": 1e-3, "adapters": 3e-3}
AT_ONCE = 16  # rows that pass a layer together while GPTQ reads them
ALPHA = 32.0  # as in the runs of docs/adapters.md
QUANTISES = 45.0  # seconds, at most, of what follows a training on one GPU: GPTQ and the divergences
LONGER = 1.3  # by how much a training of more layers may be longer
ALONE = ("original", "int4 alone")  # how forms begin that have no converted layers
WAYS = ("layers", "adapters", "int4", "int4-bf16-teacher")


STUDIED: dict[str, Any] = {  # what this study and `draft_head` take
    "original": Path,
    "out": Path,
    "--text": TEXTS,
    "--questions": Path,
    "--seeds": 3,
    "--tokens": 3e6,
    "--batch": dict(type=int, default=16, help="rows of 1024 tokens in a step"),
    "--held-out": dict(type=int, default=96, help="rows of each divergence"),
    "--seconds": 400.0,
    "--layers": dict(nargs="+", default=["50%"]),
}
ARGUMENTS = STUDIED | {
    "--ways": ",".join(WAYS),
    "--first-seed": 0,
    "--group": 64,
    "--rank": 64,
    "--calibration": dict(type=int, default=128, help="rows that GPTQ reads"),
    "--table": dict(action="store_true", help="print the table of OUT/results.jsonl, and stop"),
}


def main(given: argparse.Namespace) -> None:
    """Measure every form, or print the table of what was measured."""
    if given.table:
        print(table(stored(given.out / "results.jsonl")))
        return
    for way in given.ways.split(","):
        if way not in WAYS:
            raise unknown_value("way", way, WAYS)
    Study(given).run()


class Study:
    """The models in memory, the texts, and what all forms have in common."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.began, self.texts = given, time.time(), dict(given.text)
        self.original = loaded(given.original)
        self.device, self.dtype = self.original.device.type, self.original.dtype
        self.questions = {} if given.questions is None else read(given.questions)
        self.convert(given.layers[0])
        self.rows = token_rows(self.texts["own"] / "train", int(given.tokens)).to(self.device)
        given.out.mkdir(parents=True, exist_ok=True)
        self.file = given.out / "results.jsonl"

    def convert(self, layers: str) -> None:
        """From now on, students are converted in these layers."""
        self.layers_text = layers
        self.wiring = Wiring("ladder", select_layers(layers, len(decoder_layers(self.original))))

    def run(self) -> None:
        """Measure what needs no training, and then what each seed gives, as long as there is time."""
        gptq, rtn = self.gptq(self.original), self.rtn(weights_of(self.original))
        for name, weights in (("original", None), ("int4 alone: rtn", rtn), ("int4 alone: gptq", gptq)):
            self.measure(name, self.model(weights, wired=False), int4=weights is not None)
        ways: dict[str, Callable[[int], None]] = {
            "layers": self.layers,
            "adapters": self.adapters,
            "int4": partial(self.int4, gptq, self.model(gptq, wired=False), ""),
            "int4-bf16-teacher": partial(self.int4, gptq, self.model(wired=False), "-bf16-teacher"),
        }
        longest = QUANTISES if self.device == "cuda" else 0.0
        for layers in self.given.layers:
            self.convert(layers)
            self.measure("untrained", self.model())
            self.measure("untrained, int4", self.model(gptq), int4=True)
            for seed in range(self.given.first_seed, self.given.first_seed + self.given.seeds):
                for way in self.given.ways.split(","):
                    left = self.given.seconds - (time.time() - self.began)
                    if left < LONGER * longest:
                        return self.store({"stopped": f"{left:.0f} seconds were left before {way} of seed {seed}"})
                    began = time.time()
                    ways[way](seed)
                    longest = max(longest, time.time() - began)

    def layers(self, seed: int) -> None:
        """The converted layers train themselves."""
        student = self.model()
        own = [p for number in self.wiring.layers for p in decoder_layers(student)[number].parameters()]
        rate = self.heal(student, self.model(wired=False), own, RATES["layers"], seed)
        self.measure("layers", student, seed, tokens_per_second=rate)
        self.quantise("layers", student, seed)

    def adapters(self, seed: int) -> None:
        """Adapters train beside the converted layers, and are merged before these are quantised."""
        student = self.model()
        adapters = self.add(student, seed)
        rate = self.heal(student, self.model(wired=False), parameters_of(adapters), RATES["adapters"], seed)
        weights = weights_of(student) | {path: merged_weight(layer) for path, layer in adapters.items()}
        merged = self.model(weights)
        self.measure("adapters", merged, seed, tokens_per_second=rate)
        self.quantise("adapters", merged, seed)

    def quantise(self, name: str, healed: Any, seed: int) -> None:
        """Measure a healed model after both ways of quantising it."""
        for how, weights in (("rtn", self.rtn(weights_of(healed))), ("gptq", self.gptq(healed))):
            self.measure(f"{name}+{how}", self.model(weights), seed, int4=True)

    def int4(self, gptq: dict[str, Tensor], guide: Any, teacher: str, seed: int) -> None:
        """Adapters train beside INT4 weights, by the teacher ``guide``, and stay."""
        student = self.model(gptq)
        adapters = self.add(student, seed)
        rate = self.heal(student, guide, parameters_of(adapters), RATES["adapters"], seed)
        beside = sum(p.numel() for p in parameters_of(adapters)) * 2
        self.measure(f"int4{teacher}+beside", student, seed, int4=True, adapters=beside, tokens_per_second=rate)

    def model(self, weights: dict[str, Tensor] | None = None, wired: bool = True) -> Any:
        """A copy of the original, with some weights and the wiring."""
        model = deepcopy(self.original)
        for path, weight in (weights or {}).items():
            model.get_submodule(path).weight.data = weight.clone()
        if wired:
            wire(model, self.wiring)
        model.requires_grad_(False)
        fuse_parts(model, arch_of(model.config), self.device == "cuda")
        return model

    def add(self, student: Any, seed: int) -> dict[str, Any]:
        """Adapters beside the linear layers of the converted layers, by the paths of these."""
        inside = {module for number in self.wiring.layers for module in decoder_layers(student)[number].modules()}
        paths = [path for path, module in student.named_modules() if type(module) is nn.Linear and module in inside]
        return add_adapters(student, dict(zip(paths, paths, strict=True)), self.given.rank, ALPHA, seed)

    def rtn(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights rounded to nearest."""
        return {path: to_int4(weight, self.given.group) for path, weight in weights.items()}

    def gptq(self, model: Any) -> dict[str, Tensor]:
        """The weights that llm-compressor's GPTQ gives a model in its own wiring."""
        from fcsd.export.quantise import group_size, ignored, quantise_model

        copy = deepcopy(model).cpu()  # llm-compressor brings one layer after the other to the GPU
        fuse_parts(copy, arch_of(copy.config), False)  # as anyone quantises it
        vars(copy).pop("save_pretrained", None)  # a refusal, which llm-compressor would wrap
        if (size := group_size(copy, ignored(copy))) != self.given.group:
            raise ValueError(f"llm-compressor would get groups of {size}, and --group is {self.given.group}")
        rows = self.rows[: self.given.calibration].cpu()
        quantise_model(copy, self.given.original, "W4A16", list(rows), min(AT_ONCE, len(rows)))
        return {path: weight.to(self.device, self.dtype) for path, weight in weights_of(copy).items()}

    def heal(self, student: Any, teacher: Any, trained: list[nn.Parameter], lr: float, seed: int) -> float:
        """Train by the divergence from the teacher; the tokens of a second."""
        steps = max(1, len(self.rows) // self.given.batch)
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed)).to(self.device)

        own, head = (model.get_output_embeddings().weight for model in (student, teacher))

        def losses() -> Iterator[tuple[Tensor, int]]:
            for step in range(steps):
                batch = self.rows[order[step * self.given.batch :][: self.given.batch]]
                with torch.no_grad():
                    target = decoder_of(teacher)(batch, use_cache=False).last_hidden_state
                hidden, mask = decoder_of(student)(batch, use_cache=False).last_hidden_state, torch.ones_like(batch) > 0
                count = mask.numel()
                yield kl_divergence(hidden, own, target, head, mask, denominator=count, chunk_tokens=4096), count

        return descend(losses(), [(trained, lr)], steps)

    def measure(
        self, form: str, model: Any, seed: int | None = None, int4: bool = False, adapters: int = 0, **more: Any
    ) -> None:
        """Store the divergences, the answers and the bytes of a form; ``adapters`` are bytes beside its weights."""
        began = time.time()
        kl = divergences(model, self.original, self.texts, self.given.held_out)
        linear = sum(weight.numel() for weight in weights_of(self.original).values())
        whole = sum(parameter.numel() for parameter in self.original.parameters())
        per_weight = 0.5 + 2 / self.given.group if int4 else 2.0
        size = round((whole - linear) * 2 + linear * per_weight) + adapters
        if self.questions and not form.endswith("rtn"):
            told = answers(model, self.questions)
            more["answers"] = {task: {"right": [int(one) for one in found["right"]]} for task, found in told.items()}
        seconds = {"measured_in": time.time() - began, "at": time.time() - self.began}
        self.store({"form": form, "seed": seed, "kl": kl, "bytes": size, **seconds, **more})

    def store(self, line: dict[str, Any]) -> None:
        """Append a line to the results, and show it."""
        fixed = {key: getattr(self.given, key) for key in ("tokens", "group", "rank", "batch", "calibration")}
        fixed["layers"] = self.layers_text
        store(self.file, {**line, **fixed})
        found = {name: round(value["kl"], 4) for name, value in line.get("kl", {}).items()}
        print(line.get("form", line), "" if line.get("seed") is None else f"seed {line['seed']}", found, flush=True)


def descend(losses: Iterator[tuple[Tensor, int]], groups: list[tuple[list[nn.Parameter], float]], steps: int) -> float:
    """Train parameters, each group at its learning rate; ``losses`` have their tokens. Returns the tokens of a second.

    The optimizer has fp32 copies of what trains.
    """
    trained = [parameter for parameters, _ in groups for parameter in parameters]
    for parameter in trained:
        parameter.requires_grad_(True)
    copies = [[parameter.detach().float().clone() for parameter in parameters] for parameters, _ in groups]
    masters = [master for own in copies for master in own]
    placed: Any = [{"params": own, "lr": lr} for own, (_, lr) in zip(copies, groups, strict=True)]
    optimizer = torch.optim.AdamW(placed, betas=(0.9, 0.95), weight_decay=0.0)
    began, tokens = time.time(), 0
    for step, (loss, count) in enumerate(losses):
        loss.backward()
        for master, parameter in zip(masters, trained, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        done = (step + 1) / steps
        share = min(done / WARMUP, LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2)
        for group, (_, lr) in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = lr * share
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, masters)
        tokens += count
        if step % max(1, steps // 5) == 0:
            print(f"  step {step} of {steps}: {loss.item():.4f}", flush=True)
    for parameter in trained:
        parameter.requires_grad_(False)
    return tokens / (time.time() - began)


def weights_of(model: Any) -> dict[str, Tensor]:
    """The weights of the linear layers in the decoder layers, by the paths of the layers; those under adapters, too."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    found = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    plain = {path: module for path, module in found.items() if module in inside and ".lora_" not in path}
    return {path.removesuffix(".base_layer"): module.weight.data for path, module in plain.items()}


def parameters_of(adapters: dict[str, Any]) -> list[nn.Parameter]:
    """Both matrices of every adapter."""
    return [p for layer in adapters.values() for name, p in layer.named_parameters() if "lora_" in name]


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown with a row for each form: mean and standard deviation over the seeds, megabytes, and points if asked.

    Forms of a model that is not converted are the same for all layers.
    """
    forms: dict[str, list[dict[str, Any]]] = {}
    several = len({line["layers"] for line in lines}) > 1
    for line in lines:
        if "form" in line:
            shared = not several or line["form"].startswith(ALONE)
            forms.setdefault(line["form"] + ("" if shared else f", {line['layers']}"), []).append(line)
    texts = list(next(iter(forms.values()))[0]["kl"])
    told = {form: [line["answers"] for line in own if "answers" in line] for form, own in forms.items()}
    right = {form: right_shares(answered) for form, answered in told.items() if answered}
    head = ["form", "runs", *(f"KL, {text}" for text in texts), "MB", *(["points", "minus original"] if right else [])]
    rows = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for form, own in forms.items():
        shown = [form, str(len(own))]
        for text in texts:
            values = torch.tensor([line["kl"][text]["kl"] for line in own], dtype=torch.float64)
            shown.append(f"{values.mean():.4f}" + (f" ± {values.std():.4f}" if len(own) > 1 else ""))
        shown.append(f"{own[0]['bytes'] / 1e6:.1f}")
        if form in right:
            shown += [f"{points(right[form]):.2f}", "" if form == ALONE[0] else gap(right[form], right[ALONE[0]])]
        elif right:
            shown += ["", ""]
        rows.append(f"| {' | '.join(shown)} |")
    return "\n".join(rows)
