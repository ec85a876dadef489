"""Says how the tensors of a decoder layer are divided among tensor-parallel ranks: one row of data per architecture.

The division is Megatron-LM's (§3). The first product of a sub-block is divided by output columns: each rank has whole
heads of attention, and a part of the intermediate columns of an MLP. The second product is divided by input rows, so
each rank computes a partial sum of the sub-block's output. If there are fewer key-value heads than ranks, neighbouring
ranks hold the same head.

Every tensor of a decoder layer is named in the row of its architecture. A tensor without a name is an error, because
a tensor that is divided wrongly gives wrong results without a message.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fcsd.errors import BadInputError, ConfigError
from fcsd.models.archs import Arch

Experts = Literal["sliced", "whole"]


class TensorGroup(NamedTuple):
    """The ranks that divide a model, as one of them sees them.

    Attributes:
        group: the process group of torch.distributed.
        degree: the number of ranks.
        rank: this rank's place in the group.
    """

    group: Any
    degree: int
    rank: int


@dataclass(frozen=True)
class Cut:
    """A division into equal parts along one dimension.

    Attributes:
        dim: the dimension.
        packed: how many blocks lie one after the other along it (gate and up projections); each block is divided.
        kv: whether the dimension consists of key-value heads, which are repeated if there are fewer than ranks.
    """

    dim: int
    packed: int = 1
    kv: bool = False


# How the ranks share a tensor. Every rank has a ``whole`` one. The ``first`` rank has the bias of a row-parallel
# product, and the others have zeros, because the bias is added once. The rows of a ``vocabulary`` are divided as
# evenly as possible; ranks that get fewer rows have zeros in place of the missing rows.
Share = Cut | Literal["whole", "first", "vocabulary"]

_COLUMNS, _ROWS, _KV = Cut(0), Cut(1), Cut(0, kv=True)


@dataclass(frozen=True)
class Division:
    """One architecture's row.

    Attributes:
        layer: patterns of parameter and buffer names inside a decoder layer, the experts' apart -> how they are shared.
        experts: names inside the experts' module -> how a rank's slice of every expert is cut out. The first dimension
            is that of experts.
        split_norms: the names of norms that normalise over all heads, whose mean needs a sum over ranks.
    """

    layer: Mapping[str, Share]
    experts: Mapping[str, Share] = field(default_factory=dict)
    split_norms: tuple[str, ...] = ()


_ATTENTION: Mapping[str, Share] = {
    "self_attn.q_proj.*": _COLUMNS,
    "self_attn.[kv]_proj.*": _KV,
    "self_attn.o_proj.weight": _ROWS,
    "self_attn.o_proj.bias": "first",
    "*_layernorm.weight": "whole",
}
_LATENT: Mapping[str, Share] = {
    "self_attn.q_proj.weight": _COLUMNS,
    "self_attn.q_b_proj.weight": _COLUMNS,
    "self_attn.kv_b_proj.weight": _COLUMNS,
    "self_attn.q_a_proj.*": "whole",
    "self_attn.kv_a_proj_with_mqa.*": "whole",
    "self_attn.*_a_layernorm.weight": "whole",
    "self_attn.o_proj.weight": _ROWS,
    "self_attn.o_proj.bias": "first",
    "*_layernorm.weight": "whole",
}
_HEAD_NORMS: Mapping[str, Share] = {"self_attn.[qk]_norm.weight": "whole"}
# A dense MLP, and shared experts.
_MLP: Mapping[str, Share] = {
    "*.gate_proj.*": _COLUMNS,
    "*.up_proj.*": _COLUMNS,
    "*.down_proj.weight": _ROWS,
    "*.down_proj.bias": "first",
}
_GATE: Mapping[str, Share] = {"mlp.gate.*": "whole"}
_EXPERTS: Mapping[str, Share] = {"gate_up_proj": Cut(1, packed=2), "down_proj": Cut(2)}

DIVISIONS: Mapping[str, Division] = {
    "llama": Division({**_ATTENTION, **_MLP}),
    "qwen3": Division({**_ATTENTION, **_HEAD_NORMS, **_MLP}),
    "qwen3_moe": Division({**_ATTENTION, **_HEAD_NORMS, **_MLP, **_GATE}, _EXPERTS),
    "qwen2_moe": Division({**_ATTENTION, **_MLP, **_GATE, "mlp.shared_expert_gate.weight": "whole"}, _EXPERTS),
    "mixtral": Division({**_ATTENTION, **_GATE}, _EXPERTS),
    "olmoe": Division(
        {**_ATTENTION, **_GATE, "self_attn.q_norm.weight": _COLUMNS, "self_attn.k_norm.weight": _KV},
        _EXPERTS,
        split_norms=("self_attn.q_norm", "self_attn.k_norm"),
    ),
    "glm4_moe": Division({**_ATTENTION, **_HEAD_NORMS, **_MLP, **_GATE}, _EXPERTS),
    "deepseek_v2": Division({**_LATENT, **_MLP, **_GATE}, _EXPERTS),
    "deepseek_v3": Division({**_LATENT, **_MLP, **_GATE}, _EXPERTS),
    "gpt_oss": Division(
        {**_ATTENTION, "self_attn.sinks": _COLUMNS, "mlp.router.*": "whole"},
        # Columns of gate and up alternate, so that a range of columns holds whole pairs.
        {"gate_up_proj": Cut(2), "gate_up_proj_bias": Cut(1), "down_proj": Cut(1), "down_proj_bias": "first"},
    ),
    # The same row serves both types of Llama-4. Every rank holds the whole vision model.
    **dict.fromkeys(
        ("llama4_text", "llama4"),
        Division(
            {**_ATTENTION, **_MLP, "feed_forward.router.weight": "whole"},
            {"gate_up_proj": Cut(2, packed=2), "down_proj": Cut(1)},
        ),
    ),
}


def division_of(arch: Arch) -> Division:
    """The row of an architecture.

    Raises:
        BadInputError: tensor parallelism does not support the architecture.
    """
    if arch.model_type not in DIVISIONS:
        raise BadInputError(
            f"tensor parallelism does not support {arch.model_type}", hint=f"one of {', '.join(DIVISIONS)}"
        )
    return DIVISIONS[arch.model_type]


def check_degree(config: Any, degree: int) -> None:
    """Refuse a degree that does not give each rank whole heads.

    Args:
        config: the config of the language model.
        degree: the number of ranks.

    Raises:
        ConfigError: the heads cannot be divided evenly among so many ranks. The message names the numbers.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        raise ConfigError(
            f"{degree} ranks cannot share {heads} attention heads and {kv_heads} key-value heads",
            hint="choose a number of GPUs that divides both, or that divides the first and is a multiple of the second",
        )


def expert_tensor(name: str) -> str | None:
    """The name inside the experts' module of a parameter, ``gate_up_proj`` for example; None for other parameters."""
    match = re.search(r"\.experts\.(\w+)$", name)
    return match[1] if match else None


def layer_share(division: Division, name: str) -> Share:
    """How the ranks share a tensor of a decoder layer, by its name inside the layer.

    Raises:
        BadInputError: the row of the architecture does not name the tensor.
    """
    inside = expert_tensor(name)
    rules = division.layer if inside is None else division.experts
    for pattern, share in rules.items():
        if fnmatchcase(inside or name, pattern):
            return share
    raise BadInputError(f"tensor parallelism does not know how to divide {name}")


def own_range(share: Share, size: int, ranks: TensorGroup, kv_heads: int) -> list[tuple[int, int]]:
    """The ranges ``(start, count)`` of this rank along the divided dimension, of ``size``, of a whole tensor.

    Raises:
        ConfigError: the ranks cannot divide the dimension evenly.
    """
    if share == "vocabulary":
        rows = vocabulary_rows(size, ranks.degree)
        start = min(ranks.rank * rows, size)
        return [(start, min(rows, size - start))]
    assert isinstance(share, Cut)
    if share.kv and kv_heads < ranks.degree:
        width = size // kv_heads
        return [(ranks.rank * kv_heads // ranks.degree * width, width)]
    if size % (share.packed * ranks.degree):
        raise ConfigError(
            f"{ranks.degree} ranks cannot share {size // share.packed} columns of a weight evenly",
            hint="choose a number of GPUs that divides the model's intermediate sizes",
        )
    block = size // share.packed
    width = block // ranks.degree
    return [(number * block + ranks.rank * width, width) for number in range(share.packed)]


def vocabulary_rows(size: int, degree: int) -> int:
    """How many rows of a vocabulary of ``size`` each rank holds; on the last ranks, some of them are zeros."""
    return -(-size // degree)


def own_part(value: Tensor, share: Share, ranks: TensorGroup, kv_heads: int) -> Tensor:
    """This rank's part of a whole tensor. It is a new tensor or a view, on the same device (the meta device, too)."""
    if share == "whole":
        return value
    if share == "first":
        return value if ranks.rank == 0 else torch.zeros_like(value)
    dim = share.dim if isinstance(share, Cut) else 0
    found = [value.narrow(dim, *piece) for piece in own_range(share, value.shape[dim], ranks, kv_heads)]
    part = found[0] if len(found) == 1 else torch.cat(found, dim)
    if share == "vocabulary":
        missing = vocabulary_rows(value.shape[0], ranks.degree) - part.shape[0]
        part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
    return part


def of_one_expert(share: Share) -> Share:
    """How one expert's row of a tensor is shared, if the tensor of all experts is shared as ``share`` says."""
    return replace(share, dim=share.dim - 1) if isinstance(share, Cut) else share
