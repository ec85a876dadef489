"""The formats that the study compares, by name: those of the wire, and two baselines of other works."""

from functools import partial
from typing import NamedTuple

from studies.formats.baselines import hadamard, logfmt

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.quantised.rows import Rounding
from fcsd.parallel.quantised.simulated_all_reduce import rounding_of

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
    baseline = next(filter(name.startswith, _BASELINES), None)
    format = Format.parse(name if baseline is None else name.replace(baseline, "int", 1))
    if baseline is None:
        return Studied(format.bits_per_value, rounding_of(format))
    if name != f"{baseline}{format.bits}:g{format.group}":
        raise ConfigError(f'"{name}" is not a baseline', hint="write for example hadamard4:g32 or logfmt4:g32")
    return Studied(format.bits_per_value, partial(_BASELINES[baseline], bits=format.bits, group=format.group))
