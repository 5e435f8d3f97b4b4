"""Methods outside laconic: `method = "package.module:Class"` in a recipe, with the options of `[method_options]`.

Such a class is a torch module that implements `interfaces.Method`; docs/extending.md is its contract.
"""

import importlib
import inspect
import json
import os
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError, create_model
from torch import Tensor, nn

from laconic.config.config_model import ConfigModel
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.models.decoder import Decoder
from laconic.rng import default_seed
from laconic.storage import atomic
from laconic.storage.strict_json import abbreviate

ALLOW_CODE_VARIABLE = "LACONIC_ALLOW_CODE"
SIGNATURES = {"__init__": "decoder, tokenizer, *, …", "forward": "batch, state=None"}


def check_code_allowed(recipe: Recipe, folder: Path, allow_code: bool) -> None:
    """Raise UsageError for a run whose method is code outside laconic, unless the user has allowed it."""
    if recipe.is_custom_method and not allow_code and os.environ.get(ALLOW_CODE_VARIABLE) != "1":
        raise UsageError(
            f"{folder} was trained with {recipe.method}, code outside laconic; if you trust it, set "
            f"{ALLOW_CODE_VARIABLE}=1, or pass allow_code=True in Python"
        )


def import_method_class(name: str) -> type[nn.Module]:
    """Import the class "package.module:Class" of a method, from the current directory or anywhere on `sys.path`."""
    module_name, _, class_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # as `python -m` has it; a console script has not
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's code and may raise anything
        is_missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "?")
        reason = f"no module {module_name} in {Path.cwd()} or on PYTHONPATH; add its folder to PYTHONPATH"
        raise UsageError(f"method {name}: {reason if is_missing else f'{type(error).__name__}: {error}'}") from error
    method_class = getattr(module, class_name, None)
    if not isinstance(method_class, type) or not issubclass(method_class, nn.Module):
        raise UsageError(f"method {name}: {module_name} has no class {class_name} that is a torch.nn.Module")
    return method_class


def validate_options(method_class: type[nn.Module], recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe's method, checked against the keyword-only parameters of its class."""
    hints = typing.get_type_hints(method_class.__init__)
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(method_class.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    options_class = create_model(f"{method_class.__name__}Options", __base__=ConfigModel, **fields)
    try:  # through JSON, as recipes are validated
        options = options_class.model_validate_json(json.dumps(recipe.method_options or {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("method_options", *first["loc"])))
        problem = "no such key" if first["type"] == "extra_forbidden" else first["msg"]
        known = f"the keyword-only parameters of {recipe.method} are {', '.join(fields) or 'none'}"
        raise UsageError(f"{key}: {abbreviate(first['input'])}: {problem}; {known}") from None
    values = {name: getattr(options, name) for name in fields}
    for function, expected in SIGNATURES.items():
        implementation = getattr(method_class, function)
        expected = f"expected {function}(self, {expected}); change the class"
        if implementation is getattr(nn.Module, function):
            raise UsageError(f"method {recipe.method} has no {function}; {expected}")
        signature = inspect.signature(implementation)
        try:
            signature.bind(None, None, None, **(values if function == "__init__" else {}))
        except TypeError:
            raise UsageError(f"method {recipe.method} has {function}{signature}, {expected}") from None
    return values


def build_custom_method(recipe: Recipe, decoder: Decoder, tokenizer: Tokenizer) -> nn.Module:
    """Build a recipe's method as `Class(decoder, tokenizer, **options)`, with random numbers from the run's seed."""
    method_class = import_method_class(recipe.method)
    options = validate_options(method_class, recipe)
    before = default_seed.set(recipe.seed)
    try:
        with torch.random.fork_rng([]):
            torch.manual_seed(recipe.seed)
            return method_class(decoder, tokenizer, **options)
    finally:
        default_seed.reset(before)


def describe_method_source(recipe: Recipe, folder: Path) -> str:
    """Import a recipe's method, also from the recipe's folder, check its options, and say where its code is."""
    sys.path.append(str(folder.resolve()))  # last, so that it replaces no module of another package
    method_class = import_method_class(recipe.method)
    validate_options(method_class, recipe)
    return f"method {recipe.method} is code outside laconic: {inspect.getsourcefile(method_class)}"


@dataclass(frozen=True)
class MethodParameters:
    """Parameters and buffers of a method beside those of its decoder, as a step stores them."""

    method: nn.Module
    decoder: Decoder

    def state_dict(self) -> dict[str, Tensor]:
        shared = {id(tensor) for tensor in (*self.decoder.parameters(), *self.decoder.buffers())}
        tensors = cast(Mapping[str, Tensor], self.method.state_dict(keep_vars=True))
        return {name: tensor.detach() for name, tensor in tensors.items() if id(tensor) not in shared}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.method.load_state_dict(tensors, strict=False)

    def save(self, path: Path, metadata: Mapping[str, object]) -> None:
        """Write the tensors to a safetensors file; `metadata` identifies method, base model and tokenizer."""
        atomic.save_artifact(path, self.state_dict(), "method", metadata)

    def load(self, path: Path, metadata: Mapping[str, object]) -> None:
        """Read what `save` wrote; CorruptArtifactError if the file has other metadata or tensors."""
        atomic.load_into_module(cast(nn.Module, self), path, "method", metadata)
