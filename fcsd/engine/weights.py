"""Loads models of which each tensor-parallel rank holds its own part.

The model is built on the meta device, which takes no memory, and its parameters are narrowed there. Then this rank's
parts are allocated and filled, one tensor of the checkpoint after the other. Where a part is a range of the first
dimension, only its bytes are read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint import Layout
from fcsd.checkpoint.weights import Reader, stored
from fcsd.engine.sharded_modules import replace_modules
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers, experts_of, read_generation_config, register
from fcsd.models.wiring import unwire_layers
from fcsd.parallel.tensor.tp_plan import (
    Shard,
    Sharding,
    TensorGroup,
    check_degree,
    model_shardings,
    of_one_expert,
    own_part,
    own_range,
)
from fcsd.parallel.weights.loading import empty_model, give_memory, verified_layout
from fcsd.parallel.weights.random_init import drawn
from fcsd.parallel.weights.tensor_map import apart, read_apart, state


@dataclass(frozen=True)
class _Source:
    """A tensor on disk, or one row of it, and the parameter that holds its values.

    Attributes:
        stored: the name on disk.
        row: the index into the first dimension on disk; None for the whole tensor.
        name: transformers' name of the parameter.
        expert: the expert's number in the parameter; None if the source is the whole parameter.
        block: the number of the packed block (gate 0, up 1) that the source is; None if it is all blocks.
    """

    stored: str
    row: int | None
    name: str
    expert: int | None = None
    block: int | None = None


_OF_EXPERTS = re.compile(r"\.experts\.\w+$")  # a parameter of an experts' module
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.")


class _ShardedModel:
    """A model whose parameters are narrowed to one rank's parts, while they are filled.

    Args:
        config: the config of a transformers model or of a converted one.
        dtype: the dtype of the weights in memory.
        ranks: the ranks that divide the model.
        whole_vocabulary: whether every rank has the whole embeddings and the whole output head.

    Attributes:
        model: the model, in eval mode. Its parts compute this rank's partial sums, which nothing reduces until
            ``layer.wire_tensor_parallel`` has wired it.

    Raises:
        BadInputError: the architecture is not supported.
        ConfigError: the ranks cannot divide the model evenly.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, ranks: TensorGroup, whole_vocabulary: bool
    ) -> None:
        arch = arch_of(config)
        text = config.get_text_config()
        if arch.no_tp is not None and ranks.degree > 1:
            raise ConfigError(f"{ranks.degree} ranks cannot share a model of {arch.model_type}: {arch.no_tp}")
        check_degree(text, ranks.degree)
        self.ranks = ranks
        self.model = empty_model(config, dtype)
        attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in decoder_layers(self.model)]
        heads = [a.num_heads if hasattr(a, "num_heads") else text.num_attention_heads for a in attentions]
        groups = [getattr(attention, "num_key_value_groups", None) for attention in attentions]
        # Layers of MiMo and Laguna may have other numbers of heads than the config says.
        self._kv_heads = [h // g if g else text.num_key_value_heads for h, g in zip(heads, groups, strict=True)]
        unwire_layers(decoder_layers(self.model))
        self._shardings = model_shardings(self.model, arch, "whole" if whole_vocabulary else "vocabulary")
        vocabulary = self._narrow()
        replace_modules(self.model, arch, ranks, None if whole_vocabulary else vocabulary)

    def _narrow(self) -> int:
        """Narrow every parameter on the meta device, and return the number of rows of the whole vocabulary."""
        embedding: nn.Module = self.model.get_input_embeddings()
        vocabulary = len(embedding.weight)  # pyright: ignore[reportArgumentType]
        made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights remain one parameter
        for path, module in self.model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in made:
                    part = self._own(parameter.data, f"{path}.{name}" if path else name)
                    made[parameter] = nn.Parameter(part, requires_grad=False)
                setattr(module, name, made[parameter])
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
        return vocabulary

    def _own(self, whole: Tensor, name: str) -> Tensor:
        return own_part(whole, self._shardings[name], self.ranks, self._kv_heads_of(name))

    def _kv_heads_of(self, name: str) -> int:
        """The key-value heads of the layer that a tensor belongs to; of the first layer for other tensors."""
        match = _DECODER_LAYER.search(name)
        return self._kv_heads[int(match[1]) if match else 0]

    @torch.no_grad()
    def fill(self, layout: Layout, device: torch.device) -> None:
        """Allocate this rank's parts on ``device`` and read them. Host memory holds one tensor of the files at a time.

        Args:
            layout: a checkpoint whose tensors match the model's config.
        """
        give_memory(self.model, device)
        tensors = state(self.model)
        with Reader(layout) as reader:
            for source in self._sources(layout):
                target, sharding = self._place(tensors[source.name], source)
                if sharding == "first" and self.ranks.rank > 0:
                    target.zero_()
                    continue
                shape = layout.tensors[source.stored].shape[source.row is not None :]
                rows = None
                if sharding in ("vocabulary", Shard(0), Shard(0, kv=True)):
                    (rows,) = own_range(sharding, shape[0], self.ranks, self._kv_heads_of(source.name))
                    target[rows[1] :] = 0  # the rows that the vocabulary does not have
                    target, sharding = target[: rows[1]], "whole"
                value = reader.tensor(source.stored, source.row, rows)
                own = partial(own_part, sharding=sharding, ranks=self.ranks, kv_heads=self._kv_heads_of(source.name))
                part = own(value)
                if source.expert is not None and part.shape != target.shape:  # files have it transposed: see cut_like
                    part = own(value.mT)
                target.copy_(part)
            for name, value in read_apart(self.model, reader, layout.tensors).items():
                tensors[name].copy_(value)

    @torch.no_grad()
    def draw(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """Allocate this rank's parts on ``device``, with the weights that ``random_model`` has with the same seed.

        One module at a time is drawn as a whole.
        """
        give_memory(self.model, device)
        tensors = state(self.model)
        whole = empty_model(config, dtype)
        unwire_layers(decoder_layers(whole))
        for values in drawn(whole, seed, device):
            for name, value in values.items():
                tensors[name].copy_(self._own(value, name))

    def _place(self, target: Tensor, source: _Source) -> tuple[Tensor, Sharding]:
        """The part of ``target`` that a source fills, and what this rank has of the source."""
        sharding = self._shardings[source.name]
        if source.expert is not None:
            sharding, target = of_one_expert(sharding), target[source.expert]
        if source.block is not None and isinstance(sharding, Shard):
            target = target.chunk(sharding.packed, sharding.dim)[source.block]
            sharding = replace(sharding, packed=1)
        return target, sharding

    def _sources(self, layout: Layout) -> Iterator[_Source]:
        """All tensors on disk but those of ``apart``.

        Their names are found for small tensors that hold numbers in place of values, one for each block of each expert.
        """
        numbered: list[_Source] = []
        probes: dict[str, Tensor] = {}
        count = experts_of(self.model.config)
        left_out = set(apart(self.model))
        for name, tensor in state(self.model).items():
            if name in left_out:
                continue
            sharding = self._shardings[name]
            start = len(numbered)
            if _OF_EXPERTS.search(name) and tensor.ndim == 3:
                blocks = sharding.packed if isinstance(sharding, Shard) else 1
                numbered += [_Source("", None, name, e, b) for e in range(count) for b in range(blocks)]
                probes[name] = torch.arange(start, len(numbered)).view(count, blocks, 1)
            else:
                numbered.append(_Source("", None, name))
                probes[name] = torch.tensor([[start]])
        for name, numbers in stored(self.model, probes, layout.tensors).items():
            source = numbered[int(numbers.flatten()[0])]
            if _OF_EXPERTS.search(source.name) and (numbers.ndim == 3 or source.expert is None):
                # All experts lie in one tensor, which is read expert by expert.
                block = source.block if numbers.numel() == count else None
                yield from (_Source(name, e, source.name, e, block) for e in range(count))
            else:
                yield replace(source, stored=name)


def load_tensor_parallel(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks: TensorGroup,
    config: PretrainedConfig | None = None,
    whole_vocabulary: bool = False,
) -> PreTrainedModel:
    """Load an original or converted checkpoint directory; this rank holds only its own part.

    Args:
        config: used in place of the config of the directory.
        whole_vocabulary: whether every rank has the whole embeddings and the whole output head.

    Returns:
        A model in eval mode whose layers compute partial sums; see ``layer.wire_tensor_parallel``.

    Raises:
        BadInputError: the architecture is not supported, the checkpoint is quantised, or its tensors do not match its
            config. In all these cases nothing but headers has been read.
        ConfigError: the ranks cannot divide the model evenly.
    """
    path = Path(path)
    layout = verified_layout(path, "tensor parallelism")
    register()
    config = config or AutoConfig.from_pretrained(path, trust_remote_code=False)
    sharded = _ShardedModel(config, dtype, ranks, whole_vocabulary)
    sharded.fill(layout, torch.device(device))
    sharded.model.generation_config = read_generation_config(path) or sharded.model.generation_config
    return sharded.model


def random_tensor_parallel(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks: TensorGroup,
    seed: int = 0,
    whole_vocabulary: bool = False,
) -> PreTrainedModel:
    """A random model, of which this rank holds its own part. The weights do not depend on the number of ranks.

    Args:
        config: the config of a transformers model or of a converted one.
        whole_vocabulary: whether every rank has the whole embeddings and the whole output head.

    Raises:
        BadInputError: the architecture is not supported.
        ConfigError: the ranks cannot divide the model evenly.
    """
    register()
    sharded = _ShardedModel(config, dtype, ranks, whole_vocabulary)
    sharded.draw(config, dtype, torch.device(device), seed)
    return sharded.model
