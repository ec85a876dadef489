"""`objective`: the loss, and the table of its terms."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fcsd.config.fields import Positive, Section, Weight


def automatic_chunk(vocab: int) -> int:
    """How many tokens' logits are in memory at the same time where the recipe does not say it."""
    return max(512, 2**26 // vocab // 64 * 64)


@dataclass(frozen=True)
class Term:
    """A row of the table of terms: what marks a field of ``Objective`` as the weight of a term of the loss.

    Attributes:
        title: the title of its curve.
        teacher: whether it needs a teacher in memory.
        models: of how many models it computes logits, which take memory; 0 if it computes none.
        held_out: its name as a measure of held-out text, whatever its weight; empty if only its weight lets it measure.
    """

    title: str
    teacher: bool = False
    models: int = 0
    held_out: str = ""


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

    kl: Annotated[Weight, Term("KL(teacher || student)", teacher=True, models=2, held_out="KL")] = 1.0
    """The weight of KL(teacher || student), the divergence from the teacher's distribution; 0 turns it off."""
    sft: Annotated[Weight, Term("cross-entropy", models=1, held_out="cross-entropy")] = 0.0
    """The weight of the cross-entropy with the text itself; 0 turns it off."""
    hidden: Annotated[Hidden, Term("hidden L2", teacher=True)] = Hidden()
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

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the terms by name; terms with weight 0 are left out."""
        found = {name: getattr(self, name) for name in TERMS}
        return {name: weight for name, term in found.items() if (weight := getattr(term, "weight", term))}

    @property
    def needs_teacher(self) -> bool:
        """Whether a term needs a teacher in memory."""
        return any(TERMS[name].teacher for name in self.weights)

    @property
    def measures(self) -> tuple[str, ...]:
        """The terms that held-out text is measured with; no teacher is loaded for them alone."""
        possible = {name: term for name, term in TERMS.items() if self.needs_teacher or not term.teacher}
        return tuple(name for name, term in possible.items() if term.held_out or name in self.weights)

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.weights:
            raise ValueError(f"the weights of objective.{', objective.'.join(TERMS)} are all 0, so nothing is learned")
        return self


TERMS = {
    name: mark for name, field in Objective.model_fields.items() for mark in field.metadata if isinstance(mark, Term)
}
