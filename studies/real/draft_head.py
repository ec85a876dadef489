"""How often the drafts of an EAGLE head are right before and after its target was converted and healed.

    python -m studies.real draft_head ORIGINAL OUT --text own=DIR [--layers 50%] [--tokens 3e6] [--head-epochs 3]
        [--head-batch 4] [--drafts 3] [--new 96] [--prompts 64] [--seeds 2] [--seconds 140]

A head is that of ``train.draft_head`` of a recipe. It is trained by KL from the target's next distribution, the head
alone. The layers are converted to ladder and healed to the original, as in
`quantised`, and four pairs are measured: the original with its head, the conversion with that head before
and after it was healed, and the healed model with the head after this was trained on the healed model for one epoch.

The target answers greedily, and verifies the drafts itself: `accepted` of `drafted` tokens, and how many tokens come
out of one pass of the target. `like greedy` counts the answers that are those without drafts; in bfloat16 a pass over
more tokens may round otherwise. `OUT/results.jsonl` receives a line for each pair, and `OUT/NAME` the heads as vLLM
loads them (`--speculative-config '{"method": "eagle", "model": "OUT/healed", ...}'`).
"""

import time
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from studies.real import quantised
from studies.real.quantised import RATES, Study, descend
from studies.real.runner import store, token_rows
from torch import Tensor
from torch.nn import functional as F

from fcsd.config import Objective
from fcsd.distill.data.rows import batch as rows_batch
from fcsd.distill.draft import Drafting, start_head
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.teacher.targets import LiveTeacher
from fcsd.models.build import decoder_layers, decoder_of
from fcsd.models.draft_head import DraftHead

ARGUMENTS = quantised.STUDIED | {
    "--head-epochs": 3,
    "--head-batch": dict(type=int, default=4, help="rows of a step of the head"),
    "--drafts": dict(type=int, default=3, help="tokens that are guessed before each pass"),
    "--new": dict(type=int, default=96, help="tokens of an answer"),
    "--prompts": 64,
}
RATE = 1e-3
PROMPT = 64  # tokens


def train(target: Any, head: DraftHead, rows: Tensor, batch: int, seed: int, epochs: int = 1, lr: float = RATE) -> None:
    """Train the head alone on ``rows`` of token ids, ``batch`` of them in a step, as ``fcsd distill`` does."""
    drafting, source = Drafting(head, target, Objective()), LiveTeacher(target, Objective())
    steps, draw = max(1, len(rows) // batch), torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(rows), generator=draw)[: steps * batch] for _ in range(epochs)])
    whole = np.arange(rows.shape[1]), np.ones(rows.shape[1], dtype=np.bool_)
    documents = [(ids, *whole) for ids in rows.cpu().numpy()]

    def loss(chosen: Tensor) -> tuple[Tensor, int]:
        columns = {name: x.to(rows.device) for name, x in rows_batch(documents, chosen.tolist(), drafts=True).items()}
        count = (columns["labels"] != IGNORE).sum()
        return drafting(columns, source.get_targets(columns), count, ("kl",))["kl"], rows[chosen].numel()

    descend(map(loss, order.chunk(steps * epochs)), [(list(head.parameters()), lr)], steps * epochs)


@torch.no_grad()
def speculate(target: Any, head: DraftHead, prompts: Tensor, new: int, drafts: int) -> tuple[Tensor, dict[str, int]]:
    """Greedy answers with drafts that the target verifies, token by token and without caches.

    Args:
        prompts: int64 ``[rows, tokens]``.
        new: tokens of each answer.
        drafts: tokens that the head guesses before each pass of the target; 0 for none.

    Returns:
        The answers ``[rows, new]``, and ``passes`` of the target per row, ``drafted`` and ``accepted`` tokens, all as
        sums over the rows.
    """
    embeddings, out = target.get_input_embeddings().weight, target.get_output_embeddings()  # as Drafting takes them
    rows, begin = prompts.shape
    tokens = prompts.new_zeros(rows, begin + new + 2 * drafts + 2)
    tokens[:, :begin] = prompts
    every, steps = torch.arange(rows, device=tokens.device)[:, None], torch.arange(drafts + 1, device=tokens.device)
    hidden = decoder_of(target)(tokens, use_cache=False).last_hidden_state
    tokens[:, begin] = out(hidden[:, begin - 1]).argmax(-1)
    length = torch.full((rows,), begin + 1, device=tokens.device)  # tokens that are certain
    counted = {"passes": 0, "drafted": 0, "accepted": 0}
    while bool((going := length < begin + new).any()):
        features = hidden.clone()
        for step in range(drafts):
            guessed = head(F.embedding(tokens[:, 1:], embeddings), features[:, :-1])
            last = length[:, None] + step - 2  # where the token after the next one is guessed
            features[every, last + 1] = guessed[every, last]
            tokens[every, last + 2] = out(guessed[every, last]).argmax(-1)
        places = length[:, None] + steps
        hidden = decoder_of(target)(tokens, use_cache=False).last_hidden_state
        said = out(hidden[every, places - 1]).argmax(-1)
        right = (said[:, :drafts] == tokens[every, places[:, :drafts]]).long().cumprod(1).sum(1)
        tokens[every, places] = said  # those that were right, and one more; what is behind is not certain
        counted["passes"] += int(going.sum())
        counted["drafted"] += drafts * int(going.sum())
        counted["accepted"] += int(right[going].sum())
        length = torch.where(going, length + right + 1, length)
    return tokens[:, begin : begin + new], counted


class HeadStudy(Study):
    """The original, its conversion, and the heads."""

    def run(self) -> None:
        """Measure the pairs of every seed, as long as there is time."""
        held_out = token_rows(self.texts["own"] / "held_out", self.given.prompts * 1024).to(self.device)
        self.prompts = held_out.reshape(-1, held_out.shape[1])[: self.given.prompts, :PROMPT].contiguous()
        longest = 0.0
        for seed in range(self.given.seeds):
            began = time.time()
            if self.given.seconds - (began - self.began) < 1.1 * longest:
                return self.store({"stopped": f"{began - self.began:.0f} s, before seed {seed}"})
            self.pairs(seed)
            longest = time.time() - began

    def pairs(self, seed: int) -> None:
        """A head for the original; and with it, and with its own, the conversion."""
        torch.manual_seed(seed)
        original, converted = self.model(wired=False), self.model()
        head = start_head(original, seed).requires_grad_(False)
        self.pair("original", original, "not trained", head, seed)
        train(original, head, self.rows, self.given.head_batch, seed, self.given.head_epochs)
        self.pair("original", original, "original", head, seed)
        head.save(self.given.out / "original")
        self.pair("not healed", converted, "original", head, seed)
        own = [p for number in self.wiring.layers for p in decoder_layers(converted)[number].parameters()]
        self.heal(converted, original, own, RATES["layers"], seed)
        self.pair("healed", converted, "original", head, seed)
        again = deepcopy(head)
        train(original, again, self.rows, self.given.head_batch, seed + 1)  # what one epoch more brings by itself
        self.pair("original", original, "original, one epoch more", again, seed)
        train(converted, head, self.rows, self.given.head_batch, seed + 1)
        self.pair("healed", converted, "healed", head, seed)
        head.save(self.given.out / "healed")

    def pair(self, target: str, model: Any, trained_on: str, head: DraftHead, seed: int) -> None:
        """Store how often the drafts of a head are right."""
        given = self.given
        said, counted = speculate(model, head, self.prompts, given.new, given.drafts)
        plain, _ = speculate(model, head, self.prompts, given.new, 0)
        shares = {
            "acceptance": counted["accepted"] / counted["drafted"],
            "tokens of a pass": (counted["accepted"] + counted["passes"]) / counted["passes"],
        }
        same = int((said == plain).all(1).sum())
        row = {"target": target, "head": trained_on, "seed": seed, **counted, **shares, "like greedy": same}
        self.store(row | {"answers": len(said), "at": round(time.time() - self.began, 1)})

    def store(self, line: dict[str, Any]) -> None:
        """Append a line to the results, and show it."""
        names = "layers", "tokens", "batch", "head_batch", "head_epochs", "drafts", "new"
        store(self.file, {**line, **{name: getattr(self.given, name) for name in names}})
        print(line, flush=True)


def main(given: Any) -> None:
    """Measure all pairs."""
    HeadStudy(given).run()
