"""The teacher's k most likely token ids with one bucket for all others, and the KL divergence computed from them.

Let ``q`` be the teacher's distribution, ``p`` the student's, ``S`` the k token ids, ``T`` all others (the tail), and
``q_T``, ``p_T`` the probabilities of ``T``:

    KL_k = sum over S of q log(q / p)  +  q_T log(q_T / p_T)   <=   KL(q ‖ p)

by the data-processing inequality. The difference is exactly ``q_T KL(q(.|T) ‖ p(.|T))``, which is 0 at k = V. Inside
the tail the teacher's distribution is unknown, and the loss uses the student's own distribution in its place. The
gradient at the logits of T is therefore ``p - q_T p(.|T)`` instead of ``p - q``. The sum of the absolute errors of the
gradient is at most ``2 q_T``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fcsd.distill.loss.losses import chunked, for_matmul, logits_of


class TopK(NamedTuple):
    """For each of ``tokens`` positions: the log-probabilities of the k most likely token ids, these ids, and the tail.

    ``tail`` is the log-probability of all other token ids together.
    """

    log_probs: Tensor  # [tokens, k] fp32
    words: Tensor  # [tokens, k] int32
    tail: Tensor  # [tokens] fp32, -inf if there are no other token ids


@torch.no_grad()
def top_k(
    hidden: Tensor, head: Tensor, k: int, *, temperature: float = 1.0, chunk_tokens: int = 512, cap: float | None = None
) -> TopK:
    """The k most likely next token ids at each position, and the tail.

    Args:
        hidden: ``[tokens, hidden]`` after the final norm.
        head: ``[vocab, hidden]`` output weight.
        k: the number of token ids, at most ``vocab``.
        chunk_tokens: the number of positions whose logits are computed at a time.
        cap: as in ``kl_divergence``.
    """
    weight = for_matmul(head)
    chunks = []
    for rows in hidden.split(chunk_tokens):
        log_q = (logits_of(rows, weight, cap) / temperature).log_softmax(-1)
        log_probs, words = log_q.topk(k)
        tail = log_q.scatter_(1, words, -torch.inf).logsumexp(1)
        chunks.append(TopK(log_probs, words.int(), tail))
    return TopK(*map(torch.cat, zip(*chunks, strict=True)))


def kl_from_top_k(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher: TopK,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    denominator: float | Tensor = 1.0,
    chunk_tokens: int = 512,
    kept: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The divergence ``KL_k`` of this module's docstring, a lower bound of FarSkip's equation 4.

    Args:
        student_hidden: ``[..., hidden]`` after the final norm.
        student_head: ``[vocab, hidden]`` output weight.
        teacher: the teacher's distribution at the positions where ``mask`` is true, in their order and at the same
            temperature.
        mask: ``[...]`` bool, true where the position counts.
        temperature, denominator, chunk_tokens, kept, cap: as in ``kl_divergence``.

    Returns: an fp32 scalar with gradients to ``student_hidden`` and, if it requires them, ``student_head``.
    """

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_p = (logits / temperature).log_softmax(-1)
        words = teacher.words[rows].long()
        log_q_top, log_q_tail = teacher.log_probs[rows].to(log_p.dtype), teacher.tail[rows].to(log_p.dtype)
        log_p_top = log_p.gather(1, words)
        log_p_tail = log_p.scatter_(1, words, -torch.inf).logsumexp(1)
        log_q = torch.cat([log_q_top, log_q_tail.unsqueeze(1)], 1)
        log_ratio = log_q - torch.cat([log_p_top, log_p_tail.unsqueeze(1)], 1)
        log_ratio = log_ratio.masked_fill(log_q == -torch.inf, 0.0)  # 0 * log 0 = 0
        difference = torch.cat([log_p_top, log_p_tail.unsqueeze(1)], 1).exp() - log_q.exp()
        # As in kl_divergence, each addend q log(q/p) + p - q is non-negative by itself.
        loss = (log_q.exp() * log_ratio + difference).sum()
        off = difference[:, -1] / log_p_tail.exp()  # (p_T - q_T) / p_T
        gradient = log_p.exp_().mul_(off.nan_to_num(0.0).unsqueeze(1)).scatter_(1, words, difference[:, :-1])
        return loss * temperature**2, gradient.mul_(temperature)

    keep = mask.flatten().nonzero().squeeze(1) if kept is None else kept
    return chunked(student_hidden.flatten(0, -2)[keep], student_head, chunk_loss, chunk_tokens, cap) / denominator
