"""Initialises models of full size with random weights, with all experts or with divided experts.

Every module and every expert uses a random generator of its own. The weights are therefore the same on any number of
ranks, and no process needs the whole model. The distributions are those of the family: transformers initialises each
module, and it initialises each expert as a layer with one expert.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.models.build import register
from fcsd.parallel.weights.loading import empty_model, give_memory, shard_empty
from fcsd.parallel.weights.tensor_map import Piece, pieces, put, state

# Maps a path to its module and to the innermost model that contains it, whose rules initialise the module.
Owned = dict[str, tuple[nn.Module, PreTrainedModel]]


def random_model(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> PreTrainedModel:
    """A random causal LM with all its experts, wired as its config says, in eval mode.

    The weights are those of ``random_expert_parallel``.
    """
    register()
    model = empty_model(config, dtype)
    give_memory(model, torch.device(device))
    tensors = state(model)
    for values in drawn(model, seed, torch.device(device)):
        for name, value in values.items():
            tensors[name].data.copy_(value)
    return model


def random_expert_parallel(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device | str, ep_size: int, seed: int
) -> PreTrainedModel:
    """A random causal LM with this rank's experts, wired as its config says, in eval mode.

    The weights depend on the seed, the kind of device and the version of torch, but not on ``ep_size``.

    Args:
        config: the config of a transformers model or of a converted one.
        ep_size: see ``load_expert_parallel``.

    Raises:
        ConfigError: see ``shard_experts``.
    """
    register()
    model = empty_model(config, dtype)
    original = _owned(model)
    shard_empty(model, ep_size)
    give_memory(model, torch.device(device))
    tensors = state(model)
    groups: dict[tuple[str, int | None], dict[str, Piece]] = {}
    for piece in pieces(model):
        path, _, name = piece.name.rpartition(".")
        if piece.here:
            groups.setdefault((path, piece.expert), {})[name] = piece
    for (path, expert), members in groups.items():
        values = _initial(path, original, seed, torch.device(device), expert)
        for name, piece in members.items():
            put(tensors, piece, values[name])
    return model


def drawn(model: PreTrainedModel, seed: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """The random weights of a model whose experts are not divided, module by module, under the names of ``state``.

    The model itself may be on the meta device.
    """
    names = state(model).keys()
    owned = _owned(model)
    for path, (module, _) in owned.items():
        prefix = f"{path}." if path else ""
        if not any(f"{prefix}{name}" in names for name in module.state_dict(keep_vars=True) if "." not in name):
            continue
        if path.endswith(".experts"):
            values = {name: torch.empty_like(p, device=device).detach() for name, p in module.named_parameters()}
            for expert in range(len(next(module.parameters()))):
                for name, value in _initial(path, owned, seed, device, expert).items():
                    values[name][expert] = value
        else:
            values = _initial(path, owned, seed, device)
        yield {f"{prefix}{name}": value for name, value in values.items() if f"{prefix}{name}" in names}


def _owned(model: PreTrainedModel) -> Owned:
    """All modules of a model whose MoE blocks have not been replaced, with the model that initialises each."""
    models = {path: module for path, module in model.named_modules() if isinstance(module, PreTrainedModel)}

    def owner(path: str) -> PreTrainedModel:
        return models[max((outer for outer in models if f"{path}.".startswith(f"{outer}." if outer else "")), key=len)]

    return {path: (module, owner(path)) for path, module in model.named_modules()}


@torch.no_grad()
def _initial(path: str, owned: Owned, seed: int, device: torch.device, expert: int | None = None) -> dict[str, Tensor]:
    """The initial values of a module's own parameters and buffers, by name; with ``expert``, those of this expert only.

    A parameter that the family does not initialise is NaN, so that the omission is noticed. Some families initialise a
    router together with the block that holds it.
    """
    module = owned[path]
    twin = copy.copy(module[0])
    twin._parameters = dict(twin._parameters)
    for name, p in module[0].named_parameters(recurse=False):
        unset = torch.full_like(p if expert is None else p[:1], float("nan"), device=device)
        twin._parameters[name] = nn.Parameter(unset)
    digest = hashlib.sha256(f"{seed} {path} {expert}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        module[1]._init_weights(twin)
        if any(p.isnan().all() for p in twin.parameters(recurse=False)):
            outer, _, name = path.rpartition(".")
            holder = copy.copy(owned[outer][0])
            holder._parameters, holder._modules = {}, {name: twin}
            with suppress(AttributeError):  # what initialises other children, too, is not about this one
                module[1]._init_weights(holder)
    made = {name: p.data if expert is None else p.data[0] for name, p in twin.named_parameters(recurse=False)}
    return {**made, **dict(twin.named_buffers(recurse=False))}
