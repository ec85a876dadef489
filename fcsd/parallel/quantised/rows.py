"""Rounds the rows of dispatch and combine, and their gradients, to the formats of ``fcsd.kernels.bit_split``.

``Formats`` names a format for each of the four directions. A ``RowCodec`` packs the rows of one direction into
records, which any transport sends unchanged (FlashCommunication V2, section 3). ``simulate`` computes in one process
what an exchange between ranks would deliver: for training with all experts on one rank, and for evaluations.

The gradient of rounding is the identity (straight-through). Gradients that are sent are rounded to their own formats.
A rank's own rows are rounded as well, so the result does not depend on which rank holds a token or an expert.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fcsd.config import Quantised
from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.format import SCALES, parse_directions
from fcsd.parallel.deferred import Codec

Direction = Literal["dispatch", "combine", "dispatch_grad", "combine_grad"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
_GRADIENTS: tuple[Direction, ...] = ("dispatch_grad", "combine_grad")


@dataclass(frozen=True)
class Formats:
    """The format of the rows in each direction; None sends the rows as they are.

    Args:
        dispatch: the rows from the tokens' ranks to the experts' ranks.
        combine: the outputs of the experts on their way back.
        dispatch_grad: the gradients of the rows of dispatch, which travel from the experts to the tokens.
        combine_grad: the gradients of the rows of combine, which travel from the tokens to the experts.

    Raises:
        ConfigError: the scales of a gradient's format cannot be as small as gradients need.
    """

    dispatch: Format | None = None
    combine: Format | None = None
    dispatch_grad: Format | None = None
    combine_grad: Format | None = None

    def __post_init__(self) -> None:
        for direction in _GRADIENTS:
            format = self.of(direction)
            if format is not None and not SCALES[format.meta].gradients:
                raise ConfigError(
                    f"{direction}: the scales of the format {format} cannot express values as small as gradients",
                    hint=f"write {replace(format, meta='bf16')}",
                )

    @classmethod
    def parse(cls, text: str) -> "Formats":
        """Read one format for all directions, ``int8``, or one for each, ``dispatch=int8,combine_grad=int5``.

        Raises:
            ConfigError: a format or a direction is unknown, a direction is repeated, or the format does not suit it.
        """
        every = "=" not in text
        formats = dict.fromkeys(DIRECTIONS, Format.parse(text)) if every else parse_directions(text, DIRECTIONS)
        return cls(**formats)

    def __str__(self) -> str:
        """The directions with their formats and the bits of a value, as a dry run prints them."""
        named = ((direction, self.of(direction)) for direction in DIRECTIONS)
        return ", ".join(f"{d} {format} ({format.bits_per_value:g} bits a value)" for d, format in named if format)

    def of(self, direction: Direction) -> Format | None:
        """The format of a direction."""
        return getattr(self, direction)

    def check_width(self, width: int) -> None:
        """Check that rows of ``width`` values can be packed.

        Raises:
            ConfigError: the groups of a format do not divide the row.
        """
        for format in filter(None, map(self.of, DIRECTIONS)):
            format.layout(width)


def formats_of(quantised: Quantised) -> Formats | None:
    """The formats of a recipe's ``parallel.quantised``; None if no direction has one.

    Raises:
        ConfigError: see ``Formats``.
    """
    named = {direction: name for direction in DIRECTIONS if (name := getattr(quantised, direction)) is not None}
    formats = {direction: Format.parse(name) for direction, name in named.items()}
    return Formats(**formats) if formats else None


class RowCodec:
    """A ``Codec`` that rounds rows to a format."""

    def __init__(self, format: Format) -> None:
        self._format = format

    def encode(self, rows: Tensor) -> Tensor:
        return encode(rows, self._format)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return decode(records, self._format, width, dtype)


@dataclass(frozen=True)
class Codecs:
    """The codecs of one layer in one pass of a batch; None sends the rows of the direction as they are."""

    dispatch: Codec | None = None
    combine: Codec | None = None
    dispatch_grad: Codec | None = None
    combine_grad: Codec | None = None


class Quantiser:
    """Makes the codecs of every pass through a layer of a model. Rows are rounded except in a block of ``paused``."""

    def __init__(self, formats: Formats) -> None:
        self._formats, self._paused = formats, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Send all rows as they are within the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def formats(self) -> Formats | None:
        """The formats to which rows are rounded now; None in a block of ``paused``."""
        return None if self._paused else self._formats

    def codecs(self) -> Codecs:
        """Codecs of every direction; they serve any layer and any pass."""
        formats = self.formats
        if formats is None:
            return Codecs()
        return Codecs(**{d: RowCodec(f) for d in DIRECTIONS if (f := formats.of(d)) is not None})


# What communication makes of rows ``[n, width]``: the values that arrive, ``[n, width]`` of any floating dtype.
Rounding = Callable[[Tensor], Tensor]


def simulate(rows: Tensor, there: Codec | Rounding | None, back: Codec | Rounding | None = None) -> Tensor:
    """What an exchange of ``rows [rows, width]`` delivers, without ranks: every row is encoded and decoded in place.

    The result and the gradient equal, bit for bit, the rows and the gradients that ranks would receive.

    Args:
        there: packs the rows, or says which values arrive; None leaves them as they are.
        back: the same for their gradient.
    """
    if there is None and back is None:
        return rows
    return _Simulated.apply(rows, there, back)


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Codec | Rounding | None, back: Codec | Rounding | None) -> Tensor:
        ctx.back = back
        return _delivered(rows, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _delivered(grad, ctx.back), None, None


def _delivered(rows: Tensor, how: Codec | Rounding | None) -> Tensor:
    if how is None:
        return rows.view_as(rows)
    if callable(how):
        return how(rows).to(rows.dtype)
    return how.decode(how.encode(rows.contiguous()), rows.shape[1], rows.dtype)
