"""Generates greedily in batches over a growing KV cache. Rows whose answers have ended are removed from the batch."""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from fcsd.engine.padded_cache import left_padded, select_rows
from fcsd.launch.shared_work import ALONE, Team

# The most tokens (of prompts and answers, padded) whose keys and values are in memory at once.
CACHE_TOKENS = 65536


@torch.no_grad()
def generate_greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ended: Callable[[list[int], int], int | None],
    team: Team = ALONE,
) -> list[list[int]]:
    """Continue every prompt with its most likely tokens.

    Sampling settings and penalties in the model's ``generation_config`` are not applied.

    Args:
        model: a causal LM in eval mode.
        prompts: token ids; each sequence is a row of the batch, and none is empty.
        max_new_tokens: the most tokens to add to a row.
        ended: called after each step with the new token ids of a row and the number of them that it has seen before;
            the row ends unless it returns None.
        team: the ranks. In lockstep, a rank whose rows have all ended continues until the rows of all ranks have ended.

    Returns:
        The new token ids of each row, including the token that ended it.

    Raises:
        NonFiniteError: the model gives NaN or infinite logits.
    """
    ids, mask, positions = left_padded(prompts, model.device)
    cache = DynamicCache(config=model.config)
    new: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    running = set(rows)
    while True:
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        team.require_finite(bool(logits.isfinite().all()))
        ids = logits.argmax(-1, keepdim=True)
        for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
            if row in running:
                new[row].append(token)
                if len(new[row]) == max_new_tokens or ended(new[row], len(new[row]) - 1) is not None:
                    running.discard(row)
        if not team.any(bool(running)):
            return new
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        # Copying the cache takes more time than computing a few rows whose results are not used.
        if 0 < len(running) <= 0.75 * len(rows):
            keep = torch.tensor([i for i, row in enumerate(rows) if row in running], device=model.device)
            select_rows(cache, keep, len(rows))
            ids, positions, mask = ids[keep], positions[keep], mask[keep]
            rows = [row for row in rows if row in running]
