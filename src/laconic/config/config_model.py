"""The base class of all recipe tables, and the number ranges that several tables use. Nothing here imports torch."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

FREE_TABLE = "method_options"  # table whose keys a custom method defines
# Former options that runs, models, states and memories store with their default values
FORMER_DEFAULTS: dict[str, Any] = {
    "max_lr": 1.0, "reset_every": None, "global_chunk_size": None, "new_level_init": "zero", "donor_map": None,
    "mlp_width": None, "loss_factor": 1, "forbid_unknown_fields": False, "reduction": "mean", "joint_training": False,
    "exploration": 0.3, "prior_kl_weight": 0.0, "prior_stop_prob": 0.25, "entropy_weight": 0.0, "entropy_floor": 0.0,
    "target_mean_length": None, "cost_step_size": 0.01, "max_length_cost": 10.0,
    "loss_reduction": "token",
}  # fmt: skip


def drop_former_options(content: Any) -> Any:
    """Return stored options, or a recipe with its tables, without former options that have their default value."""
    if not isinstance(content, Mapping):
        return content
    items = cast(Mapping[str, Any], content).items()
    return {
        name: value if name == FREE_TABLE else drop_former_options(value)
        for name, value in items
        if FORMER_DEFAULTS.get(name, ...) != value
    }


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
PathText = Annotated[str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]


class ConfigModel(BaseModel):
    """A frozen table of settings that refuses unknown keys, implicit conversions, infinity and NaN."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
