"""Check the metadata of a golden bundle, which may come from anywhere, before it is used."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from laconic.errors import InputError

MAX_TOKENS = 1_000_000  # of a case

Ids = Annotated[list[NonNegativeInt], Field(min_length=1)]
FiniteFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class BundleModel(BaseModel):
    """Base: unknown keys are ignored, types are not coerced."""

    model_config = ConfigDict(extra="ignore", strict=True)


class BundleInput(BundleModel):
    """Token ids of a case."""

    name: str
    ids: Annotated[list[Ids], Field(min_length=1)]
    positions: list[list[NonNegativeInt]] | None
    live: list[list[Literal[0, 1]]] | None
    pass_positions: bool = Field(alias="given")
    cuts: list[PositiveInt]
    covers: list[str]


class BundleStage(BundleModel):
    """Where the activations of a stage lie, and their shape."""

    shape: list[NonNegativeInt]
    at: str
    sha256: str
    floor: FiniteFloat
    index: str | None = None


class BundleCase(BundleModel):
    """A case with its stages."""

    kind: Literal["small", "long"]
    input: BundleInput
    stages: dict[str, BundleStage]


class BundleMetadata(BundleModel):
    """Contents of golden.json."""

    reference: str
    fingerprint: str
    config: dict[str, str]
    cases: list[BundleCase]


def check_bundle(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Check types, and that the inputs and tensors of each case fit one another.

    Raises:
        InputError: With the first value that does not fit.
    """
    try:
        bundle = BundleMetadata.model_validate(dict(metadata))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {key}: {first['msg'].lower()}; download the bundle again") from None
    names = [case.input.name for case in bundle.cases]
    repeated = next((name for name in names if names.count(name) > 1), None)
    problem = None if repeated is None else f"two cases are named {repeated!r}"
    for case in bundle.cases:
        problem = problem or find_input_problem(case.input) or find_stage_problem(case, tensors)
    if problem is not None:
        raise InputError(f"{path}: {problem}; download the bundle again")


def find_input_problem(source: BundleInput) -> str | None:
    """Return what does not fit in the token ids of a case, or None."""
    B, T = len(source.ids), len(source.ids[0])
    for name, rows in (("ids", source.ids), ("positions", source.positions), ("live", source.live)):
        if rows is not None and (len(rows) != B or any(len(row) != T for row in rows)):
            return f"case {source.name}: {name} is not {B} rows of {T}"
    if B * T > MAX_TOKENS or max(max(row) for row in source.ids) >= 2**31:
        return f"case {source.name} has more than {MAX_TOKENS:,} tokens, or ids of 2^31 and more"
    if source.cuts and sum(source.cuts) != T:
        return f"case {source.name}: cuts {source.cuts[:8]} do not add up to {T} tokens"
    return None


def find_stage_problem(case: BundleCase, tensors: Mapping[str, Tensor]) -> str | None:
    """Return what does not fit between the stages of a case and the tensors, or None."""
    for key, stage in case.stages.items():
        place, size = f"{key} of case {case.input.name}", math.prod(stage.shape)
        if stage.at not in tensors:
            continue  # reported as not run
        values, index = tensors[stage.at], tensors.get(stage.index) if stage.index is not None else None
        if case.kind == "small":
            if values.numel() != size:
                return f"{place} has {values.numel():,} numbers, its shape {size:,}"
        elif index is None or index.shape != values.shape or index.is_floating_point() or index.ndim != 1:
            return f"{place} has no index of its numbers"
        elif index.numel() == 0 or not 0 <= int(index.min()) <= int(index.max()) < size:
            return f"{place} has an index outside its {size:,} numbers"
    return None
