"""Computes log-probabilities of continuations. Each context runs once; logits exist only at positions to score."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from fcsd.engine.batches import is_recurrent, left_padded, select_rows
from fcsd.errors import BadInputError
from fcsd.launch.shared_work import ALONE, Team
from fcsd.models.build import logits_cap, logits_factor
from fcsd.models.config_keys import cache_keyword
from fcsd.models.rope import RopeBorder, rope_border

# The most padded tokens in one forward pass.
FORWARD_TOKENS = 16384
# The most positions whose logits exist at once: [1024, vocab] in fp32 takes at most 0.8 GB.
HEAD_ROWS = 1024

Tokens = tuple[int, ...]
Request = tuple[Sequence[int], Sequence[int]]


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Make sure that the decoder followed by ``head_logits`` gives the model's logits.

    A model that does more to its logits than its row says would be scored wrongly.

    Raises:
        BadInputError: the two give different logits.
        NonFiniteError: the model gives NaN or infinite logits.
    """
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device)
    whole = model(input_ids=ids, use_cache=False).logits[0].float()
    ALONE.require_finite(bool(whole.isfinite().all()))
    rounding = 8 * torch.finfo(model.dtype).eps * whole.abs().max()
    hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
    if (head_logits(model, hidden).to(whole.device) - whole).abs().max() > rounding:
        raise BadInputError(
            f"{type(model).__name__} does more to its logits than its output embeddings and its row do",
            "this architecture cannot be scored yet",
        )


def decoder_of(model: PreTrainedModel) -> Any:
    """The part of a causal LM whose output is the last hidden states."""
    decoder = model.get_decoder()
    # For Llama 4, transformers returns the causal LM itself, with its head.
    return decoder if decoder.get_output_embeddings() is None else decoder.model


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """fp32 logits ``[rows, vocab]`` of hidden states ``[rows, hidden]``."""
    head: Any = model.get_output_embeddings()
    logits, cap = head(hidden).float() * logits_factor(model.config), logits_cap(model.config)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def batches(
    lengths: Sequence[int], tokens: int, batch_size: int | None, border: int | None = None
) -> Iterator[list[int]]:
    """Indices of ``lengths``, longest first, in batches of at most ``tokens`` padded tokens and ``batch_size``.

    Args:
        border: a batch has no lengths of both sides of this one, which is on the side of the shorter ones.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, tokens // lengths[order[0]])
        size = min(size, batch_size or size)
        if border is not None:
            size = min(size, sum((lengths[i] > border) == (lengths[order[0]] > border) for i in order))
        yield order[:size]
        order = order[size:]


@torch.no_grad()
def continuation_logprobs(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    batch_size: int | None = None,
    done: Callable[[int, tuple[float, bool]], None] = lambda index, answer: None,
    team: Team = ALONE,
) -> dict[int, tuple[float, bool]]:
    """Score token continuations, or this rank's share of them.

    The choices of one context share its keys and values, except in models with recurrent layers: some of these take
    several tokens after a state as if there were none. Choices of a single token need no forward pass of their own.
    Where rotary factors depend on the length of a pass, choices that reach beyond the border share nothing with a
    context before it, and no pass has inputs of both sides.

    Args:
        model: a causal LM in eval mode.
        requests: ``(context ids, continuation ids)``, neither empty.
        batch_size: the most contexts in one forward pass; None for as many as ``FORWARD_TOKENS`` allows.
        done: called with ``(index, answer)`` as soon as an answer is known.
        team: the ranks that share the work; the batches do not depend on their number.

    Returns:
        For each request, by its index: the summed log-probability (natural log, from fp32 logits) of the continuation,
        and whether greedy decoding would have produced it.

    Raises:
        ConfigError: an input is beyond the border of rotary factors that differ from length to length.
        NonFiniteError: the model gives NaN or infinite logits.
    """
    border = rope_border(model.config)
    if border is not None and requests:
        border.require_computable(max(len(context) + len(continuation) - 1 for context, continuation in requests))
    trunks: dict[Tokens, dict[Tokens, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, (context, continuation) in enumerate(requests):
        trunks[tuple(context[:-1])][(context[-1], *continuation[:-1])].append(index)
    layers: Any = DynamicCache(config=model.config).layers
    divisible = not any(map(is_recurrent, layers))
    shared = {
        trunk: branches
        for trunk, branches in trunks.items()
        if divisible and trunk and len(branches) > 1 and not _crosses(border, trunk, branches)
    }
    single: dict[Tokens, list[int]] = defaultdict(list)  # requests that divide the same tokens elsewhere share a row
    for trunk, branches in trunks.items():
        if trunk not in shared:
            for branch, indices in branches.items():
                single[trunk + branch] += indices
    answers: dict[int, tuple[float, bool]] = {}
    forwards = chain(
        _whole(model, single, batch_size, team, border), _branched(model, shared, batch_size, team, border)
    )
    for hidden, ends in forwards:
        scored = [(end, index) for end, indices in ends for index in indices]
        positions = [p for end, index in scored for p in range(end - len(requests[index][1]), end)]
        targets = [token for _, index in scored for token in requests[index][1]]
        logprobs, hits = _score_positions(model, hidden.flatten(0, 1), positions, targets, team)
        start = 0
        for _, index in scored:
            stop = start + len(requests[index][1])
            answers[index] = (float(logprobs[start:stop].sum()), bool(hits[start:stop].all()))
            done(index, answers[index])
            start = stop
    return answers


def _crosses(border: RopeBorder | None, trunk: Tokens, branches: Mapping[Tokens, list[int]]) -> bool:
    """Whether a beginning has other rotary factors alone than with some of its branches."""
    return border is not None and not border.beyond(len(trunk)) and border.beyond(len(trunk) + max(map(len, branches)))


def _whole(
    model: PreTrainedModel,
    inputs: dict[Tokens, list[int]],
    batch_size: int | None,
    team: Team,
    border: RopeBorder | None,
) -> Iterator[tuple[torch.Tensor, list[tuple[int, list[int]]]]]:
    """Forward passes over whole inputs.

    Yields:
        Hidden states ``[batch, width, hidden]``; and for each row the end of its tokens in the flattened first two
        dimensions, with the indices of its requests.
    """
    tokens = list(inputs)
    most = border and border.positions
    for batch in team.share(batches([len(t) for t in tokens], FORWARD_TOKENS, batch_size, border=most)):
        rows = [tokens[i] for i in batch]
        ids, width = right_padded(rows, model.device)
        ends = [(n * width + len(row), inputs[row]) for n, row in enumerate(rows)]
        yield decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state, ends


def _branched(
    model: PreTrainedModel,
    trunks: dict[Tokens, dict[Tokens, list[int]]],
    batch_size: int | None,
    team: Team,
    border: RopeBorder | None,
) -> Iterator[tuple[torch.Tensor, list[tuple[int, list[int]]]]]:
    """As ``_whole``, for inputs with common beginnings.

    Each beginning is computed once. The tokens that follow it are computed over copies of its cache.
    """
    decoder, keys = decoder_of(model), list(trunks)
    most = border and border.positions
    whole = batches([len(t) for t in keys], FORWARD_TOKENS, batch_size, most)
    for batch in team.share(chain.from_iterable(_narrowed(part, list(trunks.values())) for part in whole)):
        rows = [keys[i] for i in batch]
        ids, mask, positions = left_padded(rows, model.device)
        cache = DynamicCache(config=model.config)
        kept: Any = {cache_keyword(): cache}
        decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **kept)
        branches = [(n, branch, indices) for n, row in enumerate(rows) for branch, indices in trunks[row].items()]
        owners = torch.tensor([n for n, _, _ in branches], device=model.device)
        select_rows(cache, owners, len(rows))
        ids, width = right_padded([branch for _, branch, _ in branches], model.device)
        places = positions[owners, -1:] + 1 + torch.arange(width, device=model.device)
        if most is not None and len(rows[0]) <= most:  # the padding of a branch must not reach beyond the border
            places = places.clamp(max=most - 1)
        hidden = decoder(
            input_ids=ids,
            attention_mask=torch.cat([mask[owners], torch.ones_like(ids)], dim=1),
            position_ids=places,
            use_cache=True,
            **kept,
        ).last_hidden_state
        yield hidden, [(n * width + len(b), indices) for n, (_, b, indices) in enumerate(branches)]


def _narrowed(batch: list[int], branches: Sequence[Mapping[Tokens, list[int]]]) -> Iterator[list[int]]:
    """Parts of a batch of beginnings, whose branches have at most ``FORWARD_TOKENS`` padded tokens or one beginning.

    Short beginnings have far more tokens in their branches than of their own.
    """
    part: list[int] = []
    count = width = 0
    for i in batch:
        more, wide = len(branches[i]), max(map(len, branches[i]))
        if part and (count + more) * max(width, wide) > FORWARD_TOKENS:
            yield part
            part, count, width = [], 0, 0
        part.append(i)
        count, width = count + more, max(width, wide)
    yield part


def right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, int]:
    """Token ids ``[batch, width]`` and the width; padding on the right does not change a causal model's output."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device), width


def _score_positions(
    model: PreTrainedModel, hidden: torch.Tensor, positions: list[int], targets: list[int], team: Team
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each target at its row of ``hidden``, and whether it is the most likely token.

    Args:
        hidden: ``[rows, hidden]``.
        positions, targets: for each target, its row and its token id.

    Returns:
        Two tensors ``[len(targets)]`` on the CPU.
    """
    logprobs, hits, finite = [], [], True
    for start in range(0, team.most(len(positions)), HEAD_ROWS):
        # A head that is spread over the ranks must run equally often on all ranks. A rank that has no positions left
        # runs it on zero rows.
        rows = torch.tensor(positions[start : start + HEAD_ROWS], dtype=torch.long, device=hidden.device)
        wanted = torch.tensor(targets[start : start + HEAD_ROWS], dtype=torch.long, device=hidden.device)
        logits = head_logits(model, hidden[rows])
        finite = finite and bool(logits.isfinite().all())
        wanted = wanted.to(logits.device)
        logprobs.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0])
        hits.append(logits.argmax(-1) == wanted)
    team.require_finite(finite)
    return torch.cat(logprobs).cpu(), torch.cat(hits).cpu()
