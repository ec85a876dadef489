"""Whether a student heals further on answers that it writes itself, by reverse KL, than on more text: at equal tokens.

    python -m studies.real prompted ask ORIGINAL MIRROR ASKED.json.gz [--limit 1000]
    python -m studies.real prompted run ORIGINAL OUT --text own=DIR --text foreign=DIR --asked ASKED.json.gz
        --questions FILE.json.gz [--ways base,reverse] [--seeds 0,1] [--tokens 20e6] [--written 10.5e6] [--seconds 500]
    python -m studies.real prompted score OUT/results.jsonl ASKED.json.gz SCORED.jsonl
    python -m studies.real prompted table SCORED.jsonl

The last half of the layers is converted to ladder, and these layers alone are healed. `base` is the recipe: KL(original
|| student) on equal parts of the texts. The other ways are the same run up to `--written` tokens before its end. From
there they read answers to prompts in `base`'s place, of which the tokens of the answers alone count and train:

- `reverse`: the student answers, and learns KL(student || original). It answers anew in each of `--rounds` rounds.
- `forward`: the student answers, and learns KL(original || student).
- `taught`: the original answers, and the student learns KL(original || student).

The prompts are users' turns that the original invents, taken one after the other, without those that share eight tokens
in a row with a question of ASKED. All ways have the same learning rate at the same token, and as many tokens in a step.
`run` appends a line for each round and each form to OUT/results.jsonl, and keeps the training in OUT. What would not
end within `--seconds` is not begun, and the same command goes on there. A form is judged by its divergences, by the
benchmarks of `--questions` (those of `questions`), and by its greedy answers to ASKED, each a user's turn without
examples: GSM8K (the last number), SciQ (the right words in the first line) and IFEval (lm-eval's rules, the mean of its
four accuracies). `ask` needs fcsd's own environment, and `score` IFEval's libraries, too.
"""

import argparse
import gzip
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.programs import TEXTS
from studies.real.questions import answers, gap, points, read, right_shares
from studies.real.runner import SEQ, divergences, loaded, store, stored, token_rows
from torch import Tensor

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.distill.loss.losses import chunked, for_matmul, kl_divergence, logits_of
from fcsd.distill.own_text import loops
from fcsd.distill.teacher.targets import left_out, noted
from fcsd.distill.writer import turns_of
from fcsd.engine.decode import GRAIN
from fcsd.engine.fused import fuse
from fcsd.engine.generate import GRAPHS, SLOTS, ending, generate
from fcsd.eval.statistics import spread
from fcsd.markdown import table as markdown_table
from fcsd.models.build import arch_of, decoder_layers, decoder_of, wire
from fcsd.models.fused import fuse_parts
from fcsd.models.selection import select_layers
from fcsd.models.wiring import Wiring

ARGUMENTS = None  # each part has its own
LR = 1e-3
WARMUP, LEAST = 0.1, 0.02  # shares of the tokens and of the learning rate
SHARED = 8  # tokens in a row that no prompt shares with a question
MOST_ASKED = 128  # tokens of a prompt
SEED_OF_PROMPTS = 1 << 40  # no seed of a round
TEXT = 4  # a round of text is as long as so many of answers: nothing is written in it
LONGER = 1.3  # by how much a part may take longer than any of its kind so far
JUDGED = {  # where the mirror has the questions, and the keys of the user's turn
    "GSM8K": ("openai/gsm8k/main/test.jsonl", "{question}"),
    "SciQ": ("allenai/sciq/default/test.jsonl", "{question} Answer in one short sentence."),
    "IFEval": ("google/IFEval/ifeval_input_data.jsonl", "{prompt}"),
}
Loss = Callable[..., Tensor]
Line = dict[str, Any]


class Document(NamedTuple):
    """Token ids, and how many of them are the prompt."""

    ids: list[int]
    prompt: int

    @property
    def answer(self) -> int:
        """The tokens of the answer."""
        return len(self.ids) - self.prompt


def reverse_kl(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    mask: Tensor,
    *,
    denominator: float = 1.0,
    chunk_tokens: int = 512,
) -> Tensor:
    """KL(student || teacher), as ``kl_divergence`` is KL(teacher || student), whose arguments these are."""
    keep = mask.flatten().nonzero().squeeze(1)
    teacher_rows, weight = teacher_hidden.detach().flatten(0, -2)[keep], for_matmul(teacher_head.detach())

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_p = logits.log_softmax(-1)
        gaps = log_p - logits_of(teacher_rows[rows], weight).log_softmax(-1)
        p = log_p.exp_()
        divergence = (p * gaps).sum(-1, keepdim=True)
        return divergence.sum(), gaps.sub_(divergence).mul_(p)

    return chunked(student_hidden.flatten(0, -2)[keep], student_head, chunk_loss, chunk_tokens) / denominator


WAYS: dict[str, tuple[str, Loss]] = {  # who writes in the last part, and what is learned there
    "base": ("nobody", kl_divergence),
    "reverse": ("student", reverse_kl),
    "forward": ("student", kl_divergence),
    "taught": ("original", kl_divergence),
}


def main(given: argparse.Namespace) -> None:
    """Do what the first argument says."""
    given = arguments().parse_args(given.words)
    if given.what == "ask":
        ask(given.original, given.mirror, given.asked, given.limit)
    elif given.what == "run":
        Study(given).run()
    elif given.what == "score":
        asked, lines = read(given.asked), stored(given.results)
        given.scored.write_text("".join(json.dumps(scored(line, asked)) + "\n" for line in lines))
    else:
        print(table(stored(given.scored)))


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("ask", help="pack the questions that are answered by writing")
    for name in ("original", "mirror", "asked"):
        part.add_argument(name, type=Path)
    part.add_argument("--limit", type=int, default=1000, help="questions of a set, spread over it")
    part = parts.add_parser("run", help="heal and judge; the same command goes on")
    part.add_argument("original", type=Path)
    part.add_argument("out", type=Path)
    part.add_argument("--text", **TEXTS, required=True)
    part.add_argument("--asked", type=Path, required=True)
    part.add_argument("--questions", type=Path, required=True)
    part.add_argument("--ways", default="base,reverse", help=", ".join(WAYS))
    part.add_argument("--layers", default="50%")
    part.add_argument("--seeds", default="0,1", help="with 0 the original is judged, too")
    part.add_argument("--tokens", type=float, default=20e6)
    part.add_argument("--written", type=float, default=10.5e6, help="how many of the tokens are answers in other ways")
    part.add_argument("--rounds", type=int, default=8, help="in the written tokens")
    part.add_argument("--batch", type=int, default=32, help="rows of 1024 tokens in a step")
    part.add_argument("--prompts", type=int, default=24000)
    part.add_argument("--prompt-temperature", type=float, default=0.8)
    part.add_argument("--answer", type=int, default=512, help="the most tokens of an answer")
    part.add_argument("--at-once", type=int, default=1024, help="answers that are written at a time")
    part.add_argument("--held-out", type=int, default=96, help="rows of each divergence")
    part.add_argument("--seconds", type=float, default=500)
    part = parts.add_parser("score", help="judge the answers of a run, and leave their text out")
    for name in ("results", "asked", "scored"):
        part.add_argument(name, type=Path)
    parts.add_parser("table", help="print a row for each form").add_argument("scored", type=Path)
    return parser


def ask(model: Path, mirror: Path, file: Path, limit: int) -> None:
    """Write the questions as users' turns in token ids."""
    tokenizer, found = load_tokenizer(model), {}
    for name, (path, turn) in JUDGED.items():
        documents = stored(mirror / path)
        chosen = [documents[number] for number in spread(len(documents), limit)]
        ids = [tokenizer(turn.format(**one), add_special_tokens=False)["input_ids"] for one in chosen]
        found[name] = [{"ids": own, "document": one} for own, one in zip(ids, chosen, strict=True)]
    with gzip.open(file, "wt") as target:
        json.dump(found, target)
    print(", ".join(f"{name}: {len(rows)}" for name, rows in found.items()))


class Training:
    """A student whose converted layers train in fp32 copies, and how far it is."""

    def __init__(self, student: Any, layers: Sequence[int]) -> None:
        self.student = student
        inside = decoder_layers(student)
        self.trained = [p.requires_grad_(True) for layer in layers for p in inside[layer].parameters()]
        self.masters = [p.detach().float().clone() for p in self.trained]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.counts = {"tokens": 0, "rounds": 0, "asked": 0, "written": 0}
        self.seconds = 0.0

    def step(self, loss: Tensor, tokens: int, total: int) -> Tensor:
        """Descend by a loss of so many tokens of ``total``; the loss, for which the host does not wait."""
        loss.backward()
        for master, parameter in zip(self.masters, self.trained, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.counts["tokens"] += tokens
        done = min(1.0, self.counts["tokens"] / total)
        share = min(done / WARMUP, LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2)
        self.optimizer.param_groups[0]["lr"] = LR * share
        self.optimizer.step()
        self.copy()
        return loss.detach()

    @torch.no_grad()
    def copy(self) -> None:
        """Give the student the weights of the fp32 copies."""
        torch._foreach_copy_(self.trained, self.masters)

    def save(self, file: Path) -> None:
        """Store all that goes on."""
        state = {"masters": self.masters, "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"counts": self.counts, "seconds": self.seconds}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load(self, file: Path) -> None:
        """Go on from what ``save`` has stored."""
        state = torch.load(file, map_location=self.masters[0].device, weights_only=True)
        with torch.no_grad():
            torch._foreach_copy_(self.masters, state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.counts, self.seconds = state["counts"], state["seconds"]
        self.copy()


class Study:
    """The models in memory, the texts and prompts, and what all ways have in common."""

    def __init__(self, given: argparse.Namespace) -> None:
        cuda = torch.cuda.is_available()
        self.given, self.began = given, time.time()
        self.ways, self.seeds = given.ways.split(","), [int(seed) for seed in given.seeds.split(",")]
        if unknown := set(self.ways) - set(WAYS):
            raise SystemExit(f"{', '.join(sorted(unknown))}: ways are {', '.join(WAYS)}")
        self.device, self.texts = "cuda" if cuda else "cpu", dict(given.text)
        self.questions, self.asked = read(given.questions), read(given.asked)
        self.original = loaded(given.original).requires_grad_(False)
        fuse_parts(self.original, arch_of(self.original.config), cuda)
        tokenizer = load_tokenizer(given.original)
        self.tokenizer, self.turns = tokenizer, turns_of(tokenizer)
        self.end = ending(self.original, tokenizer, ())
        self.layers = select_layers(given.layers, len(decoder_layers(self.original)))
        self.first = max(0, self.layers[0] - 1)  # the layer before a converted one passes its streams apart
        self.step_tokens = given.batch * SEQ
        steps, written = (int(tokens / self.step_tokens) for tokens in (given.tokens, given.written))
        self.total, self.half = steps * self.step_tokens, (steps - written) * self.step_tokens
        self.round_tokens = max(1, written // given.rounds) * self.step_tokens
        share = -(-self.total // len(self.texts) // SEQ) * SEQ
        parts = [token_rows(folder / "train", share, SEQ) for folder in self.texts.values()]
        if short := [name for name, part in zip(self.texts, parts, strict=True) if part.numel() < share]:
            raise SystemExit(f"less than {share} tokens in {', '.join(short)}")
        self.rows = torch.cat(parts)
        given.out.mkdir(parents=True, exist_ok=True)
        self.file = given.out / "results.jsonl"
        self.fixed = {"layers": given.layers, "total": self.total, "answers_from": self.half, "batch": given.batch}
        lines = stored(self.file)
        if any(not self.fixed.items() <= line.items() for line in lines):
            raise SystemExit(f"{self.file} was begun with other options; give the same ones, or another OUT")
        self.ended = {(line["form"], line["seed"]) for line in lines if "form" in line}
        self.longest: dict[str, float] = {}  # seconds of a part, by its kind

    def run(self) -> None:
        """Measure the original and every way of every seed, as long as there is time."""
        self.prompts = self.invented()
        plan: list[tuple[str, int | None]] = [("original", None)] if 0 in self.seeds else []
        plan += [(way, seed) for seed in self.seeds for way in self.ways]
        for form, seed in plan:
            if (form, seed) in self.ended:
                continue
            training = None if seed is None else self.healed(form, seed)
            if (seed is not None and training is None) or self.is_late("judging"):
                return self.store({"stopped": f"before the end of {form}, seed {seed}", "at": self.at()})
            with self.timed("judging"):
                self.judge(form, seed, training)
            if training is not None:
                self.state(form, seed, self.total).unlink()

    def at(self) -> float:
        """Seconds since the beginning."""
        return time.time() - self.began

    def is_late(self, kind: str) -> bool:
        """Whether a part of this kind would not end in time."""
        return self.at() + LONGER * self.longest.get(kind, 0.0) > self.given.seconds

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """A block that is a part of this kind."""
        began = time.time()
        yield
        self.longest[kind] = max(self.longest.get(kind, 0.0), time.time() - began)

    def invented(self) -> list[list[int]]:
        """Users' turns that the original invents, as token ids without the chat template."""
        file = self.given.out / "prompts.json"
        if not file.exists():
            count, before = self.given.prompts, self.turns.before
            heat = self.given.prompt_temperature
            told = self.write(self.original, [before] * count, SEED_OF_PROMPTS, heat, MOST_ASKED)
            turns = [ids[:-1] for ids in told if ids[-1] in self.end.tokens]
            seen = {run for rows in self.asked.values() for row in rows for run in runs(row["ids"])}
            kept = [list(ids) for ids in dict.fromkeys(map(tuple, turns)) if ids and seen.isdisjoint(runs(ids))]
            example = self.tokenizer.decode(kept[0])
            self.store({"prompts": len(kept), "of": count, "ended": len(turns), "example": example, "at": self.at()})
            file.write_text(json.dumps(kept))
        return json.loads(file.read_text())

    def state(self, way: str, seed: int, tokens: int) -> Path:
        """The file of a training. Up to its last part it is that of all ways."""
        return self.given.out / f"{'half' if tokens <= self.half else way}-{seed}.pt"

    def healed(self, way: str, seed: int) -> Training | None:
        """A trained student, or None if time is over before; then the next call goes on."""
        training = Training(self.student(), self.layers)
        stored = (self.state(way, seed, tokens) for tokens in (self.total, self.half))
        if file := next((file for file in stored if file.exists()), None):
            training.load(file)
        while (tokens := training.counts["tokens"]) < self.total:
            on_text, end = way == "base" or tokens < self.half, self.half if tokens < self.half else self.total
            until = min(end, tokens + (TEXT if on_text else 1) * self.round_tokens)
            kind, began = "text" if on_text else way, time.time()
            if self.is_late(kind):
                return None
            with self.timed(kind):
                if on_text:
                    losses, told = self.read_text(training, seed, until), {}
                else:
                    losses, told = self.read_answers(training, way, seed, until)
                training.counts["rounds"] += 1
                training.seconds += time.time() - began
                training.save(self.state(way, seed, training.counts["tokens"]))
            loss = float(torch.stack(losses).mean())
            self.store({"round": kind, "way": way, "seed": seed, **training.counts, "loss": loss, **told,
                        "seconds": time.time() - began, "at": self.at()})  # fmt: skip
        return training

    def student(self) -> Any:
        """A copy of the original with the layers converted."""
        student = wire(deepcopy(self.original), Wiring("ladder", self.layers))
        fuse_parts(student, arch_of(student.config), self.device == "cuda")
        return student

    def read_text(self, training: Training, seed: int, until: int) -> list[Tensor]:
        """Train on the next rows of the text, in the order of a seed; the loss of each step."""
        order, losses = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed)), []
        while (tokens := training.counts["tokens"]) < until:
            ids = self.rows[order[tokens // SEQ :][: self.given.batch]].to(self.device)
            mask = torch.ones_like(ids, dtype=torch.bool)
            loss = self.divergence(training.student, ids, mask, kl_divergence, ids.numel())
            losses.append(training.step(loss, ids.numel(), self.total))
        return losses

    def read_answers(self, training: Training, way: str, seed: int, until: int) -> tuple[list[Tensor], Line]:
        """Train on new answers to the next prompts; the loss of each step, and what answers they were."""
        counts, began, (who, learns) = training.counts, time.time(), WAYS[way]
        writer = training.student if who == "student" else self.original
        documents, cut = self.answered(training, writer, seed, until - counts["tokens"])
        told: Line = {"answers": len(documents), "cut": cut, "writing": time.time() - began}
        told["ended"] = statistics.mean(one.ids[-1] in self.end.tokens for one in documents)
        told["loops"] = statistics.mean(loops(one.ids[one.prompt :]) for one in documents)
        losses = []
        for step in steps_of(documents, self.step_tokens):
            tokens = sum(one.answer for one in step)
            parts = [
                self.divergence(training.student, ids.to(self.device), mask.to(self.device), learns, tokens)
                for ids, mask in padded(step, self.step_tokens)
            ]
            losses.append(training.step(torch.stack(parts).sum(), tokens, self.total))
        return losses, told

    def answered(self, training: Training, writer: Any, seed: int, tokens: int) -> tuple[list[Document], int]:
        """Answers of ``tokens`` tokens in all to the next prompts of a seed, and the tokens that were one too many.

        How many prompts are asked follows from how long the answers were so far.
        """
        counts = training.counts
        order = torch.randperm(len(self.prompts), generator=torch.Generator().manual_seed(seed)).tolist()
        mean = counts["written"] / counts["asked"] if counts["asked"] else self.given.answer / 2
        count = max(1, math.ceil(tokens / mean))
        places = (order[number % len(order)] for number in range(counts["asked"], counts["asked"] + count))
        asked = [[*self.turns.before, *self.prompts[place], *self.turns.after] for place in places]
        told = self.write(writer, asked, seed << 32 | counts["rounds"], 1.0, self.given.answer)
        counts["asked"] += count
        counts["written"] += sum(map(len, told))
        documents, total = [], 0
        for prompt, ids in zip(asked, told, strict=True):
            if total < tokens:
                documents.append(Document([*prompt, *ids], len(prompt)))
                total += len(ids)
        return documents, sum(map(len, told)) - total

    def write(self, model: Any, prompts: Sequence[list[int]], seed: int, heat: float, most: int) -> list[list[int]]:
        """The new tokens of a model after each prompt, with the one that ends them; most likely ones if heat is 0."""
        cuda = self.device == "cuda"
        writer = deepcopy(model).requires_grad_(False)
        fuse(writer, cuda)
        torch.manual_seed(seed)
        told = generate(
            writer,
            prompts,
            max_new_tokens=most,
            ended=self.end.of,
            way=GRAPHS if cuda else SLOTS,
            batch_size=self.given.at_once,
            cache_tokens=self.given.at_once * (max(map(len, prompts)) + most + GRAIN),
            temperatures=[heat] * len(prompts) if heat else None,
        )
        found = dict(told)
        return [found[number] for number in range(len(prompts))]

    def divergence(self, student: Any, ids: Tensor, mask: Tensor, loss: Loss, tokens: int) -> Tensor:
        """A divergence of the student and the original, as the sum over the mask by ``tokens``."""
        with torch.no_grad(), noted(self.original, self.first) as found:
            target = decoder_of(self.original)(ids, use_cache=False).last_hidden_state
        with left_out(student, found[0] if found else None):
            hidden = decoder_of(student)(ids, use_cache=False).last_hidden_state
        head, theirs = (model.get_output_embeddings().weight for model in (student, self.original))
        return loss(hidden, head, target, theirs, mask, denominator=tokens, chunk_tokens=4096)

    def judge(self, form: str, seed: int | None, training: Training | None) -> None:
        """Store the divergences of a form, its answers to the benchmarks, and what it writes."""
        began, model = time.time(), self.original if training is None else training.student.requires_grad_(False)
        kl = divergences(model, self.original, self.texts, self.given.held_out, SEQ)
        told = answers(model, self.questions)
        chosen = {task: {"right": [int(one) for one in found["right"]]} for task, found in told.items()}
        asked = [(name, row["ids"]) for name, rows in self.asked.items() for row in rows]
        prompts = [[*self.turns.before, *ids, *self.turns.after] for _, ids in asked]
        said: dict[str, list[Any]] = {name: [] for name in self.asked}
        for (name, _), ids in zip(asked, self.write(model, prompts, 0, 0.0, self.given.answer), strict=True):
            said[name].append([len(ids), ids[-1] in self.end.tokens, self.end.text(ids)])
        spent = {} if training is None else {"trained_in": training.seconds, **training.counts}
        self.store({"form": form, "seed": seed, "kl": kl, "chosen": chosen, "said": said, **spent,
                    "judged_in": time.time() - began, "at": self.at()})  # fmt: skip

    def store(self, line: Line) -> None:
        """Append a line to the results, and show it."""
        store(self.file, {**line, **self.fixed})
        shown = {key: value for key, value in line.items() if key not in ("said", "chosen")}
        print(json.dumps(shown), flush=True)


def runs(ids: Sequence[int]) -> set[tuple[int, ...]]:
    """All sequences of ``SHARED`` tokens."""
    return {tuple(ids[n : n + SHARED]) for n in range(len(ids) - SHARED + 1)}


def steps_of(documents: Sequence[Document], tokens: int) -> Iterator[list[Document]]:
    """The documents in their order, in steps whose answers have at least ``tokens`` tokens; the last may have fewer."""
    step: list[Document] = []
    for document in documents:
        step.append(document)
        if sum(one.answer for one in step) >= tokens:
            yield step
            step = []
    if step:
        yield step


def padded(documents: Sequence[Document], most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids ``[rows, width]`` of documents of like length, at most ``most`` ids, and where an answer is predicted.

    Rows are padded on the right, which a causal model does not see.
    """
    waiting = sorted(documents, key=lambda one: -len(one.ids))
    while waiting:
        width = len(waiting[0].ids)
        rows, waiting = waiting[: max(1, most // width)], waiting[max(1, most // width) :]
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
        for number, one in enumerate(rows):
            ids[number, : len(one.ids)] = torch.tensor(one.ids)
            mask[number, one.prompt - 1 : len(one.ids) - 1] = True
        yield ids, mask


def scored(line: Line, asked: dict[str, list[Line]]) -> Line:
    """A line with what each answer scores in place of its text."""
    if "said" not in line:
        return line
    judged = {}
    for name, said in line["said"].items():
        documents = [row["document"] for row in asked[name]]
        right = scores(name, documents, [text for _, _, text in said])
        judged[name] = {"right": right, "tokens": [one[0] for one in said], "ended": [int(one[1]) for one in said]}
    return {key: value for key, value in line.items() if key != "said"} | {"judged": judged}


def scores(name: str, documents: list[Line], texts: list[str]) -> list[float]:
    """What the answers of a set score."""
    if name == "IFEval":
        from fcsd.eval.ifeval import aggregated_items, require_ifeval_tools

        require_ifeval_tools()
        from lm_eval.tasks.ifeval.utils import process_results

        return aggregated_items([process_results(one, [text]) for one, text in zip(documents, texts, strict=True)])
    check = {"GSM8K": _last_number, "SciQ": _has_words}[name]
    return [float(check(one, text)) for one, text in zip(documents, texts, strict=True)]


def _last_number(document: Line, text: str) -> bool:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    right = document["answer"].split("####")[1]
    return bool(found) and float(found[-1].replace(",", "")) == float(right.replace(",", ""))


def _has_words(document: Line, text: str) -> bool:
    line = text.strip().split("\n")[0].lower()
    return re.search(rf"\b{re.escape(document['correct_answer'].strip().lower())}\b", line) is not None


def table(lines: list[Line]) -> str:
    """Markdown with a row for each form, over its seeds and for each: what it lost, gained and wrote.

    Points are in percent. Differences from `base`, of the same seeds, have the error of the questions.
    """
    forms: dict[tuple[str, int | None], list[Line]] = {}
    for line in lines:
        if "form" in line:
            forms.setdefault((line["form"], None), []).append(line)
            if line["seed"] is not None:
                forms.setdefault((line["form"], line["seed"]), []).append(line)
    texts, sets = (list(next(iter(forms.values()))[0][key]) for key in ("kl", "judged"))
    chosen, judged = (
        {form: right_shares([line[key] for line in own]) for form, own in forms.items()} for key in ("chosen", "judged")
    )
    head = ["form", "seeds", *(f"KL, {text}" for text in texts), "benchmarks", "minus base"]
    head += [column for name in sets for column in (name, "minus base")]
    head += ["all written", "minus base", "do not end, %", "tokens of an answer", "seconds"]
    body = []
    for (form, seed), own in forms.items():
        base = None if form == "base" else ("base", seed)
        shown = [form, str(len(own)) if seed is None else f"seed {seed}"]
        shown += [f"{statistics.mean(line['kl'][text]['kl'] for line in own):.4f}" for text in texts]
        for told, names in ((chosen, None), *((judged, [name]) for name in sets), (judged, sets)):
            items = {name: told[form, seed][name] for name in names or told[form, seed]}
            shown.append(f"{points(items):.2f}")
            shown.append(gap(items, {name: told[base][name] for name in items}) if base in told else "")
        said = [one for line in own for one in line["judged"].values()]
        shown.append(f"{100 * (1 - statistics.mean(end for one in said for end in one['ended'])):.1f}")
        shown.append(f"{statistics.mean(count for one in said for count in one['tokens']):.0f}")
        shown.append(f"{statistics.mean(line.get('trained_in', 0.0) for line in own):.0f}")
        body.append(shown)
    return markdown_table(head, body, left=1)
