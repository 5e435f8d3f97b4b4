"""The base class of all recipe tables, and the number ranges that several tables use. Nothing here imports torch."""

import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def path_to_text(value: Any) -> Any:
    """Return a path as text, as recipes hold it; other values stay as they are."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PathText = Annotated[str, BeforeValidator(path_to_text)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]


class ConfigModel(BaseModel):
    """A frozen table of settings that refuses unknown keys, implicit conversions, infinity and NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
