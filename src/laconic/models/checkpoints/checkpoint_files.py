"""Tensors of a checkpoint folder: which file holds each, and how they match a module's parameters."""

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from laconic.console import pluralize
from laconic.errors import InputError, UnsafeFileError, translate_os_errors
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.storage import atomic, file_names, safetensors_header
from laconic.storage.file_names import is_printable
from laconic.storage.safetensors_header import TensorSpec
from laconic.storage.strict_json import read_foreign_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"  # first words of a Git LFS pointer file
PICKLE_SUFFIXES = (".bin", ".pth", ".pt", ".ckpt")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEADLESS_HINT = (
    "; a checkpoint without a language-model head continues no text; allow_missing (--allow-missing) initialises one "
    "at random"
)
MAX_LISTED = 10  # names of each kind in one error message
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # stored only; bfloat16 holds their numbers exactly
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
SCALE_SUFFIXES = ("_scale", "_scale_inv")  # of the name of a float8 weight; its numbers count only times the scale


class StoredTensor(NamedTuple):
    """A tensor on disk: its file, its name there, and dtype and shape from the header."""

    path: Path
    name: str
    spec: TensorSpec

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype to load the tensor in: its own, or bfloat16 for float8."""
        return torch.bfloat16 if self.spec.dtype in FLOAT8_DTYPES else self.spec.dtype

    def load(self) -> Tensor:
        return atomic.open_tensors(self.path, [self.name])[self.name].to(self.float_dtype)


def match_tensors(
    module: nn.Module,
    folder: Path,
    config: DecoderConfig,
    allow_missing: tuple[str, ...],
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the tensor on disk for each parameter of a module, and the allowed names that are absent.

    Warn of tensors that belong to nothing in the module. Raise InputError if tensors are missing, of another shape or
    dtype, or parameters of a decoder that the configuration rules out; the message lists them.
    """
    transposed = transposed_weights(config)
    shapes = {
        name: tuple(tensor.shape)[::-1] if name in transposed else tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
    }
    unknown = [name for name in allow_missing if name not in shapes]
    if unknown:
        raise InputError(f"allow_missing: the model has no tensor {unknown[0]}")
    extra = [name for name, x in stored.items() if name not in shapes and not is_redundant(name, x, config)]
    matched = {name: tensor for name, tensor in stored.items() if name in shapes}
    absent = [name for name in shapes if name not in stored]
    missing = [name for name in absent if name not in allow_missing]
    problems = {
        "missing": missing,
        "that config.json rules out": [name for name in extra if is_decoder_parameter(name, config)],
        "of wrong shape": [
            f"{name} {list(tensor.spec.shape)}, config says {list(shapes[name])}"
            for name, tensor in matched.items()
            if tensor.spec.shape != shapes[name]
        ],
        "of a dtype that needs other kernels": [
            f"{name} {tensor.spec.dtype}" for name, tensor in matched.items() if not is_readable(name, tensor, stored)
        ],
    }
    listed = [
        f"{pluralize(len(names), 'tensor')} {kind} ({list_names(names)})" for kind, names in problems.items() if names
    ]
    if listed:
        hint = HEADLESS_HINT if missing == [f"{WEIGHT_NAMES[config.family].head}.weight"] else ""
        raise InputError(", ".join(listed) + hint)
    if extra:
        count = pluralize(len(extra), "tensor")
        warnings.warn(
            f"{folder}: {count} ignored that a {config.family} decoder does not have (first {min(extra)})", stacklevel=2
        )
    return matched, tuple(name for name in absent if name in allow_missing)


def list_names(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_LISTED], *(["…"] if len(names) > MAX_LISTED else [])])


def index_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint folder by name, from validated headers."""
    if (folder / SINGLE_FILE).exists() or (folder / SINGLE_FILE).is_symlink():
        files = {SINGLE_FILE: [""]}
    elif (folder / INDEX_FILE).exists():
        files = _read_index(read_foreign_json(file_names.resolve_inside(folder, INDEX_FILE)))
    else:
        refuse_pickle(folder)
        raise InputError(f"{folder} has config.json but no model.safetensors and no index; was the download cut?")
    stored: dict[str, StoredTensor] = {}
    for shard, names in files.items():
        refuse_pickle(folder, shard)
        path = file_names.resolve_inside(folder, shard)
        if not path.exists():
            raise InputError(f"{shard}, which the index names for {names[0]}, is not in the folder; download it again")
        for name, spec in read_specs(path).items():
            if name in stored:
                raise InputError(f"{name} is in {stored[name].path.name} and in {shard}; download them again")
            stored[name] = StoredTensor(path, name, spec)
    return stored


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return the tensors of a safetensors file; raise InputError if git-lfs has not replaced it by its content."""
    try:
        return safetensors_header.read_safetensors_header(path).tensors
    except safetensors_header.NotSafetensorsError:
        with translate_os_errors(path), path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if is_pointer:
            hint = "run git lfs pull in its repository, or download the file"
            raise InputError(f"{path} holds a pointer of git-lfs, not the weights; {hint}") from None
        raise


def _read_index(index: dict[str, Any]) -> dict[str, list[str]]:
    weight_map = index.get("weight_map")
    files: dict[str, list[str]] = {}
    for name, shard in cast(dict[str, Any], weight_map if isinstance(weight_map, dict) else {"": None}).items():
        if not is_printable(name) or type(shard) is not str:
            raise InputError(f"{INDEX_FILE}: weight_map must map tensor names to file names")
        files.setdefault(shard, []).append(name)
    return files


def refuse_pickle(folder: Path, name: str | None = None) -> None:
    """Raise UnsafeFileError if the named file, or any file of the folder, has a pickle's suffix."""
    names = sorted(path.name for path in folder.iterdir()) if name is None else [name]
    pickle = next((name for name in names if name.endswith(PICKLE_SUFFIXES)), None)
    if pickle:
        raise UnsafeFileError(
            f"{pickle} is a pickle, which can run code; it was not opened. "
            "Convert it to safetensors with transformers' save_pretrained in an environment you trust "
            "(an AutoCompressor with safetensors' save_file, since transformers drops its summary tokens)"
        )


def match_prefix(stored: dict[str, StoredTensor], names: set[str], config: DecoderConfig) -> dict[str, StoredTensor]:
    """Return the tensors under the module's names: checkpoints of base models lack a prefix such as `model.`."""
    parts = WEIGHT_NAMES[config.family].base_prefix.split(".")
    head = f"{WEIGHT_NAMES[config.family].head}.weight"
    variants = [stored]
    for i in range(len(parts)):
        prefix = ".".join(parts[: i + 1])
        variants.append({f"{prefix}.{name}" if name != head else name: tensor for name, tensor in stored.items()})
    return min(variants, key=lambda variant: len(names ^ variant.keys()))


def resolve_tensors(
    folder: Path, config: DecoderConfig, ignore_tensors: tuple[str, ...] = ()
) -> tuple[DecoderConfig, dict[str, StoredTensor]]:
    """Return a folder's tensors by the names of the decoder, and the configuration as the weights have it.

    As in transformers, a head beside a tied embedding is used if it differs, and left out if not. Some files hold a
    tied embedding under the name of the head alone. `ignore_tensors` are left out.
    """
    names = WEIGHT_NAMES[config.family]
    head, embedding, norm = (f"{name}.weight" for name in (names.head, names.token_embedding, names.final_norm))
    stored = {name: tensor for name, tensor in index_tensors(folder).items() if name not in ignore_tensors}
    stored = match_prefix(stored, {head, embedding, norm}, config)
    if not config.tie_word_embeddings or head not in stored:
        return config, stored
    if embedding in stored and not torch.equal(stored[head].load(), stored[embedding].load()):
        warnings.warn(f"{folder}: tie_word_embeddings is ignored: {head} differs from {embedding}", stacklevel=3)
        return replace(config, tie_word_embeddings=False), stored
    tensor = stored.pop(head)
    return config, {embedding: tensor} | stored


def is_redundant(name: str, tensor: StoredTensor, config: DecoderConfig) -> bool:
    """Return whether an unmatched tensor carries no information: masks, RoPE tables, biases of zeros."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if config.family == "gpt2" and name.endswith(".attn.masked_bias"):
        return tensor.spec.shape == ()
    if config.family == "gpt2" and name.endswith(".attn.bias"):
        square = tensor.load().squeeze()
        return square.ndim == 2 and torch.equal(square.bool(), torch.ones(square.shape, dtype=torch.bool).tril())
    return name.endswith(".bias") and tensor.spec.dtype in FLOAT_DTYPES and not bool(tensor.load().any())


def is_decoder_parameter(name: str, config: DecoderConfig) -> bool:
    """Return whether a decoder of the family, or one like it, could have this parameter: its configuration is wrong."""
    names = WEIGHT_NAMES[config.family]
    module, _, kind = name.removeprefix(f"{names.layers}.").rpartition(".")
    return kind in ("weight", "bias") and re.sub(r"^\d+\.", "", module) in {*astuple(names), *HEAD_NORMS}


def is_readable(name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tensor holds the numbers of a weight themselves."""
    if tensor.spec.dtype in FLOAT8_DTYPES:
        return not any(name + suffix in stored for suffix in SCALE_SUFFIXES)
    return tensor.spec.dtype in FLOAT_DTYPES


def transposed_weights(config: DecoderConfig) -> frozenset[str]:
    """Return the names of the weights that checkpoints store as [in, out] (GPT-2's)."""
    names = WEIGHT_NAMES[config.family]
    layers = range(config.num_hidden_layers)
    return frozenset(f"{names.layers}.{l}.{name}.weight" for l in layers for name in names.transposed)


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: float) -> dict[str, list[str]]:
    """Return file names with their tensors, in order. A file exceeds the limit only if one tensor alone does."""
    files: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if files[-1] and total + size > max_shard_bytes:
            files.append([])
            total = 0
        files[-1].append(name)
        total += size
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def save_shards(folder: Path, sizes: Mapping[str, int], load: Callable[[str], Tensor], max_shard_bytes: float) -> None:
    """Write tensors as safetensors files, with an index if there are several; call it inside an atomic write.

    `sizes` are bytes by name; only the tensors of one file are loaded at a time.
    """
    shards = plan_shards(sizes, max_shard_bytes)
    num_parameters = 0
    for file, names in shards.items():
        tensors = {name: load(name) for name in names}
        num_parameters += sum(tensor.numel() for tensor in tensors.values())
        atomic.save_tensors(folder / file, tensors, {"format": "pt"})
    if len(shards) > 1:
        totals = {"total_size": sum(sizes.values()), "total_parameters": num_parameters}
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / INDEX_FILE).write_text(index + "\n", encoding="utf-8")
