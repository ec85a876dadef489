"""Reads the formats of several directions of communication from one text, as programs of the lab take them."""

from collections.abc import Sequence

from fcsd.config import Quantised
from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.quantised import Formats, formats_of


def parse_formats(text: str) -> Formats:
    """Read one format for all directions, ``int8``, or one for each, ``dispatch=int8,combine_grad=int5``.

    Raises:
        ConfigError: a format or a direction is unknown, a direction is repeated, or the format does not suit it.
    """
    every = "=" not in text
    named = dict.fromkeys(Formats._fields, Format.parse(text)) if every else parse_directions(text, Formats._fields)
    return formats_of(Quantised(**{direction: str(format) for direction, format in named.items()}))


def parse_directions(text: str, directions: Sequence[str]) -> dict[str, Format]:
    """Read ``DIRECTION=FORMAT[,DIRECTION=FORMAT]``, for example ``dispatch=int8,combine=int5``.

    Raises:
        ConfigError: a direction is not one of ``directions`` or is repeated, or a format is unknown.
    """
    formats: dict[str, Format] = {}
    for part in text.split(","):
        direction, _, name = part.strip().partition("=")
        if direction not in directions or direction in formats:
            raise ConfigError(
                f'"{text}" does not name formats: the direction "{direction}" is unknown or repeated',
                hint=f"write for example {directions[0]}=int8; the directions are {', '.join(directions)}, and "
                "docs/slow_links.md lists the formats",
            )
        formats[direction] = Format.parse(name)
    return formats
