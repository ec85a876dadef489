"""The data types in which a command may load weights."""

from fcsd.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def check_dtype(dtype: str | None) -> None:
    """Refuses a data type that is not supported; None stands for the default.

    Raises:
        ConfigError: the data type is not in ``DTYPES``. The message names those that are.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}", f"Use one of {', '.join(DTYPES)}.")


def default_dtype(on_cpu: bool) -> str:
    """The data type without ``--dtype``: float32 on the CPU, which is fast in no other one, and bfloat16 on GPUs."""
    return "float32" if on_cpu else "bfloat16"
