"""The machine file: a JSON file that describes the links of a cluster, measured by ``fcsd bench links`` or by hand."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fcsd.config.explain import explain
from fcsd.disk import read_input
from fcsd.errors import ConfigError
from fcsd.parallel.cost import Dedup, Line, Links
from fcsd.strict_json import MAX_BYTES, StrictJsonError, parse

H200_TFLOPS = 989.0  # the peak of an H200, which that of an H100 SXM equals
# Smaller rates and larger times are mistakes. A step would take no finite time, and ratios of steps would be nan.
_Rate = Annotated[float, Field(gt=1e-4)]
_Microseconds = Annotated[float, Field(ge=0, le=1e9)]
_Duration = Annotated[float, Field(gt=0, le=1e9)]  # of what sends something, in microseconds


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
    peak_tflops: _Rate = H200_TFLOPS
    """The GPU's peak in bf16 without sparsity, from its data sheet, in 10^12 operations per second."""
    gpus_per_node: Annotated[int, Field(gt=0)]
    """The number of GPUs in a node."""
    near: Link
    """The links between the GPUs of a node."""
    far: Link | None = None
    """The links between nodes, where each GPU sends to those that have the same place in other nodes. Without them,
    only one node is predicted."""
    direct: Link | None = None
    """The links between nodes, where each GPU sends to all GPUs of other nodes. Without them, `far` is used."""
    fixed_us: dict[Dedup, _Microseconds] = Field(default_factory=dict)
    """For each of `off`, `rank` and `node`: microseconds of a dispatch or combine that depend neither on its bytes nor
    on its rows. 0 where none is given."""
    hidden_cost: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Seconds that computation loses for each second of a transfer that it hides. 0.27 was measured for copies and 0.45
    for NCCL, on four H200s."""
    copy_tb_per_s: _Rate = 4.26
    """The rate at which a kernel of the GPU reads and writes memory, in 10^12 bytes per second for both together."""
    codec: Annotated[float, Field(gt=1e-4, le=1)] = 0.88
    """The share of that rate that the kernels reach which encode and decode rows: that of INT8 on an H200."""
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

    @property
    def assumed(self) -> str | None:
        """What a prediction assumes because the file does not say it, as a sentence."""
        if "peak_tflops" in self.model_fields_set or re.search("H[12]00", self.gpu):
            return None
        return f"The computation is that of an H200, because the machine file has no peak_tflops of {self.gpu}."

    @property
    def links(self) -> Links:
        """The links in the form in which ``fcsd.parallel.cost`` takes them."""
        far = None if self.far is None else self.far.line
        rate = self.copy_tb_per_s * 1e12
        direct = None if self.direct is None else self.direct.line
        fixed: dict[Dedup, float] = {dedup: microseconds * 1e-6 for dedup, microseconds in self.fixed_us.items()}
        speed = self.peak_tflops / H200_TFLOPS
        return Links(self.gpus_per_node, self.near.line, far, self.hidden_cost, rate, self.codec, direct, fixed, speed)


def read_machine(path: Path) -> Machine:
    """Read a machine file.

    Raises:
        ConfigError: the file cannot be read, or is not a machine file; the message names a wrong key, and for an
            unknown one the key that was probably meant.
    """
    hint = "docs/planning.md describes the file; fcsd bench links writes one"
    try:
        text = read_input(path, MAX_BYTES)
        parse(text)
        # Strict: a boolean or a text is no number. The text is read again, because a key of JSON is one, too.
        return Machine.model_validate_json(text, strict=True)
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
