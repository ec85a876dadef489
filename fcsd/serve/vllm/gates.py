"""The gates of Instella-MoE's attention. vLLM has no class for it, so its DeepSeek-V3 attention gets them here."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.models.arch import VllmNames
from fcsd.models.fused import with_mixin

GATE = ".self_attn.gate_proj.weight"  # a tensor of a gated attention, as checkpoints name it


class GatedAttention(nn.Module):
    """An attention whose result is multiplied by ``sigmoid(gate_proj(x))`` in front of its output projection; a mixin.

    The reference is ``fcsd.models.wiring.GatedAttention``.
    """

    gate_proj: Any
    o_proj: Any

    def forward(self, positions: Tensor, hidden_states: Tensor, *extra: Any, **named: Any) -> Tensor:
        """``hidden_states`` is the normalised input ``[tokens, hidden]``."""
        self.o_proj.fcsd_gates.append(torch.sigmoid(self.gate_proj(hidden_states)[0]))
        return super().forward(positions, hidden_states, *extra, **named)


class GatedProjection(nn.Module):
    """The output projection of a gated attention; a mixin."""

    fcsd_gates: list[Tensor]

    def forward(self, x: Tensor) -> Any:
        """``x`` is the result of the attention, ``[tokens, heads * head]`` of this rank."""
        return super().forward(x * self.fcsd_gates.pop())


def gate_attention(attention: Any, gate_proj: nn.Module) -> None:
    """Give an attention a gate, in place: ``gate_proj`` returns this rank's part of it, and None."""
    attention.gate_proj, attention.o_proj.fcsd_gates = gate_proj, []
    attention.o_proj.__class__ = with_mixin(GatedProjection, type(attention.o_proj))
    attention.__class__ = with_mixin(GatedAttention, type(attention))


def add_gates(model: Any, names: VllmNames) -> None:
    """Give every attention of one of vLLM's models a gate, in place. Ranks share it as they share the heads."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.utils import PPMissingLayer  # pyright: ignore[reportMissingImports]

    for layer in model.get_submodule(names.decoder).layers:
        if not isinstance(layer, PPMissingLayer):
            attention = getattr(layer, names.attn)
            projection = attention.o_proj
            gate = ColumnParallelLinear(projection.output_size, projection.input_size, bias=False)
            gate_attention(attention, gate)


def load_gates(model: Any, weights: Iterable[tuple[str, Tensor]], gates: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Load the gates of attentions, put their names into ``gates``, and pass on all other tensors of a checkpoint.

    vLLM's own loader would take a gate for that of an MLP. Other pipeline stages load those that are not in ``model``.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        if not name.endswith(GATE):
            yield name, tensor
        elif name in parameters:
            parameters[name].weight_loader(parameters[name], tensor)
            gates.add(name)
