"""The base class of all recipe tables, and the number ranges that several tables use. Nothing here imports torch."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def path_to_text(value: Any) -> Any:
    """Return a path as text, as recipes hold it; other values stay as they are."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def check_ascending(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers that are distinct and ascend; raise ValueError for others, and for none."""
    if not numbers or list(numbers) != sorted(set(numbers)):
        raise ValueError(f"{list(numbers)}: give distinct numbers in ascending order")
    return numbers


PositiveInt = Annotated[int, Field(ge=1)]
AscendingCounts = Annotated[tuple[PositiveInt, ...], AfterValidator(check_ascending)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e38)]  # what float32 can hold
NonNegative = Annotated[float, Field(ge=0, le=1e38)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PathText = Annotated[str, BeforeValidator(path_to_text)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]


class ConfigModel(BaseModel):
    """A frozen table of settings that refuses unknown keys, implicit conversions, infinity and NaN."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
