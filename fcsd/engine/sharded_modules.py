"""Modules of transformers that need more than narrower weights under tensor parallelism.

Each class derives from the module's own class and takes its place after the model was built. Weights are those that
``weights.py`` has narrowed.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from fcsd.models.arch import Arch
from fcsd.models.build import decoder_layers
from fcsd.models.wiring import mixer
from fcsd.parallel.tensor.sums import sum_of_parts
from fcsd.parallel.tensor.tp_plan import TensorGroup


class DividedEmbedding(nn.Embedding):
    """An embedding of which each rank holds a range of rows; the ranks' results are summed."""

    ranks: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        """Token ids ``[batch, seq]`` -> ``[batch, seq, hidden]``."""
        local = input - self.ranks.rank * self.weight.shape[0]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere[..., None], 0)
        dist.all_reduce(found, group=self.ranks.group)
        return found


@cache
def _divided_embedding_class(cls: type[nn.Module]) -> type[nn.Module]:
    """``DividedEmbedding``, whose result the forward pass of an embedding's own class then scales, as Gemma's does."""
    bases: Any = (cls, DividedEmbedding)
    return DividedEmbedding if cls is nn.Embedding else type(f"{cls.__name__}OfRanks", bases, {})


class DividedHead(nn.Linear):
    """Output embeddings of which each rank holds a range of rows; every rank gets the logits of all ranks."""

    ranks: TensorGroup
    vocabulary: int  # the number of tokens; the ranks may hold a few more rows

    def forward(self, input: Tensor) -> Tensor:
        """``[..., hidden]`` -> logits ``[..., vocab]``."""
        own = functional.linear(input, self.weight)
        every = own.new_empty(self.ranks.degree, *own.shape)
        dist.all_gather(list(every.unbind()), own.contiguous(), group=self.ranks.group)
        logits = every.movedim(0, -2).flatten(-2)[..., : self.vocabulary]
        return logits if self.bias is None else logits + self.bias  # every rank has the whole bias


class SplitNorm(nn.Module):
    """An RMSNorm over all heads, of which each rank has some (OLMoE).

    The mean of the squares is the mean of the ranks' means: each rank has equally many heads, and a head that is
    repeated is repeated equally often.
    """

    ranks: TensorGroup
    epsilon: float
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., width of this rank's heads]``, normalised over the heads of all ranks in fp32."""
        x = hidden_states.float()
        squares = x.pow(2).mean(-1, keepdim=True)
        if squares.requires_grad:
            squares = sum_of_parts(squares, self.ranks.group)
        else:
            dist.all_reduce(squares, group=self.ranks.group)
        x = x * torch.rsqrt(squares / self.ranks.degree + self.epsilon)
        return self.weight * x.to(hidden_states.dtype)


@cache
def _split_norm_class(cls: type[nn.Module]) -> type[nn.Module]:
    # ``fuse_norms`` leaves the class alone, because its forward pass is not transformers'.
    return type(f"{cls.__name__}OfRanks", (SplitNorm, cls), {"__module__": cls.__module__})


class OwnHeads:
    """The config of an attention that reads its number of query heads from there: that of a rank; else it is another's.

    Args:
        config: the config of the whole model, which may change later.
        num_attention_heads: the query heads of the rank.
    """

    def __init__(self, config: Any, num_attention_heads: int) -> None:
        self._config = config
        self.num_attention_heads = num_attention_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def replace_modules(model: PreTrainedModel, arch: Arch, ranks: TensorGroup, vocabulary: int | None) -> None:
    """Let the modules of a model with narrowed weights compute with the other ranks.

    Args:
        vocabulary: the number of rows of the whole embedding; None if every rank has the whole one, and the whole head.
    """
    text = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if ranks.degree > 1 and vocabulary is not None:
        embedding.__class__, embedding.ranks = _divided_embedding_class(type(embedding)), ranks
        head.__class__, head.ranks, head.vocabulary = DividedHead, ranks, vocabulary
    for layer in decoder_layers(model):
        attention: Any = mixer(arch.blocks, layer)
        if ranks.degree == 1:
            continue
        if "num_key_value_groups" in vars(attention):
            heads = getattr(attention, "num_heads", text.num_attention_heads)  # layers may differ in them
            kv_heads = heads // attention.num_key_value_groups
            own_heads, own_kv_heads = heads // ranks.degree, max(kv_heads // ranks.degree, 1)
            attention.num_key_value_groups = own_heads // own_kv_heads
            if hasattr(attention, "qkv_proj"):
                attention.num_key_value_heads = own_kv_heads
                attention.config = OwnHeads(attention.config, own_heads)
        for path in arch.norms_over_heads:
            norm: Any = layer.get_submodule(path)
            norm.ranks, norm.epsilon = ranks, getattr(norm, arch.norm_epsilon or "")
            norm.__class__ = _split_norm_class(type(norm))
