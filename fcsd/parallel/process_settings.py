"""Settings of a process on which overlap depends; CUDA and NCCL read them once, when they start."""

import warnings
from collections.abc import Mapping, MutableMapping

# Streams beyond the number of connections share one, and then wait for each other; NCCL's blocks go before those of
# computation that have not started.
DEFAULTS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_HIGH_PRIORITY": "1"}


class OverlapWarning(UserWarning):
    """The environment keeps collectives from running beside computation."""


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Chooses what the user did not."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def faults(environment: Mapping[str, str]) -> list[str]:
    """What in an environment hinders overlap, a line each."""
    found = []
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append("CUDA_DEVICE_MAX_CONNECTIONS=1 lets kernels of different streams start in turn only: set it to 32")
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        found.append("CUDA_LAUNCH_BLOCKING lets nothing run beside anything: unset it")
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0":
        found.append("TORCH_NCCL_BLOCKING_WAIT stops the host at every awaited collective: unset it")
    if environment.get("TORCH_NCCL_HIGH_PRIORITY", "0") == "0":
        found.append("without TORCH_NCCL_HIGH_PRIORITY=1 NCCL queues behind computation: set it")
    return found


def warn(environment: Mapping[str, str]) -> None:
    """Warns, as ``OverlapWarning``, about each fault."""
    for fault in faults(environment):
        warnings.warn(fault, OverlapWarning, stacklevel=2)
