"""The data types and the devices for which a command may load weights."""

import re

from fcsd.errors import ConfigError, unknown_value

# The words for a data type, in options and recipes: as torch writes them, and in short.
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPES = tuple(_SHORT)


def long_name(dtype: str | None) -> str | None:
    """The name that torch has for a data type, which may be written in short; any other text stays."""
    return next((long for long, short in _SHORT.items() if short == dtype), dtype)


def short_name(dtype: object) -> object:
    """The short name of a data type, which may be written as torch writes it; anything else stays."""
    return _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype


def check_dtype(dtype: str | None) -> None:
    """Refuses a data type that is not supported; None stands for the default.

    Raises:
        ConfigError: the data type is not in ``DTYPES``. The message names those that are.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown_value("dtype", dtype, DTYPES)


def check_device(device: str | None, *others: str) -> None:
    """Refuses a device other than ``cpu``, ``cuda``, ``cuda:N`` and ``others``; None stands for the default.

    Raises:
        ConfigError: the device is another one, or a GPU that this machine lacks. The message says what is possible.
    """
    if device is not None and device not in others and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", device):
        raise unknown_value("device", device, ("cuda", "cpu", *others))
    if device is not None and device.startswith("cuda"):
        import torch

        there = torch.cuda.device_count()
        if int(device.partition(":")[2] or 0) >= there:
            found = f"{there} GPU{'s' * (there != 1)}" if there else "no GPU"
            raise ConfigError(f"--device {device}: torch finds {found} here", "Leave --device out, or give cpu.")


def default_dtype(on_cpu: bool) -> str:
    """The data type without ``--dtype``: float32 on the CPU, which is fast in no other one, and bfloat16 on GPUs."""
    return "float32" if on_cpu else "bfloat16"
