"""Rewires transformers' deepseek_v4, whose layers pass on several streams: what a read may miss, and how it lands.

``HYPER_CONNECTIONS.md`` has the formulas. A sub-block of such a layer reads a weighted sum of ``n`` streams, mixes the
streams, and adds its output to each of them with a weight of its own. All weights are computed from the streams. An
output that a read misses is kept apart from the streams, as the output ``[batch, seq, hidden]`` and one weight for each
stream ``[batch, seq, n]``. It lands in the write of the sub-block that missed it, before the next read. Which outputs a
read misses is fcsd's own table (``plan_layers``). What several streams leave open is a ``Choice``.

This is a study: no command of fcsd converts such a model.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from fcsd.models.wiring import LayerWiring, plan_layers, split, wired_class
from fcsd.models.wiring_block import DESYNC, Blocks, Wiring

BLOCKS = Blocks(shared="shared_experts")
Arrive = Callable[[], Tensor]  # waits for an output that is in flight, and returns it


class Choice(NamedTuple):
    """What the table of reads leaves open if there are several streams.

    Attributes:
        read: whether a read that may miss an output sees the streams as the sub-block before it has mixed them.
        write: whether H_res and H_post of a sub-block that missed an output come from the streams that it read
            (stale), or from the streams in which the output has landed (fresh).
        lands: whether a late output is added before the sub-block that missed it mixes the streams (carried), after it
            with the weights that the output would have had (direct), or after it with those of that sub-block's own
            output (joined).
    """

    read: Literal["mixed", "unmixed"] = "mixed"
    write: Literal["stale", "fresh"] = "stale"
    lands: Literal["carried", "direct", "joined"] = "carried"


CHOICES = {
    "carried": Choice(),
    "fresh": Choice(write="fresh"),
    "direct": Choice(lands="direct"),
    "joined": Choice(lands="joined"),
    "unmixed": Choice(read="unmixed"),
}


class Late(NamedTuple):
    """An output that the streams do not include yet, and the weight with which each stream would have got it."""

    weights: Tensor
    arrive: Arrive


class Streams(NamedTuple):
    """What a layer passes on: the streams ``[batch, seq, n, hidden]``, the late output, and what the next read sees."""

    streams: Tensor
    late: Late | None
    seen: Tensor


def at_once(output: Tensor) -> Arrive:
    """The communication of one device: there is none."""
    return lambda: output


class HyperLayer(nn.Module):
    """A decoder layer with hyper-connections, taken apart; a mixin that precedes transformers' own class."""

    fcsd: LayerWiring
    choice: Choice
    start: Callable[[Tensor], Arrive]  # starts the communication of an output
    unwired: type[nn.Module]

    def forward(self, hidden_states: Any, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """``hidden_states``: the streams ``[batch, seq, n, hidden]``, or the ``Streams`` of the layer before."""
        layer, plan, x = cast(Any, self), self.fcsd, hidden_states
        state = x if isinstance(x, Streams) else Streams(x, None, x)

        *own, x = layer.attn_hc(state.seen)
        output = layer.self_attn(layer.input_layernorm(x), **kwargs)[0]
        state = self._write(layer.attn_hc, own, state, None, output, keep=plan.mlp)

        *own, x = layer.ffn_hc(state.seen)
        shared, routed = experts(layer.mlp, layer.post_attention_layernorm(x), input_ids)
        state = self._write(layer.ffn_hc, own, state, *split(shared, routed, plan.settles(True)), plan.hands_on - 1)
        return state if plan.hands_on > 1 else state.streams

    def _write(
        self, hc: Any, own: Sequence[Tensor], state: Streams, settled: Tensor | None, output: Any, keep: int
    ) -> Streams:
        """The streams after a sub-block.

        Args:
            hc: the module that computes the weights.
            own: H_post and H_res as computed from what the sub-block read.
            state: what it read, and the output that it missed, which lands here.
            settled: the part of its output that is added at once.
            output: the part that may be in flight.
            keep: 1 if the next read misses ``output``, otherwise 0.
        """
        choice, arrive, streams = self.choice, self.start(output), state.streams
        late = None if state.late is None else spread(state.late.weights, state.late.arrive())
        post, mix = own
        if late is not None and choice.write == "fresh":
            post, mix, _ = hc(streams + late)
        post, mix = post.to(streams.dtype), mix.to(streams.dtype).transpose(-1, -2)
        if late is not None and choice.lands == "joined":
            late = spread(post, state.late.arrive())
        if late is not None and choice.lands == "carried":
            streams, late = streams + late, None
        unmixed, streams = streams, torch.matmul(mix, streams)
        for added in (late, None if settled is None else spread(post, settled)):
            if added is not None:
                unmixed, streams = unmixed + added, streams + added
        if not keep:
            streams = streams + spread(post, arrive())
            return Streams(streams, None, streams)
        return Streams(streams, Late(post, arrive), streams if choice.read == "mixed" else unmixed)


def spread(weights: Tensor, output: Tensor) -> Tensor:
    """What an output ``[batch, seq, hidden]`` adds to the streams, of which each has a weight ``[batch, seq, n]``."""
    return weights.unsqueeze(-1) * output.unsqueeze(-2)


def experts(mlp: Any, x: Tensor, input_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs of the shared and of the routed experts, computed in the order in which transformers does."""
    rows = x.view(-1, x.shape[-1])
    _, weights, indices = mlp.gate(x, input_ids) if mlp.is_hash else mlp.gate(x)
    routed = mlp.experts(rows, indices, weights).view_as(x)
    return mlp.shared_experts(x), routed


def wire(
    model: Any,
    wiring: Wiring,
    choice: Choice = CHOICES["carried"],
    start: Callable[[Tensor], Arrive] = at_once,
    every: bool = False,
) -> None:
    """Rewire a ``DeepseekV4ForCausalLM`` in place; an earlier wiring is undone.

    Args:
        wiring: any wiring but Desync.
        choice: what several streams leave open.
        start: starts the communication of an output ``[batch, seq, hidden]`` of this rank, and returns what waits for
            the sum over the ranks.
        every: whether to take apart also the layers that the wiring does not change.

    Raises:
        ValueError: the wiring is one that the literal table of ``literal.py`` does not have.
    """
    if wiring.name in DESYNC or wiring.variant != "full" or wiring.distance > 1:
        raise ValueError("the study has the whole wirings farskip, ladder and parallel, with one output in flight")
    layers = model.model.layers
    for layer in layers:
        layer.__class__ = getattr(layer, "unwired", type(layer))
    for i, plan in plan_layers(wiring, len(layers), BLOCKS, every=every).items():
        layers[i].__class__ = wired_class(HyperLayer, type(layers[i]))
        layers[i].fcsd, layers[i].choice, layers[i].start = plan, choice, start
