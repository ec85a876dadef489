"""The formats that the study compares, by name: those of the wire, and two baselines of other works."""

import re
from functools import partial
from typing import NamedTuple

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.baselines import hadamard, logfmt
from fcsd.parallel.quantised.simulated_all_reduce import Rounding, rounding_of

_BASELINES = {"hadamard": hadamard, "logfmt": logfmt}


class Studied(NamedTuple):
    """A format of the study.

    Attributes:
        bits: the bits on the wire per value, with scales, zeros, spikes and indices, without the padding of rows.
        rounding: what the wire makes of rows.
    """

    bits: float
    rounding: Rounding


def studied(name: str) -> Studied:
    """The format of a name as ``Format.parse`` reads it, or of ``hadamard4:g32`` or ``logfmt4:g32``.

    A baseline would send codes and two bf16 numbers for each group.

    Raises:
        ConfigError: there is no such format.
    """
    baseline = re.fullmatch(r"(hadamard|logfmt)(\d):g(\d+)", name)
    if baseline is None:
        if name.startswith(tuple(_BASELINES)):
            raise ConfigError(f'"{name}" is not a baseline', hint="write for example hadamard4:g32 or logfmt4:g32")
        format = Format.parse(name)
        return Studied(format.bits_per_value, rounding_of(format))
    bits, group = int(baseline[2]), int(baseline[3])
    like = Format(bits, group)  # refuses other widths and groups
    return Studied(like.bits_per_value, partial(_BASELINES[baseline[1]], bits=bits, group=group))
