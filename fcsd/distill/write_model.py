"""The model directory of a checkpoint: ordinary Hugging Face, weights under their original names."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.launch import World
from fcsd.models.archs import Arch
from fcsd.models.build import arch_of


def write_model(model: PreTrainedModel, source: Path, directory: Path, world: World) -> None:
    """Writes the trained weights, and all else as the student came; called by every rank, written by the first."""
    sharded = any(".experts.w1" in name for name, _ in model.named_parameters())
    weights = gather(model, model.state_dict()) if sharded else None
    world.on_first(lambda: _write(model, weights, source, directory))


def gather(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state``, named like an expert-parallel model's, whole, on the CPU, and named as transformers does in memory.

    AutoEP keeps gate, down and up apart as ``w1``, ``w2`` and ``w3``, ``[experts, out, in]``; transformers fuses gate
    and up. Changes ``state``.
    """
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    arch = arch_of(model.config)
    for prefix, moe in model.named_modules():
        if isinstance(moe, AutoEPMoELayer):
            own = {name: state.pop(name) for name in list(state) if name.startswith(f"{prefix}.")}
            whole = {name: _from_all(own[f"{prefix}.experts.{name}"], moe.ep_group) for name in ("w1", "w2", "w3")}
            gate_up, down = torch.cat((whole["w1"], whole["w3"]), dim=1), whole["w2"]
            if arch.blocks.prescaled:  # llama4 keeps [experts, in, out]
                gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
            state[f"{prefix}.experts.gate_up_proj"], state[f"{prefix}.experts.down_proj"] = gate_up, down
            names = {name: _transformers_name(name.removeprefix(f"{prefix}."), arch) for name in own}
            state |= {f"{prefix}.{new}": own[name] for name, new in names.items() if new}
    return {name: tensor.cpu() for name, tensor in state.items()}


def _transformers_name(name: str, arch: Arch) -> str | None:
    """What transformers calls a tensor of a MoE block that AutoEP calls ``name``; None for what is not its own."""
    first, _, rest = name.partition(".")
    blocks = arch.blocks
    if first == "router":
        return f"{blocks.router}.{rest.removeprefix('gate.')}"
    if first == "shared_experts":
        return f"{blocks.shared}.{rest}"
    if first == "shared_experts_gate":
        return f"{blocks.shared_gate}.{rest}"
    return None


def _from_all(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat([part.cpu() for part in parts])


def _write(model: PreTrainedModel, weights: dict[str, Tensor] | None, source: Path, directory: Path) -> None:
    model.save_pretrained(directory, state_dict=weights)
    for path in source.iterdir():
        is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if path.is_file() and not is_weights and not (directory / path.name).exists():
            shutil.copy(path, directory)
