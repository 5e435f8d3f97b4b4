"""Recipe keys: the dotted names of all fields of a recipe, and their types. Nothing here imports torch."""

import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from laconic.config.data import is_row_file
from laconic.config.recipe import RESUMABLE_KEYS, Recipe


def iter_fields(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field with its dotted key, a table before its keys."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        for part in union_members(info.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from iter_fields(part, f"{prefix}{name}.")


def union_members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union without their metadata, or the annotation itself if it is not a union."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from union_members(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from union_members(part)
    else:
        yield annotation


@cache
def fields_by_key() -> Mapping[str, FieldInfo]:
    return dict(iter_fields())


def known_keys() -> list[str]:
    return list(fields_by_key())


def leaf_keys() -> list[str]:
    """Return every dotted key that holds a value, not a table."""
    keys = known_keys()
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def find_name_table(key: str) -> str | None:
    """Return the table around a key whose keys are names, such as `data.columns`, or None."""
    return next((table for table in name_tables() if key.startswith(f"{table}.")), None)


@cache
def name_tables() -> tuple[str, ...]:
    """Return the tables whose keys are names, not fields."""
    return tuple(
        key
        for key, info in iter_fields()
        if any(typing.get_origin(x) is Mapping for x in union_members(info.annotation))
    )


def find_field(key: str) -> FieldInfo | None:
    """Return the field of a dotted key, or None; a key in a table of names has the field of its table."""
    return fields_by_key().get(find_name_table(key) or key)


def accepts_type(key: str, *annotations: Any) -> bool:
    """Return whether the field of a key may hold one of some types, such as `str` or `tuple[str, ...]`."""
    info = fields_by_key().get(key)
    return info is not None and any(part in annotations for part in union_members(info.annotation))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def explicit_values(recipe: Recipe) -> dict[str, Any]:
    """Return, by dotted key, the values that differ from their defaults and can change what is learned.

    Defaults are left out, since a later version may have more keys, and files of rows, since they may move.
    """
    values = flatten(recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    data_sets = [name for name in values.pop("data.name", ()) if not is_row_file(name)]
    if data_sets:
        values["data.name"] = data_sets
    return {k: v for k, v in values.items() if k not in RESUMABLE_KEYS and not k.startswith("deviations.")}
