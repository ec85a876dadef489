"""Takes up the optimizer's state of a checkpoint that another number of ranks or another degree has saved.

ZeRO's files hold flat partitions of the groups of parameters, and say where the parameters lie in them. The parts of a
parameter are joined here over the data parallel ranks, which divide it, and over the tensor-parallel ranks, which shard
it. ``OneProcessAdamW`` has whole parameters in one file. No value changes. Each rank opens all files, and reads its own
part of each parameter.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.distill.optim.adamw_one_process import OneProcessAdamW
from fcsd.distill.train_engine import Trained
from fcsd.errors import CheckpointError
from fcsd.launch.world import World
from fcsd.models.build import arch_of
from fcsd.parallel.expert.autoep import expert_blocks, trains_divided
from fcsd.parallel.tensor.shard import whole_shape
from fcsd.parallel.tensor.tp_plan import TensorGroup, model_shardings, own_part, put_part

_MASTER, _STEP, _TAKEN = "master", "step", "taken"
Fragment = tuple[int, str, str, Tensor]  # rank, name of the parameter, kind of state, flat values


def resharded(
    trained: Trained, files: list[Path], degree: int, world: World, ranks: TensorGroup, read: Callable[[Path], Any]
) -> Any:
    """The state that the optimizer of this rank takes, made from the files of all ranks of the saved run.

    Every rank calls this.

    Args:
        files: the optimizer's files by rank. Neighbouring ranks have sharded the model.
        degree: the tensor-parallel degree of the saved run.
        ranks: the ranks that shard the model now.

    Raises:
        CheckpointError: the moments are in 8 bits.
        KeyError, RuntimeError, TypeError, ValueError: the files hold another state.
    """
    optimizer, model = trained.engine.optimizer, trained.model
    alone = isinstance(optimizer, OneProcessAdamW)
    groups = [group["params"] for group in optimizer.param_groups] if alone else optimizer.bit16_groups
    names = {parameter: name for name, parameter in trained.engine.module.named_parameters()}
    block = next(iter(expert_blocks(model).values()), None)
    # So many neighbouring ranks have different parts of a parameter, or different parameters of the same name.
    over = {names[p]: block.placement.ranks if block and trains_divided(p) else degree for g in groups for p in g}
    everything = world.everywhere(lambda: list(over))[0]  # the others do not train biases that are added once
    saved = [read(path) for path in files]
    whole_ones = _TAKEN in saved[0]
    found = _of_one_process(saved[0], everything) if whole_ones else _of_partitions(files, saved)
    parts: dict[tuple[int, str, str], list[Tensor]] = {}
    for writer, name, kind, values in found:
        if name in over:
            parts.setdefault((writer % over[name], name, kind), []).append(values)
    kinds = {kind for _, _, kind in parts}
    shardings = {} if degree == ranks.degree else model_shardings(model, arch_of(model.config), "whole")

    def own(parameter: nn.Parameter, kind: str) -> Tensor:
        """What this rank has of a parameter's state, in the shape of the parameter."""
        name = names[parameter]
        if degree == ranks.degree:
            return torch.cat(parts[world.rank % over[name], name, kind]).view(parameter.shape)
        sharding = shardings.get(name.removeprefix("model."), "whole")  # a draft head is beside the model
        kv_heads = model.config.get_text_config().num_key_value_heads
        whole = torch.zeros(whole_shape(parameter, sharding, ranks.degree))
        for place in (TensorGroup(None, degree, number) for number in range(1 if sharding == "first" else degree)):
            like = own_part(whole, sharding, place, kv_heads)
            put_part(whole, torch.cat(parts[place.rank, name, kind]).view(like.shape), sharding, place, kv_heads)
        return own_part(whole, sharding, ranks, kv_heads)

    step = saved[0][_TAKEN] if whole_ones else _steps(saved)
    if not alone:
        return _partitions(optimizer, own, kinds, step)
    parameters = [parameter for group in groups for parameter in group]
    state = {number: {kind: own(p, kind) for kind in kinds} for number, p in enumerate(parameters)}
    return {**optimizer.state_dict(), "state": state, _TAKEN: step}


def _of_one_process(state: Any, names: list[str]) -> Iterator[Fragment]:
    """What ``OneProcessAdamW`` has saved, whose state has the numbers of the parameters."""
    for name, (_, kept) in zip(names, sorted(state["state"].items()), strict=True):
        yield from ((0, name, kind, values.flatten()) for kind, values in kept.items())


def _of_partitions(files: list[Path], saved: list[Any]) -> Iterator[Fragment]:
    """What ZeRO has saved, in the order of the partitions."""
    from deepspeed.checkpoint.constants import (
        BASE_OPTIMIZER_STATE,
        PARAM_SLICE_MAPPINGS,
        SINGLE_PARTITION_OF_FP32_GROUPS,
    )

    for rank, state in enumerate(saved):
        for number, places in enumerate(state[PARAM_SLICE_MAPPINGS]):
            kept = dict(state[BASE_OPTIMIZER_STATE]["state"].get(number, {}))
            if any(isinstance(value, dict) for value in kept.values()):  # a block may lie on two ranks or parameters
                raise CheckpointError(
                    "a run with optim.moments 8bit resumes on as many GPUs and with the parallel.tp_size that it had "
                    "before",
                    "Resume it there, or start anew in another output_dir.",
                )
            kept.pop(_STEP, None)
            if SINGLE_PARTITION_OF_FP32_GROUPS in state:
                kept[_MASTER] = state[SINGLE_PARTITION_OF_FP32_GROUPS][number]
            for name, place in places.items():
                for kind, flat in kept.items():
                    values = flat[place.start : place.start + place.numel]
                    if values.shape != (place.numel,):
                        raise ValueError(f"{files[rank].name} has {kind} of shape {list(flat.shape)} for {name}")
                    yield rank, name, kind, values


def _steps(saved: list[Any]) -> Tensor:
    """The number of steps that were taken. Each group of each rank counts them, and all have counted as many."""
    from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE

    counts = {float(kept[_STEP]) for state in saved for kept in state[BASE_OPTIMIZER_STATE]["state"].values()}
    if len(counts) > 1:
        raise ValueError(f"its groups have taken {sorted(counts)} steps")
    return torch.tensor(max(counts, default=0.0))


def _partitions(zero: Any, own: Callable[[nn.Parameter, str], Tensor], kinds: set[str], step: Tensor) -> Any:
    """The state of ZeRO's optimizer. What aligns its partitions is 0, as in a run that has not been resumed."""
    from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, SINGLE_PARTITION_OF_FP32_GROUPS

    template = zero.state_dict()
    groups: dict[int, dict[str, Tensor]] = {}
    masters: list[Tensor] = []
    for number, parameters in enumerate(zero.bit16_groups):
        flat = zero.single_partition_of_fp32_groups[number]
        made = {kind: torch.zeros(flat.numel()) for kind in kinds}
        for parameter in parameters:
            mapping = parameter._hp_mapping  # None if another rank has it
            if mapping is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                for kind, values in made.items():
                    part = own(parameter, kind).reshape(-1).narrow(0, there.start, there.numel)
                    values.narrow(0, here.start, here.numel).copy_(part)
        masters.append(made.pop(_MASTER, flat.detach()))
        groups[number] = {**made, _STEP: step.to(torch.float32, copy=True)} if made else {}
    base = {"state": groups, "param_groups": template[BASE_OPTIMIZER_STATE]["param_groups"]}
    unpadded = zero._get_groups_without_padding(masters)
    return {**template, BASE_OPTIMIZER_STATE: base, SINGLE_PARTITION_OF_FP32_GROUPS: unpadded}
