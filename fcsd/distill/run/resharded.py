"""Takes up the optimizer's state of a checkpoint that another tensor-parallel degree has saved.

ZeRO's files hold flat partitions of the groups of parameters, and say where the parameters lie in them. The parts of a
parameter are joined here over the data parallel ranks, which divide it, and over the tensor-parallel ranks, which shard
it. Each rank reads all files, and keeps its own part of one kind of state at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.distill.train_engine import Trained
from fcsd.errors import CheckpointError
from fcsd.models.build import arch_of
from fcsd.parallel.tensor.shard import whole_shape
from fcsd.parallel.tensor.tp_plan import Sharding, TensorGroup, model_shardings, own_part, put_part

_MASTER = "master"


def resharded(trained: Trained, files: list[Path], degree: int, ranks: TensorGroup, read: Callable[[Path], Any]) -> Any:
    """The state that DeepSpeed's optimizer of this rank takes, made from the files of all ranks of the saved run.

    Args:
        files: the optimizer's files by rank. Neighbouring ranks have sharded the model.
        degree: the tensor-parallel degree of the saved run.
        ranks: the ranks that shard the model now.

    Raises:
        CheckpointError: ZeRO has not written the files.
    """
    from deepspeed.checkpoint.constants import (
        BASE_OPTIMIZER_STATE,
        PARAM_SLICE_MAPPINGS,
        SINGLE_PARTITION_OF_FP32_GROUPS,
    )

    saved = [read(path) for path in files]
    if any(PARAM_SLICE_MAPPINGS not in state for state in saved):
        raise CheckpointError(
            f"{files[0].parent}: a run of one process in bf16 cannot be resumed with parallel.tp_size {ranks.degree}",
            hint="resume it with one process, or start anew in another output_dir",
        )

    _require_values(state[BASE_OPTIMIZER_STATE]["state"] for state in saved)

    def flats(state: Any, number: int) -> dict[str, Any]:
        """The flat tensors of a group in the file of a rank, and its count of steps."""
        found = dict(state[BASE_OPTIMIZER_STATE]["state"].get(number, {}))
        if SINGLE_PARTITION_OF_FP32_GROUPS in state:
            found[_MASTER] = state[SINGLE_PARTITION_OF_FP32_GROUPS][number]
        return found

    def fragments(state: Any) -> Iterator[tuple[str, str, Tensor]]:
        """Name, kind and values of what a rank has of each parameter."""
        for number, places in enumerate(state[PARAM_SLICE_MAPPINGS]):
            for kind, flat in flats(state, number).items():
                if isinstance(flat, Tensor) and flat.ndim:
                    for name, place in places.items():
                        yield name, kind, flat[place.start : place.start + place.numel]

    parts: list[dict[tuple[str, str], list[Tensor]]] = [{} for _ in range(degree)]
    for rank, state in enumerate(saved):
        for name, kind, values in fragments(state):
            parts[rank % degree].setdefault((name, kind), []).append(values)
    prefix, zero = "model.", trained.engine.optimizer
    shardings = model_shardings(trained.model, arch_of(trained.model.config), "whole")
    kv_heads = trained.model.config.get_text_config().num_key_value_heads
    names = {parameter: name for name, parameter in trained.engine.module.named_parameters()}

    def own(parameter: Any, kind: str) -> Tensor:
        """This rank's part of a parameter's state, flat."""
        name = names[parameter]
        sharding: Sharding = shardings[name.removeprefix(prefix)]
        shape = whole_shape(parameter, sharding, ranks.degree)
        whole = torch.zeros(shape)
        for rank in range(degree):
            if (name, kind) in parts[rank]:
                place = TensorGroup(None, degree, rank)
                like = own_part(whole, sharding, place, kv_heads)
                part = torch.cat(parts[rank][name, kind]).view(like.shape)
                put_part(whole, part, sharding, place, kv_heads)
        return own_part(whole, sharding, ranks, kv_heads).reshape(-1)

    template = zero.state_dict()
    groups: dict[int, dict[str, Any]] = {}
    masters: list[Tensor] = []
    some = next(number for number in range(len(saved[0][PARAM_SLICE_MAPPINGS])) if flats(saved[0], number))
    for number, parameters in enumerate(zero.bit16_groups):
        flat = zero.single_partition_of_fp32_groups[number]
        made = {}
        for kind, like in flats(saved[0], some).items():
            if not (isinstance(like, Tensor) and like.ndim):
                made[kind] = deepcopy(like)  # the count of steps, which each group counts up by itself
                continue
            made[kind] = torch.zeros(flat.numel())
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                    values = own(parameter, kind).narrow(0, there.start, there.numel)
                    made[kind].narrow(0, here.start, here.numel).copy_(values)
        masters.append(made.pop(_MASTER, flat.detach()))
        groups[number] = made
    base = {"state": groups, "param_groups": template[BASE_OPTIMIZER_STATE]["param_groups"]}
    unpadded = zero._get_groups_without_padding(masters)
    return {**template, BASE_OPTIMIZER_STATE: base, SINGLE_PARTITION_OF_FP32_GROUPS: unpadded}


def _require_values(states: Iterable[Any]) -> None:
    """Refuses moments in 8 bits: a block of them may have values of two parameters, or of two ranks of another number.

    Raises:
        CheckpointError: a state of a rank, by number of the group, has such moments.
    """
    if any(isinstance(kept, dict) for state in states for group in state.values() for kept in group.values()):
        raise CheckpointError(
            "a run with optim.moments 8bit resumes on as many GPUs and with the parallel.tp_size that it had before",
            "Resume it there, or start anew in another output_dir.",
        )
