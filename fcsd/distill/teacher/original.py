"""Identifies the frozen teacher, and computes the hidden states that the loss reads of teacher and student."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fcsd.checkpoint import Layout, open_checkpoint
from fcsd.checkpoint.files import open_regular
from fcsd.config import Recipe
from fcsd.disk import bytes_sha256
from fcsd.distill.teacher.documents import documents_of, stay_inside_documents
from fcsd.errors import BadInputError, ConfigError
from fcsd.kernels.packed_attention import packed_arguments, takes_borders, use_packed_attention
from fcsd.models.build import arch_of, decoder_layers, decoder_of, logits_factor
from fcsd.models.config_keys import cache_keyword
from fcsd.models.rope import require_short_rows

_BLOCK = 1 << 20  # bytes that are read at once
_MOST_COMPILED = 64  # torch's own limit is 8; beyond it layers would silently run uncompiled


_NO_BASE = "If it is an original, convert it or set init.wiring. If not, name its original in the recipe: `teacher:`."


def teacher_name(recipe: Recipe) -> str:
    """The directory or hub id of the teacher.

    It is the teacher of the recipe or, if the recipe names none, the original that the student was converted from.

    Raises:
        ConfigError: the recipe names no teacher and the student's config records no original.
    """
    if recipe.teacher is not None:
        return recipe.teacher
    if recipe.init.wiring is not None and recipe.init.weights == "loaded":
        return recipe.model
    original = open_checkpoint(recipe.model, weights=False).original
    if original is None:
        raise ConfigError(f"{recipe.model} records no base model", hint=_NO_BASE)
    return original


def identify_teacher(recipe: Recipe) -> dict[str, str]:
    """Hashes of the teacher: ``teacher.fingerprint`` of its config and headers, ``teacher.sample`` of all its weights.

    Raises:
        BadInputError: the teacher does not exist, or its fingerprint is not the expected one.
        ConfigError: it would give short documents of a row the rotary factors of long ones.
    """
    name = teacher_name(recipe)
    try:
        teacher = open_checkpoint(name)
        found = teacher.fingerprint
    except BadInputError as error:
        if recipe.teacher is None:
            error.hint = f"{recipe.model} records it as its original; if it moved, set `teacher:` in the recipe"
        raise
    # The conversion has recorded the fingerprint of the original. Where nothing names one, any teacher is accepted.
    recorded = (open_checkpoint(recipe.model, weights=False).config.raw.get("fcsd") or {}).get("base_sha256")
    if (expected := recipe.teacher_sha256 or recorded) not in (None, found):
        where = "the recipe asks for" if recipe.teacher_sha256 else f"{recipe.model} was made from"
        raise BadInputError(
            f"teacher {name} has the fingerprint {found}, {where} {expected}",
            hint=f"it moved or changed; if it is the teacher you mean, set teacher_sha256: {found}",
        )
    config = AutoConfig.from_pretrained(teacher.path, trust_remote_code=False)
    require_short_rows(config, recipe.data.seq_len, f"teacher {name}")
    return {"teacher.fingerprint": found, "teacher.sample": weights_sha256(teacher.layout)}


def weights_sha256(layout: Layout) -> str:
    """SHA-256 of the SHA-256 of every tensor's bytes, in the order of shards and of places in a shard.

    Every byte is read once. Headers and names are not hashed, so that a conversion has the hash of its original.

    Raises:
        BadInputError: a file is missing or not a regular file.
    """
    places = [
        (layout.files[name], tensor.start, tensor.end)
        for name, header in sorted(layout.shards.items())
        for tensor in sorted(header.values(), key=lambda tensor: tensor.start)
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashlib and reads leave the lock to other threads
        return bytes_sha256(b"".join(pool.map(_range_digest, places)))


def _range_digest(place: tuple[Path, int, int]) -> bytes:
    path, start, end = place
    digest = hashlib.sha256()
    with open_regular(path) as file:
        file.seek(start)
        while block := file.read(min(_BLOCK, end - file.tell())):
            digest.update(block)
    return digest.digest()


def final_hidden(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The hidden states ``[batch, seq, hidden]`` after the final norm.

    Attention stays inside documents because position ids restart and there is neither a mask nor a cache. An
    architecture that does not derive the document boundaries from position ids gets explicit masks. A model with
    packed attention gets the borders of the documents. Linear attention, and attention that chooses keys by their
    places, get each document as a row.
    """
    decoder = decoder_of(model)
    ids, positions = batch["input_ids"], batch["position_ids"]
    if takes_borders(model):
        inside: dict[str, Any] = packed_arguments(batch["borders"])
    else:
        inside = {"attention_mask": None if arch_of(model.config).packs else _document_masks(decoder, ids, positions)}
    arch = arch_of(model.config)
    if arch.blocks.linear is not None:
        stay_inside_documents(decoder_layers(model), None if arch.keeps_documents else arch.blocks)
        inside["documents"] = documents_of(batch["borders"], ids.numel())
    hidden = decoder(input_ids=ids, position_ids=positions, use_cache=False, **inside).last_hidden_state
    factor = logits_factor(model.config)
    return hidden if factor == 1 else hidden * factor


def pack_attention(model: PreTrainedModel, recipe: Recipe) -> None:
    """Lets a student or teacher use packed attention, if the recipe asks for it and the model is in bf16 on a GPU.

    This must be called before ``wire_sharded``, which wraps the attention function.
    """
    if recipe.train.attention == "packed" and model.device.type == "cuda" and model.dtype == torch.bfloat16:
        use_packed_attention(model)


def _document_masks(decoder: Any, ids: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor | None] | None:
    """The masks, by kind of attention if there are kinds, that other decoders derive from the position ids."""
    given = {"config": decoder.config, "inputs_embeds": decoder.embed_tokens(ids), "attention_mask": None}
    given |= {cache_keyword(): None, "position_ids": positions}
    masks = {"full_attention": create_causal_mask(**given), "linear_attention": None}  # this has a row a document
    if getattr(decoder.config, "sliding_window", None) is not None:
        masks["sliding_attention"] = create_sliding_window_causal_mask(**given)
    return masks if hasattr(decoder.config, "layer_types") else masks["full_attention"]


def compile_layers(model: PreTrainedModel, recipe: Recipe, backend: str = "inductor") -> None:
    """Compiles each decoder layer separately if the recipe says so. The results stay the same up to rounding.

    Args:
        backend: the backend of torch.compile; tests use one that needs no compiler.
    """
    if recipe.train.compile:
        import torch._dynamo.config as compiler  # not at the top, because it takes long

        # All layers of student and teacher share one code object, which torch compiles at most this often. It is
        # compiled once for each kind of layer and its streams, and again when the number of documents first varies.
        compiler.recompile_limit = max(compiler.recompile_limit, _MOST_COMPILED)
        for layer in decoder_layers(model):
            layer.compile(backend=backend)


def without_compiling(recipe: Recipe) -> AbstractContextManager[Any]:
    """A context in which layers run compiled only for the shapes for which they were compiled already.

    For other shapes, such as those of generation, they run uncompiled instead of being compiled again and again.
    """
    return torch.compiler.set_stance("eager_on_recompile") if recipe.train.compile else nullcontext()


def output_head(model: PreTrainedModel) -> Tensor:
    """The weight of the output head, ``[vocab, hidden]``.

    Its product with ``final_hidden`` are the logits, which a model may still cap (``logits_cap``).

    Raises:
        ConfigError: the head has a bias, which the losses would leave out.
    """
    head: Any = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError("the output head of this model has a bias, without which no loss is computed right")
    return head.weight
