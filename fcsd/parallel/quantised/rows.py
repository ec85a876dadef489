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
from fcsd.kernels.bit_split import Draws, Format, decode, encode
from fcsd.kernels.bit_split.format import parse_directions
from fcsd.parallel.deferred import Codec

Direction = Literal["dispatch", "combine", "dispatch_grad", "combine_grad"]
Stochastic = Literal["off", "gradients", "all"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
_GRADIENTS: tuple[Direction, ...] = ("dispatch_grad", "combine_grad")
_TAIL = 16  # the bytes behind a record for the number of its row: 8, and 8 zeros, so that records stay aligned


@dataclass(frozen=True)
class Formats:
    """The format of the rows in each direction; None sends the rows as they are.

    Args:
        dispatch: the rows from the tokens' ranks to the experts' ranks.
        combine: the outputs of the experts on their way back.
        dispatch_grad: the gradients of the rows of dispatch, which travel from the experts to the tokens.
        combine_grad: the gradients of the rows of combine, which travel from the tokens to the experts.
        stochastic: which directions are rounded up or down at random in a training step, so that the values are right
            on average. All other rows are rounded to the nearest code.

    Raises:
        ConfigError: the format of a gradient has integer scales.
    """

    dispatch: Format | None = None
    combine: Format | None = None
    dispatch_grad: Format | None = None
    combine_grad: Format | None = None
    stochastic: Stochastic = "off"

    def __post_init__(self) -> None:
        for direction in _GRADIENTS:
            format = self.of(direction)
            if format is not None and format.meta == "int":
                raise ConfigError(
                    f"{direction}: the format {format} has integer scales, which cannot express values as small as "
                    "gradients",
                    hint=f"write {replace(format, meta='bf16')}",
                )

    @classmethod
    def parse(cls, text: str, stochastic: Stochastic = "off") -> "Formats":
        """Read one format for all directions, ``int8``, or one for each, ``dispatch=int8,combine_grad=int5``.

        Raises:
            ConfigError: a format or a direction is unknown, a direction is repeated, or the format does not suit it.
        """
        every = "=" not in text
        formats = dict.fromkeys(DIRECTIONS, Format.parse(text)) if every else parse_directions(text, DIRECTIONS)
        return cls(**formats, stochastic=stochastic)

    def __str__(self) -> str:
        """The directions with their formats and the bits of a value, as a dry run prints them."""
        named = ((direction, self.of(direction)) for direction in DIRECTIONS)
        shown = ", ".join(f"{d} {format} ({format.bits_per_value:g} bits a value)" for d, format in named if format)
        return shown if self.stochastic == "off" else f"{shown}; rounded at random: {self.stochastic}"

    def of(self, direction: Direction) -> Format | None:
        """The format of a direction."""
        return getattr(self, direction)

    def rounds_at_random(self, direction: Direction) -> bool:
        """Whether the rows of a direction are rounded stochastically in a training step."""
        allowed = {"off": (), "gradients": _GRADIENTS, "all": DIRECTIONS}[self.stochastic]
        return direction in allowed and self.of(direction) is not None

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
        ConfigError: the format of a gradient has integer scales.
    """
    named = {direction: name for direction in DIRECTIONS if (name := getattr(quantised, direction)) is not None}
    formats = {direction: Format.parse(name) for direction, name in named.items()}
    return Formats(**formats, stochastic=quantised.stochastic) if formats else None


class RowCodec:
    """A ``Codec`` that rounds rows to a format.

    Args:
        draws: returns the random numbers of the rows to encode; None rounds to the nearest code. It is called when
            the rows are encoded, because the experts' ranks learn the numbers of their rows only with dispatch.
    """

    def __init__(self, format: Format, draws: Callable[[], Draws] | None = None) -> None:
        self._format, self._draws = format, draws

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``."""
        return encode(rows, self._format, None if self._draws is None else self._draws())

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """See ``Codec``."""
        return decode(records, self._format, width, dtype)


class NumberedCodec:
    """A ``Codec`` that sends a number behind the record of each row, and keeps the numbers that arrive.

    Args:
        codec: packs the rows; None sends their bytes as they are.
        numbers: int64 ``[rows]``, the numbers of the rows to send.
    """

    received: Tensor  # int64 [received rows]; set by ``decode``

    def __init__(self, codec: Codec | None, numbers: Tensor) -> None:
        self._codec, self._numbers = codec, numbers

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``."""
        records = rows.view(torch.uint8) if self._codec is None else self._codec.encode(rows)
        tail = torch.stack([self._numbers, torch.zeros_like(self._numbers)], dim=1)
        return torch.cat([records, tail.view(torch.uint8)], dim=1)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """See ``Codec``."""
        self.received = records[:, -_TAIL:].contiguous().view(torch.int64)[:, 0].contiguous()
        rows = records[:, :-_TAIL].contiguous()
        return rows.view(dtype) if self._codec is None else self._codec.decode(rows, width, dtype)


@dataclass(frozen=True)
class Codecs:
    """The codecs of one layer in one pass of a batch; None sends the rows of the direction as they are."""

    dispatch: Codec | None = None
    combine: Codec | None = None
    dispatch_grad: Codec | None = None
    combine_grad: Codec | None = None


class Quantiser:
    """Makes the codecs of every pass through a layer of a model. Rows are rounded except in a block of ``paused``.

    Args:
        seed: the seed of the run, on which stochastic rounding depends.
    """

    def __init__(self, formats: Formats, seed: int = 0) -> None:
        self.formats = formats
        self._seed = seed
        self._step: tuple[int, Tensor] | None = None
        self._paused = False

    @contextmanager
    def training_step(self, step: int, tokens: Tensor) -> Iterator[None]:
        """Round stochastically within the block, which runs the forward and the backward pass of a micro-batch.

        Outside of such a block rows are rounded to the nearest code.

        Args:
            step: the number of the optimizer step, below 2^31.
            tokens: int64 ``[tokens]``, the number of each token of the micro-batch in the global batch of the step.
                ``tokens * top_k`` is below 2^31.
        """
        self._step = step, tokens
        try:
            yield
        finally:
            self._step = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Send all rows as they are within the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def formats_to_nearest(self) -> Formats | None:
        """The formats, if all rows are rounded to the nearest code now; None if some are random, or none is rounded."""
        random = self._step is not None and any(map(self.formats.rounds_at_random, DIRECTIONS))
        return None if self._paused or random else self.formats

    def nearest(self) -> Codecs:
        """Codecs that round to the nearest code in every direction; they serve any layer and any pass."""
        if self._paused:
            return Codecs()
        return Codecs(**{d: RowCodec(f) for d in DIRECTIONS if (f := self.formats.of(d)) is not None})

    def codecs(self, layer: int, pairs: Tensor, top_k: int) -> Codecs:
        """The codecs of one pass through a layer, which uses the tokens of the surrounding ``training_step``.

        Args:
            layer: 0-based index of the decoder layer.
            pairs: int64 ``[tokens * top_k]``, the number ``token * top_k + k`` of each row that this rank sends in
                dispatch; ``token`` is the place of the token in this rank's micro-batch.
        """
        formats = self.formats
        if self._paused:
            return Codecs()
        if self._step is None or not any(map(formats.rounds_at_random, DIRECTIONS)):
            return self.nearest()
        step, tokens = self._step
        sent = tokens[pairs // top_k] * top_k + pairs % top_k

        def codec(direction: Direction, numbers: Callable[[], Tensor]) -> Codec | None:
            format, index = formats.of(direction), DIRECTIONS.index(direction)
            if format is None or not formats.rounds_at_random(direction):
                return None if format is None else RowCodec(format)
            return RowCodec(format, lambda: Draws(self._seed, step, layer, index, numbers()))

        there, back = codec("dispatch", lambda: sent), codec("combine_grad", lambda: sent)
        if not (formats.rounds_at_random("combine") or formats.rounds_at_random("dispatch_grad")):
            return Codecs(there, codec("combine", lambda: sent), None, back)
        numbered = NumberedCodec(there, sent)  # the experts' ranks need the numbers for the rows that they send
        outputs = codec("combine", lambda: numbered.received)
        return Codecs(numbered, outputs, codec("dispatch_grad", lambda: numbered.received), back)


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
