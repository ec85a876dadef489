"""Says how tensor-parallel ranks shard the tensors of a model: the TP plan of a family, and its effect on one tensor.

The sharding is Megatron-LM's (§3). The first product of a sub-block is sharded by output columns: each rank has whole
heads of attention, and a part of the intermediate columns of an MLP. The second product is sharded by input rows, so
each rank computes a partial sum of the sub-block's output. If there are fewer key-value heads than ranks, neighbouring
ranks hold the same head.

A TP plan gives modules and tensors inside a decoder layer a style. The styles have transformers' names:

- ``colwise``: the rows of a matrix as it is stored, ``[..., out, in]``, and what else has one value for each of them.
- ``rowwise``: the columns of a matrix, ``[..., in]``. Its bias is added once, so the first rank has it.
- ``packed_colwise``, ``packed_rowwise``: the same for two blocks that lie one after the other (gate and up).
- ``heads_colwise``: the same as ``colwise`` for all query heads, then all key heads, then all value heads (Phi-3).
- ``replicated``, ``replicated_with_grad_allreduce``: every rank has the whole tensor.

Every tensor of a decoder layer must have one of these styles. Anything else is an error, because a tensor that is
sharded wrongly gives wrong results without a message. ``colwise_gather_output`` is such an error, too: transformers
uses it where ranks cannot compute with their own columns alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.errors import BadInputError, ConfigError
from fcsd.models.arch import Arch


class TensorGroup(NamedTuple):
    """The ranks that shard a model, as one of them sees them.

    Attributes:
        group: the process group of torch.distributed.
        degree: the number of ranks.
        rank: this rank's place in the group.
    """

    group: Any
    degree: int
    rank: int


@dataclass(frozen=True)
class Shard:
    """Equal parts along one dimension, of which each rank has one.

    Attributes:
        dim: the dimension.
        packed: how many blocks lie one after the other along it (gate and up projections); each block is sharded.
        kv: whether the dimension consists of key-value heads, which are repeated if there are fewer than ranks.
        query_heads: how many query heads lie before the key heads and the value heads; 0 if there are none.
    """

    dim: int
    packed: int = 1
    kv: bool = False
    query_heads: int = 0


# What a rank has of a tensor. Every rank has a ``whole`` one. The ``first`` rank has the bias of a row-parallel
# product, and the others have zeros, because the bias is added once. The rows of a ``vocabulary`` are sharded as
# evenly as possible; ranks that get fewer rows have zeros in place of the missing rows.
Sharding = Shard | Literal["whole", "first", "vocabulary"]

# Sources of styles, the most important one first: name or pattern inside a decoder layer -> style.
TpPlan = Sequence[Mapping[str, str]]

_KV_HEADS = re.compile(r"\bself_attn\.[kv]_(proj|norm)\.")

# Styles of transformers for what fcsd's ranks compute in the same way, without what its hooks do around a module.
_SAME = {"rowwise_split_input": "rowwise", "mla_kv_a_proj": "replicated"}
# The styles of the usual names, where neither a row nor transformers says another one. In latent attention every rank
# makes the latents of all heads, and unfolds them for its own heads; an indexer chooses keys for all heads.
_USUAL = {
    **dict.fromkeys(("self_attn.[qkv]_proj", "self_attn.*_b_proj", "*.gate_proj", "*.up_proj"), "colwise"),
    **dict.fromkeys(("self_attn.o_proj", "*.down_proj"), "rowwise"),
    **dict.fromkeys(("self_attn.*_a_proj*", "self_attn.indexer.*", "*norm", "*norm[12]"), "replicated"),
}


def tp_plan_of(arch: Arch, config: PretrainedConfig) -> TpPlan:
    """The styles of a family: those of its row, those of transformers, and those of usual names.

    Routers, their biases and gates are replicated, and so is everything else of a family that has one rank alone.

    Args:
        config: the config of a transformers model or of a converted one.
    """
    blocks, text = arch.blocks, config.get_text_config()
    heads = f"heads_colwise:{text.num_attention_heads}"
    own = {"mlp.gate_up_proj": "packed_colwise"}  # two parts in one weight, whose product transformers' ranks gather
    own |= {name: heads if style == "heads_colwise" else style for name, style in arch.tp_plan.items()}
    if arch.norms_over_heads:  # for which transformers gathers all heads
        own |= {"self_attn.[qkv]_proj": "colwise", "self_attn.o_proj": "rowwise"}
        own |= dict.fromkeys(arch.norms_over_heads, "colwise")
    if blocks.linear is not None:
        own[f"{blocks.linear}.*"] = "replicated"  # of a single rank
    # The attribute of the class: config.json could bring one for the object.
    theirs = type(text).base_model_tp_plan or {}
    names = (blocks.router, f"{blocks.router}.*", blocks.router_bias, blocks.shared_gate)
    whole = [f"{blocks.mlp}.{name}" for name in names if name is not None]
    return (
        own,
        {name.removeprefix("layers.*."): str(_SAME.get(style, style)) for name, style in theirs.items()},
        dict.fromkeys(whole, "replicated") | _USUAL,
        {"*": "replicated"} if arch.no_tp else {},
    )


def check_degree(config: Any, degree: int) -> None:
    """Refuse a degree that does not give each rank whole heads.

    Args:
        config: the config of the language model.

    Raises:
        ConfigError: the heads cannot be divided evenly among so many ranks. The message names the numbers.
    """
    if degree == 1:  # layers may differ in their heads then
        return
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        raise ConfigError(
            f"{degree} ranks cannot share {heads} attention heads and {kv_heads} key-value heads",
            hint="choose a number of GPUs that divides both, or that divides the first and is a multiple of the second",
        )


def layer_sharding(plan: TpPlan, name: str, ndim: int) -> Sharding:
    """What a rank has of a tensor of a decoder layer.

    Args:
        plan: from ``tp_plan_of``.
        name: the name inside the layer.

    Raises:
        BadInputError: the plan has no style for the tensor, or one that is not in the list above.
    """
    style = _style(plan, name)
    if style in ("replicated", "replicated_with_grad_allreduce"):
        return "whole"
    way, bias = str(style).removeprefix("packed_"), name.endswith("bias")
    if way.startswith("heads_colwise:"):
        return Shard(ndim - 1 if bias else 0, query_heads=int(way.partition(":")[2]))
    if way == "rowwise" and bias:
        return "first"
    if way not in ("colwise", "rowwise"):
        raise BadInputError(
            f"tensor parallelism does not know how to shard {name}" + (f" as {style}" if style else ""),
            hint="Give it a style in the field tp_plan of the architecture's row.",
        )
    dim = ndim - 1 if way == "rowwise" or bias else max(ndim - 2, 0)
    return Shard(dim, 1 if style == way else 2, kv=way == "colwise" and _KV_HEADS.search(name) is not None)


def model_shardings(model: PreTrainedModel, arch: Arch, vocabulary: Sharding) -> dict[str, Sharding]:
    """What a rank has of every parameter and persistent buffer of a model, by name.

    Args:
        vocabulary: what it has of the embeddings and the output head.

    Raises:
        BadInputError: see ``layer_sharding``.
    """
    _, decoder = arch.classes["AutoModelForCausalLM"]
    heads = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}  # pyright: ignore
    plan = tp_plan_of(arch, model.config)
    shardings: dict[str, Sharding] = {}
    inside = re.compile(rf"{re.escape(decoder)}\.layers\.\d+\.(.+)")
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = inside.fullmatch(name)
        if match:
            shardings[name] = layer_sharding(plan, match[1], tensor.ndim)
        else:
            shardings[name] = vocabulary if tensor in heads else "whole"
    return shardings


def _style(plan: TpPlan, name: str) -> str | None:
    for source in plan:
        for path in (name, name.rpartition(".")[0]):  # the tensor, then its module
            for pattern, style in source.items():
                if fnmatchcase(path, pattern):
                    return style
    return None


def own_range(sharding: Sharding, size: int, ranks: TensorGroup, kv_heads: int) -> list[tuple[int, int]]:
    """The ranges ``(start, count)`` of this rank along the sharded dimension, of ``size``, of a whole tensor.

    Raises:
        ConfigError: the ranks cannot divide the dimension evenly.
    """
    if sharding == "vocabulary":
        rows = vocabulary_rows(size, ranks.degree)
        start = min(ranks.rank * rows, size)
        return [(start, min(rows, size - start))]
    assert isinstance(sharding, Shard)
    if sharding.kv and kv_heads < ranks.degree:
        width = size // kv_heads
        return [(ranks.rank * kv_heads // ranks.degree * width, width)]
    if sharding.query_heads:
        width = size // (sharding.query_heads + 2 * kv_heads)
        ends = [end * width for end in (0, sharding.query_heads, sharding.query_heads + kv_heads)]
        parts = [(Shard(0), sharding.query_heads), *[(Shard(0, kv=True), kv_heads)] * 2]
        own = [own_range(part, heads * width, ranks, kv_heads)[0] for part, heads in parts]
        return [(end + start, count) for end, (start, count) in zip(ends, own, strict=True)]
    if size % (sharding.packed * ranks.degree):
        raise ConfigError(
            f"{ranks.degree} ranks cannot share {size // sharding.packed} columns of a weight evenly",
            hint="choose a number of GPUs that divides the model's intermediate sizes",
        )
    block = size // sharding.packed
    width = block // ranks.degree
    return [(number * block + ranks.rank * width, width) for number in range(sharding.packed)]


def vocabulary_rows(size: int, degree: int) -> int:
    """How many rows of a vocabulary of ``size`` each rank holds; on the last ranks, some of them are zeros."""
    return -(-size // degree)


def own_part(value: Tensor, sharding: Sharding, ranks: TensorGroup, kv_heads: int) -> Tensor:
    """This rank's part of a whole tensor. It is a new tensor or a view, on the same device (the meta device, too)."""
    if sharding == "whole":
        return value
    if sharding == "first":
        return value if ranks.rank == 0 else torch.zeros_like(value)
    dim = sharding.dim if isinstance(sharding, Shard) else 0
    found = [value.narrow(dim, *piece) for piece in own_range(sharding, value.shape[dim], ranks, kv_heads)]
    part = found[0] if len(found) == 1 else torch.cat(found, dim)
    if sharding == "vocabulary":
        missing = vocabulary_rows(value.shape[0], ranks.degree) - part.shape[0]
        part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
    return part


def put_part(whole: Tensor, part: Tensor, sharding: Sharding, ranks: TensorGroup, kv_heads: int) -> None:
    """Write one rank's part into a whole tensor, in place: ``own_part`` the other way round.

    Args:
        ranks: the rank whose part it is.
    """
    if sharding == "whole" or (sharding == "first" and ranks.rank == 0):
        whole.copy_(part)
    elif sharding != "first":
        dim, start = sharding.dim if isinstance(sharding, Shard) else 0, 0
        for first, count in own_range(sharding, whole.shape[dim], ranks, kv_heads):
            whole.narrow(dim, first, count).copy_(part.narrow(dim, start, count))
            start += count


def of_one_expert(sharding: Sharding) -> Sharding:
    """What a rank has of one expert's row of a tensor, if it has ``sharding`` of the tensor of all experts."""
    return replace(sharding, dim=sharding.dim - 1) if isinstance(sharding, Shard) else sharding
