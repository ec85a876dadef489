"""`objective`: the loss."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fcsd.config.fields import OutputPath, Positive, Section, Weight


class Hidden(Section):
    """The squared distance of the residual streams: weight * sum over layers of ||student - teacher||^2."""

    weight: Weight = 0.0
    """Weight of the distance; it grows with the hidden size and with the number of layers."""
    layers: str = "all"
    """Which layers' full streams to compare: all, last:24, first:8, 50%, 12-27 or 0,2,5-7."""


class TeacherCache(Section):
    """The teacher's most likely words on disk, instead of the teacher; written by `fcsd cache-teacher`."""

    path: OutputPath
    """Directory of the cache."""
    top_k: Positive = 64
    """Words per position; 8 bytes each."""


class Objective(Section):
    """The loss: kl * KL(teacher || student) + sft * cross-entropy + hidden.weight * squared distance."""

    kl: Weight = 1.0
    """Weight of the divergence from the teacher."""
    sft: Weight = 0.0
    """Weight of the cross-entropy with the text itself."""
    hidden: Hidden = Hidden()
    """The distance of the streams inside."""
    teacher_cache: TeacherCache | None = None
    """Use a cache for the divergence, a lower bound of it; null runs the teacher."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Both softmaxes' temperature in the divergence."""
    reduction: Literal["mean", "sum"] = "mean"
    """Mean or sum over the tokens of a batch; clipping and the meaning of lr depend on it."""
    chunk_tokens: Positive = 512
    """Tokens whose logits exist at the same time; bounds memory, not the result."""
    freeze_embeddings: bool = False
    """Leave the input embeddings as they are."""
    freeze_lm_head: bool = False
    """Leave the output head as it is."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.kl == 0 and self.sft == 0 and self.hidden.weight == 0:
            raise ValueError("objective.kl, objective.sft and objective.hidden.weight are all 0, so nothing is learned")
        if self.teacher_cache and (self.kl == 0 or self.hidden.weight):
            raise ValueError("objective.teacher_cache serves kl alone: kl must have a weight, hidden none")
        return self
