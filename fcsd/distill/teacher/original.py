"""The frozen teacher: which model it is, and what the loss reads of teacher and student alike."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fcsd.checkpoint import fingerprint, read_config, read_layout, resolve, sample_sha256
from fcsd.checkpoint.location import read_base_path
from fcsd.config import Recipe
from fcsd.errors import BadInputError, ConfigError
from fcsd.kernels.packed_attention import packed_arguments, takes_borders, use_packed_attention
from fcsd.models.build import arch_of, decoder_layers


def needs_teacher(recipe: Recipe) -> bool:
    """Whether a term of the loss compares with a teacher in memory."""
    objective = recipe.objective
    return objective.teacher_cache is None and bool(objective.kl or objective.hidden.weight)


def teacher_name(recipe: Recipe) -> str:
    """Directory or hub id of the teacher: the recipe's, or the original that the student was converted from.

    Raises:
        ConfigError: the recipe names none and the student's config records none.
    """
    if recipe.teacher is not None:
        return recipe.teacher
    if recipe.init.wiring is not None and recipe.init.weights == "loaded":
        return recipe.model
    block = student_block(recipe)
    if not block.get("base_model"):
        raise ConfigError(f"{recipe.model} records no base model", hint="set `teacher:` in the recipe")
    if revision := block.get("base_revision"):
        return f"{block['base_model']}@{revision}"
    return read_base_path(resolve(recipe.model, weights=False).path) or block["base_model"]


def student_block(recipe: Recipe) -> dict[str, Any]:
    """What the student's conversion recorded; empty for an original."""
    return read_config(resolve(recipe.model, weights=False).path).raw.get("fcsd") or {}


def identify_teacher(recipe: Recipe) -> dict[str, str]:
    """Hashes of the teacher: ``teacher.fingerprint`` of its config and headers, ``teacher.sample`` of its weights.

    Raises:
        BadInputError: it is not there, or not the one that the student was made from.
    """
    name = teacher_name(recipe)
    try:
        layout = read_layout(resolve(name).path)
    except BadInputError as error:
        if recipe.teacher is None:
            error.hint = f"{recipe.model} records it as its original; if it moved, set `teacher:` in the recipe"
        raise
    found = fingerprint(layout)
    expect_fingerprint(recipe, found, f"teacher {name}")
    return {"teacher.fingerprint": found, "teacher.sample": sample_sha256(layout)}


def expect_fingerprint(recipe: Recipe, found: str, what: str) -> None:
    """Check a teacher's fingerprint against the recipe's, or else the one that the student records, if it does.

    Raises:
        BadInputError: they differ.
    """
    expected = recipe.teacher_sha256 or student_block(recipe).get("base_sha256")
    if expected not in (None, found):
        source = "the recipe asks for" if recipe.teacher_sha256 else f"{recipe.model} was made from"
        raise BadInputError(
            f"{what} has the fingerprint {found}, {source} {expected}",
            hint=f"it moved or changed; if it is the teacher you mean, set teacher_sha256: {found}",
        )


def final_hidden(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """``[batch, seq, hidden]`` after the final norm.

    Attention stays inside documents because position ids restart and there is neither a mask nor a cache. An
    architecture whose code does not look at position ids for that is given explicit masks, and a model with packed
    attention is given the borders of the documents.
    """
    arch = arch_of(model.config)
    decoder: Any = model.get_submodule(arch.classes["AutoModelForCausalLM"][1])
    ids, positions = batch["input_ids"], batch["position_ids"]
    if takes_borders(model):
        inside = packed_arguments(batch["borders"])
    else:
        inside = {"attention_mask": None if arch.packs else _document_masks(decoder, ids, positions)}
    return decoder(input_ids=ids, position_ids=positions, use_cache=False, **inside).last_hidden_state


def pack_attention(model: PreTrainedModel, recipe: Recipe) -> None:
    """Let a model that is trained or followed use packed attention where the recipe, the device and the model allow it.

    This must happen before ``wire_sharded``, which wraps the attention function.
    """
    if recipe.train.attention == "packed" and model.device.type == "cuda" and model.dtype == torch.bfloat16:
        use_packed_attention(model)


def _document_masks(decoder: Any, ids: Tensor, positions: Tensor) -> dict[str, Tensor | None]:
    """By kind of attention, the mask that other decoders derive from the position ids themselves."""
    given = {"config": decoder.config, "inputs_embeds": decoder.embed_tokens(ids), "attention_mask": None}
    given |= {"past_key_values": None, "position_ids": positions}
    return {
        "full_attention": create_causal_mask(**given),
        "sliding_attention": create_sliding_window_causal_mask(**given),
    }


def compile_layers(model: PreTrainedModel, recipe: Recipe, backend: str = "inductor") -> None:
    """Compile each decoder layer on its own, if the recipe says so; the model computes the same up to rounding.

    Args:
        backend: of torch.compile; tests use one that needs no compiler.
    """
    if recipe.train.compile:
        for layer in decoder_layers(model):
            layer.compile(dynamic=False, backend=backend)


def without_compiling(recipe: Recipe) -> AbstractContextManager[Any]:
    """Inside the block layers run compiled for the shapes that they were compiled for. For other shapes, such as those
    of generation, they run uncompiled instead of being compiled again and again."""
    return torch.compiler.set_stance("eager_on_recompile") if recipe.train.compile else nullcontext()


def output_head(model: PreTrainedModel) -> Tensor:
    """``[vocab, hidden]``: the weight that turns final hidden states into logits."""
    head: Any = model.get_output_embeddings()
    return head.weight
