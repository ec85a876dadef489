"""Rounds the rows of dispatch and combine, and their gradients, to the formats of ``fcsd.kernels.bit_split``.

``Formats`` names a format for each of the four directions. A ``RowCodec`` packs the rows of one direction into
records, which any transport sends unchanged (FlashCommunication V2, section 3). ``simulate`` computes in one process
what an exchange between ranks would deliver: for training with all experts on one rank, and for evaluations.

The gradient of rounding is the identity (straight-through). Gradients that are sent are rounded to their own formats.
A rank's own rows are rounded as well, so the result does not depend on which rank holds a token or an expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcsd.config import Quantised
from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.format import SCALES
from fcsd.parallel.deferred import Codec


class Formats(NamedTuple):
    """The format of the rows in each direction; None sends the rows as they are.

    Attributes:
        dispatch: the rows from the tokens' ranks to the experts' ranks.
        combine: the outputs of the experts on their way back.
        dispatch_grad: the gradients of the rows of dispatch, which travel from the experts to the tokens.
        combine_grad: the gradients of the rows of combine, which travel from the tokens to the experts.
    """

    dispatch: Format | None = None
    combine: Format | None = None
    dispatch_grad: Format | None = None
    combine_grad: Format | None = None

    def __str__(self) -> str:
        """The directions with their formats and the bits of a value, as a dry run prints them."""
        named = self._asdict().items()
        return ", ".join(f"{d} {format} ({format.bits_per_value:g} bits a value)" for d, format in named if format)

    def check_width(self, width: int) -> None:
        """Check that rows of ``width`` values can be packed.

        Raises:
            ConfigError: the groups of a format do not divide the row.
        """
        for format in filter(None, self):
            format.layout(width)


def formats_of(quantised: Quantised) -> Formats:
    """The formats of a recipe's ``parallel.quantised``.

    Raises:
        ConfigError: the scales of a gradient's format cannot be as small as gradients need.
    """
    names = {direction: getattr(quantised, direction) for direction in Formats._fields}
    formats = Formats(**{direction: Format.parse(name) for direction, name in names.items() if name is not None})
    for direction, format in formats._asdict().items():
        if format is not None and direction.endswith("_grad") and not SCALES[format.meta].gradients:
            raise ConfigError(
                f"{direction}: the scales of the format {format} cannot express values as small as gradients",
                hint=f"write {replace(format, meta='bf16')}",
            )
    return formats


class RowCodec:
    """A ``Codec`` that rounds rows to a format."""

    def __init__(self, format: Format) -> None:
        self._format = format

    def encode(self, rows: Tensor) -> Tensor:
        return encode(rows, self._format)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return decode(records, self._format, width, dtype)


class Codecs(NamedTuple):
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
        return Codecs(*(None if format is None else RowCodec(format) for format in self.formats or ()))


def simulate(rows: Tensor, there: Codec | None, back: Codec | None = None) -> Tensor:
    """What an exchange of ``rows [rows, width]`` delivers, without ranks: every row is encoded and decoded in place.

    The result and the gradient equal, bit for bit, the rows and the gradients that ranks would receive.

    Args:
        there: packs the rows; None leaves them as they are.
        back: the same for their gradient.
    """
    return rows if there is None and back is None else _Simulated.apply(rows, there, back)


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Codec | None, back: Codec | None) -> Tensor:
        ctx.back = back
        return _delivered(rows, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _delivered(grad, ctx.back), None, None


def _delivered(rows: Tensor, codec: Codec | None) -> Tensor:
    if codec is None:
        return rows.view_as(rows)
    return codec.decode(codec.encode(rows.contiguous()), rows.shape[1], rows.dtype)
