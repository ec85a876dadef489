"""How many unseen items the teacher in training answers, so that a world that teaches nothing is noticed early.

An item counts as answered if every token of its answer is the most likely one after the right tokens before it. That
is close to what the benchmarks measure and needs a single pass. `fcsd eval` gives the benchmarks' own scores.
"""

import random

import examples
import torch
from items import KINDS, Pieces, item_of, joined
from transformers import PreTrainedTokenizerFast
from world import items

IGNORED = -100
BATCH = 64


def questions(kind: str, count: int) -> list[Pieces]:
    """``count`` items of the mirror's split. MBPP's follow three worked examples, as in lm-eval."""
    rng = random.Random(f"probe {kind}")
    shots = 3 if kind == "mbpp_plus" else 0
    source = items(examples.example, "mirror", rng)
    return [joined([*(next(source) for _ in range(shots)), item_of(kind, "mirror", rng)]) for _ in range(count)]


def encoded(tokenizer: PreTrainedTokenizerFast, asked: list[Pieces]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[items, length]`` and the labels of the last answer's tokens, other places being ``IGNORED``."""
    rows = []
    for pieces in asked:
        parts = [[tokenizer.bos_token_id], *(tokenizer(t, add_special_tokens=False)["input_ids"] for t, _ in pieces)]
        ids = [token for part in parts for token in part]
        rows.append((ids, len(ids) - len(parts[-1])))
    length = max(len(ids) for ids, _ in rows)
    all_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), IGNORED)
    for n, (ids, prompt) in enumerate(rows):
        all_ids[n, : len(ids)] = torch.tensor(ids)
        labels[n, prompt : len(ids)] = torch.tensor(ids[prompt:])
    return all_ids, labels


class Probe:
    """Fixed items of every kind but WinoGrande, whose answer is the end of a sentence and tells nothing here."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, device: str, count: int):
        self.device = device
        self.batches = {
            kind: encoded(tokenizer, questions(kind, count)) for kind in KINDS if count and kind != "winogrande"
        }

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """Points per kind of item."""
        return {
            kind: round(100 * torch.cat([self._right(model, *batch) for batch in self._split(*both)]).mean().item(), 1)
            for kind, both in self.batches.items()
        }

    @staticmethod
    def _split(ids: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(ids.split(BATCH), labels.split(BATCH), strict=True))

    def _right(self, model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels.to(self.device)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            guesses = model(input_ids=ids.to(self.device), use_cache=False).logits.argmax(-1)
        return ((guesses[:, :-1] == labels[:, 1:]) | (labels[:, 1:] == IGNORED)).all(-1).float()
