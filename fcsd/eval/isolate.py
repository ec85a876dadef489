"""Leave no trace: what an evaluation inside a training process must put back."""

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from torch import nn


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Afterwards the generators of Python, NumPy and torch (CPU and current GPU) are as they were."""
    python, array = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every single module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
