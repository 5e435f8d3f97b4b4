"""Load a recipe file with its overrides. All errors are collected and reported together."""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import tomli_w
from pydantic import ValidationError

from laconic.config.config_model import FREE_TABLE, drop_former_options
from laconic.config.data import SYNTHETIC_DOCUMENTS, DataConfig, is_row_file
from laconic.config.recipe import (
    BUILT_IN_TOKENIZERS,
    COT_TEACHER_METHODS,
    FULL_CHAIN_METHODS,
    METHOD_SCHEDULES,
    NEW_DECODER_KEYS,
    PATH_KEYS,
    Recipe,
    required_tables,
)
from laconic.config.recipe_keys import accepts_type, find_field, find_name_table, known_keys
from laconic.errors import InputError, UsageError
from laconic.storage.strict_json import abbreviate

SHIPPED_RECIPES = Path(__file__).resolve().parents[1] / "recipes"
ALL_KEYS_HINT = "laconic train --schema lists all keys"
# Groups of keys: a recipe sets at most one of each; an override with another key of the group replaces it.
EXCLUSIVE_KEYS = (
    ("model.name", "model.init_from_run", "model.family"),
    ("data.path", "data.name"),
    ("train.steps", "train.epochs"),
    ("train.warmup_steps", "train.warmup_ratio"),
)
KEY_ALIASES = {"lr": "learning_rate", "wd": "weight_decay", "batch": "batch_size", "grad_accum": "micro_batch_size"}


@dataclass
class RecipeDraft:
    """The content of a recipe file with overrides applied, and the errors found so far."""

    file: str
    content: dict[str, Any]
    overrides: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_error(self, key: str, message: str) -> None:
        """Record an error with the file, or with the override that set the key or a table around it."""
        place = f"{self.file}: {key}"
        table = key
        while table and table not in self.overrides:
            table = table.rpartition(".")[0]
        if table:
            place = f"{table}={self.overrides[table]}" + ("" if table == key else f": {key}")
        self.errors.append(f"{place}: {message}")


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """Load a recipe file and apply overrides.

    Relative paths are resolved against the file's folder; those of overrides and of shipped recipes against the working
    directory.

    Args:
        path_or_name: A TOML file, or the name of a shipped recipe.
        overrides: Texts of the form `table.key=value`; the value is TOML, or bare text if the key holds text. Without
            a value, `table.key=`, the key is removed, so that its default applies.

    Returns:
        The recipe, and notes for the user, for example on keys that an override replaced.

    Raises:
        UsageError: With one line for each error of the file and the overrides.
        InputError: If there is no such recipe.
    """
    if isinstance(overrides, str | Mapping):
        raise UsageError(f'overrides: expected a list such as ["train.steps=1"], given {type(overrides).__name__}')
    path = find_recipe_file(path_or_name)
    draft = RecipeDraft(path.name, parse_recipe_file(path))
    make_paths_absolute(draft.content, Path.cwd() if path.parent == SHIPPED_RECIPES else path.parent)
    apply_overrides(draft, overrides)
    return validate_recipe(draft), draft.notes


def build_data_config(content: dict[str, Any], overrides: Sequence[str]) -> DataConfig:
    """Return [data] with these keys, for a method that keeps whole chains; overrides and errors as in `load_recipe`."""
    draft = RecipeDraft("data", {"method": "cot", "model": {"name": "-"}, "data": content, "train": {"steps": 1}})
    apply_overrides(draft, overrides)
    for key in draft.overrides:
        if not key.startswith("data."):
            draft.add_error(key, "only keys data.* change how rows are read; remove it")
        elif key in ("data.path", "data.name", "data.source"):
            draft.add_error(key, "FILE names the rows to check; remove it")
    return validate_recipe(draft).data


def find_recipe_file(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    shipped = SHIPPED_RECIPES / f"{path.name.removesuffix('.toml')}.toml"
    if path.is_file():
        return path
    if path.parent == Path() and shipped.is_file():
        return shipped
    names = [file.stem for file in SHIPPED_RECIPES.glob("*.toml")]
    close = [str(file) for file in (path / "recipe.toml", Path(f"{path}.toml")) if file.is_file()]
    close += difflib.get_close_matches(str(path_or_name), names, n=1, cutoff=0.8)
    hint = f"did you mean {close[0]}?" if close else "give a path, or a name that laconic recipes lists"
    raise InputError(f"no recipe {path_or_name}; {hint}")


def parse_recipe_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.name}: not valid TOML: {error}") from None


def apply_overrides(draft: RecipeDraft, overrides: Sequence[str]) -> None:
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UsageError(f"{override}: no value; write {override}=VALUE")
        key = key.lstrip("-")
        plain = key.replace("-", "_")
        table = find_name_table(plain)  # its keys are names that users choose, in which "-" stays
        apply_override(draft, plain if table is None else table + key[len(table) :], text)
    drop_replaced_keys(draft)


def apply_override(draft: RecipeDraft, key: str, text: str) -> None:
    """Set a key of the draft, or record an error for an unknown key or an invalid value."""
    if find_field(key) is None:
        close = closest_key(key, known_keys())
        hint = f"did you mean {close}?" if close else ALL_KEYS_HINT
        draft.errors.append(f"{key}={text}: no such key; {hint}")
        return
    value = parse_value(key, text)
    if isinstance(value, str) and value.startswith("[") and accepts_type(key, tuple[str, ...]):
        hint = 'write lists as ["a", "b"] (in a shell, quote the whole argument)'
        draft.errors.append(f"{key}={text}: not a TOML list; {hint}")
        return
    name_table = find_name_table(key)
    *tables, last = key.split(".")
    if name_table is not None and name_table != FREE_TABLE:  # a name in `deviations` is itself a key, with dots
        tables, last = name_table.split("."), key.removeprefix(f"{name_table}.")
    table = draft.content
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            draft.errors.append(f"{key}={text}: {name} is not a table in {draft.file}")
            return
    draft.overrides[key] = text
    if not text:
        if table.pop(last, None) is not None:
            draft.notes.append(f"{key} is removed from the recipe")
        return
    table[last] = resolve_path_value(key, value, Path.cwd()) if key in PATH_KEYS else value


def drop_replaced_keys(draft: RecipeDraft) -> None:
    """Remove a key of the file if an override sets another key of its group in `EXCLUSIVE_KEYS`."""
    for keys in EXCLUSIVE_KEYS:
        table_name = keys[0].partition(".")[0]
        table = draft.content.get(table_name)
        overridden = [key for key in keys if draft.overrides.get(key)]
        if not isinstance(table, dict) or len(overridden) != 1:
            continue
        if table_name == "data" and table.get("source") != "text":  # other sources accept one of them
            continue
        replaced = [key for key in keys if key != overridden[0] and key.partition(".")[2] in table]
        for key in replaced:
            del table[key.partition(".")[2]]
            draft.notes.append(f"{overridden[0]} replaces {key}")
        if replaced and overridden[0] in ("model.name", "model.init_from_run"):
            for key in ("tokenizer", *NEW_DECODER_KEYS):
                if f"model.{key}" not in draft.overrides:
                    table.pop(key, None)


def parse_value(key: str, text: str) -> Any:
    """Return the value of an override: TOML, or the text itself if it is not TOML or looks like another type."""
    try:
        content = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # a number or date for a key that takes text, such as the name of a folder, is that text
    is_text = accepts_type(key, str, tuple[str, ...]) and not isinstance(content["x"], str | list)
    return text if is_text or len(content) > 1 else content["x"]


def make_paths_absolute(content: dict[str, Any], folder: Path) -> None:
    """Make a file's paths absolute, so that the resolved recipe repeats the run from anywhere."""
    for key in PATH_KEYS:
        table_name, name = key.split(".")
        table = content.get(table_name)
        if isinstance(table, dict) and name in table:
            table[name] = resolve_path_value(key, table[name], folder)


def resolve_path_value(key: str, value: Any, folder: Path) -> Any:
    """Resolve the paths of a value against a folder; keep it if it is a name and no such path exists."""
    if isinstance(value, list):
        return [resolve_path_value(key, entry, folder) for entry in value]
    if not isinstance(value, str) or (key == "model.tokenizer" and value in BUILT_IN_TOKENIZERS):
        return value
    path = (folder / os.path.expanduser(value)).absolute()
    is_name = {
        "path": False,
        "name": not os.path.exists(path),  # Path.exists raises for names that are too long
        "rows": not is_row_file(value) and not os.path.isfile(path),
    }[PATH_KEYS[key]]
    return value if is_name else str(path)


def validate_recipe(draft: RecipeDraft) -> Recipe:
    """Return the recipe, or raise UsageError with one line for each error."""
    add_default_tables(draft.content)
    recipe = None
    try:  # through JSON, from which strict pydantic accepts an array for a tuple but converts nothing else
        recipe = Recipe.model_validate_json(json.dumps(drop_former_options(draft.content), default=str))
    except ValidationError as error:
        explain_errors(draft, cast("list[Mapping[str, Any]]", error.errors(include_url=False)))
    if draft.errors or recipe is None:
        raise UsageError("\n".join(dict.fromkeys(draft.errors)))
    draft.notes.extend(list_notes(recipe, draft.content["model"]))
    return recipe


def add_default_tables(content: dict[str, Any]) -> None:
    """Add the method's missing tables, and the defaults that depend on the method."""
    train, data = content.get("train"), content.get("data")
    trainable = train.get("trainable", "") if isinstance(train, dict) else ""
    for name in required_tables(str(content.get("method")), trainable):
        content.setdefault(name, {})
    if content.get("method") in FULL_CHAIN_METHODS and isinstance(data, dict):
        data.setdefault("chain_steps", "all")
    schedule = METHOD_SCHEDULES.get(str(content.get("method")))
    latents = content.get("latents")
    if schedule is not None and isinstance(latents, dict):
        latents.setdefault("schedule", schedule)


def explain_errors(draft: RecipeDraft, errors: Sequence[Mapping[str, Any]]) -> None:
    """Turn pydantic's errors into lines; do not report a mistyped key as missing too."""
    located = [(".".join(map(str, error["loc"])).removesuffix(".[key]"), error) for error in errors]
    unknown = {key: closest_key(key, known_keys()) for key, error in located if error["type"] == "extra_forbidden"}
    for key, error in located:
        kind = error["type"]
        if kind == "extra_forbidden":
            hint = f"did you mean {unknown[key]}?" if unknown[key] else ALL_KEYS_HINT
            draft.add_error(key, f"no such key; {hint}")
        elif kind == "missing" and key not in unknown.values():
            draft.add_error(key, f"missing; {describe_field(key)}")
        elif kind == "value_error":
            draft.add_error(*split_message(key, error["msg"].removeprefix("Value error, ")))
        elif kind != "missing":
            rule = re.sub(r"\d{9,}", lambda digits: f"{float(digits[0]):g}", error["msg"].removeprefix("Input "))
            rule = rule.replace("a valid boolean", "true or false")
            draft.add_error(key, f"{abbreviate(error['input'])}: {rule}; {describe_field(key)}")


def split_message(table: str, message: str) -> tuple[str, str]:
    """Return key and text of a validator's message that may begin with the key's name within its table."""
    name = message.replace(":", " ").split(" ", 1)[0]
    key = f"{table}.{name}".lstrip(".")
    if find_field(key):
        return key, message[len(name) :].lstrip(": ")
    return table or "recipe", message


def closest_key(key: str, keys: Sequence[str]) -> str | None:
    """Return the known key that `key` most likely means: a usual alias, a similar one, or one of another table.

    Without a table, a similar name is enough, and the table train comes first.
    """
    table, _, name = key.rpartition(".")
    if table in ("", "train") and name in KEY_ALIASES:
        return f"train.{KEY_ALIASES[name]}"
    names = {other.rpartition(".")[2]: other for other in sorted(keys, key=lambda other: other.startswith("train."))}
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
    same = difflib.get_close_matches(name, names, n=1, cutoff=1.0 if table else 0.75)
    if close:
        return close[0]
    return names[same[0]] if same else None


def list_notes(recipe: Recipe, model_keys: Collection[str]) -> Iterator[str]:
    """Yield a note for each group of keys that do nothing; `model_keys` are those that [model] gives."""
    data, model = recipe.data, recipe.model
    learns_chain = recipe.method in FULL_CHAIN_METHODS and model.init_from_run is None  # else it may know it
    if learns_chain and data.chain_steps == "drop_last":
        yield f'data.chain_steps "drop_last": method {recipe.method} never learns the last step; the default is "all"'
    distils = recipe.method in COT_TEACHER_METHODS and recipe.distillation and recipe.distillation.hidden_weight
    if distils and (data.format in ("coconut", "icot") or (data.format == "chat" and data.answer_type == "text")):
        format = f'data.format "{data.format}"' + (" and answers that are texts" if data.format == "chat" else "")
        yield f"distillation.hidden_weight: not used with {format}, which have no token to distil before an answer"
    if data.source in ("digits", *SYNTHETIC_DOCUMENTS):
        keys = [f"data.{key}" for key in ("valid", "test", "max_train_rows") if getattr(data, key) is not None]
        if keys:
            yield f'{", ".join(keys)}: not used with data.source "{data.source}", which generates its rows'
    elif data.valid is not None and recipe.validation is None:
        yield (
            "data.valid: only checked for questions that are also in data.path; a table [validation] measures accuracy"
        )
    sizes = [f"model.{key}" for key in NEW_DECODER_KEYS if key in model_keys]
    if sizes and model.family is None:
        origin = "model.init_from_run" if model.name is None else "model.name"
        yield f"{', '.join(sizes)}: not used with {origin}; a trained model has its own sizes and weights"


def describe_field(key: str) -> str:
    info = find_field(key)
    return f"it is: {' '.join(info.description.split())}" if info and info.description else "see laconic train --schema"


def to_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML with the defaults that apply; loading it gives an equal recipe.

    A pretrained model has sizes of its own, so those of a new decoder are left out.
    """
    content = recipe.model_dump(mode="json", exclude_none=True)
    if recipe.model.family is None:
        explicit = recipe.model.model_dump(mode="json", exclude_defaults=True)
        content["model"] = {k: v for k, v in content["model"].items() if k not in NEW_DECODER_KEYS or k in explicit}
    return tomli_w.dumps(content)
