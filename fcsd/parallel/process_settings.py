"""Environment variables on which overlap depends. CUDA and NCCL read them once, when a process first uses them."""

import warnings
from collections.abc import Mapping, MutableMapping

# If there are more streams than connections, some streams share a connection and wait for each other. The second
# setting lets the blocks of NCCL's kernels start before blocks of computation that have not started.
DEFAULTS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_HIGH_PRIORITY": "1"}


class OverlapWarning(UserWarning):
    """Something keeps collectives from running beside computation, or from running as fast as they could."""


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the variables of ``DEFAULTS`` that the user has not set."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def faults(environment: Mapping[str, str]) -> list[str]:
    """One line for each variable of ``environment`` that prevents overlap."""
    found = []
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append("CUDA_DEVICE_MAX_CONNECTIONS=1 lets kernels of different streams start only in turn: set it to 32")
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        found.append("CUDA_LAUNCH_BLOCKING makes the host wait for every kernel, so nothing overlaps: unset it")
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0":
        found.append("TORCH_NCCL_BLOCKING_WAIT makes the host wait for every collective: unset it")
    if environment.get("TORCH_NCCL_HIGH_PRIORITY", "0") == "0":
        found.append("without TORCH_NCCL_HIGH_PRIORITY=1 NCCL's kernels queue behind computation: set it to 1")
    return found


def warn(environment: Mapping[str, str]) -> None:
    """Issue an ``OverlapWarning`` for each line of ``faults``."""
    for fault in faults(environment):
        warnings.warn(fault, OverlapWarning, stacklevel=2)
