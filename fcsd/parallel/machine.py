"""The machine file: a JSON file that describes the links of a cluster, measured by ``fcsd bench links`` or by hand."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fcsd.config.explain import explain
from fcsd.disk import read_input
from fcsd.errors import ConfigError
from fcsd.strict_json import MAX_BYTES, StrictJsonError, parse

# What earlier files have beside, for predictions of training that are gone; nothing reads it.
_FORMER = ("peak_tflops", "direct", "fixed_us", "hidden_cost", "copy_tb_per_s", "codec")
# Smaller rates and larger times are mistakes. A step would take no finite time, and ratios of steps would be nan.
_Rate = Annotated[float, Field(gt=1e-4)]
_Microseconds = Annotated[float, Field(ge=0, le=1e9)]
_Duration = Annotated[float, Field(gt=0, le=1e9)]  # of what sends something, in microseconds


@dataclass(frozen=True)
class Line:
    """The time of a transfer as a function of its size (HierMoE eq. 1).

    Attributes:
        alpha: seconds that a transfer of any size takes.
        beta: seconds for each byte that a rank sends.
    """

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        """The seconds of a transfer of ``size`` bytes; nothing is sent in no time."""
        return self.alpha + self.beta * size if size else 0.0


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Link(_Part):
    """One kind of link, as a GPU sees it."""

    latency_us: _Microseconds
    """Microseconds that an all-to-all of any size takes."""
    gb_per_s: _Rate
    """The rate at which a GPU sends, in 10^9 bytes per second in one direction."""

    @property
    def line(self) -> Line:
        """The time of a transfer over this link."""
        return Line(self.latency_us * 1e-6, 1e-9 / self.gb_per_s)

    @classmethod
    def of(cls, line: Line) -> "Link":
        """The link with these times. 10^6 GB/s stand for a time that does not grow with the bytes."""
        return cls(latency_us=line.alpha * 1e6, gb_per_s=1e-9 / line.beta if line.beta else 1e6)


class Machine(_Part):
    """A cluster. Only the links and the number of GPUs of a node are required."""

    gpu: str = "NVIDIA H200"
    """The name of the GPU, as torch prints it."""
    gpus_per_node: Annotated[int, Field(gt=0)]
    """The number of GPUs in a node."""
    near: Link
    """The links between the GPUs of a node."""
    far: Link | None = None
    """The links between nodes, where each GPU sends to those that have the same place in other nodes."""
    all_reduce_us: dict[Annotated[int, Field(gt=1)], dict[Annotated[int, Field(gt=0)], _Duration]] = Field(
        default_factory=dict
    )
    """For numbers of GPUs of one node: the microseconds of an all-reduce by NCCL, by its bytes."""
    sums_us: dict[str, dict[Annotated[int, Field(gt=1)], dict[Annotated[int, Field(gt=0)], _Duration]]] = Field(
        default_factory=dict
    )
    """The same of other ways to sum: `host`, `host:int8`, and `NCCL_SHM_USE_CUDA_MEMCPY=1`, which is NCCL with that
    setting."""
    measured: dict[str, Any] | None = None
    """What `fcsd bench links` measured, and where. A prediction does not read it."""

    @model_validator(mode="after")
    def _several_gpus(self) -> "Machine":
        if self.gpus_per_node == 1 and self.far is None:
            raise ValueError("a machine of one GPU has no link; set `gpus_per_node` or `far`")
        return self


def read_machine(path: Path) -> Machine:
    """Read a machine file.

    Raises:
        ConfigError: the file cannot be read, or is not a machine file; the message names a wrong key, and for an
            unknown one the key that was probably meant.
    """
    hint = "docs/planning.md describes the file; fcsd bench links writes one"
    try:
        text = read_input(path, MAX_BYTES)
        content = parse(text)
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if key not in _FORMER}
        # Strict: a boolean or a text is no number. It is read as JSON, because a key of JSON is a text.
        return Machine.model_validate_json(json.dumps(content), strict=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint=f"Measure one: fcsd bench links --out {path}") from None
    except StrictJsonError as error:
        raise ConfigError(f"{path} is not a machine file: {error}", hint) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="fcsd bench links writes such a file") from error
    except ValidationError as error:
        # A mistyped key is unknown, and the right one is then missing, too. The unknown one says more.
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        if first["loc"]:
            said = explain(first, {"": str(path)}, Machine)
        else:
            said = f"{path} is not a machine file: {first['msg'].removeprefix('Value error, ')}"
        raise ConfigError(said, hint) from error
