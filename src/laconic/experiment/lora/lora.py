"""LoRA adapters in the format of peft: add, save, load, merge.

LoRA (arXiv:2106.09685), rsLoRA (2312.03732), DoRA (2402.09353), and rows of new tokens.
"""

import copy
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from laconic.errors import InputError, UnsafeFileError, UsageError
from laconic.experiment.lora.adapter_config import (
    ADAPTER_CONFIG_FILE,
    check_supported,
    expand_pattern_keys,
    match_modules,
    read_adapter_config,
)
from laconic.experiment.lora.lora_linear import use_fast_forward
from laconic.generation.config import check_type
from laconic.models.decoder import Decoder
from laconic.models.init import Namespace, add_submodule
from laconic.storage import atomic, file_names, safetensors_header
from laconic.storage.strict_json import abbreviate

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

ADAPTER_WEIGHTS_FILE, ADAPTER_PICKLE_FILE = "adapter_model.safetensors", "adapter_model.bin"
SUPPORTED_INITS = (True, False, "gaussian", "orthogonal", "eva")  # these leave the base model unchanged
PEFT_PREFIX = "base_model.model."
TensorShapes = Mapping[str, tuple[int, ...]]


def add_adapter(decoder: Decoder, settings: "LoraConfig") -> "PeftModel":
    """Wrap the linear layers of a decoder in place; only the adapter is trainable. Call the result like the decoder.

    Target "all-linear" means every linear layer of the blocks. Raises InputError if a target does not exist, UsageError
    for anything but a decoder without an adapter.
    """
    from peft import get_peft_model

    check_has_no_adapter(decoder)
    model = cast("PeftModel", get_peft_model(decoder, adapt_config_to_decoder(decoder, settings)))
    use_fast_forward(model)
    return model


def check_has_no_adapter(decoder: Decoder) -> None:
    """Raise `UsageError` for anything but a decoder, and for one that is wrapped already."""
    check_type("decoder", decoder, Decoder, "a decoder without an adapter, such as model.decoder")
    if any(name.endswith(".base_layer") for name, _ in decoder.named_modules()):
        raise UsageError("the decoder has an adapter already; lora.merge_adapter it, or load the decoder again")


def save_adapter(model: "PeftModel", folder: str | Path) -> None:
    """Write an adapter in the layout that peft loads onto the model of transformers."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)

    def write(new: Path) -> None:
        save_adapter_config(model, new)
        atomic.save_tensors(new / ADAPTER_WEIGHTS_FILE, tensors, {"format": "pt"})

    atomic.write_folder_atomically(Path(folder), write, sum(t.nbytes for t in tensors.values()))


def save_adapter_config(model: "PeftModel", folder: Path) -> None:
    settings = cast("LoraConfig", model.peft_config["default"])
    settings = replace(settings, task_type="CAUSAL_LM", inference_mode=True)
    if isinstance(settings.target_modules, set):  # whose order differs from process to process
        settings.target_modules = sorted(settings.target_modules)
    settings.save_pretrained(str(folder))


def load_adapter(decoder: Decoder, folder: str | Path, *, trainable: bool = False) -> "PeftModel":
    """Put an adapter from a folder on a decoder, in place; the errors are those of `add_adapter`, and of the files.

    If the adapter was trained with more tokens, it is put on a decoder with as many, which shares the other weights. A
    head that is tied to the token embedding becomes a matrix of its own if the adapter changes one of the two, as peft
    computes it.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    check_has_no_adapter(decoder)
    settings = read_adapter_config(Path(folder))
    shapes = read_adapter_shapes(Path(folder))
    num_new_tokens = count_new_tokens(decoder, shapes)
    if num_new_tokens > 0:
        decoder = decoder.resize_vocabulary(num_new_tokens)  # the adapter's file has the new rows
    if changes_embedding_or_head(decoder, settings):
        untie_head(decoder)
        settings.ensure_weight_tying = False  # the file holds both
    settings = adapt_config_to_decoder(decoder, settings)
    settings.init_lora_weights = True  # replaced below
    expected = expected_tensors(decoder, settings)
    copies = base_weight_copies(decoder)
    copies |= {name: shapes[name] for name in find_tied_rows(decoder, shapes)}
    adapter_shapes = {name: shape for name, shape in shapes.items() if name in expected or copies.get(name) != shape}
    check_adapter_shapes(decoder, adapter_shapes, expected)
    tensors = load_finite_tensors(Path(folder), shapes)
    settings.inference_mode = not trainable
    model = cast("PeftModel", get_peft_model(decoder, settings))
    set_peft_model_state_dict(model, tensors)
    use_fast_forward(model)
    return model.train(decoder.training)


def load_adapter_weights(model: "PeftModel", folder: str | Path) -> None:
    """Copy the weights of a saved adapter into the adapter of a decoder."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    decoder = cast(Decoder, model.get_base_model())
    shapes = read_adapter_shapes(Path(folder))
    check_adapter_shapes(decoder, shapes, {name: tuple(tensor.shape) for name, tensor in state.items()})
    set_peft_model_state_dict(model, load_finite_tensors(Path(folder), shapes))


def read_adapter_shapes(folder: Path) -> TensorShapes:
    if not (folder / ADAPTER_WEIGHTS_FILE).exists():
        if (folder / ADAPTER_PICKLE_FILE).exists():
            raise UnsafeFileError(
                f"{ADAPTER_PICKLE_FILE} is a pickle and can run code; not opened. "
                "Save it as safetensors with peft's save_pretrained in an environment you trust"
            )
        raise InputError(f"{folder} has {ADAPTER_CONFIG_FILE} but no {ADAPTER_WEIGHTS_FILE}; was the download cut?")
    header = safetensors_header.read_safetensors_header(file_names.resolve_inside(folder, ADAPTER_WEIGHTS_FILE))
    return {name: entry.shape for name, entry in header.tensors.items()}


def load_finite_tensors(folder: Path, shapes: TensorShapes) -> dict[str, torch.Tensor]:
    tensors = atomic.open_tensors(file_names.resolve_inside(folder, ADAPTER_WEIGHTS_FILE), shapes)
    for name, tensor in tensors.items():
        atomic.check_finite(name, tensor)
    return tensors


def merge_adapter(model: "PeftModel") -> Decoder:
    """Return the decoder with the adapter merged into its weights; InputError if it adds biases to layers without."""
    for name, layer in model.named_modules():
        if any(getattr(layer, "lora_bias", {}).values()) and layer.get_base_layer().bias is None:
            raise InputError(
                f"the adapter has a lora_bias on {name}, which has no bias to merge it into; train it without lora_bias"
            )
    decoder = model.merge_and_unload()
    assert isinstance(decoder, Decoder)
    decoder._cached_fingerprint = None  # peft changes `.data`, which the version counter misses
    return decoder.requires_grad_()


def adapt_config_to_decoder(decoder: Decoder, settings: "LoraConfig") -> "LoraConfig":
    """Return a copy of the settings for our module names. Raises `InputError` if an option is not supported."""
    settings = copy.deepcopy(settings)
    settings.task_type = None  # peft would ask for generate's methods
    settings.base_model_name_or_path = None  # peft takes it from the decoder
    settings.fan_in_fan_out = False  # every layer is an nn.Linear
    if settings.init_lora_weights not in SUPPORTED_INITS:
        start = json.dumps(settings.init_lora_weights)
        raise InputError(
            f"init_lora_weights {start} changes the base model; convert the adapter to plain LoRA with peft"
        )
    check_supported(vars(settings))
    settings.target_modules = target_module_names(decoder, settings.target_modules)
    names = [name for name, _ in decoder.named_modules()]
    if isinstance(settings.exclude_modules, str):
        settings.exclude_modules = match_modules([settings.exclude_modules], names)[0] or None
    excluded = settings.exclude_modules or ()
    targets = [name for name in names if ends_in(name, settings.target_modules) and not ends_in(name, excluded)]
    settings.rank_pattern = expand_pattern_keys(settings.rank_pattern or {}, targets)
    settings.alpha_pattern = expand_pattern_keys(settings.alpha_pattern or {}, targets)
    saved = settings.modules_to_save or ()
    whole = [name for name, module in decoder.named_modules() if isinstance(module, Namespace) and ends_in(name, saved)]
    if whole:
        raise InputError(f"modules_to_save: {whole[0]} has several layers; name the layers, such as down_proj")
    rows = settings.trainable_token_indices
    head = decoder.weight_names.head
    if isinstance(rows, dict) and len(rows) > 1 and decoder.config.tie_word_embeddings:  # the head's are the same
        settings.trainable_token_indices = {name: ids for name, ids in rows.items() if not ends_in(head, [name])}
    tied = [name for name in saved if ends_in(decoder.weight_names.token_embedding, [name])]
    if tied and decoder.config.tie_word_embeddings:
        raise InputError(f"modules_to_save {tied[0]}: this model's head is tied to it; use trainable_token_indices")
    return settings


def changes_embedding_or_head(decoder: Decoder, settings: "LoraConfig") -> bool:
    names = (decoder.weight_names.token_embedding, decoder.weight_names.head)
    targets = settings.target_modules
    if isinstance(targets, str):
        targets = [] if targets == "all-linear" else match_modules([targets], names)[0]
    return any(ends_in(name, (*(targets or ()), *(settings.modules_to_save or ()))) for name in names)


def untie_head(decoder: Decoder) -> None:
    """Give a head that is tied to the token embedding a matrix of its own, with the same numbers."""
    if not decoder.config.tie_word_embeddings:
        return
    weight = decoder.get_parameter(f"{decoder.weight_names.token_embedding}.weight")
    with torch.device("meta"):
        head = nn.Linear(*reversed(weight.shape), bias=False)
    head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    add_submodule(decoder, decoder.weight_names.head, head)
    decoder.config = replace(decoder.config, tie_word_embeddings=False)


def count_new_tokens(decoder: Decoder, shapes: TensorShapes) -> int:
    """Return how many more rows than the decoder's an embedding or head in the adapter's file has; 0 without one."""
    V, D = decoder.get_parameter(f"{decoder.weight_names.token_embedding}.weight").shape
    sizes = [shapes[name] for name in base_weight_copies(decoder) if name in shapes]
    return max((shape[0] - V for shape in sizes if len(shape) == 2 and shape[1] == D), default=0)


def find_tied_rows(decoder: Decoder, shapes: TensorShapes) -> list[str]:
    """Return the names of a tied head's token rows, which peft saves once more for the embedding."""
    if not decoder.config.tie_word_embeddings:
        return []
    head, embedding = (f"{PEFT_PREFIX}{x}." for x in (decoder.weight_names.head, decoder.weight_names.token_embedding))
    rows = [name for name in shapes if name.startswith(head) and name.endswith(".trainable_tokens_delta")]
    return [name for name in rows if shapes.get(name.replace(head, embedding, 1)) == shapes[name]]


def base_weight_copies(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the weights of embedding and head that peft may save beside an adapter, under several names, and loads."""
    modules = (decoder.weight_names.token_embedding, decoder.weight_names.head)
    shape = tuple(decoder.get_parameter(f"{modules[0]}.weight").shape)
    layers = ("", ".base_layer", ".token_adapter.base_layer", ".modules_to_save", ".original_module")
    return {f"{PEFT_PREFIX}{module}{layer}.weight": shape for module in modules for layer in layers}


def ends_in(name: str, ends: Iterable[str]) -> bool:
    """Return whether the last parts of a module's name are one of these names, as peft matches lists."""
    return any(f".{name}".endswith(f".{end}") for end in ends)


def target_module_names(decoder: Decoder, requested: list[str] | set[str] | str | None) -> list[str]:
    """Return the layers to wrap; a text other than "all-linear" is a pattern over whole names."""
    maps = {name for name, module in decoder.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    inside = {name.rsplit(".", 1)[-1] for name in maps if name.startswith(decoder.weight_names.layers)}
    if not inside:
        raise InputError("the decoder has no float linear layers; quantise it after training, not before")
    if requested == "all-linear":
        return sorted(inside)
    if not requested:
        raise InputError(f"target_modules is empty; all-linear, or some of {', '.join(sorted(inside))}")
    if isinstance(requested, str):
        (matches,) = match_modules([requested], sorted(maps))
        if not matches:
            raise InputError(f"target_modules {abbreviate(requested)} fits no module; the first is {min(maps)}")
        return matches
    for name in sorted(requested):
        if not any(ends_in(known, [name]) for known in maps):
            near = difflib.get_close_matches(name, sorted(inside), 1, 0.0)[0]
            family = decoder.config.family
            raise InputError(f"target {name}: no such module in this {family}; did you mean {near}?")
    return sorted(requested)


def expected_tensors(decoder: Decoder, settings: "LoraConfig") -> TensorShapes:
    """Return names and shapes of the tensors that these settings create on this decoder."""
    from peft import get_peft_model, get_peft_model_state_dict

    with torch.device("meta"):
        probe_decoder = Decoder(decoder.config, seed=None)
        try:
            probe = get_peft_model(probe_decoder, copy.deepcopy(settings))
        except Exception as error:  # peft raises many kinds for options that fit neither one another nor the model
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"{ADAPTER_CONFIG_FILE}: peft cannot apply it: {reason}") from None
    state = get_peft_model_state_dict(probe, save_embedding_layers=False)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_adapter_shapes(decoder: Decoder, shapes: TensorShapes, expected: TensorShapes) -> None:
    """Raise InputError unless the file has exactly the tensors that its settings create here."""
    if shapes == expected:
        return
    odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    have, need = (list(table[odd[0]]) if odd[0] in table else "nothing" for table in (shapes, expected))
    config = decoder.config
    raise InputError(
        f"{ADAPTER_WEIGHTS_FILE} does not fit its settings and this {config.family} of width {config.hidden_size} and "
        f"{config.num_hidden_layers} layers: {len(odd)} tensors, first {odd[0]}: {have}, expected {need}"
    )
