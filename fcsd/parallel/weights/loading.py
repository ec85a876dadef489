"""Loads models with divided experts in such a way that no process ever holds the whole model.

The model is built on the meta device, which takes no memory, and its experts are divided there. Then the tensors of
this rank are allocated, one after the other, on the device where they stay.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint import Checkpoint, Layout
from fcsd.checkpoint.weights import Reader
from fcsd.errors import BadInputError
from fcsd.models.build import (
    arch_of,
    causal_lm_class,
    read_generation_config,
    register,
    require_working,
    wiring_of,
    without_further_outputs,
)
from fcsd.models.quantised.method import plain_copy
from fcsd.parallel.expert.autoep import expert_blocks, shard_experts
from fcsd.parallel.expert.blocking import wire_parallel
from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.weights.tensor_map import on_disk, pieces, put, read_apart, state


def load_expert_parallel(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ep_size: int,
    config: PretrainedConfig | None = None,
    orders: Mapping[str, Sequence[int]] | None = None,
) -> PreTrainedModel:
    """Load an original or converted checkpoint directory; this rank reads only its own experts.

    The model equals, bit for bit, the one that ``load_model``, ``shard_experts`` and ``wire_parallel`` make with the
    checkpoint's own wiring. It is in eval mode. Besides the model on ``device``, host memory holds one tensor of the
    checkpoint at a time. ``deepspeed.initialize`` takes the model as it is if its config has no ``expert_parallel``
    section.

    Args:
        ep_size: the number of ranks that share the experts of a layer. It divides the number of ranks and of experts.
        config: used in place of the config of the directory.
        orders: the numbers of a layer's experts by position, by the path of its MoE block, see ``Placement``. The
            layers that are not named have the order of numbers.

    Raises:
        BadInputError: the architecture is not supported, the checkpoint is quantised, or its tensors do not match
            its config. In all these cases nothing but headers has been read.
        ConfigError: see ``shard_experts``.
    """
    path = Path(path)
    layout = verified_layout(path, "expert parallelism")
    register()
    config = config or AutoConfig.from_pretrained(path, trust_remote_code=False)
    model = empty_model(config, dtype)
    shard_empty(model, ep_size)
    blocks = expert_blocks(model)
    for block_path, order in (orders or {}).items():
        block = blocks[block_path]
        block.place(Placement(block.placement.experts, ep_size, tuple(order)))
    give_memory(model, torch.device(device))
    tensors = state(model)
    with Reader(layout) as reader:
        for piece in on_disk(model, pieces(model), layout.tensors):
            if piece.here:
                put(tensors, piece, reader.tensor(piece.name, piece.row))
        for name, value in read_apart(model, reader, layout.tensors).items():
            tensors[name].data.copy_(value)
    model.generation_config = read_generation_config(path) or model.generation_config
    return model


def verified_layout(path: Path, what: str) -> Layout:
    """The layout of a checkpoint that is not quantised and whose tensors match its config. Only headers are read.

    Args:
        what: what needs the checkpoint, for the message.

    Raises:
        BadInputError: the checkpoint is quantised, or its tensors do not match its config.
    """
    found = Checkpoint(path)
    if found.config.quantization is not None:
        raise BadInputError(
            f"{path} is quantised ({found.config.quantization}), and {what} cannot load that",
            plain_copy(path),
        )
    found.verify()
    return found.layout


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM in eval mode whose parameters are on the meta device and whose buffers are real.

    Raises:
        BadInputError: the architecture is not supported, or the installed transformers cannot compute it.
    """
    require_working(arch_of(config))
    config, asked = without_further_outputs(config)
    with init_empty_weights(include_buffers=False):
        model = causal_lm_class(config)._from_config(config, dtype=dtype)
    vars(model)["fcsd_asked"] = asked
    model.tie_weights()
    if dtype in (torch.bfloat16, torch.float16):
        _keep_in_fp32(model)
    return model.eval()


def _keep_in_fp32(model: PreTrainedModel) -> None:
    """Convert the tensors to fp32 that the family keeps in fp32 at half precision, as ``from_pretrained`` does."""
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if any(key in f"{path}.{name}" for key in kept):
                tensor.data = tensor.data.float()


def shard_empty(model: PreTrainedModel, ep_size: int) -> None:
    """Keep only this rank's experts of a model on the meta device, and wire the model as its config says."""
    shard_experts(model, arch_of(model.config), ep_size)
    wire_parallel(model, wiring_of(model.config))


def give_memory(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, with undefined values, and move its buffers."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights remain one parameter
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                vars(real).update(vars(parameter))  # attributes that mark divided experts for DeepSpeed
                made[parameter] = real
            setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Buffers on the meta device are counters of divided experts, which start at zero.
            real = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            setattr(module, name, real)
