"""What formats send, for the line below a table."""

from collections.abc import Iterable

from fcsd.kernels.bit_split import Format


def bits_sent(names: Iterable[str]) -> str:
    """What the formats with these names send, for the reader of a table: ``int8 8.25, int4 5 bits per value``.

    Raises:
        ConfigError: a name is not a format.
    """
    return ", ".join(f"{name} {Format.parse(name).bits_per_value:g}" for name in names) + " bits per value"
