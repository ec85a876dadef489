"""The base class of all sections of a recipe, and the types that their fields share."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fcsd.checkpoint.location import located
from fcsd.load_options import short_name


class Section(BaseModel):
    """A mapping of a recipe; an unknown key, a wrong type or a number that is none is an error."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _literal_path(value: str) -> str:
    if value.startswith("~"):
        raise ValueError("`~` is not expanded; write the path out")
    if "$" in value:
        raise ValueError("`$` is not expanded; write the path out")
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("a path must not contain a control character")
    return value


def _stays_below(value: str) -> str:
    if ".." in Path(value).parts:
        raise ValueError("`..` is not allowed in a path that is written to; write an absolute path")
    return value


def whole(value: object) -> object:
    """Turn a float such as `500e6` into an integer, because YAML reads this notation as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Of both, ``float32`` is ``fp32``, as in options.
Dtype = Annotated[Literal["bf16", "fp32"], BeforeValidator(short_name)]
DtypeOrAuto = Annotated[Literal["auto", "bf16", "fp32"], BeforeValidator(short_name)]
PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_literal_path)]
InputPath = Annotated[PathText, AfterValidator(located)]
OutputPath = Annotated[PathText, AfterValidator(_stays_below)]
Positive = Annotated[int, Field(gt=0)]
# The limits stand first, because pydantic writes only such limits into a JSON Schema.
Count = Annotated[int, Field(gt=0, lt=2**63), BeforeValidator(whole)]
NonNegative = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]
