"""`objective`: the loss."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fcsd.config.fields import Positive, Section, Weight


def automatic_chunk(vocab: int) -> int:
    """How many tokens' logits are in memory at the same time where the recipe does not say it."""
    return max(512, 2**26 // vocab // 64 * 64)


class Hidden(Section):
    """The squared distance between the hidden states of student and teacher: weight * sum over layers of
    ||student - teacher||^2 (FarSkip eq. 5)."""

    weight: Weight = 0.0
    """The weight of the distance in the loss; 0 turns it off. The distance grows with the hidden size and with the
    number of layers."""
    layers: str = "all"
    """The layers whose full residual stream is compared: all, last:24, first:8, 50%, 12-27 or 0,2,5-7. The comparison
    costs the overlap of these layers."""


class Objective(Section):
    """The loss: kl * KL(teacher || student) + sft * cross-entropy + hidden.weight * squared distance."""

    kl: Weight = 1.0
    """The weight of KL(teacher || student), the divergence from the teacher's distribution; 0 turns it off."""
    sft: Weight = 0.0
    """The weight of the cross-entropy with the text itself; 0 turns it off."""
    hidden: Hidden = Hidden()
    """The distance between the hidden states of student and teacher, as a third term of the loss."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The temperature of the teacher's and the student's softmax in the divergence."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether the loss is the mean or the sum over the tokens of a batch that count. With `sum`, `optim.grad_clip` and
    `optim.lr` have to fit the batch size."""
    chunk_tokens: Positive | None = None
    """The number of tokens whose logits are in memory at the same time. Smaller values need less memory, larger ones
    start fewer kernels; the result is the same up to rounding. null takes 512 tokens, or more where the vocabulary is
    so small that 2^26 logits are those of more tokens."""
    freeze_embeddings: bool = False
    """Do not train the input embeddings."""
    freeze_lm_head: bool = False
    """Do not train the output head."""

    def chunk(self, vocab: int) -> int:
        """``chunk_tokens`` for a vocabulary of this size."""
        return self.chunk_tokens or automatic_chunk(vocab)

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.kl == 0 and self.sft == 0 and self.hidden.weight == 0:
            raise ValueError("objective.kl, objective.sft and objective.hidden.weight are all 0, so nothing is learned")
        return self
