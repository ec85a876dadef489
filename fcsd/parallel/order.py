"""Sets the order of the backward pass through autograd's sequence numbers.

Of the nodes that are ready, autograd's engine runs the one with the highest sequence number first. A node gets its
number when the forward pass creates it, and the numbers count up. An all-to-all is hidden if its launch runs as soon as
it is ready, and its wait runs after all other nodes that are ready at that time. The number of a launch
needs no change, because the nodes that were created after it in the forward pass have run before it. A wait gets the
number of the place in the forward pass where the computation that hides it begins (FarSkip §4.1, Figure 10).

The nodes that accumulate a parameter's gradient have the highest numbers of all by default. ZeRO's hooks, which copy
and reduce the gradient, run with them. The hooks of the experts must not run before the rows that carry the gradients
of the experts' inputs are sent, so those nodes get lower numbers.
"""

from typing import Any

import torch
from torch import Tensor, nn


def mark() -> int:
    """A number that is higher than those of all nodes created so far and lower than those of all later nodes."""
    number = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).view(())  # this node takes the number, so that no other node gets it
    return number


def run_at(output: Tensor, number: int | None) -> None:
    """Let the node that made ``output`` run at the place ``number`` of the backward pass; None keeps its own number."""
    if number is not None and output.grad_fn is not None:
        output.grad_fn._set_sequence_nr(number)  # pyright: ignore[reportAttributeAccessIssue]


def accumulations(module: nn.Module) -> list[Any]:
    """The nodes that accumulate the gradients of ``module``'s parameters.

    Torch keeps such a node only as long as somebody refers to it, so the caller keeps the list.
    """
    with torch.enable_grad():
        views = [parameter.view_as(parameter) for parameter in module.parameters() if parameter.requires_grad]
    return [view.grad_fn.next_functions[0][0] for view in views]  # pyright: ignore[reportOptionalMemberAccess]


def in_backward() -> bool:
    """Whether the backward pass is running: a forward pass inside of it is a recompute of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
