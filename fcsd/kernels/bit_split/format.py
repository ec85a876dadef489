"""Defines a format of quantised communication: its name, its options, and the bytes that a row takes in it.

This is the only file that reads names of formats: alone (``Format.parse``), and in the name of a reduction
(``format_of_reduction``).
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fcsd.errors import ConfigError

GROUPS = (16, 32, 64, 128, 256)  # an index fits into a byte; 16 values take whole 2-byte words in every plane
Rounding = Literal["floor", "nearest", "ceil"]

_HINT = "write for example int8, int4:g32, int3:g128:sr or int2:g64:sr:clip0.7; docs/slow_links.md explains the parts"
_REDUCTION = "quantised"


class Scales(NamedTuple):
    """How a format stores the scales of its groups; ``reference.CODINGS`` computes them.

    Attributes:
        bytes: the size of a scale, of a zero and of the index of a spike: 1 or 2.
        gradients: whether a scale can be as small as gradients need.
        kernels: whether the Triton kernels know them. Torch encodes the others, on GPUs as well.
    """

    bytes: int
    gradients: bool = True
    kernels: bool = False


# How scales can be stored, by the word in the name of a format. docs/adding_a_format.md says how a row is added.
SCALES = {
    "bf16": Scales(2, kernels=True),
    "int": Scales(1, gradients=False, kernels=True),
}
# Unicode has more digits, which a ``\d`` and ``int`` accept.
_OPTION = re.compile(rf"(?P<group>g[0-9]+)|(?P<spikes>sr)|(?P<meta>{'|'.join(SCALES)})|(?P<clip>clip[0-9]+(\.[0-9]+)?)")


class Layout(NamedTuple):
    """The offsets of the parts of a record, and its size, in bytes."""

    planes: tuple[int, ...]  # one for each plane
    scales: int
    zeros: int
    spikes: int
    indices: int
    end: int  # where the padding starts
    bytes: int


@dataclass(frozen=True)
class Format:
    """How the values of a row are rounded and stored. ``str`` writes a format as ``parse`` reads it.

    Args:
        bits: the number of bits of a code, 2 to 8.
        group: how many values share a scale: 16, 32, 64, 128 or 256.
        spikes: whether the least and the greatest value of each group are stored in bf16 (spike reserving).
        meta: how scales and zeros are stored, a key of ``SCALES``. They and the indices of spikes take two bytes each
            with "bf16" and one with "int", as in the paper's Table 4. A bf16 scale is rounded to nearest: the greatest
            value of a group may be cut by up to (2^bits - 1) / 256 steps.
        clip: the factor by which the range of the other values is multiplied, 0.1 to 1. It may be below 1 only with
            spikes and at most 3 bits: without spike reserving the largest activations would be clipped.

    Raises:
        ConfigError: a value is not one of these.
    """

    bits: int
    group: int = 128
    spikes: bool = False
    meta: str = "bf16"
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"a format has 2 to 8 bits, not {self.bits}", hint=_HINT)
        if self.group not in GROUPS:
            raise ConfigError(f"a group of a format has 16, 32, 64, 128 or 256 values, not {self.group}", hint=_HINT)
        if self.meta not in SCALES:
            raise ConfigError(f'scales are stored as {" or ".join(SCALES)}, not as "{self.meta}"', hint=_HINT)
        if not 0.1 <= self.clip <= 1:
            raise ConfigError(f"a format clips to 0.1 to 1 of the range, not to {self.clip}", hint=_HINT)
        if self.clip != 1 and (not self.spikes or self.bits > 3):
            raise ConfigError("only formats of 2 or 3 bits with spike reserving (sr) can clip", hint=_HINT)

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Read ``intB[:gN][:sr][:bf16|:int][:clipX]``. The parts after the first may be in any order.

        Without ``gN`` the group is that of the paper: 128 values for 5 bits and more, 32 for fewer. Without
        ``bf16`` or ``int`` the scales are integers with ``sr``, and bf16 otherwise, as in the paper's tables.

        Raises:
            ConfigError: the text is not a format.
        """
        first, *parts = text.split(":")
        bits = re.fullmatch(r"int([0-9])", first)
        options: dict[str, str] = {}
        for part in parts:
            option = _OPTION.fullmatch(part)
            name = option.lastgroup if option else None
            if name is None or name in options:
                raise ConfigError(f'"{text}" is not a format: "{part}" is unknown or repeated', hint=_HINT)
            options[name] = part
        if bits is None:
            raise ConfigError(f'"{text}" is not a format: it must start with int2 to int8', hint=_HINT)
        width, spikes = int(bits[1]), "spikes" in options
        return cls(
            width,
            int(options["group"][1:]) if "group" in options else _paper_group(width),
            spikes,
            options.get("meta", "int" if spikes else "bf16"),
            float(options["clip"].removeprefix("clip")) if "clip" in options else 1.0,
        )

    def __str__(self) -> str:
        """The shortest name, for example ``int4`` or ``int3:g128:sr``."""
        group = f":g{self.group}" if self.group != _paper_group(self.bits) else ""
        meta = f":{self.meta}" if self.meta != ("int" if self.spikes else "bf16") else ""
        clip = f":clip{self.clip}" if self.clip != 1 else ""
        return f"int{self.bits}{group}{':sr' if self.spikes else ''}{meta}{clip}"

    @property
    def levels(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    @property
    def planes(self) -> tuple[int, ...]:
        """The number of bits of each plane, beginning with the highest bits of a code: ``(4, 2, 1)`` for 7 bits."""
        return tuple(plane for plane in (8, 4, 2, 1) if self.bits & plane)

    @property
    def rounding(self) -> Rounding:
        """How the step between codes is rounded to an integer scale.

        The paper uses ``floor``. It loses up to 6.7 % of the range. At up to 3 bits this loss costs less accuracy than
        larger steps, and at 4 bits it costs more. At 6 bits and more, ``ceil`` keeps every error below half a step.
        """
        if self.clip != 1 or self.bits in (4, 5):
            return "nearest"
        return "floor" if self.bits <= 3 else "ceil"

    @property
    def bits_per_value(self) -> float:
        """Bits of a value as it is sent: codes, scales, zeros, spikes and indices, without the padding of the row."""
        return self.bits + 8 * self._group_bytes / self.group

    @property
    def meta_bytes(self) -> int:
        """The number of bytes of a scale, of a zero and of an index."""
        return SCALES[self.meta].bytes

    @property
    def has_kernels(self) -> bool:
        """Whether Triton kernels encode the format on GPUs."""
        return SCALES[self.meta].kernels

    @property
    def _group_bytes(self) -> int:
        """The bytes of a group besides its codes: a scale, a zero, and two spikes of 2 bytes with their indices."""
        number = self.meta_bytes
        return 2 * number + (4 + 2 * number if self.spikes else 0)

    def row_bytes(self, width: int) -> int:
        """The size in bytes of the record of a row of ``width`` values, a multiple of 16.

        Raises:
            ConfigError: groups do not divide the row.
        """
        return self.layout(width).bytes

    def layout(self, width: int) -> Layout:
        """The layout of the record of a row of ``width`` values.

        Raises:
            ConfigError: groups do not divide the row.
        """
        if width % self.group:
            fits = [group for group in GROUPS if width % group == 0]
            hint = "the width must be a multiple of 16"
            if fits:
                hint = f"use groups of {fits[-1]} values: int{self.bits}:g{fits[-1]}"
            raise ConfigError(f"the groups of format {self} do not divide rows of {width} values", hint=hint)
        groups = width // self.group
        sizes = [width * plane // 8 for plane in self.planes]
        number = groups * self.meta_bytes
        sizes += [number, number, 4 * groups * self.spikes, 2 * number * self.spikes]
        starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
        return Layout(tuple(starts[:-5]), *starts[-5:], bytes=-(-starts[-1] // 16) * 16)


def format_of_reduction(name: str) -> Format | None:
    """The format of the reductions ``quantised:FORMAT`` and ``host:FORMAT``; None for any other name.

    Raises:
        ConfigError: FORMAT is not a format.
    """
    first, _, format = name.partition(":")
    return Format.parse(format) if first == _REDUCTION or (first == "host" and format) else None


def takes_rows(reduction: str, width: int) -> bool:
    """Whether the groups of a reduction's format, if it has one, divide rows of ``width`` values."""
    format = format_of_reduction(reduction)
    return format is None or width % format.group == 0


def _paper_group(bits: int) -> int:
    """The size of a group in FlashCommunication V2, section 3: 128 values, or 32 for 4 bits and fewer."""
    return 128 if bits >= 5 else 32
