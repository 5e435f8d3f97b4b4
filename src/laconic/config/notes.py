"""Notes on keys of a recipe that do nothing, or less than they seem to. Nothing here imports torch."""

import json
from collections.abc import Collection, Iterator

from laconic.config.data import SYNTHETIC_DOCUMENTS, DataConfig
from laconic.config.recipe import COT_TEACHER_METHODS, FULL_CHAIN_METHODS, NEW_DECODER_KEYS, Recipe

# Keys that need a value of another key of their table: (table, key, that key, its values).
DEPENDENT_KEYS: tuple[tuple[str, str, str, tuple[object, ...]], ...] = (
    ("latents", "projection_width", "projection", ("codi",)),
    ("latents", "projection_dropout", "projection", ("codi",)),
    ("latents", "length_cost", "length_policy", ("stop_head",)),
    ("kv_selection", "importance_weight", "policy", ("rkv",)),
    ("stop_head", "ratio_memory_weight", "cost_kind", ("ratio",)),
)
OWN_PROMPT_FORMATS = ("coconut", "icot", "digits")  # formats with a fixed text before the answer


def list_notes(recipe: Recipe, model_keys: Collection[str]) -> Iterator[str]:
    """Yield a note for each group of keys that do nothing; `model_keys` are those that [model] gives."""
    learns_chain = recipe.method in FULL_CHAIN_METHODS and recipe.model.init_from_run is None  # else it may know it
    if learns_chain and recipe.data.chain_steps == "drop_last":
        yield f'data.chain_steps "drop_last": method {recipe.method} never learns the last step; the default is "all"'
    yield from list_dependent_keys(recipe)
    head, compression = recipe.stop_head, recipe.compression
    if (
        head is not None
        and compression is not None
        and head.cost_kind == "ratio"
        and (compression.length_policy == "classifier" or head.estimator == "reinforce")
    ):
        yield 'stop_head.cost_kind "ratio": not used by the classifier and by reinforce, which price each vector'
    if recipe.method in COT_TEACHER_METHODS and recipe.distillation and recipe.distillation.hidden_weight:
        data = recipe.data
        if data.format in ("coconut", "icot") or (data.format == "chat" and data.answer_type == "text"):
            format = f'data.format "{data.format}"' + (" and answers that are texts" if data.format == "chat" else "")
            yield f"distillation.hidden_weight: not used with {format}, which have no token to distil before an answer"
    yield from list_data_notes(recipe.data, recipe.validation is not None)
    sizes = [f"model.{key}" for key in NEW_DECODER_KEYS if key in model_keys]
    if sizes and recipe.model.family is None:
        origin = "model.init_from_run" if recipe.model.name is None else "model.name"
        yield f"{', '.join(sizes)}: not used with {origin}; a trained model has its own sizes and weights"


def list_dependent_keys(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each key that a recipe sets and that does nothing with the value of another one."""
    for table, key, other, values in DEPENDENT_KEYS:
        config = getattr(recipe, table)
        if config is None or key not in config.model_fields_set:
            continue
        value = getattr(config, other)
        if value not in values:
            yield f"{table}.{key}: not used with {table}.{other} = {json.dumps(value)}"


def list_data_notes(data: DataConfig, has_validation: bool) -> Iterator[str]:
    if data.source in ("digits", *SYNTHETIC_DOCUMENTS):
        keys = [f"data.{key}" for key in ("valid", "test", "max_train_rows") if getattr(data, key) is not None]
        if keys:
            yield f'{", ".join(keys)}: not used with data.source "{data.source}", which generates its rows'
    elif data.valid is not None and not has_validation:
        yield (
            "data.valid: only checked for questions that are also in data.path; a table [validation] measures accuracy"
        )
    if data.format in OWN_PROMPT_FORMATS and data.answer_prompt != DataConfig.model_fields["answer_prompt"].default:
        yield f'data.answer_prompt: not used with data.format "{data.format}", which has its own text before an answer'
