"""The decoder layer under vLLM: vLLM's own layer, whose parts run in the order and with the sums of a ``LayerPlan``.

vLLM's loop over layers passes ``(hidden, residual)`` from layer to layer, and the full stream is their sum. Between two
layers that are taken apart here, ``residual`` is a ``Flight``: what has landed, and what has not. ``hidden`` is then
any tensor ``[tokens, hidden]``, because some of vLLM's loops look at its shape. The layers of some families add their
outputs to the stream themselves, and pass it on whole (``VllmNames.whole``). Their loops pass ``hidden`` alone, which
is then the ``Flight``, or a second value that no layer reads.

RMSNorm of vLLM takes a tensor and a residual, and returns the norm of their sum, and the sum. It may write both over
its arguments. That is harmless here: a sum that has landed and the running sum before it are never read again. Norms
of layers that add themselves take one tensor, as in vLLM's own code.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from fcsd.models.arch import VllmNames
from fcsd.models.fused import with_mixin
from fcsd.models.schedule import Kind, LayerPlan, Running, Step, run_step
from fcsd.serve.vllm.reduction import Reducer, Sum


class Flight(NamedTuple):
    """The state of the residual stream. All tensors are ``[tokens, hidden]``.

    Attributes:
        landed: the sum of the embedding and of all outputs that a read has included; None if ``sums`` hold it, too.
        sums: what no read has included yet, oldest first.
        newest: the tensor that was computed last.
    """

    landed: Tensor | None
    sums: tuple[Sum, ...]
    newest: Tensor


@dataclass(frozen=True)
class Wired:
    """What a layer needs besides vLLM's own attributes."""

    names: VllmNames
    plan: LayerPlan
    reducer: Reducer
    beside: bool = False  # whether it leaves to vLLM where shared experts with a sum of their own are computed
    linear: bool = False  # whether the layer has linear attention
    fills: bool = False  # whether the attention writes its output where it is told to, as linear layers' up to 0.25
    multiplier: float | None = None  # what multiplies an output before it is added to the stream
    bare: bool = False  # whether vLLM's loop passes one tensor from layer to layer, and no pair
    twin: bool = False  # whether the layer has experts beside its MLP
    ahead: tuple[int, ...] = ()  # the sums that the layer awaits for the next one: see ``read_ahead``


class WiredLayer(nn.Module):
    """A decoder layer that runs by its plan; a mixin that precedes vLLM's own class."""

    fcsd: Wired

    def forward(
        self,
        *args: Any,
        positions: Any = None,
        hidden_states: Any = None,
        residual: Any = None,
        idx: int = -1,
        t_cond: None = None,
        per_layer_input: Any = None,
    ) -> Any:
        """Run the layer. Returns what the next layer takes as ``hidden`` and ``residual``, or as ``hidden`` alone.

        Args:
            args: positions and ``hidden`` in the order of ``VllmNames``, then ``residual``, then what vLLM's loop adds
                for the attention; empty if the loop names the next three.
            hidden_states: see ``Flight``.
            residual: see ``Flight``.
            idx: the number of the layer, which one of vLLM's loops passes and no layer reads.
            t_cond: what one of vLLM's loops passes for models of speech, which are not served.
            per_layer_input: the features of the tokens for this layer, ``[tokens, width]``, if it has any.

        Raises:
            RuntimeError: ``t_cond`` is given.
        """
        if t_cond is not None:
            raise RuntimeError("a rewired layer takes no condition of time")
        names = self.fcsd.names
        args = args or (positions, hidden_states, residual)
        positions, hidden = (args[1], args[0]) if names.hidden_first else (args[0], args[1])
        plan = self.fcsd.plan
        flight = _enter(hidden, *args[2:3], lands=names.whole and bool(plan.attn))
        x, flight = self._read(flight, plan.attn, self._norm(names.attn_norms[0]))
        out = self._attention(positions, x, args[3:])
        flight, collected = self._add(flight, None, out, plan.steps[0])
        x, flight = self._read(flight, plan.mlp, self._norm(None if self.fcsd.twin else names.mlp_norms[0]))
        steps = plan.steps[1:]
        if plan.splits and self.fcsd.beside:
            flight, steps = self._experts(flight, collected, x), ()
        for step in steps:
            self.fcsd.reducer.cover(x, flight.newest, flight.sums)
            flight, collected = self._add(flight, collected, self._mlp(x, step), step)
        if names.inputs is not None or names.scale is not None:
            flight = self._with_features(flight, per_layer_input)
        if plan.hands_on is None:
            return flight if self.fcsd.bare else (flight.newest, flight)
        hidden, residual = self._leave(flight, plan.hands_on)
        if not names.whole:
            return hidden, residual
        return residual + hidden if self.fcsd.bare else (residual + hidden, None)

    def _norm(self, name: str | None) -> Any:
        return _same if name is None else getattr(self, name)

    def _attention(self, positions: Tensor, x: Tensor, extra: Sequence[Any]) -> Tensor:
        names, linear = self.fcsd.names, self.fcsd.linear
        attention = getattr(self, _attention_name(names, linear))
        if names.linear is not None:
            given = {"hidden_states": x} if linear else {"hidden_states": x, "positions": positions}
            if not self.fcsd.fills:
                return attention(**given)
            out = torch.empty_like(x)
            attention(output=out, **given)
            return out
        if names.unscaled:
            extra = (None,)
        return attention(x, positions) if names.hidden_first else attention(positions, x, *extra)

    def _experts(self, flight: Flight, collected: Tensor | None, x: Tensor) -> Flight:
        """Compute shared and routed experts by one call of vLLM's, which runs small steps of them on two streams.

        The sum of the shared experts starts where they end, so it travels under the routed ones on either stream.
        """
        shared, routed = self.fcsd.plan.steps[1:]
        reducer = self.fcsd.reducer
        own, collected = (collected, None) if shared.joins else (None, collected)
        reducer.cover(x, flight.newest, flight.sums)
        reducer.hold(x, own)
        mlp = mlp_of(self, self.fcsd.names)
        out = mlp(x)
        sum_ = reducer.held(mlp.experts.fcsd_apart.pop(), own, out, shared)
        flight = Flight(flight.landed, (*flight.sums, sum_), sum_.total)
        return self._add(flight, collected, out, routed)[0]

    def _mlp(self, x: Tensor, step: Step) -> Tensor:
        names = self.fcsd.names
        if self.fcsd.twin and names.beside is not None:
            before = self._norm(names.mlp_norms[0]), self._norm(names.beside[0])
            dense, router = getattr(self, names.mlp)(before[0](x)), getattr(self, names.router)
            return torch.cat((dense, experts_of(self, names)(before[1](x), router(x))), -1)
        mlp, shared = mlp_of(self, names), _beside(self, names)
        if step.call == "shared":
            return getattr(self if names.shared_beside else mlp, names.shared or "")(x)
        if step.call != "mlp" or shared is None:
            return mlp(x)
        return shared(x) + mlp(x)  # experts may write over what they read

    def _both(self, total: Tensor) -> Tensor:
        """What is added for an MLP and the experts beside it, from the sums of both ``[tokens, 2 * hidden]``."""
        names = self.fcsd.names
        assert names.beside is not None
        parts = (part.contiguous() for part in total.chunk(2, -1))
        dense, routed = (self._norm(name)(part) for name, part in zip(names.beside[1:], parts, strict=True))
        return self._norm(names.mlp_norms[1])(dense + routed)

    def _with_features(self, flight: Flight, given: Tensor | None) -> Flight:
        """The state after a layer has added features of each token, and has multiplied the stream.

        Every stream gets both, and a sum in flight is multiplied on arrival. The features are computed from what the
        next attention reads, which is therefore read here: see ``Blocks.leave``.
        """
        names, landing = self.fcsd.names, self.fcsd.plan.hands_on is not None
        landed, flight = self._read(flight, range(len(flight.sums)) if landing else self.fcsd.ahead, _same)
        if names.inputs is not None and given is not None:
            gate, projection, norm = (getattr(self, name) for name in names.inputs)
            landed = landed + norm(projection(gelu(gate(landed), approximate="tanh") * given))
        if names.scale is None:
            return flight._replace(landed=landed)
        scale = getattr(self, names.scale)
        sums = [s._replace(arrive=partial(_arrived, norm=s.arrive or _same, factor=scale)) for s in flight.sums]
        return Flight(landed * scale, tuple(sums), flight.newest)

    def _read(self, flight: Flight, places: Sequence[int], norm: Any) -> tuple[Tensor, Flight]:
        """The normalised stream with the sums at ``places``, and what is left."""
        landed, totals = flight.landed, self._await(flight, places)
        sums = tuple(sum_ for n, sum_ in enumerate(flight.sums) if n not in places)
        landed = _added([landed, *totals[:-1]])
        first = totals[-1] if totals else landed
        assert first is not None, "a read under Desync lands what was added before it"
        if all(flight.sums[n].summand is None for n in places):  # no wait keeps this read behind the newest start
            self.fcsd.reducer.cover(first, flight.newest, sums)
        if totals and landed is not None and not self.fcsd.names.whole:
            x, landed = norm(totals[-1], landed)
        else:
            landed = _added([landed, *totals[-1:]])
            x = norm(landed)
        return x, Flight(landed, sums, flight.newest)

    def _add(self, flight: Flight, collected: Tensor | None, out: Tensor, step: Step) -> tuple[Flight, Tensor | None]:
        """Do with an output what the step says. Returns the new state and what is being collected."""
        reducer, arrive = self.fcsd.reducer, self._arrival(step)
        running, sent = run_step(step, out, Running(flight.landed, collected), arrive, reducer.size)
        if sent is None:
            return Flight(running.landed, flight.sums, running.collected), running.collected
        if sent.how == "start":
            sum_ = reducer.start(sent.out, step)
        else:
            sum_ = reducer.now(sent.out) if sent.how == "now" else Sum(sent.out, None)
        if sent.arrives:
            sum_ = sum_._replace(arrive=arrive)
        return Flight(running.landed, (*flight.sums, sum_), sum_.total), running.collected

    def _arrival(self, step: Step) -> Callable[[Tensor], Tensor] | None:
        """What becomes of a sum on arrival: its norm, and the factor of this family; None if it is added as it is."""
        names = self.fcsd.names
        if self.fcsd.twin and step.call != "attn":
            return self._both
        name = (names.attn_norms if step.call == "attn" else names.mlp_norms)[1]
        if name is None and self.fcsd.multiplier is None:
            return None
        norm = getattr(self, name or "", _same)  # the config of a family can leave its norms on arrival out
        return partial(_arrived, norm=norm, factor=self.fcsd.multiplier)

    def _leave(self, flight: Flight, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """vLLM's pair: ``hidden``, and the residual with the sums at ``places``."""
        totals = self._await(flight, range(len(flight.sums)))
        residual = _added([flight.landed, *(total for n, total in enumerate(totals) if n in places)])
        hidden = _added([total for n, total in enumerate(totals) if n not in places])
        some = residual if hidden is None else hidden
        assert some is not None, "a layer passes on a stream"
        zeros = torch.zeros_like(some)
        return zeros if hidden is None else hidden, zeros if residual is None else residual

    def _await(self, flight: Flight, places: Sequence[int]) -> list[Tensor]:
        sums = [flight.sums[n] for n in places]
        totals = [self.fcsd.reducer.wait(sum_, flight.newest) for sum_ in sums]
        return [total if sum_.arrive is None else sum_.arrive(total) for sum_, total in zip(sums, totals, strict=True)]


def _same(x: Tensor) -> Tensor:
    return x


def _added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of what is there, in this order; None if nothing is."""
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def _arrived(total: Tensor, norm: Callable[[Tensor], Tensor], factor: float | Tensor | None) -> Tensor:
    return norm(total) if factor is None else norm(total) * factor


def _enter(hidden: Any, residual: Any = None, *, lands: bool) -> Flight:
    """The state of the stream at a layer; ``lands`` if ``hidden`` is the whole stream and the plan has it as a sum."""
    for given in (hidden, residual):
        if isinstance(given, Flight):
            return given
    if residual is None and not lands:  # the embedding
        return Flight(hidden, (), hidden)
    return Flight(None if lands else residual, (Sum(hidden, None),), hidden)


def _attention_name(names: VllmNames, linear: bool) -> str:
    return names.linear if linear and names.linear is not None else names.attn


def _beside(layer: Any, names: VllmNames) -> Any:
    """The shared experts beside the MLP of a layer; None if there are none."""
    shared = getattr(layer, names.shared or "") if names.shared_beside else None
    return None if shared is mlp_of(layer, names) else shared


def kind_of(layer: Any, names: VllmNames) -> Kind:
    """The kind of one of vLLM's decoder layers.

    Raises:
        ValueError: the layer has experts under another name.
    """
    moe = experts_of(layer, names)
    if moe is None:
        if any(hasattr(module, "_maybe_reduce_final_output") for module in layer.modules()):
            raise ValueError("the layers have experts under a name that the plugin does not know")
        return "dense"
    shared = names.beside is not None or runner_of(moe)._shared_experts is not None
    return "moe-shared" if shared or _beside(layer, names) is not None else "moe"


def experts_of(layer: Any, names: VllmNames) -> Any:
    """The mixture of experts of a layer; None if it has none."""
    found = [getattr(layer, name, None) for name in names.moe or (names.mlp,)]
    return next((moe for moe in found if moe is not None and hasattr(runner_of(moe), "_shared_experts")), None)


def runner_of(moe: Any) -> Any:
    """vLLM's runner of the experts of a mixture, or the mixture if it is one."""
    return getattr(moe, "experts", moe)


def mlp_of(layer: Any, names: VllmNames) -> Any:
    """The MLP of a layer or the mixture of experts in its place."""
    moe = None if names.beside is not None else experts_of(layer, names)
    mlp = getattr(layer, names.mlp) if moe is None else moe
    return getattr(layer, names.shared or "") if mlp is None and names.shared_beside else mlp


def read_ahead(plans: dict[int, LayerPlan]) -> dict[int, tuple[int, ...]]:
    """Move what an attention awaits to the end of the layer before it, in place; for layers that add features there.

    Returns:
        For each layer that hands on sums in flight, what it awaits.
    """
    ahead = {i: plans[i + 1].attn for i, plan in plans.items() if plan.hands_on is None}
    plans |= {i + 1: plans[i + 1]._replace(attn=()) for i in ahead}
    return ahead


def check_handed_on(plans: Mapping[int, LayerPlan], count: int) -> None:
    """Refuse a model to whose first ``count`` layers' outputs vLLM adds image features, if these would get lost.

    Raises:
        ValueError: one of these layers hands on sums in flight, beside the tensor to which vLLM adds.
    """
    for i, plan in plans.items():
        if i < count and plan.hands_on is None:
            raise ValueError(
                f"vLLM adds image features to the output of layer {i}, which hands on sums in flight; "
                f"convert layers from {count + 1} on alone"
            )


def take_apart(layer: Any, wired: Wired) -> None:
    """Turn one of vLLM's decoder layers into a ``WiredLayer``, in place. Its weights and their names stay.

    Args:
        layer: a layer of vLLM's own class.

    Raises:
        ValueError: the layer multiplies its outputs, which the plugin's does not.
    """
    if getattr(layer, "layer_scale", False):
        raise ValueError("the layers multiply their outputs (layer_scale), which rewired layers do not")
    names, moe = wired.names, experts_of(layer, wired.names)
    bare = names.whole and "residual" not in signature(layer.forward).parameters
    linear = names.linear is not None and hasattr(layer, names.linear)
    attention = getattr(layer, _attention_name(names, linear))
    getattr(attention, names.outs[linear]).reduce_results = False
    fills = "output" in signature(attention.forward).parameters
    if moe is not None:
        runner, beside = runner_of(moe), _beside(layer, names)
        runner.__class__ = with_mixin(UnreducedExperts, type(runner))
        if beside is not None:
            getattr(beside, names.down).reduce_results = False
        elif wired.plan.splits and not wired.beside:
            # The layer calls the shared experts itself. They stay where the checkpoint's names find them.
            runner._shared_experts = None
            runner._forward_entry = runner._select_forward()
        elif wired.plan.splits:
            step = wired.plan.steps[1]
            assert step.then == "start" and names.mlp_norms[1] is None, "routed experts cover the sum of shared ones"
            shared = runner._shared_experts._layer
            shared.__class__ = with_mixin(SummedExperts, type(shared))
            shared.fcsd = Held(wired.reducer, step)
            runner.fcsd_apart = []
    if moe is None or names.beside is not None:
        getattr(mlp_of(layer, names), names.down).reduce_results = False
    layer.__class__ = with_mixin(WiredLayer, type(layer))
    twin = names.beside is not None and moe is not None
    layer.fcsd = replace(wired, linear=linear, fills=fills, bare=bare, twin=twin)


class Held(NamedTuple):
    """What shared experts need to start the sum of their output: see ``Reducer.start_held``."""

    reducer: Reducer
    step: Step


class SummedExperts(nn.Module):
    """Shared experts that return their sum over the ranks, which may be in flight; a mixin.

    vLLM calls them inside its operator for experts, on a stream that it chooses for the number of tokens.
    """

    fcsd: Held

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same: see ``Reducer.start_held``."""
        return self.fcsd.reducer.start_held(super().forward(x), self.fcsd.step)


class UnreducedExperts(nn.Module):
    """Routed experts whose output stays this rank's part of the sum; a mixin that precedes vLLM's ``MoERunner``."""

    _fused_output_is_reduced: bool
    fcsd_apart: list[Tensor] | None = None  # takes the output of the shared experts, where it has a sum of its own

    def _maybe_reduce_shared_expert_output(self, output: Tensor | None, *reduced: Any) -> Tensor | None:
        if self.fcsd_apart is None or output is None:
            return output
        self.fcsd_apart.append(output)
        return None

    def _maybe_reduce_final_output(self, states: Tensor, trunc_size: int | None, *reduced: Any) -> Tensor:
        if self._fused_output_is_reduced or True in reduced:
            raise RuntimeError(
                "vLLM chose a kernel for experts that sums over the ranks itself, before fcsd starts the sum"
            )
        return states if trunc_size is None else states[..., :trunc_size]
