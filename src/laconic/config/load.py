"""A recipe file and its overrides -> `Recipe`: every fault in one pass, each with its line and what was meant."""

import datetime
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import ValidationError

from laconic.config import lines
from laconic.config.data import is_row_file
from laconic.config.recipe import (
    BUILT_IN_TOKENIZERS,
    FULL_CHAIN_METHODS,
    PATH_KEYS,
    Recipe,
    accepts_text,
    find_field,
    known_keys,
    required_tables,
)
from laconic.errors import InputError, UsageError
from laconic.models.nearest import nearest_key

SHIPPED_RECIPES = Path(__file__).resolve().parents[1] / "recipes"
ORIGIN_KEYS = (
    ("model.name", "model.init_from_run", "model.family"),
    ("data.path", "data.name"),
)  # of each one is given
Content = dict[str, Any]


@dataclass
class RecipeDraft:
    """What a file and its overrides say, and where: a line of the file, or the override itself."""

    content: Content
    locations: dict[str, str]
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_error(self, key: str, text: str) -> None:
        """One more fault, at the place of its key."""
        place = lines.line_of(key, self.locations) or self.locations[""]
        self.errors.append(f"{place}: {text}" if place.startswith(f"{key}=") else f"{place}: {key}: {text}")


def load_recipe(
    path_or_name: str | Path, overrides: Sequence[str] = (), flags: Iterable[str] = ()
) -> tuple[Recipe, list[str]]:
    """A recipe by path, or by name among those that come with laconic, with `key.sub=value` put over it; and notes.

    Paths in it are relative to its file; those of overrides, and of what comes with laconic, to the working folder.
    `flags` are names that an override may have been meant for. Raises `Usage` (2) with every fault of the file and the
    overrides, `BadInput` (66).
    """
    path = find_recipe_file(path_or_name)
    draft = parse_recipe_file(path)
    make_paths_absolute(draft.content, Path.cwd() if path.parent == SHIPPED_RECIPES else path.parent)
    given = list(deduplicate_overrides(overrides, draft.notes))
    for override in given:
        apply_override(draft, override, flags)
    replace_origin(draft, [key for key, _ in given])
    return validate(draft), draft.notes


def find_recipe_file(recipe: str | Path) -> Path:
    """The file of a recipe. Raises `BadInput` (66)."""
    path, shipped = Path(recipe), SHIPPED_RECIPES / f"{Path(recipe).name.removesuffix('.toml')}.toml"
    if path.is_file():
        return path
    if path.parent == Path() and shipped.is_file():
        return shipped
    near = nearest_key(str(recipe), names := sorted(file.stem for file in SHIPPED_RECIPES.glob("*.toml")))
    begun = [name for name in names if name.startswith(f"{recipe}-")]
    kinds = begun or sorted({f"{name.partition('-')[0]}-…" for name in names})
    meant = f"did you mean {near}?" if near and not begun else f"a path, or one of {', '.join(kinds)}"
    raise InputError(f"no recipe {recipe}; {meant}")


def parse_recipe_file(path: Path) -> RecipeDraft:
    """The content of a file. Raises `Usage` (2) where it is no TOML, with both lines of a doubled key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    places, twice = dict[str, str](), None
    for key, line in lines.keys(text):
        if key in places and twice is None:
            twice = f"{path.name}:{line}: {key}: stands there twice, first in line {places[key].rpartition(':')[2]}"
        places.setdefault(key, f"{path.name}:{line}")
    try:
        return RecipeDraft(tomllib.loads(text), places | {"": path.name})
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = f":{at[1]}" if at else ""
        raise UsageError(twice or f"{path.name}{line}: not TOML: {str(error)[: at.start() if at else None]}") from None


def deduplicate_overrides(overrides: Sequence[str], notes: list[str]) -> Iterator[tuple[str, str]]:
    """Each override as its key, with `_` for `-`, and its value; of a key given twice the last, which is noted."""
    found: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UsageError(f"{override}: no value; write {override}=VALUE")
        key = key.lstrip("-").replace("-", "_")
        if key in found:
            notes.append(f"{key} is given twice; the last holds: {value}")
        found[key] = value
    yield from found.items()


def apply_override(draft: RecipeDraft, override: tuple[str, str], flags: Iterable[str]) -> None:
    """One override into the content; a fault if there is no such key or its value is none."""
    key, text = override
    if find_field(key) is None:
        near = nearest_key(key, [*known_keys(), *flags])
        draft.errors.append(
            f"{key}={text}: no such key; did you mean {near}?" if near else describe_unknown_key(key, text)
        )
        return
    value = parse_value(key, text)
    if value is None:
        draft.errors.append(f"{key}={text}: no value of TOML; a list is [1, 2], a switch true or false")
        return
    *tables, last = key.split(".")
    into = draft.content
    for name in tables:
        into = into.setdefault(name, {})
        if not isinstance(into, dict):
            draft.errors.append(f"{key}={text}: {name} is no table in {draft.locations['']}")
            return
    draft.locations[key] = f"{key}={text}"
    into[last] = resolve_path_value(key, value, Path.cwd()) if key in PATH_KEYS else value


def replace_origin(draft: RecipeDraft, keys: Sequence[str]) -> None:
    """Where one override says where decoder or documents come from, it takes the place of what the file says."""
    for origins in ORIGIN_KEYS:
        table, asked = draft.content.get(origins[0].partition(".")[0]), [key for key in origins if key in keys]
        if not isinstance(table, dict) or len(asked) != 1:
            continue
        if asked[0].startswith("data.") and table.get("source") != "text":
            continue
        old = [key for key in origins if key != asked[0] and table.pop(key.partition(".")[2], None) is not None]
        draft.notes.extend(f"{asked[0]} takes the place of {key}" for key in old)
        if old and asked[0] in ("model.name", "model.init_from_run") and "model.tokenizer" not in keys:
            table.pop("tokenizer", None)  # that of what it takes the place of


def describe_unknown_key(key: str, text: str) -> str:
    return f"{key}={text}: no such key; laconic train --schema lists all"


def parse_value(key: str, text: str) -> Any:
    """The value of an override: TOML, or a bare word where the field is text; None where it is neither."""
    try:
        value = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text if accepts_text(key) else None
    if set(value) != {"x"} or (accepts_text(key) and not isinstance(value["x"], str | list)):
        return text  # a name of digits only
    return value["x"]


def make_paths_absolute(content: Content, folder: Path) -> None:
    """Paths of a file become absolute, so that the resolved recipe repeats the run from anywhere."""
    for key in PATH_KEYS:
        *tables, last = key.split(".")
        into: Any = content
        for name in tables:
            into = into.get(name) if isinstance(into, dict) else None
        if isinstance(into, dict) and last in into:
            into[last] = resolve_path_value(key, into[last], folder)


def resolve_path_value(key: str, value: Any, folder: Path) -> Any:
    """A value with the paths in it from a folder; what PATHS says may be a name stays one where no such path is."""
    if isinstance(value, list):
        return [resolve_path_value(key, one, folder) for one in value]
    if not isinstance(value, str) or (key == "model.tokenizer" and value in BUILT_IN_TOKENIZERS):
        return value
    path = (folder / value).absolute()
    name = {
        "path": False,
        "name": not path.exists(),
        "rows": not is_row_file(value) and not path.is_file(),
    }[PATH_KEYS[key]]
    return value if name else str(path)


def validate(draft: RecipeDraft) -> Recipe:
    """The recipe, or `Usage` (2) with all faults, one a line."""
    for key, value in iter_values(draft.content):
        if isinstance(value, datetime.date | datetime.time):
            draft.add_error(key, "a date; no key takes one, put it in quotes if it is a name")
    add_default_tables(draft.content)
    recipe = None
    try:  # by way of JSON, where strict pydantic takes an array for a tuple and nothing else for anything else
        recipe = Recipe.model_validate_json(json.dumps(draft.content, default=str))
    except ValidationError as error:
        explain_errors(draft, cast("list[Mapping[str, Any]]", error.errors(include_url=False)))
    if draft.errors or recipe is None:
        raise UsageError("\n".join(dict.fromkeys(draft.errors)))
    if recipe.method in FULL_CHAIN_METHODS and recipe.data.chain_steps == "drop_last":
        draft.notes.append(
            f'data.chain_steps "drop_last": method {recipe.method} is not taught the last step; "all" is usual'
        )
    return recipe


def add_default_tables(content: Content) -> None:
    """The tables that the method reads are there, if only with their defaults, some of which go by the method."""
    train = content.get("train")
    for name in required_tables(
        str(content.get("method")), train.get("trainable", "") if isinstance(train, dict) else ""
    ):
        content.setdefault(name, {})
    data = content.get("data")
    if content.get("method") in FULL_CHAIN_METHODS and isinstance(data, dict):
        data.setdefault("chain_steps", "all")


def explain_errors(draft: RecipeDraft, errors: Sequence[Mapping[str, Any]]) -> None:
    """Pydantic's errors as faults; a key that is missing because it is mistyped is said once."""
    meant = set[str]()
    for error in errors:
        key, kind = ".".join(map(str, error["loc"])), error["type"]
        if kind == "extra_forbidden":
            near = nearest_key(key, known_keys())
            meant.add(near or "")
            draft.add_error(key, f"no such key; did you mean {near}?" if near else f"no such key; {sibling_keys(key)}")
    for error in errors:
        key, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
        if kind == "extra_forbidden" or (kind == "missing" and key in meant):
            continue
        if kind == "missing":
            draft.add_error(key, f"absent; {describe_field(key)}")
        elif kind == "value_error":
            draft.add_error(*split_message(key, error["msg"].removeprefix("Value error, ")))
        elif isinstance(value, str) and kind.partition("_")[0] in ("int", "float", "bool") and is_toml_scalar(value):
            draft.add_error(key, f"{json.dumps(value)} is text; drop the quotes")
        else:
            rule = error["msg"].removeprefix("Input ")
            draft.add_error(key, f"{format_value(value)}: {rule}; {describe_field(key)}")


def split_message(key: str, message: str) -> tuple[str, str]:
    """The message of a check of ours, which may begin with the key it is about: `rounds 3: ...`, `rounds: absent`."""
    named = re.match(r"([a-z_0-9.]+)\b(?=[ :])", message)
    inside = f"{key}.{named[1]}".lstrip(".") if named else ""
    if named and find_field(inside):
        return inside, message[named.end() :].lstrip(": ")
    return key or "recipe", message


def is_toml_scalar(value: str) -> bool:
    """Whether a text is a number or a switch of TOML once its quotes are dropped."""
    try:
        return isinstance(tomllib.loads(f"x = {value}")["x"], int | float)
    except (tomllib.TOMLDecodeError, KeyError):
        return False


def describe_field(key: str) -> str:
    """What a field is."""
    found = find_field(key)
    return f"it is {found.description}" if found and found.description else "laconic train --schema has its bounds"


def sibling_keys(key: str) -> str:
    """The keys of the table in which a key stands."""
    home = key.rpartition(".")[0]
    keys = [k.removeprefix(f"{home}.") for k in known_keys() if not home or k.startswith(f"{home}.")]
    here = sorted({k.partition(".")[0] for k in keys})
    return f"{f'[{home}]' if home else 'a recipe'} has {', '.join(here)}"


def format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def iter_values(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in items:
        key = f"{prefix}{name}"
        if isinstance(value, dict | list):
            yield from iter_values(value, f"{key}.")
        else:
            yield key, value


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML, every default written out; read again it is equal."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))
