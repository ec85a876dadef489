"""The order of the backward pass, by autograd's sequence numbers.

Of the nodes that are ready the engine runs the one with the highest number first; a node's own number counts up as
the forward pass creates nodes. An all-to-all is hidden when its launch runs as soon as it is ready and its wait runs
after all that is ready beside it. Launches need no help: what is created after them in forward has run before them.
A wait gets the number of the place in the forward pass at which its cover begins (FarSkip §4.1, Figure 10).

Nodes that accumulate a parameter's gradient come before all others by torch's own numbers, and with them ZeRO's
hooks, which copy and reduce it: the experts' must not run before the rows that their inputs' gradients fill are sent.
"""

from typing import Any

import torch
from torch import Tensor, nn


def mark() -> int:
    """A number between those of the nodes created so far and those to come."""
    number = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).view(())  # takes the number, so that no other node has it
    return number


def run_at(output: Tensor, number: int | None) -> None:
    """Let the node that made ``output`` run at this place in the backward pass; ``None`` keeps its own."""
    if number is not None and output.grad_fn is not None:
        output.grad_fn._set_sequence_nr(number)  # pyright: ignore[reportAttributeAccessIssue]


def accumulations(module: nn.Module) -> list[Any]:
    """The nodes that accumulate the gradients of ``module``'s parameters; torch keeps them while somebody does."""
    with torch.enable_grad():
        views = [parameter.view_as(parameter) for parameter in module.parameters() if parameter.requires_grad]
    return [view.grad_fn.next_functions[0][0] for view in views]  # pyright: ignore[reportOptionalMemberAccess]


def in_backward() -> bool:
    """Whether the engine is running: a forward pass in there is a recompute of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
