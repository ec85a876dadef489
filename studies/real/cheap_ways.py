"""Cheap ways to lose less in healing, beside the best recipe at equal tokens: divergences and answers to benchmarks.

    python -m studies.real.cheap_ways ORIGINAL OUT --text own=DIR --text foreign=DIR --questions FILE --costs FILE
        [--ways base,long,rates,mean,twice,task] [--tokens 8e6] [--seconds 400]
    python -m studies.real.cheap_ways --table OUT/results.jsonl

The last half of the layers is converted to ladder, and these layers alone are healed by the divergence from the
original, on equal parts of the texts, as in `base`. One thing differs in each other way:

- `long`: the last 5 % of the tokens are documents of the last text in rows of 4096 tokens. `base` reads the same tokens
  in rows of 1024, at any time.
- `rates`: the learning rate of a layer is that of `base` times the square root of what converting this layer alone
  costs, over the geometric mean of these costs (`studies.real.layers`).
- `mean`: the mean of the weights of all seeds of `base` so far. `twice` reads the tokens of `base` twice, in one run.
- `task`: other layers are converted. All are converted and healed for an eighth of the tokens, and then one at a time
  is the original's again. Those whose return helps most with every second question, by the loss, stay as they are.

Every seed draws one order of the rows for all ways. What does not differ is computed once: the original's last hidden
states, and the layers before the first converted one. `OUT/results.jsonl` receives a line for each form. What would not
end within `--seconds` is not begun, and the last line says so. In the table, points are the mean over the tasks minus
the original's and `base`'s, in percent, paired over the questions, of the mean over the seeds; if there is a form
`task`, only the questions that chose nothing count.
"""

import argparse
import json
import math
import statistics
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from studies.real.heal import divergences, token_rows
from studies.real.quantised import Batch, common_arguments, train
from studies.real.questions import answers, gap, points, read, right_shares
from torch import Tensor

from fcsd.distill.teacher.targets import Prefix, noted
from fcsd.models.build import arch_of, decoder_layers, decoder_of, load_model, wire
from fcsd.models.fused.model import fuse_parts
from fcsd.models.selection import layers_text, select_layers
from fcsd.models.wiring import Wiring

LR, SEQ, LONG, LAST = 1e-3, 1024, 4096, 0.05
WAYS = {"base": 1.0, "long": 1.0, "rates": 1.0, "mean": 0.0, "twice": 2.0, "task": 4.0}  # time, in trainings of base
Layers = tuple[int, ...]


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = common_arguments(__doc__)
    parser.set_defaults(seeds=2, tokens=8e6, batch=32)
    parser.add_argument("--layers", default="50%")
    parser.add_argument("--costs", type=Path, default=Path("benchmarks/results/real_layers_smollm2_cpu.json"))
    parser.add_argument("--ways", default=",".join(WAYS))
    return parser


def main() -> None:
    """Measure every way, or print the table of a file."""
    parser = arguments()
    given = parser.parse_args()
    if given.table is not None:
        print(table([json.loads(line) for line in given.table.read_text().splitlines()]))
        return
    if given.original is None or given.out is None or given.questions is None:
        parser.error("ORIGINAL, OUT and --questions are needed")
    Study(given).run()


class Known:
    """Rows ``[rows, seq]`` of a text, and what the original and its ``first`` layers compute of them."""

    def __init__(self, original: Any, rows: Tensor, first: int, at_once: int) -> None:
        targets, inputs = [], []
        self.rows = rows
        for ids in rows.split(at_once):
            with torch.no_grad(), noted(original, first) as found:
                targets.append(decoder_of(original)(ids, use_cache=False).last_hidden_state)
            inputs += [prefix.output for prefix in found]
        self.targets, self.inputs = torch.cat(targets), torch.cat(inputs) if first else None

    def batch(self, which: Tensor, first: int) -> Batch:
        """A batch for a student whose ``first`` layers are the original's."""
        prefix = None if not first or self.inputs is None else Prefix(first, self.inputs[which])
        return Batch(self.rows[which], self.targets[which], prefix)


Batches = list[tuple[Known, Tensor]]


class Study:
    """The models in memory, the texts, and what all ways have in common."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.began, cuda = given, time.time(), torch.cuda.is_available()
        self.device, self.dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
        self.texts = {name: Path(folder) for name, folder in (text.split("=", 1) for text in given.text)}
        self.questions = read(given.questions)
        self.original = load_model(given.original, dtype=self.dtype, device=self.device).requires_grad_(False)
        fuse_parts(self.original, arch_of(self.original.config), cuda)
        self.layers = select_layers(given.layers, len(decoder_layers(self.original)))
        share = int(given.tokens / len(self.texts))
        parts = [token_rows(folder / "train", share, SEQ).to(self.device) for folder in self.texts.values()]
        if short := [name for name, part in zip(self.texts, parts, strict=True) if part.numel() <= share - SEQ]:
            raise SystemExit(f"less than {share} tokens in {', '.join(short)}")
        # The tokens of the last phase are at the end of the last text, where whole documents follow one another.
        tail = max(1, int(given.tokens * LAST) // LONG) * LONG
        first = self.first(self.layers)
        self.tail = Known(self.original, parts[-1].flatten()[-tail:].view(-1, LONG), first, self.at_once(LONG))
        self.whole = Known(self.original, torch.cat(parts), first, self.at_once(SEQ))
        given.out.mkdir(parents=True, exist_ok=True)
        self.file = given.out / "results.jsonl"
        self.seeds: list[Any] = []  # what base gave
        self.chosen: Layers = ()  # by task
        self.longest = 0.0

    def at_once(self, seq: int) -> int:
        """The rows of a step."""
        return max(1, self.given.batch * SEQ // seq)

    def first(self, layers: Layers) -> int:
        """How many layers are as in the original; the one before a converted one already passes its streams apart."""
        return max(0, layers[0] - 1)

    def run(self) -> None:
        """Measure the original, the conversion, and what each way gives, as long as there is time."""
        ways, seeds = self.given.ways.split(","), range(self.given.seeds)
        plan = [*(("base", seed) for seed in seeds), ("mean", 0)]  # which needs no further training
        plan += [(way, seed) for seed in seeds for way in ("long", "rates")]
        plan += [("twice", 0), *(("task", seed) for seed in seeds)]
        self.measure("original", self.original)
        self.measure("untrained", self.student(self.layers))
        for way, seed in plan:
            if way not in ways:
                continue
            left = self.given.seconds - (time.time() - self.began)
            if left < self.longest * WAYS[way]:
                return self.store({"stopped": f"{left:.0f} seconds were left before {way} of seed {seed}"})
            began = time.time()
            getattr(self, way)(seed)
            if WAYS[way]:
                self.longest = max(self.longest, (time.time() - began) / WAYS[way])

    def base(self, seed: int) -> None:
        """The recipe."""
        self.seeds.append(self.heal("base", seed, self.layers, self.shuffled(seed)))

    def long(self, seed: int) -> None:
        """The last tokens in long rows."""
        short = self.shuffled(seed, len(self.whole.rows) - self.tail.rows.numel() // SEQ)
        order = torch.randperm(len(self.tail.rows), generator=torch.Generator().manual_seed(seed)).to(self.device)
        self.heal("long", seed, self.layers, short + [(self.tail, part) for part in order.split(self.at_once(LONG))])

    def rates(self, seed: int) -> None:
        """A learning rate for each layer."""
        costs = json.loads(self.given.costs.read_text())["ladder"]["alone"]
        logs = {layer: math.log(costs[layer]) for layer in self.layers}
        middle = sum(logs.values()) / len(logs)
        rates = {layer: LR * math.exp((value - middle) / 2) for layer, value in logs.items()}
        self.heal("rates", seed, self.layers, self.shuffled(seed), rates)

    def mean(self, _: int) -> None:
        """The mean of the weights of the seeds."""
        student = deepcopy(self.seeds[0])
        with torch.no_grad():
            for mean, *values in zip(student.parameters(), *(model.parameters() for model in self.seeds), strict=True):
                mean.copy_(torch.stack([value.float() for value in values]).mean(0))
        self.measure(f"mean of {len(self.seeds)}", student)

    def twice(self, seed: int) -> None:
        """Two passes over the text."""
        self.heal("twice", seed, self.layers, self.shuffled(seed) + self.shuffled(seed + 1))

    def task(self, seed: int) -> None:
        """Layers that were chosen by the questions."""
        self.chosen = self.chosen or self.choose()
        self.heal("task", seed, self.chosen, self.shuffled(seed))

    def choose(self) -> Layers:
        """As many layers as otherwise, without those whose return helps the healed model most."""
        depth = len(decoder_layers(self.original))
        every = tuple(range(depth))
        batches = self.shuffled(0)
        model = self.healed(every, batches[: max(1, len(batches) // 8)])[0]
        layers, kept = decoder_layers(model), decoder_layers(self.original)
        asked = {name: rows[1::2] for name, rows in self.questions.items()}
        loss = {}
        for back in every:
            trained = deepcopy(layers[back].state_dict())
            layers[back].load_state_dict(kept[back].state_dict())
            self.wire(model, tuple(layer for layer in every if layer != back))
            found = answers(model, asked)
            loss[back] = sum(sum(task["loss"]) / len(task["loss"]) for task in found.values()) / len(found)
            layers[back].load_state_dict(trained)
        standard = sorted(every, key=lambda layer: loss[layer])[: depth - len(self.layers)]
        chosen = tuple(layer for layer in every if layer not in standard)
        self.store({"chosen": layers_text(chosen), "loss": loss})
        return chosen

    def student(self, layers: Layers) -> Any:
        """A copy of the original with these layers converted."""
        return self.wire(deepcopy(self.original), layers)

    def wire(self, model: Any, layers: Layers) -> Any:
        """The model, with these layers converted and no others."""
        wire(model, Wiring("ladder", layers))
        fuse_parts(model, arch_of(model.config), self.device == "cuda")
        return model

    def shuffled(self, seed: int, rows: int | None = None) -> Batches:
        """The first rows of the text, or all, in the order of a seed."""
        order = torch.randperm(rows or len(self.whole.rows), generator=torch.Generator().manual_seed(seed))
        return [(self.whole, part) for part in order.to(self.device).split(self.at_once(SEQ))]

    def heal(
        self, form: str, seed: int, layers: Layers, batches: Batches, rates: dict[int, float] | None = None
    ) -> Any:
        """A healed model, which is measured."""
        student, rate = self.healed(layers, batches, rates)
        self.measure(form, student, seed, layers=layers_text(layers), tokens_per_second=rate)
        return student

    def healed(self, layers: Layers, batches: Batches, rates: dict[int, float] | None = None) -> tuple[Any, float]:
        """A student of which the converted layers were trained, and the tokens of a second."""
        student = self.student(layers)
        inside = decoder_layers(student)
        groups = [([*inside[layer].parameters()], (rates or {}).get(layer, LR)) for layer in layers]
        first = self.first(self.layers) if self.first(layers) >= self.first(self.layers) else 0
        embeddings: Any = self.original.get_output_embeddings()
        known = (text.batch(which, first) for text, which in batches)
        return student, train(student, embeddings.weight, groups, known, len(batches))

    def measure(self, form: str, model: Any, seed: int | None = None, **more: Any) -> None:
        """Store the divergences and the answers of a form."""
        began = time.time()
        last = [*self.texts][-1]
        kl = divergences(model, self.original, self.texts, self.given.held_out, SEQ)
        long = divergences(model, self.original, {last: self.texts[last]}, self.given.held_out * SEQ // LONG, LONG)
        found = answers(model, self.questions)
        seconds = {"measured_in": time.time() - began, "at": time.time() - self.began}
        kl[f"{last}, rows of {LONG}"] = long[last]
        self.store({"form": form, "seed": seed, "kl": kl, "answers": found, **seconds, **more})

    def store(self, line: dict[str, Any]) -> None:
        """Append a line to the results, and show it."""
        fixed = {key: getattr(self.given, key) for key in ("layers", "tokens", "batch")}
        with self.file.open("a") as file:
            file.write(json.dumps({**fixed, **line}) + "\n")
        found = {name: round(value["kl"], 4) for name, value in line.get("kl", {}).items()}
        print(line.get("form", line), "" if line.get("seed") is None else f"seed {line['seed']}", found, flush=True)


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown with a row for each form: divergences, and points beside those of the original and of the recipe."""
    forms: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "form" in line:
            forms.setdefault(line["form"], []).append(line)
    step = 2 if "task" in forms else 1
    right = {form: right_shares([line["answers"] for line in own], step) for form, own in forms.items()}
    texts = list(lines[0]["kl"])
    head = ["form", "runs", *(f"KL, {text}" for text in texts), "points", "minus original", "minus base"]
    rows = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for form, own in forms.items():
        kl = [statistics.mean(line["kl"][text]["kl"] for line in own) for text in texts]
        shown = [form, str(len(own)), *(f"{value:.4f}" for value in kl), f"{points(right[form]):.2f}"]
        for other in ("original", "base"):
            shown.append(gap(right[form], right[other]) if other in right and form != other else "")
        rows.append(f"| {' | '.join(shown)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
