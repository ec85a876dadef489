"""Builds a model from its config on the meta device, to count its parameters and the bytes that its layers keep."""

import json
from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint import open_checkpoint
from fcsd.config import Adapter
from fcsd.errors import BadInputError
from fcsd.kernels.packed_attention import attends_to_all
from fcsd.models.adapters.nf4 import nf4_layers, require_nf4
from fcsd.models.adapters.targets import Chosen, choose, choose_parts, shared_prefix
from fcsd.models.build import (
    arch_of,
    causal_lm_class,
    decoder_layers,
    decoder_of,
    wiring_of,
    without_further_outputs,
)
from fcsd.models.config_keys import EXPERTS_PER_TOKEN, WEIGHTS_FILE, expert_count, first_count
from fcsd.models.draft_head import DraftHead, meta_head
from fcsd.models.fused import fuse_norms, fuse_parts, fuse_rotary
from fcsd.models.quantised.method import Method
from fcsd.models.rope import rope_border
from fcsd.models.wiring import Blocks, Wiring, hf_parts, mixer, mlp_of, shared_of
from fcsd.plan.activations import AdaptedLinear, LayerBytes, MetaExperts, RoutedExperts, attention, measure_layer
from fcsd.plan.setup import Parts, Rounded, Setup

_ATTENTION = "fcsd_plan"
_CHOOSES = {"indexed_attention", "deepseek_sparse_attention"}  # as transformers calls it since 5.23, and before
FINAL_NORM = -1  # the kind under which the final norm is listed beside the kinds of layers
DRAFT_HEAD = -2  # and a draft head, if one trains
_CONFIGS = Path(__file__).with_name("configs")


@dataclass(frozen=True)
class LayerNumbers:
    """Numbers of parameters of one decoder layer.

    Attributes:
        kind: number of the layer's kind; layers of one kind have parameters of the same names and shapes.
        dense: parameters that do not belong to routed experts.
        routed: parameters of all routed experts together.
        projections: parameters of attention that a token passes through before attention itself.
        output: parameters of attention's output projection.
        shared: parameters of the shared experts.
    """

    kind: int
    dense: int
    routed: int
    projections: int = 0
    output: int = 0
    shared: int = 0


@dataclass(frozen=True)
class ModelNumbers:
    """The numbers of a model that the formulas for memory and time use.

    Attributes:
        embedding: parameters of the input embedding.
        head: parameters of the output head, also if it is tied to the embedding.
        tied: whether the output head and the embedding are one tensor.
        other: all other parameters outside of the layers, such as those of the final norm. A vision tower, through
            which no text passes, is not counted.
        hidden: width of the residual stream.
        vocab: rows of the output head.
        experts: routed experts of one MoE layer; 0 for dense models.
        top_k: routed experts that a token is sent to; 0 for dense models.
        attention: width of a key plus width of a value, summed over a layer's query heads; the mean over all layers, of
            which those with linear attention have none.
        streams: residual streams between two layers: 1, or 2 for a rewired model.
        bits: bits of a value of a layer's weights in the files, scales included, in the mean over all layers.
    """

    layers: tuple[LayerNumbers, ...]
    embedding: int
    head: int
    tied: bool
    other: int
    hidden: int
    vocab: int
    experts: int
    top_k: int
    attention: int
    streams: int
    bits: float = 16.0

    @property
    def stored(self) -> float:
        """Bytes of all weights in the files."""
        inside = sum(layer.dense + layer.routed for layer in self.layers)
        return inside * self.bits / 8 + (self.total - inside) * 2

    @property
    def dense(self) -> int:
        """Parameters that do not belong to routed experts; every expert-parallel rank holds all of them."""
        return sum(layer.dense for layer in self.layers) + self.embedding + self.other + self.head * (not self.tied)

    @property
    def routed(self) -> int:
        """Parameters of all routed experts."""
        return sum(layer.routed for layer in self.layers)

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.routed

    @property
    def active(self) -> int:
        """Parameters that one token passes through."""
        return self.dense + (self.routed * self.top_k // self.experts if self.experts else 0)


def of_rank(model: ModelNumbers, degree: int) -> ModelNumbers:
    """What one of ``degree`` tensor-parallel ranks has of a dense model: a part of each layer, and all of the rest."""
    layers = tuple(
        replace(
            layer,
            dense=layer.dense // degree,
            projections=layer.projections // degree,
            output=layer.output // degree,
        )
        for layer in model.layers
    )
    return replace(model, layers=layers, attention=model.attention // degree)


def packaged_config(name: str) -> PretrainedConfig | None:
    """Reads the configuration of a model of the packaged recipes from ``fcsd/plan/configs``; None for other models.

    The configuration holds only the published dimensions, which suffice to build the model on the meta device.
    """
    path = {path.stem.replace("--", "/"): path for path in _CONFIGS.glob("*.json")}.get(name)
    if path is None:
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


class MetaModel:
    """A model without weights, whose parameters and layer memory can be counted.

    Args:
        name: a directory, in which ``config.json`` is enough, or a hub id. The model may be converted or not.
        rewired: whether the run rewires the model when it loads it.

    Attributes:
        name: the argument.
        config: the configuration of the model before any conversion.
        numbers: parameters and dimensions of the model.
        packaged: whether the configuration is that in ``fcsd/plan/configs``, because neither the hub nor its cache had
            it.
        wiring: the wiring that the model is converted to.
        method: how its weights are quantised in the files; None if they are not. All else is about plain weights.

    Raises:
        BadInputError: those of ``fcsd.checkpoint.open_checkpoint`` and of its ``config``. For a model that
            has a packaged configuration, only errors in files that were found are raised.
    """

    def __init__(self, name: str, rewired: bool = False) -> None:
        self.name, self.packaged, config, self.method = name, False, None, None
        try:
            source = open_checkpoint(name, weights=False, trust_remote_code=True)  # no code of a checkpoint is run here
        except BadInputError:
            config = packaged_config(name)
            if config is None:
                raise
            self.packaged = True
        else:
            rewired, self.method = rewired or source.config.rewired is not None, source.config.method
            config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
        self.wiring = wiring_of(config)
        without = ("fcsd", "model_type", "quantization_config", WEIGHTS_FILE)
        fields = {key: value for key, value in config.to_dict().items() if key not in without}
        self.config, _ = without_further_outputs(AutoConfig.for_model(arch_of(config).model_type, **fields))
        self._measured: dict[Any, dict[int, LayerBytes]] = {}
        model, _, width = self._run(seq_len=2, masked=False)
        self.numbers = _numbers(model, 2 if rewired else 1, width)
        if self.method is not None:
            self.numbers = replace(self.numbers, bits=_bits(model, self.method))

    def parts(self, adapter: Adapter | None, words: Sequence[str], wiring: Wiring | None = None) -> Parts:
        """What trains beside frozen weights.

        Args:
            adapter: ``train.adapter``.
            words: ``optim.train``.
            wiring: the wiring of the student, if it is not that of the model's config.

        Raises:
            ConfigError: see ``choose`` and ``require_nf4``.
        """
        model = self._run(seq_len=2, masked=False)[0]
        wiring, rank = wiring or self.wiring, adapter.rank if adapter else 0
        if adapter is None:
            chosen = choose_parts(model, words, wiring)
        else:
            chosen = choose(model, adapter.targets, words, adapter.layers, wiring)
        beside: list[Any] = [model.get_submodule(path) for path in chosen.adapted]
        own = [model.get_parameter(name).numel() for name in chosen.trained]
        layers = {weight for layer in decoder_layers(model) for weight in layer.parameters()}
        outside = sum(w.numel() for w in map(model.get_parameter, chosen.trained) if w not in layers)
        routed = sum(size for name, size in zip(chosen.trained, own, strict=True) if ".experts." in name)
        sizes = [rank * features for layer in beside for features in (layer.in_features, layer.out_features)]
        counts = sum(sizes), sum(own), routed, outside, max([*sizes, *own])
        rounded = None
        if adapter is not None and adapter.base == "nf4":
            require_nf4(model, chosen.trained, self.name, quantised=self.method is not None)
            found: list[Any] = list(nf4_layers(model).values())
            each = [layer.weight.numel() for layer in found]
            rounded = Rounded(sum(each), max(each), max(layer.out_features for layer in found))
        return Parts(rank, chosen, tuple(words), *counts, *shared_prefix(model, chosen, wiring), rounded)

    def draft_parts(self) -> Parts:
        """What trains in a run of ``train.draft_head``: the head alone, which is beside the frozen model.

        Raises:
            ConfigError: see ``draft_config``.
        """
        sizes = [parameter.numel() for parameter in meta_head(self.config).parameters()]
        counts, layers = (0, sum(sizes), 0, sum(sizes), max(sizes)), len(self.numbers.layers)
        return Parts(0, Chosen((), ()), ("draft head",), *counts, layers, layers, drafts=True)

    @property
    def plain(self) -> bool:
        """Whether in every layer a token attends to all tokens before it, which packed attention requires."""
        return attends_to_all(self.config)

    def layer_bytes(self, setup: Setup) -> dict[int, LayerBytes]:
        """Bytes of a layer by its kind; ``FINAL_NORM`` is the kind of the final norm.

        The bytes are measured for one row in bf16. All of them grow with the number of rows. For fp32 they are doubled.
        This is slightly too much, because what a bf16 model computes in fp32 is doubled as well.
        """
        key = (setup.seq_len, setup.masked, setup.ep_size > 1, setup.fused, setup.imbalance, setup.parts)
        if key not in self._measured:
            self._measured[key] = self._measure(setup)
        times = setup.micro_batch_size * setup.width // 2
        return {kind: one.times(times) for kind, one in self._measured[key].items()}

    def _measure(self, setup: Setup) -> dict[int, LayerBytes]:
        model, calls, _ = self._run(setup.seq_len, setup.masked)
        if (parts := setup.parts) is not None:
            model.requires_grad_(False)
            for name in parts.chosen.trained:
                model.get_parameter(name).requires_grad_()
            for path in parts.chosen.adapted:
                parent, _, own = path.rpartition(".")
                setattr(model.get_submodule(parent), own, AdaptedLinear(model.get_submodule(path), parts.rank))
        arch = arch_of(self.config)
        if setup.ep_size == 1:
            fuse_parts(model, arch, setup.fused)
        else:  # as ``fcsd.parallel.expert.blocking.wire_parallel``
            fuse_norms(model, arch, setup.fused)
            fuse_rotary(model, arch, setup.fused)
        hidden = torch.empty(1, setup.seq_len, self.numbers.hidden, dtype=torch.bfloat16, device="meta")
        decoder, layers = decoder_of(model), decoder_layers(model)
        norm = getattr(decoder, arch.final_norm)
        found = {FINAL_NORM: measure_layer(norm, list(norm.parameters()), hidden)}
        each = list(zip(layers, self.numbers.layers, calls, strict=True))
        start = 0 if parts is None else parts.frozen  # what trains is in layers from here on
        for layer, numbers, (given, kwargs) in (*each[start:], *each[:start]):
            if numbers.kind in found:
                continue
            run: Callable[[Tensor], Tensor] = partial(_call, layer, given, kwargs)
            parameters = list(layer.parameters())
            if numbers.routed and setup.ep_size > 1:
                run, own = self._over_ranks(layer, given, kwargs, setup)
                parameters += own
            with MetaExperts():
                found[numbers.kind] = measure_layer(run, parameters, hidden)
        if parts is not None and parts.drafts:
            head = meta_head(self.config).to(torch.bfloat16)
            head.config._attn_implementation = _ATTENTION
            run = partial(_guess, head)
            found[DRAFT_HEAD] = measure_layer(run, list(head.parameters()), hidden)
        return found

    def _over_ranks(
        self, layer: Any, given: tuple[Any, ...], kwargs: dict[str, Any], setup: Setup
    ) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
        """A function that runs a MoE layer with expert-parallel routed experts, and the parameters of these experts."""
        blocks, numbers = arch_of(self.config).blocks, self.numbers
        parts = hf_parts(blocks, layer)
        experts = blocks.sparse(layer).get_submodule("experts")
        inner = experts.down_proj.numel() // (numbers.experts * numbers.hidden)
        routed = RoutedExperts(
            *(numbers.hidden, inner, numbers.experts, numbers.top_k, setup.imbalance),
            prescaled=blocks.prescaled,
        ).requires_grad_(any(weight.requires_grad for weight in experts.parameters()))

        def run(stream: Tensor) -> Tensor:
            if parts.attn is not None:
                out = parts.attn(blocks.read(layer, "attn", stream), **kwargs)
                stream = stream + blocks.arrive(layer, "attn", out)
            x = blocks.read(layer, "mlp", stream)
            out = routed(x) if parts.shared is None else routed(x) + parts.shared(x)
            return blocks.leave(layer, [stream + blocks.arrive(layer, "mlp", out)], *given)[0]

        return run, list(routed.parameters())

    def _run(self, seq_len: int, masked: bool) -> tuple[PreTrainedModel, list[Any], int]:
        """Builds a new model; returns it, the arguments of each layer's call, and the width of attention.

        The arguments are those by position, without the stream, and those by keyword.

        Linear attention counts as none, in the mean over the layers.
        """
        widths: list[int] = []
        # Attention that chooses its keys does so by a mask, and needs one to choose from.
        kinds = getattr(self.config.get_text_config(), "layer_types", None) or ()
        chooses = not _CHOOSES.isdisjoint(kinds)
        AttentionInterface.register(_ATTENTION, attention(masked or chooses, widths))
        with torch.device("meta"):
            cls: Any = causal_lm_class(self.config)
            model = cls._from_config(self.config, dtype=torch.bfloat16, attn_implementation=_ATTENTION).train()
        model.to("meta")  # what torch.normal has made is on the CPU
        _keep_factors(model)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args[1:], own_copies(kwargs)))

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in decoder_layers(model)]
        ids = torch.empty(1, seq_len, dtype=torch.int64, device="meta")
        mask = torch.empty(1, 1, seq_len, seq_len, dtype=torch.bool, device="meta") if chooses else None
        with torch.no_grad(), MetaExperts():
            decoder_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)
        for hook in hooks:
            hook.remove()
        return model, calls, sum(widths) // len(calls)


def _keep_factors(model: PreTrainedModel) -> None:
    """Let rotary factors not depend on the length of a pass, which has no value on the meta device.

    Angles have the same shape with all factors.
    """
    if rope_border(model.config) is None:
        return
    for module in model.modules():
        given: Any = module
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            given.rope_type = dict.fromkeys(kinds, "default")
        elif kinds is not None:
            given.rope_type, given.config = "default", copy(given.config)
            given.config.rope_parameters = {**given.config.rope_parameters, "rope_type": "default"}


def own_copies(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layer, with copies of the tables into which layers put keys and values for later layers."""
    return {name: copy(value) if isinstance(value, MutableMapping) else value for name, value in kwargs.items()}


def _call(layer: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any], stream: Tensor) -> Tensor:
    out = layer(stream, *given, **kwargs)
    return out[0] if isinstance(out, tuple) else out  # some pass on a second value


def _guess(head: DraftHead, hidden: Tensor) -> Tensor:
    return head(torch.empty_like(hidden), hidden)


def _covering(blocks: Blocks, layer: Any) -> tuple[int, int, int]:
    """Parameters of attention before and after attention itself, and of the shared experts."""
    mlp = mlp_of(blocks, layer)
    shared = shared_of(blocks, layer) if hasattr(mlp, "experts") else None
    if blocks.has_beside(layer):
        shared = mlp
    inside = sum(parameter.numel() for parameter in shared.parameters()) if shared is not None else 0
    attention = mixer(blocks, layer)
    output = (attention.out_proj if hasattr(attention, "out_proj") else attention.o_proj).weight.numel()
    return sum(parameter.numel() for parameter in attention.parameters()) - output, output, inside


def _bits(model: PreTrainedModel, method: Method) -> float:
    """The mean bits of a value of the decoder layers' weights in files, by the names of their parameters."""
    held = count = 0.0
    prefix = next(name for name, module in model.named_modules() if module is decoder_layers(model))
    for name, parameter in decoder_layers(model).named_parameters():
        layer = f"{prefix}.{name}".removesuffix(".weight")
        scheme = method.scheme_named(layer) if parameter.ndim > 1 else None
        *stack, rows, columns = (1, *parameter.shape)
        held += 2 * parameter.numel() if scheme is None else prod(stack) * scheme.bytes(rows, columns)
        count += parameter.numel()
    return 8 * held / count


def _numbers(model: PreTrainedModel, streams: int, attention_width: int) -> ModelNumbers:
    """Counts the parameters of a model on the meta device; the other arguments are fields of the result."""
    text = model.config.get_text_config().to_dict()
    blocks = arch_of(model.config).blocks
    kinds: dict[Any, int] = {}
    layers = []
    for layer in decoder_layers(model):
        shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        routed = sum(shape.numel() for name, shape in shapes if ".experts." in f".{name}")
        whole = sum(shape.numel() for _, shape in shapes)
        kind = kinds.setdefault(shapes, len(kinds))
        layers.append(LayerNumbers(kind, whole - routed, routed, *_covering(blocks, layer)))
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    tied = inputs.weight is outputs.weight
    embedding, head = inputs.weight.numel(), outputs.weight.numel()
    inside = sum(layer.dense + layer.routed for layer in layers)
    experts = expert_count(text)  # dense models may have the key, too
    return ModelNumbers(
        layers=tuple(layers),
        embedding=embedding,
        head=head,
        tied=tied,
        other=sum(p.numel() for p in decoder_of(model).parameters()) - inside - embedding,
        hidden=outputs.weight.shape[1],
        vocab=outputs.weight.shape[0],
        experts=experts if any(layer.routed for layer in layers) else 0,
        top_k=first_count(text, EXPERTS_PER_TOKEN),
        attention=attention_width,
        streams=streams,
    )
