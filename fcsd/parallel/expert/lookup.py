"""Finds the expert blocks of a model, for every library that can divide experts."""

from torch import nn

from fcsd.parallel.expert.autoep import adapt
from fcsd.parallel.expert.block import ExpertBlock


def expert_block(module: nn.Module) -> ExpertBlock | None:
    """The ``ExpertBlock`` of a module; None if the module is not a MoE block whose experts are divided."""
    return adapt(module)


def expert_blocks(model: nn.Module) -> dict[str, ExpertBlock]:
    """Every MoE block of a model whose experts are divided, by the path of its module."""
    found = {path: expert_block(module) for path, module in model.named_modules()}
    return {path: block for path, block in found.items() if block is not None}
