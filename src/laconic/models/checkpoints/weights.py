"""Load and save weights as a Hugging Face folder: safetensors, checked to be finite."""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from laconic.errors import InputError, NonFiniteError, UsageError
from laconic.models.checkpoints.checkpoint_files import (
    StoredTensor,
    index_tensors,
    match_tensors,
    save_shards,
    transposed_weights,
)
from laconic.models.checkpoints.named_models import NAMED_MODELS, find_named_model, log_once, suggest_name
from laconic.models.checkpoints.weight_memory import WeightMemory
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.gguf.convert import find_or_convert_gguf
from laconic.storage import atomic, file_names, strict_json
from laconic.storage.export_record import EXPORT_FOLDER, check_config

FINGERPRINT_SAMPLES = 1024  # elements per tensor that enter the fingerprint
COMPANION_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


def find_checkpoint(model: str | Path, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Return the Hugging Face folder of a model.

    `model` is a folder, a GGUF file, which is converted into laconic's cache on first use, a short name such as
    `smollm2`, or a model on the hub, whose safetensors, JSON and tokenizer files are downloaded. A leading `~` is
    the home directory.
    """
    folder = Path(os.path.expanduser(model))
    name = str(model)
    if folder.is_dir():
        check_config(folder)
        if (folder / "recipe.toml").is_file() and not (folder / "config.json").exists():
            raise InputError(f"{folder} is a run of laconic train; open it with laconic.load, or export it first")
        files = sorted(folder.glob("*.gguf"))
        if with_weights and files and not (folder / "config.json").exists():
            raise InputError(f"{folder} has no config.json, but a GGUF file; pass that file: {files[0]}")
        return folder
    if folder.suffix.lower() == ".gguf":
        return find_or_convert_gguf(folder)
    file_names.check_hub_name(name)
    local = find_named_model(name, with_weights=with_weights) if revision is None else None
    return local or download_checkpoint(name, revision, with_weights)


def check_revision(model: str | Path, revision: str | None) -> str | None:
    """Return a revision. Raises UsageError for a local folder or file, which has none."""
    if revision is not None and Path(os.path.expanduser(model)).exists():
        raise UsageError(f"revision {revision}: {model} is local and has no revisions; remove revision")
    return revision


def download_checkpoint(name: str, revision: str | None, with_weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import LocalEntryNotFoundError

    named = NAMED_MODELS.get(name)
    if named and not named.hub_name:
        raise UsageError(f"revision {revision}: {name} comes with laconic and has no revisions; remove revision")
    hub_name = named.hub_name if named else name
    allowed = ["*.json", *COMPANION_FILES, *(["*.safetensors"] if with_weights else [])]
    ignored = ["*/*.json", "*/*.safetensors", "consolidated*"]
    download = cast(Callable[..., str], snapshot_download)
    options: dict[str, Any] = {"revision": revision, "etag_timeout": 5}
    try:
        folder = download(hub_name, allow_patterns=allowed, ignore_patterns=ignored, **options)
        config = Path(folder) / "config.json"
        if config.is_file() and EXPORT_FOLDER in strict_json.read_foreign_json(config):
            download(hub_name, allow_patterns=[f"{EXPORT_FOLDER}/*"], **options)
    except Exception as error:  # the hub client raises many kinds: HTTP, names, offline, cache
        advice = named.instructions.format(folder=named.folder()) if named else suggest_name(name)
        reason = f"the hub says: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"
        if isinstance(error, LocalEntryNotFoundError):
            reason = f"offline, and not in {constants.HF_HUB_CACHE}"
        raise InputError("; ".join(filter(None, (f"{name}: no such local folder", reason, advice)))) from error
    if named:
        log_once(f"laconic: {name} is {hub_name} from the hub, in full precision")
    return Path(folder)


def load_weights(
    module: nn.Module,
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    allow_missing: tuple[str, ...] = (),
    tensors: dict[str, StoredTensor] | None = None,
    on_layer: Callable[[nn.Module, Collection[str]], None] | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Assign the weights of a folder to a module on meta, one layer at a time.

    Return the fingerprint of the weights on disk, and the names of `allow_missing` that are absent: they become zeros,
    for the caller to initialise. `tensors` are those of `resolve_tensors`; without them, the names in the folder are
    the module's. `on_layer` receives the module and the names of the tensors whenever a layer has been assigned; it has
    to replace the linear ones, which may be file mappings.
    """
    target = resolve_device(device)
    tensors = index_tensors(folder) if tensors is None else tensors
    stored, missing = match_tensors(module, folder, config, allow_missing, tensors)
    transposed = transposed_weights(config)
    dtype = dtype or default_dtype(stored, config, target)
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    order = sorted((name for name in shapes if name in stored), key=lambda name: len(shapes[name]) == 1)
    is_final = target.type == "cpu" and on_layer is None
    memory = WeightMemory.for_shapes([shapes[name] for name in order], dtype) if is_final else None
    may_map = frozenset(name for name in order if on_layer and is_linear_weight(module, name))
    samples: dict[str, bytes] = {}
    layer_name = re.compile(rf"{re.escape(WEIGHT_NAMES[config.family].layers)}\.\d+\.")
    groups: dict[str, dict[str, StoredTensor]] = {}  # the tensors of each layer; all others stand alone
    for name in order:
        match = layer_name.match(name)
        groups.setdefault(match[0] if match else name, {})[name] = stored[name]
    for group in groups.values():
        for name, tensor in _load_group(group, transposed, dtype, samples, memory, may_map):
            assign_parameter(module, name, tensor.to(target))
        if on_layer is not None:
            on_layer(module, group)
    for name in missing:
        assign_parameter(module, name, torch.zeros(shapes[name], dtype=dtype, device=target))
    return _combine_samples(samples), missing


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return a device: the CPU by default, for "auto" the first GPU if there is one, for a number that GPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = f"cuda:{device}" if isinstance(device, int) else device  # torch.device(0) fails without a GPU
    try:
        resolved = torch.device("cpu" if device is None else device)
        if resolved.type != "cuda":
            torch.empty(0, device=resolved)
    except Exception as error:  # torch raises many kinds: unknown names, back ends it was built without
        raise UsageError(f"device {device} is not available to this torch; use cpu") from error
    if resolved.type == "meta":
        raise UsageError("device meta holds no weights; use cpu or cuda")
    count = torch.cuda.device_count()
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        available = f"it has {count}, from cuda:0" if count else "it has no CUDA; use cpu"
        raise UsageError(f"device {resolved} is not available to this torch; {available}")
    return resolved


def resolve_device_map(
    device: torch.device | str | None, device_map: str | Mapping[str, Any] | None
) -> torch.device | str | None:
    """Return `device`, or the one that transformers' `device_map` names for the whole model."""
    if device_map is None:
        return device
    if device is not None:
        raise UsageError(f"device={device} and device_map={device_map!r}: pass one of them")
    devices = {device_map} if isinstance(device_map, str) else set(device_map.values())
    if len(devices) != 1 or devices & {"balanced", "balanced_low_0", "sequential", "disk"}:
        raise UsageError(f"device_map={device_map!r}: a decoder lies on one device; pass device='cuda' or device='cpu'")
    (target,) = devices
    return f"cuda:{target}" if isinstance(target, int) else target


def resolve_dtype(dtype: torch.dtype | str | None, folder: Path) -> torch.dtype | None:
    """Return a floating dtype that is given by itself or by name, the stored one for "auto", or None."""
    if dtype == "auto":
        return stored_dtype(folder)
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(resolved, torch.dtype) and resolved.is_floating_point):
        raise UsageError(f"dtype {dtype!r}: give float32, bfloat16, float16, float64 or auto")
    return resolved


def _load_group(
    group: Mapping[str, StoredTensor],
    transposed: frozenset[str],
    dtype: torch.dtype,
    samples: dict[str, bytes],
    memory: WeightMemory | None,
    may_map: frozenset[str],
) -> Iterator[tuple[str, Tensor]]:
    """Load the tensors of one layer in the module's layout and dtype, checked to be finite.

    They are copies, so that the file mapping can be released: one behind another in `memory`, or anywhere. Only those
    in `may_map` may keep the mapping.
    """
    for path in {stored.path for stored in group.values()}:
        names = {name: stored.name for name, stored in group.items() if stored.path == path}
        mapped = atomic.open_tensors(path, names.values())
        for name, stored_name in names.items():
            stored = mapped[stored_name].to(group[name].float_dtype)
            samples[name] = _sample_tensor(name, stored)
            atomic.check_finite(f"{path.parent}: {name}", stored)
            check_overflow(f"{path.parent}: {name}", stored, dtype)
            tensor = stored.t() if name in transposed else stored
            if name not in may_map or stored.dtype != dtype:
                copy = memory.empty(tensor.shape, dtype) if memory else torch.empty(tensor.shape, dtype=dtype)
                tensor = copy.copy_(tensor)
            yield name, tensor


def check_overflow(label: str, stored: Tensor, dtype: torch.dtype) -> None:
    """Raise NonFiniteError, beginning with `label`, if a finite tensor has values outside the range of a dtype."""
    if stored.numel() == 0 or torch.finfo(dtype).max >= torch.finfo(stored.dtype).max:
        return
    low, high = stored.aminmax()
    largest = torch.maximum(-low, high)
    if largest.to(dtype).isinf():
        name, wider = (str(x).removeprefix("torch.") for x in (dtype, stored.dtype))
        limit = f"{name}, which holds at most {torch.finfo(dtype).max:.6g}"
        raise NonFiniteError(f"{label}: {float(largest):.6g} overflows in {limit}; load the model in {wider}")


def is_linear_weight(module: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    return attribute == "weight" and type(module.get_submodule(owner)) is nn.Linear


def assign_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, nn.Parameter(tensor, module.get_parameter(name).requires_grad))


def default_dtype(stored: Mapping[str, StoredTensor], config: DecoderConfig, device: torch.device) -> torch.dtype:
    """Return the stored dtype of the embedding; on a CPU float32, unless it is bfloat16 and the CPU is fast at it."""
    embedding = stored.get(f"{WEIGHT_NAMES[config.family].token_embedding}.weight")
    dtype = embedding.float_dtype if embedding else config.dtype
    is_fast = device.type != "cpu" or (dtype == torch.bfloat16 and has_fast_bfloat16(device))
    return dtype if is_fast else torch.float32


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether matrix products in bfloat16 are faster than in float32: on GPUs, and on CPUs that have them."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return device.type != "cpu" or any(getattr(torch.cpu, probe, bool)() for probe in probes)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the most common dtype of a checkpoint, by number of elements."""
    counts: dict[torch.dtype, int] = {}
    for tensor in index_tensors(folder).values():
        counts[tensor.float_dtype] = counts.get(tensor.float_dtype, 0) + math.prod(tensor.spec.shape)
    return max(counts, key=lambda dtype: counts[dtype])


def checkpoint_tensors(module: nn.Module, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's tensors in the layout of a checkpoint (GPT-2's weights as [in, out])."""
    transposed = transposed_weights(config)
    for name, tensor in module.state_dict().items():
        yield name, tensor.t() if name in transposed else tensor


def weights_fingerprint(state: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 of names, shapes and up to 1,024 evenly spaced elements per tensor, in checkpoint layout."""
    return _combine_samples({name: _sample_tensor(name, tensor) for name, tensor in state})


def _sample_tensor(name: str, tensor: Tensor) -> bytes:
    n = tensor.numel()
    count = min(n, FINGERPRINT_SAMPLES)
    offsets = torch.arange(count, device=tensor.device) * n // count if n else torch.arange(0)
    index: list[Tensor] = []  # as torch.unravel_index, which would import sympy
    for size in reversed(tensor.shape):
        index.insert(0, offsets % size)
        offsets = offsets // size
    sample = tensor.detach()[tuple(index)] if index else tensor.detach().reshape(1)
    header = f"{strict_json.to_canonical_json([name, list(tensor.shape)])}\n".encode()
    return header + sample.float().cpu().numpy().tobytes()


def _combine_samples(samples: Mapping[str, bytes]) -> str:
    return hashlib.sha256(b"".join(sample for _, sample in sorted(samples.items()))).hexdigest()


def save_weights(
    module: nn.Module,
    folder: Path,
    config: DecoderConfig,
    max_shard_bytes: float,
    dtype: torch.dtype | None,
    source_folder: Path | None,
    extra_fields: Mapping[str, object],
) -> None:
    """Write a complete Hugging Face folder atomically, with the tokenizer and generation files of `source_folder`.

    `extra_fields` are further keys of config.json, or replacements.
    """
    if not max_shard_bytes > 0:
        raise UsageError(f"max_shard_bytes={max_shard_bytes:g} must be > 0")
    state = dict(checkpoint_tensors(module, config))
    if any(tensor.dtype == torch.int8 for tensor in state.values()):
        raise UsageError("int8 weights cannot be saved; save the float decoder, and quantise it after loading")
    adapter = next((name for name in state if ".lora_" in name or ".base_layer." in name), None)
    if adapter:
        raise UsageError(f"{adapter} belongs to an adapter; merge it first, with lora.merge_adapter")
    sizes = {name: (dtype or tensor.dtype).itemsize * tensor.numel() for name, tensor in state.items()}
    fields = replace(config, dtype=dtype or next(iter(state.values())).dtype).to_config_json()
    config_json = json.dumps({**fields, **extra_fields}, indent=2) + "\n"

    def write(target: Path) -> None:
        (target / "config.json").write_text(config_json, encoding="utf-8")
        save_shards(target, sizes, lambda name: state[name].to(dtype or state[name].dtype), max_shard_bytes)
        if source_folder is None:
            return
        for path in filter(Path.is_file, itertools.chain.from_iterable(map(source_folder.glob, COMPANION_FILES))):
            name = path.relative_to(source_folder)
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file_names.resolve_inside(source_folder, str(name)), target / name)

    atomic.write_folder_atomically(folder, write, sum(sizes.values()))
