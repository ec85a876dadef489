"""Log-probabilities of continuations: one forward per distinct input, logits only where they are scored."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from fcsd.errors import BadInputError, NonFiniteError

# Padded tokens in one forward, and positions whose logits exist at once: [1024, vocab] fp32 is 0.8 GB at most.
FORWARD_TOKENS = 16384
HEAD_ROWS = 1024

Request = tuple[Sequence[int], Sequence[int]]


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Make sure that decoder plus output embeddings *are* the model.

    A head that scales or caps its logits outside of the embedding matrix would be scored wrongly.

    Raises:
        BadInputError: the two give different logits.
        NonFiniteError: NaN or infinite logits.
    """
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device)
    whole = model(input_ids=ids, use_cache=False).logits[0].float()
    require_finite(whole)
    rounding = 8 * torch.finfo(model.dtype).eps * whole.abs().max()
    if (_logits(model, _hidden(model, ids)[0]).to(whole.device) - whole).abs().max() > rounding:
        raise BadInputError(
            f"{type(model).__name__} does more to its logits than its output embeddings do",
            "this architecture cannot be scored yet",
        )


def _hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Final hidden states ``[batch, seq, hidden]`` of right-padded ``ids`` ``[batch, seq]``.

    A causal model never looks at the padding to the right of a token, so no mask is needed.
    """
    decoder = model.get_decoder()
    if decoder.get_output_embeddings() is not None:  # Llama 4 answers with the causal LM, head included
        decoder = decoder.model
    return decoder(input_ids=ids, use_cache=False).last_hidden_state


def _logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """fp32 logits ``[rows, vocab]`` of hidden states ``[rows, hidden]``."""
    head: Any = model.get_output_embeddings()
    return head(hidden).float()


def require_finite(logits: torch.Tensor) -> None:
    """A model that overflows must never be given a score.

    Raises:
        NonFiniteError: some logit is NaN or infinite.
    """
    if not torch.isfinite(logits).all():
        raise NonFiniteError("the model's logits are NaN or infinite", "no score is reported for such a model")


def batches(lengths: Sequence[int], tokens: int, batch_size: int | None) -> Iterator[list[int]]:
    """Indices of ``lengths``, longest first, in batches of at most ``tokens`` padded tokens and ``batch_size``."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, tokens // lengths[order[0]])
        size = min(size, batch_size or size)
        yield order[:size]
        order = order[size:]


@torch.no_grad()
def continuation_logprobs(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    batch_size: int | None = None,
    done: Callable[[int, tuple[float, bool]], None] = lambda index, answer: None,
) -> list[tuple[float, bool]]:
    """Score token continuations.

    Requests whose inputs agree (single-token choices after one context) share one forward.

    Args:
        model: a causal LM in eval mode.
        requests: ``(context ids, continuation ids)``, neither empty.
        batch_size: most sequences in one forward; None for as many as ``FORWARD_TOKENS`` allows.
        done: called with ``(index, answer)`` as soon as an answer is known.

    Returns:
        For each request the summed log-probability (natural log, from fp32 logits) of the continuation, and
        whether greedy decoding would have produced it.

    Raises:
        NonFiniteError: NaN or infinite logits.
    """
    sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (context, continuation) in enumerate(requests):
        sharing[(*context, *continuation)[:-1]].append(index)
    inputs = list(sharing)
    answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    for batch in batches([len(tokens) for tokens in inputs], FORWARD_TOKENS, batch_size):
        width = len(inputs[batch[0]])
        ids = torch.tensor([[*inputs[i], *[0] * (width - len(inputs[i]))] for i in batch], device=model.device)
        hidden = _hidden(model, ids).flatten(0, 1)
        scored = [index for i in batch for index in sharing[inputs[i]]]
        ends = [row * width + len(inputs[i]) for row, i in enumerate(batch) for _ in sharing[inputs[i]]]
        targets = [requests[index][1] for index in scored]
        positions = [p for end, t in zip(ends, targets, strict=True) for p in range(end - len(t), end)]
        logprobs, hits = _score_positions(model, hidden, positions, [t for ts in targets for t in ts])
        start = 0
        for index, target in zip(scored, targets, strict=True):
            stop = start + len(target)
            answers[index] = (float(logprobs[start:stop].sum()), bool(hits[start:stop].all()))
            done(index, answers[index])
            start = stop
    return answers


def _score_positions(
    model: PreTrainedModel, hidden: torch.Tensor, positions: list[int], targets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and greedy hit ``[len(targets)]`` (on CPU) of each target at its row of ``hidden``."""
    logprobs, hits = [], []
    for start in range(0, len(positions), HEAD_ROWS):
        rows = torch.tensor(positions[start : start + HEAD_ROWS], device=hidden.device)
        wanted = torch.tensor(targets[start : start + HEAD_ROWS], device=hidden.device)
        logits = _logits(model, hidden[rows])
        require_finite(logits)
        wanted = wanted.to(logits.device)
        logprobs.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0])
        hits.append(logits.argmax(-1) == wanted)
    return torch.cat(logprobs).cpu(), torch.cat(hits).cpu()
