"""Generates in batches over a growing KV cache, which suits every model. Rows whose answers have ended are removed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from fcsd.launch.shared_work import ALONE, Team
from fcsd.models.config_keys import cache_keyword
from fcsd.models.rope import rope_border

# The most tokens (of prompts and answers, padded) whose keys and values are in memory at once.
CACHE_TOKENS = 65536

# Chooses the next token ids ``[rows, 1]`` by the places of the rows in the batch, their tokens ``[rows, seq]``, and
# their logits ``[rows, vocab]``.
Choose = Callable[[list[int], torch.Tensor, torch.Tensor], torch.Tensor]


def most_likely(rows: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The ``Choose`` that takes the most likely tokens."""
    return logits.argmax(-1, keepdim=True)


@torch.no_grad()
def generate_in_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ended: Callable[[list[int], int], int | None],
    choose: Choose = most_likely,
    cache: Cache | None = None,
    team: Team = ALONE,
) -> list[list[int]]:
    """Continue every prompt.

    Where the rotary factors of a pass depend on its length, prompts before the border run first, and up to it. Answers
    that go on beyond it are read again from their first token, with the longer prompts: the factors of all their tokens
    have changed, and transformers drops its cache there, too.

    Args:
        model: a causal LM in eval mode.
        prompts: token ids; each sequence is a row of the batch, and none is empty.
        max_new_tokens: the most tokens to add to a row.
        ended: called after each step with the new token ids of a row and the number of them that it has seen before;
            the row ends unless it returns None.
        cache: an empty cache for the model; None for transformers' ordinary one.
        team: the ranks. In lockstep, a rank whose rows have all ended continues until the rows of all ranks have ended.

    Returns:
        The new token ids of each row, including the token that ended it.

    Raises:
        ConfigError: an answer may reach beyond the border of rotary factors that differ from length to length.
        NonFiniteError: the model gives NaN or infinite logits.
    """
    border = rope_border(model.config)
    new: list[list[int]] = [[] for _ in prompts]
    open_ = set(range(len(prompts)))

    def over(row: int) -> bool:
        return len(new[row]) == max_new_tokens or ended(new[row], len(new[row]) - 1) is not None

    if border is None:
        _continue(model, prompts, new, open_, over, choose, cache, team, most=None)
        return new
    border.require_computable(max(map(len, prompts)) + max_new_tokens - 1)
    short = {row for row in open_ if not border.beyond(len(prompts[row]))}
    if team.any(bool(short)):
        open_ = (open_ - short) | _continue(
            model, prompts, new, short, over, choose, cache, team, most=border.positions
        )
        cache = None
    if team.any(bool(open_)):
        _continue(model, prompts, new, open_, over, choose, cache, team, most=None)
    return new


def _continue(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new: list[list[int]],
    chosen: set[int],
    over: Callable[[int], bool],
    choose: Choose,
    cache: Cache | None,
    team: Team,
    most: int | None,
) -> set[int]:
    """Continue some of the prompts with what their answers have already.

    Args:
        new: the answers so far, which grow.
        chosen: the places of the prompts. If there are none, the first token of a prompt stands in for them, since
            other ranks may have some.
        over: whether the answer at a place has ended with its last token.
        most: the most tokens of an input; None for any number.

    Returns:
        The places of the answers that go on beyond ``most`` tokens.
    """
    rows = sorted(chosen)
    texts = [[*prompts[row], *new[row]] for row in rows]
    if not rows:
        rows, texts = [0], [[prompts[0][0]]]
    ids, mask, positions = left_padded(texts, model.device)
    tokens = ids
    cache = DynamicCache(config=model.config) if cache is None else cache
    kept: Any = {cache_keyword(): cache}
    running, further = set(chosen), set[int]()
    while True:
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **kept
        ).logits[:, -1]
        team.require_finite(bool(logits.isfinite().all()))
        ids = choose(rows, tokens, logits)
        for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
            if row in running:
                new[row].append(token)
                if over(row):
                    running.discard(row)
                elif most is not None and len(prompts[row]) + len(new[row]) > most:
                    running.discard(row)
                    further.add(row)
        if not team.any(bool(running)):
            return further
        tokens = torch.cat([tokens, ids], dim=1)
        # A row that has ended goes on with the others, and must not lead the pass beyond the border.
        positions = positions[:, -1:] + 1
        positions = positions if most is None else positions.clamp(max=most - 1)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        # Copying the cache takes more time than computing a few rows whose results are not used.
        if 0 < len(running) <= 0.75 * len(rows):
            keep = torch.tensor([i for i, row in enumerate(rows) if row in running], device=model.device)
            select_rows(cache, keep, len(rows))
            ids, tokens, positions, mask = ids[keep], tokens[keep], positions[keep], mask[keep]
            rows = [row for row in rows if row in running]


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and position ids, each ``[batch, width]``, of rows that are padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[*[0] * (width - len(row)), *row] for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def select_rows(cache: Cache, rows: torch.Tensor, batch: int) -> None:
    """Replace the ``batch`` rows of a cache by those at the indices ``rows``, in that order; indices may repeat.

    Layers with Desync wiring hold ``[ranks * batch, ...]``, one rank after the other.
    """
    layers: Any = cache.layers
    for layer in layers:
        if is_recurrent(layer):
            layer.reorder_cache(rows)
        elif layer.keys is not None:  # the layers of Nemotron-H that are no attention have none
            ranks = layer.keys.shape[0] // batch
            indices = torch.cat([rows + rank * batch for rank in range(ranks)])
            layer.batch_select_indices(indices.to(layer.keys.device))  # a device map spreads layers over devices


def is_recurrent(layer: Any) -> bool:
    """Whether a cache keeps the state of a convolution for its layer: linear attention, Mamba or LFM2's."""
    return hasattr(layer, "conv_states")
