"""Leave no trace: what an evaluation inside a training process must put back."""

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from torch import nn


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module's mode and every random generator are as they were."""
    modes = {module: module.training for module in model.modules()}
    python, array = random.getstate(), numpy.random.get_state()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(python)
            numpy.random.set_state(array)
