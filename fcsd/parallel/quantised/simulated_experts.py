"""Computes routed experts whose rows travel over a quantised wire, to the experts and back (FlashCommunication V2).

Every row is rounded, those of tokens whose experts lie on their own rank too, as the quantised all-to-all does.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fcsd.parallel.quantised.simulated_all_reduce import Rounding


def routed_over_wire(
    router: nn.Module, experts: nn.Module, flat: Tensor, dispatch: Rounding | None, combine: Rounding | None
) -> Tensor:
    """The routed experts' output for tokens ``[tokens, hidden]``, of the same shape.

    The router sees the tokens as they are. A row that goes to several experts is rounded once. On its way back there
    is a row for each token and expert, without the router's weight; the token's rank adds them in fp32.

    Args:
        router: transformers' router, which returns ``(logits, weights, indices)`` for tokens.
        experts: transformers' experts.
        flat: the tokens.
        dispatch: what the wire makes of the rows on their way to the experts; None leaves them as they are.
        combine: the same for their way back.
    """
    _, weights, indices = router(flat)
    sent = flat if dispatch is None else dispatch(flat).to(flat.dtype)
    if combine is None:
        return experts(sent, indices, weights)
    top_k = indices.shape[-1]
    rows = sent.repeat_interleave(top_k, dim=0)  # one row for each token and expert, [tokens * top_k, hidden]
    choice = indices.reshape(-1, 1)
    outputs = combine(experts(rows, choice, torch.ones_like(choice, dtype=weights.dtype))).to(flat.dtype)
    weighted = outputs.float() * weights.reshape(-1, 1).float()
    return weighted.view(-1, top_k, flat.shape[1]).sum(dim=1).to(flat.dtype)


def prescaled_over_wire(
    router: nn.Module, experts: nn.Module, flat: Tensor, dispatch: Rounding | None, combine: Rounding | None
) -> Tensor:
    """As ``routed_over_wire`` for llama4, whose router multiplies the rows before they are sent.

    transformers runs every expert on every token, with rows of zeros where an expert was not chosen. Every format
    leaves zeros as they are, so these rows stay what they are without a wire.
    """
    rows = prescaled_rows(router, flat)
    rows = rows if dispatch is None else dispatch(rows).to(flat.dtype)
    outputs: Any = experts(rows)
    outputs = outputs if combine is None else combine(outputs).to(flat.dtype)
    return outputs.view(-1, *flat.shape).float().sum(dim=0).to(flat.dtype)


def prescaled_rows(router: nn.Module, flat: Tensor) -> Tensor:
    """llama4's input to its experts: ``[experts * tokens, hidden]``, zero where an expert was not chosen."""
    scores, _ = router(flat)  # [tokens, experts]
    return flat.repeat(scores.shape[1], 1) * scores.transpose(0, 1).reshape(-1, 1)
