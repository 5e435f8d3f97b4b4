"""Notes on keys of a recipe that do nothing, or less than they seem to. Nothing here imports torch."""

from collections.abc import Collection, Iterator

from laconic.config.data import SYNTHETIC_DOCUMENTS
from laconic.config.recipe import COT_TEACHER_METHODS, FULL_CHAIN_METHODS, NEW_DECODER_KEYS, Recipe


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
