"""Runs a whole model as if its communication were quantised: expert parallelism, tensor parallelism, or both.

The model keeps its wiring. Under tensor parallelism, the reductions are those of ``models/schedule``: outputs that the
same read needs first are added on each rank and share one all-reduce.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from studies.formats.simulated_all_reduce import Rounding, simulate_all_reduce
from studies.formats.simulated_row_parallel import PartialSums, expert_slices, expert_sums, require_divides
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.errors import ConfigError
from fcsd.models.arch import Arch
from fcsd.models.build import arch_of, decoder_layers, wire, wiring_of
from fcsd.models.schedule import Kind, Part, kind_of, reductions
from fcsd.models.wiring import (
    DESYNC,
    Blocks,
    Parts,
    Wiring,
    hf_parts,
    mix,
    mixer,
    mlp_of,
    router_of,
    scaled,
    shared_of,
    wire_layers,
)

# The order in which a layer computes its parts, see ``wiring.WiredLayer``.
_CALLED: tuple[Part, ...] = ("attn", "routed", "shared")


@dataclass(frozen=True)
class SimulatedCommunication:
    """What communication makes of rows, by direction; None leaves rows as they are.

    Attributes:
        dispatch: rows on their way to the routed experts.
        combine: rows on their way back.
        all_reduce: partial sums of tensor parallelism, in both steps.
        tp_degree: the number of tensor-parallel ranks; 1 divides nothing.
        routed_by_tp: whether tensor parallelism divides the routed experts. Otherwise they are expert-parallel.
    """

    dispatch: Rounding | None = None
    combine: Rounding | None = None
    all_reduce: Rounding | None = None
    tp_degree: int = 1
    routed_by_tp: bool = True


@contextmanager
def over_formats(model: PreTrainedModel, simulated: SimulatedCommunication) -> Iterator[PreTrainedModel]:
    """A context in which a model computes as under quantised communication; afterwards it computes as before.

    The model must lie on one device, in evaluation mode. No gradient flows through the rounding.

    Raises:
        ConfigError: the communication cannot be simulated for this model. The message names the reason.
    """
    arch, wiring = arch_of(model.config), wiring_of(model.config)
    _check(model, arch, wiring, simulated)
    layers = decoder_layers(model)
    with ExitStack() as stack:
        if simulated.tp_degree > 1:
            parts = _tensor_parallel(model, arch.blocks, wiring, simulated, stack)
        else:
            parts = partial(_expert_parallel_parts, arch.blocks, simulated)
        stack.callback(wire, model, wiring)
        wire_layers(layers, wiring, arch.blocks, parts, every=True)
        yield model


def _check(model: PreTrainedModel, arch: Arch, wiring: Wiring, simulated: SimulatedCommunication) -> None:
    names = [name for layer in decoder_layers(model) for name, _ in layer.named_parameters()]
    if any(".experts." in name and name.endswith("_bias") for name in names):
        raise ConfigError(f"--quantised cannot be simulated for {arch.model_type}: its experts have biases")
    if arch.blocks.beside is not None:
        raise ConfigError(f"--quantised cannot be simulated for {arch.model_type}: its experts are beside an MLP")
    if wiring.name in DESYNC:
        raise ConfigError(f"--quantised cannot be simulated for {wiring.name}, whose ranks have streams of their own")
    if (simulated.dispatch or simulated.combine) and arch.dense:
        raise ConfigError(
            f"--quantised dispatch and combine need routed experts, which {arch.model_type} does not have",
            "--quantised all-reduce=FORMAT --tp-degree N",
        )
    if simulated.tp_degree > 1:
        config = model.config.get_text_config()
        require_divides(simulated.tp_degree, config.num_attention_heads, "attention heads of the model")


def _expert_parallel_parts(blocks: Blocks, simulated: SimulatedCommunication, layer: Any) -> Parts:
    own = hf_parts(blocks, layer)
    routed = None if own.routed is None else _routed_over_formats(blocks, simulated, layer)
    return Parts(own.attn, own.shared, routed)


def _routed_over_formats(blocks: Blocks, simulated: SimulatedCommunication, layer: Any) -> Callable[[Tensor], Tensor]:
    """The routed experts of a layer whose rows are rounded on their way to the experts and back.

    Every row is rounded, those of tokens whose experts lie on their own rank too, as the quantised all-to-all does.
    """
    mlp = mlp_of(blocks, layer)
    run = _prescaled if blocks.prescaled else _weighted
    router, experts = _router(blocks, mlp), mlp.get_submodule("experts")

    def routed(x: Tensor) -> Tensor:
        return scaled(blocks, mlp, run(router, experts, x.reshape(-1, x.shape[-1]), simulated)).view_as(x)

    return routed


def _router(blocks: Blocks, mlp: Any) -> Callable[[Tensor], Any]:
    """The router of a MoE block as a function of tokens ``[tokens, hidden]``."""
    router = router_of(blocks, mlp)
    flat = not blocks.router_unflattened and (blocks.flattens or blocks.shared is None)
    return router if flat else lambda tokens: router(tokens.unsqueeze(0))


def _weighted(
    router: Callable[[Tensor], Any], experts: nn.Module, flat: Tensor, simulated: SimulatedCommunication
) -> Tensor:
    """The routed experts' output for tokens ``flat [tokens, hidden]``, of the same shape.

    The router sees the tokens as they are. A row that goes to several experts is rounded once. On its way back there
    is a row for each token and expert, without the router's weight; the token's rank adds them in fp32.
    """
    _, weights, indices = router(flat)
    sent = _arriving(flat, simulated.dispatch)
    if simulated.combine is None:
        return experts(sent, indices, weights)
    top_k = indices.shape[-1]
    rows = sent.repeat_interleave(top_k, dim=0)  # one row for each token and expert, [tokens * top_k, hidden]
    choice = indices.reshape(-1, 1)
    outputs = _arriving(experts(rows, choice, torch.ones_like(choice, dtype=weights.dtype)), simulated.combine)
    weighted = outputs.float() * weights.reshape(-1, 1).float()
    return weighted.view(-1, top_k, flat.shape[1]).sum(dim=1).to(flat.dtype)


def _prescaled(
    router: Callable[[Tensor], Any], experts: nn.Module, flat: Tensor, simulated: SimulatedCommunication
) -> Tensor:
    """As ``_weighted`` for llama4, whose router multiplies the rows before they are sent.

    transformers runs every expert on every token, with rows of zeros where an expert was not chosen. Every format
    leaves zeros as they are, so these rows stay what they are without rounding.
    """
    outputs = _arriving(experts(_arriving(_prescaled_rows(router, flat), simulated.dispatch)), simulated.combine)
    return outputs.view(-1, *flat.shape).float().sum(dim=0).to(flat.dtype)


def _arriving(rows: Tensor, how: Rounding | None) -> Tensor:
    """What communication makes of rows, in their dtype."""
    return rows if how is None else how(rows).to(rows.dtype)


def _prescaled_rows(router: Callable[[Tensor], Any], flat: Tensor) -> Tensor:
    """llama4's input to its experts: ``[experts * tokens, hidden]``, zero where an expert was not chosen."""
    scores, _ = router(flat)  # [tokens, experts]
    return flat.repeat(scores.shape[1], 1) * scores.transpose(0, 1).reshape(-1, 1)


def _tensor_parallel(
    model: PreTrainedModel, blocks: Blocks, wiring: Wiring, simulated: SimulatedCommunication, stack: ExitStack
) -> Callable[[nn.Module], Parts]:
    """Takes layers apart into partial sums. Row-parallel layers are replaced until ``stack`` ends."""
    layers = decoder_layers(model)
    kinds: list[Kind] = [kind_of(hf_parts(blocks, layer)) for layer in layers]
    groups: list[list[list[Part]]] = [
        [[output.part for output in one.sums] for one in starts] for starts in reductions(wiring, kinds, blocks)
    ]
    slices: dict[int, list[dict[str, Tensor]]] = {}
    for index, layer in enumerate(layers):
        mlp = mlp_of(blocks, layer)
        divided: list[nn.Module] = [mixer(blocks, layer)]
        if kinds[index] == "dense":
            divided.append(mlp)
        elif kinds[index] == "moe-shared":
            divided.append(shared_of(blocks, layer))
        for owner in divided:
            _divide(owner, simulated.tp_degree, stack)
        if kinds[index] != "dense" and simulated.routed_by_tp:
            slices[index] = expert_slices(mlp.get_submodule("experts"), simulated.tp_degree, blocks.prescaled)
    return partial(_tensor_parallel_parts, blocks, simulated, groups, slices)


def _divide(owner: nn.Module, ranks: int, stack: ExitStack) -> None:
    """Replace the linear layer that makes the output: ``o_proj``, ``out_proj``, or the last one of an MLP."""
    linears = [name for name, module in owner.named_children() if isinstance(module, nn.Linear)]
    name = next((name for name in ("o_proj", "out_proj") if name in linears), linears[-1])
    linear: Any = getattr(owner, name)
    stack.callback(setattr, owner, name, linear)
    setattr(owner, name, PartialSums(linear, ranks))


def _tensor_parallel_parts(
    blocks: Blocks,
    simulated: SimulatedCommunication,
    groups: Sequence[Sequence[Sequence[Part]]],
    slices: dict[int, list[dict[str, Tensor]]],
    layer: Any,
) -> Parts:
    """The parts of one forward pass of a layer.

    The outputs of a group are added on each rank. The part that is computed last returns their sum over the ranks, and
    the others return zeros. No read comes between them, so the stream that the next read sees contains the sum.
    """
    attention = mixer(blocks, layer)
    index = attention.layer_idx
    group_of = {part: group for group in groups[index] for part in group}
    mlp = mlp_of(blocks, layer)
    held: dict[Part, Tensor] = {}  # partial sums [ranks, batch, seq, hidden]

    def reduced(part: Part, partials: Tensor) -> Tensor:
        held[part] = partials
        group: list[Part] = [one for one in group_of[part] if one != "routed" or simulated.routed_by_tp]
        if part != max(group, key=_CALLED.index):
            return torch.zeros_like(partials[0])
        own = held.pop(group[0])
        for one in group[1:]:
            own = own + held.pop(one)
        return simulate_all_reduce(own, simulated.all_reduce or torch.Tensor.float)

    def attn(x: Tensor, **kwargs: Any) -> Tensor:
        return reduced("attn", mix(attention, x, **kwargs))

    def dense(x: Tensor) -> Tensor:
        return reduced("shared", mlp(x))

    def shared(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        sums = shared_of(blocks, layer)(flat)
        if blocks.shared_gate is not None:
            sums = torch.sigmoid(mlp.get_submodule(blocks.shared_gate)(flat)) * sums
        return reduced("shared", sums.view(-1, *x.shape))

    def routed(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        router, experts = _router(blocks, mlp), mlp.get_submodule("experts")
        if blocks.prescaled:
            sums = expert_sums(experts, slices[index], _prescaled_rows(router, flat))
            sums = sums.view(simulated.tp_degree, -1, *flat.shape).sum(dim=1)
        else:
            _, weights, indices = router(flat)
            sums = scaled(blocks, mlp, expert_sums(experts, slices[index], flat, indices, weights))
        return reduced("routed", sums.view(-1, *x.shape))

    if not any(name == "experts" for name, _ in mlp.named_children()):
        return Parts(attn, dense, None)
    by_rank = routed if simulated.routed_by_tp else _routed_over_formats(blocks, simulated, layer)
    return Parts(attn, None if hf_parts(blocks, layer).shared is None else shared, by_rank)
