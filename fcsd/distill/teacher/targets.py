"""The targets of the student: what the loss reads of a model, and where targets come from, a ``TeacherSource``.

A run has one source. This module has that of a teacher in memory. ``fcsd.distill.teacher.shared`` computes targets
with the student's own weights.

Where the first layers are not rewired and nothing trains in them or before them, student and teacher compute the same
in them. The teacher's pass is first. The student's pass leaves these layers out and goes on with what they returned.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fcsd.checkpoint import Layout, open_checkpoint
from fcsd.checkpoint.files import open_regular
from fcsd.config import Objective, Recipe
from fcsd.disk import bytes_sha256
from fcsd.distill.inputs import teacher_name
from fcsd.distill.teacher.documents import documents_of, stay_inside_documents
from fcsd.errors import BadInputError, ConfigError
from fcsd.kernels.packed_attention import packed_arguments, takes_borders, use_packed_attention
from fcsd.models.build import arch_of, decoder_layers, decoder_of, logits_cap, logits_factor
from fcsd.models.config_keys import cache_keyword
from fcsd.models.rope import require_short_rows
from fcsd.models.selection import select_layers

_BLOCK = 1 << 20  # bytes that are read at once
_MOST_COMPILED = 64  # torch's own limit is 8; beyond it layers would silently run uncompiled


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


class Prefix(NamedTuple):
    """The first ``layers`` decoder layers, and what the last of them returned in the teacher's pass."""

    layers: int
    output: Any


@contextmanager
def noted(model: PreTrainedModel, layers: int) -> Iterator[list[Prefix]]:
    """Adds the prefix of ``layers`` layers in the forward pass of the block to a list; nothing without any layer."""
    found: list[Prefix] = []
    if not layers:
        yield found
        return
    last = decoder_layers(model)[layers - 1]

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        # Sharded layers pass on sums in flight. All reads behind a layer that is not rewired include them.
        found.append(Prefix(layers, output.land() if hasattr(output, "land") else output))

    handle = last.register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


class _LeftOut(nn.Module):
    """The class of a layer that is left out: it returns what the last layer of the prefix returned, without hooks."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return vars(self)["_prefix_output"]


@contextmanager
def left_out(model: PreTrainedModel, prefix: Prefix | None) -> Iterator[None]:
    """A block in which the layers of a prefix compute nothing. At its end the layers are as before."""
    layers: list[Any] = [] if prefix is None else list(decoder_layers(model))[: prefix.layers]
    before = [(layer, type(layer), vars(layer).pop("_compiled_call_impl", None)) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = _LeftOut
            vars(layer)["_prefix_output"] = prefix and prefix.output
        yield
    finally:
        for layer, cls, compiled in before:
            layer.__class__ = cls
            del vars(layer)["_prefix_output"]
            if compiled is not None:
                vars(layer)["_compiled_call_impl"] = compiled


class Targets(NamedTuple):
    """The teacher's outputs that the loss needs on one micro-batch.

    Attributes:
        output: the final hidden states ``[batch, seq, hidden]`` and the output head ``[vocab, hidden]``.
        streams: the full stream ``[batch, seq, hidden]`` after each layer that the objective compares, by the 0-based
            index of the layer.
        prefix: the first layers, if the student is to take the teacher's output of them.
    """

    output: tuple[Tensor, Tensor]
    streams: dict[int, Tensor]
    prefix: Prefix | None = None


class TeacherSource:
    """Gives the targets of the student, whatever is behind it. This class itself is the source without a teacher."""

    def get_targets(self, columns: dict[str, Tensor]) -> Targets | None:
        """What ``Student.forward`` takes as the targets on a micro-batch.

        Args:
            columns: the columns of the micro-batch, on the device.
        """
        return None

    @contextmanager
    def teacher(self) -> Iterator[PreTrainedModel | None]:
        """A block in which a model in memory is the teacher; None if there is no such model."""
        yield None


class LiveTeacher(TeacherSource):
    """Computes the targets with a frozen model in memory."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        self._model, self._layers = model, compared_layers(model, objective)

    @torch.no_grad()
    def get_targets(self, columns: dict[str, Tensor]) -> Targets:
        with captured(self._model, self._layers) as streams:
            return Targets((final_hidden(self._model, columns), output_head(self._model)), streams)

    @contextmanager
    def teacher(self) -> Iterator[PreTrainedModel]:
        yield self._model


def compared_layers(model: PreTrainedModel, objective: Objective) -> tuple[int, ...]:
    """The 0-based indices of the layers whose streams the objective compares; none if that term has no weight."""
    if not objective.hidden.weight:
        return ()
    return select_layers(objective.hidden.layers, len(decoder_layers(model)))


@contextmanager
def captured(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collects the full stream ``o_k`` after each of ``layers`` in the forward pass inside the block, without copies.

    If the last output of a layer is still in flight, it is awaited at the end of that layer. Only the captured layers
    lose their overlap. The hooks compute nothing. They are removed before the backward pass, so that the recompute of
    activation checkpointing does not run them again.
    """
    streams: dict[int, Tensor] = {}

    def hook(index: int) -> Callable[..., None]:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            full = output[0] if isinstance(output, tuple) else output
            streams[index] = full if isinstance(full, Tensor) else full.land()

        return keep

    modules = decoder_layers(model)
    handles = [modules[index].register_forward_hook(hook(index)) for index in layers]
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()


def expect_comparable(student: PreTrainedModel, teacher: PreTrainedModel, recipe: Recipe, name: str) -> None:
    """Checks that the objective can compare a student with the teacher called ``name``.

    Raises:
        BadInputError: the sizes of their vocabularies, or the caps of their logits, differ. If streams are compared,
            also if their hidden sizes or numbers of layers differ.
        ConfigError: ``objective.hidden.layers`` names a layer that the models do not have.
    """
    both = student, teacher
    pairs: list[tuple[Any, ...]] = [
        ("vocabulary", *(output_head(model).shape[0] for model in both)),
        ("cap of the logits", *(logits_cap(model.config) for model in both)),
    ]
    if recipe.objective.hidden.weight:
        compared_layers(student, recipe.objective)
        pairs += [
            ("number of layers", *(len(decoder_layers(model)) for model in both)),
            ("hidden size", *(cast(Any, model.get_input_embeddings()).weight.shape[1] for model in both)),
        ]
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise BadInputError(f"the {what} of student {recipe.model} is {ours}, that of teacher {name} {theirs}")
