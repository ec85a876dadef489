"""The frozen original, and what is read of either model: its last hidden states and its output head."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fcsd.checkpoint import read_config, resolve
from fcsd.config import Recipe
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of


def needs_teacher(recipe: Recipe) -> bool:
    """Whether a term of the loss compares with a teacher."""
    return bool(recipe.objective.kl or recipe.objective.hidden.weight)


def teacher_name(recipe: Recipe) -> str:
    """Directory or hub id of the teacher: the recipe's, or the base model that the student was converted from.

    Raises:
        ConfigError: the recipe names none and the student's config records none.
    """
    if recipe.teacher is not None:
        return recipe.teacher
    block = read_config(resolve(recipe.model).path).raw.get("fcsd") or {}
    if not block.get("base_model"):
        raise ConfigError(f"{recipe.model} records no base model", hint="set `teacher:` in the recipe")
    revision = block.get("base_revision")
    return f"{block['base_model']}@{revision}" if revision else block["base_model"]


def final_hidden(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """``[batch, seq, hidden]`` after the final norm.

    Position ids that restart, no attention mask and no cache are what keeps attention inside documents.
    """
    decoder: Any = model.get_submodule(arch_of(model.config).classes["AutoModelForCausalLM"][1])
    return decoder(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).last_hidden_state


def output_head(model: PreTrainedModel) -> Tensor:
    """``[vocab, hidden]``: the weight that turns final hidden states into logits."""
    head: Any = model.get_output_embeddings()
    return head.weight
