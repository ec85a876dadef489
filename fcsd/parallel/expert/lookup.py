"""The expert blocks of a model, whichever library divided its experts."""

from torch import nn

from fcsd.parallel.expert.autoep import adapt
from fcsd.parallel.expert.block import ExpertBlock


def expert_block(module: nn.Module) -> ExpertBlock | None:
    """The block that a module is; None if it is not a MoE block whose experts are divided."""
    return adapt(module)


def expert_blocks(model: nn.Module) -> dict[str, ExpertBlock]:
    """Path -> block, of every MoE block of a model whose experts are divided."""
    found = {path: expert_block(module) for path, module in model.named_modules()}
    return {path: block for path, block in found.items() if block is not None}
