"""Defines the wiring: for each read of the residual stream, which outputs may still be in flight.

A decoder layer has two sub-blocks, attention and MLP/MoE, and each adds its output to the stream. Communication
blocks because a sub-block reads all outputs before it, including the one that is still being communicated. Here a
sub-block that reads at depth ``d`` does not see what the last ``d`` sub-blocks still have in flight:

    stream 0 = all outputs                                              (the full stream, ``o_k``)
    stream d = all outputs but what the last d of them have in flight   (a partial stream)

When a sub-block adds an output made of a settled part ``s`` (computed locally) and a part in flight ``f``, the
streams become ``(x_0 + s) + f, x_0 + s, x_1 + s, ...``. This rule, together with the table ``READS``
of ``wiring_block.py`` and the choice of what a MoE settles, gives every published wiring but Desync (``desync.py``). A
partial stream is always built by adding, never by subtracting, so a runtime can hold it before the part in flight
arrives.

Some architectures norm an output before it is added. The norm needs the whole output, so it is computed when the output
has arrived: ``s`` and ``f`` are what the norm returns, and the routed and the shared experts of a layer are one output.

This file needs torch only and is shipped verbatim in exported checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .desync import alone, desync_layers, undo_desync
from .wiring_block import DESYNC, Blocks, Wiring, kept_reductions


class Parts(NamedTuple):
    """The sub-blocks of one layer, each ``[batch, seq, hidden] -> [batch, seq, hidden]`` on normalised input.

    ``shared`` needs no communication between experts: it is the shared experts, or the whole of a dense MLP.
    ``routed`` is the routed experts. A layer of one sub-block has ``attn`` alone, or no ``attn``.
    """

    attn: Callable[..., Tensor] | None
    shared: Callable[[Tensor], Tensor] | None
    routed: Callable[[Tensor], Tensor] | None


def hf_parts(blocks: Blocks, layer: Any) -> Parts:
    """The parts of a transformers decoder layer, computed with its own modules.

    Results and gradients are bit-identical to the layer's own if ``routed`` is called before ``shared``, because
    autograd sums the contributions to a tensor in the order in which they arrive.
    """
    mlp = mlp_of(blocks, layer)
    after_attn, after_mlp = map(layer.get_submodule, blocks.dropouts) if blocks.dropouts else (None, None)

    whole = partial(mix, mixer(blocks, layer))

    def dropped(x: Tensor, **kwargs: Any) -> Tensor:
        out = whole(x, **kwargs)
        return out if after_attn is None else after_attn(out)

    if blocks.has_beside(layer):
        return Parts(dropped, *_beside(blocks, layer, mlp))
    if not any(name == "experts" for name, _ in mlp.named_children()):
        return Parts(dropped, mlp if after_mlp is None or not layer.training else nn.Sequential(mlp, after_mlp), None)
    expert = shared_of(blocks, layer)
    if expert is None:
        return Parts(dropped, None, partial(_whole, mlp))

    router, experts = router_of(blocks, mlp), mlp.get_submodule("experts")
    flat = _remembered(lambda x: x.reshape(-1, x.shape[-1]))
    seen = flat if blocks.flattens else lambda x: x
    shared_expert = _remembered(lambda x: expert(x if blocks.shared_beside else seen(x)))

    def routed(x: Tensor) -> Tensor:
        if blocks.shared_first or blocks.shared_gate is not None:
            shared_expert(x)  # qwen2_moe runs it before the router, its gate after the experts
        if blocks.prescaled:
            return _prescaled(router, experts, flat(x)).view_as(x)
        _, weights, indices = router(x if blocks.router_unflattened else seen(x))
        return scaled(blocks, mlp, experts(flat(x), indices, weights)).view_as(x)

    def shared(x: Tensor) -> Tensor:
        out = shared_expert(x)
        if blocks.shared_gate is not None:
            out = torch.sigmoid(mlp.get_submodule(blocks.shared_gate)(seen(x))) * out
        return out.view_as(x)

    return Parts(dropped, shared, routed)


def mlp_of(blocks: Blocks, layer: Any) -> Any:
    """The MLP of a layer, or its MoE block."""
    mlp = getattr(layer, blocks.mlp)
    return getattr(layer, blocks.shared or "") if mlp is None else mlp


def shared_of(blocks: Blocks, layer: Any) -> Any:
    """The shared experts of a layer with a MoE block; None if it has none."""
    holder = layer if blocks.shared_beside else mlp_of(blocks, layer)
    return None if blocks.shared is None else getattr(holder, blocks.shared)


def router_of(blocks: Blocks, mlp: Any) -> Callable[[Tensor], Any]:
    """The router of a MoE block as a function of what it reads alone, in the shape in which the block gives it."""
    router, bias = mlp.get_submodule(blocks.router), blocks.router_bias
    return router if bias is None else lambda x: router(x, getattr(mlp, bias, None))


def scaled(blocks: Blocks, mlp: Any, out: Tensor) -> Tensor:
    """The output of the routed experts of a MoE block, times the number that the block multiplies it by, if any."""
    return out if blocks.routed_scale is None else out * getattr(mlp, blocks.routed_scale)


def _beside(
    blocks: Blocks, layer: Any, mlp: nn.Module
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The shared and the routed part of a layer with experts beside its MLP. They read the stream as it is."""
    assert blocks.beside is not None and blocks.mlp_norms[0] is not None
    before, before_experts, after, after_experts = map(layer.get_submodule, (blocks.mlp_norms[0], *blocks.beside))
    shared = _remembered(lambda x: after(mlp(before(x))))

    def routed(x: Tensor) -> Tensor:
        shared(x)  # the layer computes it before it routes
        flat = x.reshape(-1, x.shape[-1])
        _, weights, indices = layer.get_submodule(blocks.router)(flat)
        return after_experts(layer.experts(before_experts(flat), indices, weights).reshape(x.shape))

    return shared, routed


def mixer(blocks: Blocks, layer: Any) -> Any:
    """The child of a layer that mixes tokens: ``self_attn``, or linear attention under a name of its own."""
    attention = getattr(layer, "self_attn", None)
    return layer.get_submodule(blocks.linear) if attention is None else attention


def is_linear(attention: nn.Module) -> bool:
    """Whether a mixer is linear attention: a short convolution over the tokens, and a recurrence in most families."""
    return any(isinstance(child, nn.Conv1d) for child in attention.children())


def mix(attention: Any, x: Tensor, found: list[Any] | None = None, **kwargs: Any) -> Tensor:
    """The output of a layer's mixer, called as transformers' layer calls it.

    Linear attention has no positions and returns a bare tensor. It keeps its state in the same cache as other layers
    keep keys and values. A mixer with a recurrence gets the cache under another name.

    Args:
        attention: the result of ``mixer``.
        x: normalised input ``[batch, seq, hidden]``.
        found: a list to which the last value that the attention returns is added.
        kwargs: what transformers' loop over layers passes to a layer.
    """
    if is_linear(attention):
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_POSITIONS}
        # A convolution alone is called conv. Since transformers 5.24 every cache has one name.
        if hasattr(attention, "conv1d") and "past_key_values" in kwargs:
            kwargs["cache_params"] = kwargs.pop("past_key_values")
        return attention(hidden_states=x, **kwargs)
    out = attention(hidden_states=x, **kwargs)
    if found is not None:
        found.append(out[-1])
    return out[0]


_OF_POSITIONS = ("position_ids", "position_embeddings", "use_cache")


def _remembered(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function``, which is not computed again for the tensor of the last call.

    ``functools.cache`` would do the same, but torch.compile cannot trace it and would divide the layer.
    """
    last: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        if not last or last[0] is not x:
            last[:] = [x, function(x)]
        return last[1]

    return call


def _whole(mlp: nn.Module, x: Tensor) -> Tensor:
    out = mlp(x)
    return out[0] if isinstance(out, tuple) else out  # gpt_oss returns its router scores too


def _prescaled(router: Callable[[Tensor], Any], experts: nn.Module, flat: Tensor) -> Tensor:
    # Every expert sees every token [experts * tokens, hidden]; scores [tokens, experts] are zero where not chosen.
    scores, _ = router(flat)
    copies = flat.repeat(scores.shape[1], 1) * scores.transpose(0, 1).reshape(-1, 1)
    return experts(copies).reshape(scores.shape[1], -1, flat.shape[-1]).sum(dim=0)


@dataclass(frozen=True)
class LayerWiring:
    """What one layer reads, and which streams it passes to the next layer.

    Attributes:
        attn: depth at which the attention reads.
        mlp: depth at which the MLP reads.
        hands_on: how many streams the next layer receives.
        settles_shared: whether the output of ``Parts.shared`` is settled at once where it can be (``settles``);
            otherwise it is in flight, as the routed output is.
        parts: a function that takes a layer apart.
        blocks: what stands between the stream and the parts.
        gets_streams: whether the layer before passes on several streams, so that one alone is an error.
    """

    attn: int
    mlp: int
    hands_on: int
    settles_shared: bool
    parts: Callable[[nn.Module], Parts]
    blocks: Blocks
    gets_streams: bool = field(default=False, kw_only=True)

    def streams(self, hidden_states: Any) -> tuple[Any, ...]:
        """The streams that a layer was given.

        Raises:
            ValueError: it was given one where the layer before passes on several.
        """
        if isinstance(hidden_states, tuple):
            return hidden_states
        if self.gets_streams:
            raise ValueError(alone("streams"))
        return (hidden_states,)

    def settles(self, routed: bool) -> bool:
        """Whether the output of ``Parts.shared`` is settled, in a layer that has routed experts or has none.

        It is in flight, too, if a norm takes it together with the routed output.
        """
        return self.settles_shared and not (routed and self.blocks.normed)

    def grouped(self, by: Literal["attn", "mlp"], x: Tensor) -> Tensor:
        """What a sub-block reads; a view of it if no norm comes before the sub-block, in a converted layer.

        Without a norm the products of a sub-block read the stream itself. In the view their gradients are summed before
        they are added to the others', so that a layer that overlaps them sums them in the same order.
        """
        norm = (self.blocks.attn_norms if by == "attn" else self.blocks.mlp_norms)[0]
        return x.view_as(x) if norm is None and (self.mlp or (by == "attn" and self.attn)) else x


class Addable(Protocol):
    """What ``read``, ``split`` and ``add`` need of a stream: a tensor, or a set of names in ``schedule.py``."""

    def __add__(self, other: Any, /) -> Any: ...


S = TypeVar("S", bound=Addable)


def read(streams: Sequence[S], depth: int) -> tuple[S, Sequence[S]]:
    """The stream at ``depth``, or the deepest stream if there are fewer, and the streams that are left.

    Streams deeper than ``depth`` are dropped, because outputs that are older than this read are no longer in flight.
    """
    streams = streams[: depth + 1]
    return streams[-1], streams


def split(shared: S | None, routed: S | None, settles_shared: bool) -> tuple[S | None, S | None]:
    """The outputs of an MLP, divided into ``(settled, in_flight)``."""
    if settles_shared or shared is None:
        return shared, routed
    return None, shared if routed is None else routed + shared


def add(streams: Sequence[S], settled: S | None, in_flight: S | None, keep: int) -> list[S]:
    """The first ``keep`` streams after an output, made of a settled part and a part in flight, was added."""
    below = [x if settled is None else x + settled for x in streams[: max(keep - 1, 1)]]
    full = below[0] if in_flight is None else below[0] + in_flight
    return [full, *below][:keep]


class Streams(tuple):
    """The streams that a layer passes on, the full one first, from which tokens can be cut off as from one stream.

    transformers' loop does so before layers that only read the keys and values of earlier ones, if it needs the last
    tokens alone.
    """

    @property
    def shape(self) -> torch.Size:
        """That of each stream ``[batch, seq, hidden]``."""
        return self[0].shape

    def __getitem__(self, place: Any) -> Any:
        return Streams(x[place] for x in self) if isinstance(place, tuple) else super().__getitem__(place)


class WiredLayer(nn.Module):
    """A decoder layer whose sub-blocks read as its ``LayerWiring`` says; a mixin that precedes transformers' own class.

    transformers' unchanged loop over layers passes the streams on as a tuple in ``hidden_states``. The full stream is
    the first of the tuple.
    """

    fcsd: LayerWiring
    unwired: type[nn.Module]  # transformers' class, which ``unwire_layers`` restores
    self_attn: Any

    def forward(
        self, hidden_states: Tensor | tuple[Tensor, ...], given: Tensor | None = None, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """transformers' loop gives a layer its features of the tokens by position, if it has any: ``given``."""
        _refuse_reentrant(self)
        plan = self.fcsd
        streams: Sequence[Tensor] = plan.streams(hidden_states)
        attn, shared, routed = plan.parts(self)

        has_mlp = shared is not None or routed is not None
        if attn is not None:
            x, streams = self._read(streams, plan.attn)
            a = attn(plan.blocks.read(self, "attn", plan.grouped("attn", x)), **kwargs)
            keep = plan.mlp + 1 if has_mlp else plan.hands_on
            streams = add(streams, None, plan.blocks.arrive(self, "attn", a), keep)
        if has_mlp:
            x, streams = self._read(streams, plan.mlp)
            x = plan.blocks.read(self, "mlp", plan.grouped("mlp", x))
            r = None if routed is None else routed(x)
            s = None if shared is None else shared(x)
            outputs = split(s, r, plan.settles(r is not None))
            settled, in_flight = (None if out is None else plan.blocks.arrive(self, "mlp", out) for out in outputs)
            streams = add(streams, settled, in_flight, keep=plan.hands_on)
        streams = plan.blocks.leave(self, streams, given)
        return streams[0] if len(streams) == 1 else (Streams if plan.blocks.cuts else tuple)(streams)

    def _read(self, streams: Sequence[Tensor], depth: int) -> tuple[Tensor, Sequence[Tensor]]:
        """What a sub-block reads, and the streams that are left."""
        return read(streams, depth)


def _refuse_reentrant(layer: Any) -> None:
    # Reentrant checkpointing does not trace tensors inside a tuple, so their gradients would be lost without an error.
    checkpointed = layer.gradient_checkpointing and layer.training
    if checkpointed and layer._gradient_checkpointing_func.keywords.get("use_reentrant"):
        raise ValueError("a rewired model needs gradient checkpointing with use_reentrant=False")


class PassesOn(nn.Module):
    """A wired layer that also passes on what its attention returned last; a mixin that precedes ``WiredLayer``."""

    fcsd: LayerWiring

    def forward(self, hidden_states: Any, **kwargs: Any) -> tuple[Any, Any]:
        return pass_on(self.fcsd.blocks, super().forward, hidden_states, **kwargs)


def pass_on(blocks: Blocks, forward: Callable[..., Any], hidden_states: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What a wired layer returns if it passes on a second value, see ``Blocks.passes``.

    The first value is the full stream, as recorders of hidden states expect it. Other streams are beside the second
    value.

    Args:
        blocks: names the argument in which a layer gets the second value.
        forward: computes the streams, and adds what the attention returned last to the list ``found``.
    """
    name, found = blocks.passes or "", []
    passed, streams = kwargs.pop(name, None), hidden_states
    if isinstance(passed, tuple):
        passed, streams = passed
    out = forward(streams, found=found, **{name: passed}, **kwargs)
    return (out[0], (found[0], out)) if isinstance(out, tuple) else (out, found[0])


@cache
def wired_class(mixin: type[Any], cls: type[nn.Module], passes: bool = False) -> type[Any]:
    """transformers' class of a layer with ``mixin``, a ``WiredLayer``, before it; ``unwired`` is that class.

    The class keeps its name, because transformers, accelerate, FSDP and DeepSpeed find decoder layers by the name.

    Args:
        passes: whether layers of the class pass on a second value; see ``Blocks.passes``.
    """
    bases = (PassesOn, mixin, cls) if passes else (mixin, cls)
    return type(cls.__name__, bases, {"__module__": cls.__module__, "unwired": cls})


def plan_layers(
    wiring: Wiring,
    count: int,
    blocks: Blocks,
    parts: Callable[[nn.Module], Parts] | None = None,
    every: bool = False,
) -> dict[int, LayerWiring]:
    """The layers to take apart and how each of them reads; the other layers stay transformers' own.

    The streams that a layer passes on are those of the next layer's first read.

    Args:
        wiring: any wiring but Desync.
        parts: takes a layer apart; ``hf_parts`` if it is None.
        every: whether to take apart also the layers that the wiring does not change.
    """
    attn, mlp = wiring.reads
    settles = wiring.name == "farskip"
    parts = parts or partial(hf_parts, blocks)
    plans: dict[int, LayerWiring] = {}
    got = 1
    for i in range(count):
        feeds = i + 1 in wiring.layers and (i in wiring.layers or wiring.border == "partial")
        hands_on = attn + 1 if feeds else 1
        if i in wiring.layers:
            plans[i] = LayerWiring(attn, mlp, hands_on, settles, parts, blocks, gets_streams=got > 1)
        elif every or hands_on > 1:
            plans[i] = LayerWiring(0, 0, hands_on, settles, parts, blocks, gets_streams=got > 1)
        got = hands_on
    return plans


def wire_layers(
    layers: nn.ModuleList,
    wiring: Wiring,
    blocks: Blocks,
    parts: Callable[[nn.Module], Parts] | None = None,
    every: bool = False,
) -> None:
    """Rewire decoder layers in place. An earlier wiring is undone first.

    Args:
        layers: the decoder's layers, with transformers' own classes or with an earlier wiring.
        wiring: the new wiring. If it names no layers, every layer gets transformers' own class back.
        blocks: the names of a layer's children, from the architecture's row.
        parts: a function of a parallel runtime that takes a layer apart; ``hf_parts`` if it is None.
        every: whether to take apart also the layers that the wiring does not change, so that ``parts`` computes all.

    Raises:
        ValueError: the wiring names a layer that does not exist, or Desync does not fit the architecture.
    """
    if wiring.layers and wiring.layers[-1] >= len(layers):
        raise ValueError(f"layer {wiring.layers[-1]} does not exist: the model has {len(layers)}")
    unwire_layers(layers)
    if wiring.name in DESYNC:
        desync_layers(layers, blocks, kept_reductions(wiring.layers, wiring.kept), wiring.tp_degree)
        return
    for i, plan in plan_layers(wiring, len(layers), blocks, parts, every).items():
        take_apart(layers[i], plan)


def take_apart(layer: Any, plan: LayerWiring) -> None:
    """Let a decoder layer with transformers' own class read and pass on streams as its plan says."""
    layer.__class__ = wired_class(WiredLayer, type(layer), plan.blocks.passes is not None)
    layer.fcsd = plan


def unwire_layers(layers: Any) -> None:
    """Restore transformers' own class of every layer."""
    undo_desync(layers)
    for layer in layers:
        if isinstance(layer, WiredLayer):
            del layer.fcsd
            layer.__class__ = layer.unwired  # pyright: ignore[reportAttributeAccessIssue]


class GatedAttention(nn.Module):
    """An attention whose result is multiplied by ``sigmoid(gate_proj(x))`` in front of its output projection.

    A mixin that precedes transformers' own class, which has no gate. AMD's Instella-MoE gates latent attention so.
    """

    gate_proj: nn.Module
    o_proj: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``hidden_states`` is the normalised input ``[batch, seq, hidden]``."""
        gate = torch.sigmoid(self.gate_proj(hidden_states))
        # The projection may be another module by now: one with an adapter, or of one rank.
        hook = self.o_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0] * gate,))
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            hook.remove()


def gate_attentions(layers: Any) -> None:
    """Give the attentions of decoder layers a gate, which a checkpoint has as ``self_attn.gate_proj``."""
    for layer in layers:
        attention, config = layer.self_attn, layer.self_attn.config
        attention.gate_proj = nn.Linear(config.hidden_size, attention.o_proj.in_features, bias=False)
        nn.init.normal_(attention.gate_proj.weight, std=config.initializer_range)
        attention.__class__ = _gated_class(type(attention))


@cache
def _gated_class(cls: type[nn.Module]) -> type[nn.Module]:
    # A compiled forward pass would keep the gate of the pass in which it was compiled: the hook is no guard of it.
    namespace = {"__module__": cls.__module__, "forward": torch.compiler.disable(GatedAttention.forward)}
    return type(cls.__name__, (GatedAttention, cls), namespace)


# What transformers itself attends by, and fcsd's training. ``paged|`` comes before a name, ``/`` is in hub kernels.
_ATTENTION = ("eager", "sdpa", "flash_attention", "flex_attention", "paged|", "fcsd_", "packed")


def refuse_unknown_backend(config: Any) -> None:
    """Refuse to be built by an inference server that brings its own attention, as vLLM's Transformers backend does.

    Such a server also replaces linear layers, experts and reductions, and knows nothing of the wiring. The model would
    compute another function without an error.

    Raises:
        ValueError: the config, or that of its decoder, names an attention that is not transformers'.
    """
    for part in (config, config.get_text_config()):
        name = getattr(part, "_attn_implementation", None)
        if name is not None and "/" not in name and not name.startswith(_ATTENTION):
            raise ValueError(
                f"this rewired model cannot be built by a backend with attention {name!r}, which does not know its "
                "wiring; serve it by vLLM with fcsd's plugin (pip install 'fcsd[vllm]')"
            )


class WiredModel(nn.Module):
    """A mixin for a transformers model class: the model is built as usual, and then wired as ``config.fcsd`` says."""

    fcsd_decoder = ""  # path of the module that holds ``layers``; empty for the model itself
    fcsd_blocks = Blocks()

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown_backend(config)
        super().__init__(config, *args, **kwargs)
        layers: Any = self.get_submodule(self.fcsd_decoder).layers
        gated = self.fcsd_blocks.gated is not None and getattr(config, self.fcsd_blocks.gated, False)
        if gated:
            gate_attentions(layers)
        if not gated or hasattr(config, "fcsd"):  # the config of an original with gates is transformers' own
            wire_layers(layers, Wiring.from_block(config.fcsd), self.fcsd_blocks)

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """False, which tells vLLM not to serve this code with its own linear layers and reductions in place of these.

        Nothing has shown that the result would be right under tensor parallelism. fcsd's plugin for vLLM serves
        rewired models.
        """
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether transformers may choose how the experts are computed, as it may for the class without wiring.

        transformers looks for a decorator in the file that defines the class. The experts are defined in the file of
        the unwired class. Without this method, the experts would run one after the other, with several host
        synchronisations for each of them.
        """
        unwired: Any = cls.__mro__[cls.__mro__.index(WiredModel) + 1]
        return unwired._can_set_experts_implementation()
