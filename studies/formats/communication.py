"""The quantised communication under which ``studies.formats.scores`` scores a model, simulated in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from studies.formats.directions import parse_directions
from studies.formats.simulated_all_reduce import rounding_of
from studies.formats.simulated_model import SimulatedCommunication, over_formats
from transformers import PreTrainedModel

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format


@dataclass(frozen=True)
class QuantisedCommunication:
    """The format of the rows of each collective; None sends them as they are.

    Attributes:
        dispatch: rows on their way to the routed experts, one for each token.
        combine: rows on their way back, one for each token and expert.
        all_reduce: the partial sums of tensor parallelism, in both steps of the all-reduce.
        tp_degree: the number of tensor-parallel ranks; 1 without an all-reduce.
    """

    dispatch: Format | None = None
    combine: Format | None = None
    all_reduce: Format | None = None
    tp_degree: int = 1

    @classmethod
    def parse(cls, text: str, tp_degree: int | None = None) -> "QuantisedCommunication":
        """Read ``DIRECTION=FORMAT[,DIRECTION=FORMAT]`` with the directions dispatch, combine and all-reduce.

        Raises:
            ConfigError: a direction or a format is unknown, or the tensor-parallel degree is missing or not needed.
        """
        named = parse_directions(text, ("dispatch", "combine", "all-reduce"))
        formats = {direction.replace("-", "_"): format for direction, format in named.items()}
        if ("all_reduce" in formats) != (tp_degree is not None):
            raise ConfigError(
                "--quantised all-reduce=FORMAT and --tp-degree N belong together", "give both of them, or neither"
            )
        if tp_degree is not None and tp_degree < 2:
            raise ConfigError(f"--tp-degree {tp_degree} reduces nothing", "give 2 or more")
        return cls(**formats, tp_degree=tp_degree or 1)

    @property
    def formats(self) -> dict[str, Format]:
        """The formats that are set, by direction."""
        named = {"dispatch": self.dispatch, "combine": self.combine, "all-reduce": self.all_reduce}
        return {direction: format for direction, format in named.items() if format is not None}

    def __str__(self) -> str:
        """A name that can be part of a file name: ``dispatch=int4-g128,combine=int8``."""
        text = ",".join(f"{direction}={format}" for direction, format in self.formats.items()).replace(":", "-")
        return text if self.tp_degree == 1 else f"{text},tp={self.tp_degree}"

    def to_json(self) -> dict[str, Any]:
        """The formats as a result records them, with the bits per value as it is sent."""
        named = {direction: str(format) for direction, format in self.formats.items()}
        bits = {direction: format.bits_per_value for direction, format in self.formats.items()}
        return {**named, "tp_degree": self.tp_degree, "bits_on_the_wire": bits}


@contextmanager
def over(model: PreTrainedModel, quantised: QuantisedCommunication) -> Iterator[None]:
    """A context in which the model computes as under the formats.

    Raises:
        ConfigError: the formats cannot be simulated for this model, or the groups of a format do not divide its rows.
    """
    for format in quantised.formats.values():
        format.layout(model.config.get_text_config().hidden_size)
    rounding = {d: rounding_of(f) for d, f in quantised.formats.items()}
    by_experts = quantised.dispatch is not None or quantised.combine is not None
    simulated = SimulatedCommunication(
        dispatch=rounding.get("dispatch"),
        combine=rounding.get("combine"),
        all_reduce=rounding.get("all-reduce"),
        tp_degree=quantised.tp_degree,
        routed_by_tp=not by_experts,
    )
    with over_formats(model, simulated):
        yield
