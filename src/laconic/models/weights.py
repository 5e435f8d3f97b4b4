"""Weights in and out: a Hugging Face folder of safetensors, read strictly and mapped, written as transformers does."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from laconic.errors import InputError, UsageError
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.models.folder import (
    INDEX_FILE,
    StoredTensor,
    index_tensors,
    match_tensors,
    plan_shards,
    transposed_weights,
)
from laconic.storage import atomic, strict_json

FINGERPRINT_SAMPLES = 1024  # elements of a tensor that enter the fingerprint
COMPANION_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class LoadReport(NamedTuple):
    """What loading found: `fingerprint` of the weights on disk, and the names allowed to be missing that were."""

    fingerprint: str
    missing: tuple[str, ...]


def find_checkpoint(folder_or_hub: str | Path, revision: str | None = None) -> Path:
    """A local folder, else the snapshot of a model on the hub: safetensors, JSON and tokenizer files only."""
    folder, name = Path(folder_or_hub), str(folder_or_hub)
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise InputError(f"{name} is no folder and no name on the hub; give the folder that holds config.json")
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    asked, unasked = ["*.safetensors", "*.json", *COMPANION_FILES], ["*/*", "consolidated*"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=asked, ignore_patterns=unasked))
    except Exception as error:  # the hub's client raises of many kinds: HTTP, names, offline, cache
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{name}: no such folder here, and from the hub: {said}") from error


def load_weights(
    module: nn.Module,
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    allow_missing: tuple[str, ...] = (),
    ignore_tensors: tuple[str, ...] = (),
) -> LoadReport:
    """Assigns the weights of `folder` to a module on meta; mapped from the file where type and layout are right.

    Names in `allow_missing` that are missing become zeros, for the caller to draw; those `beside` are not the module's.
    One block is open at a time.
    """
    place = resolve_device(device)
    found, missing = match_tensors(module, folder, config, allow_missing, ignore_tensors)
    turned = transposed_weights(config)
    kind = dtype or default_dtype(found, config, place)
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    samples: dict[str, bytes] = {}
    for group in group_by_layer(found, config):
        state = {name: tensor.to(place) for name, tensor in _load_group(group, turned, kind, samples)}
        module.load_state_dict(state, strict=False, assign=True)
    zeros = {name: torch.zeros(shapes[name], dtype=kind, device=place) for name in missing}
    module.load_state_dict(zeros, strict=False, assign=True)
    return LoadReport(_combine_samples(samples), missing)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device meant, the CPU by default. Raises `Usage` for one that this torch does not reach."""
    try:
        place = torch.device(device or "cpu")
        if place.type != "cuda":
            torch.empty(0, device=place)
    except Exception as error:  # torch raises of many kinds: names, back ends it was built without
        raise UsageError(f"device {device}: this torch reaches no such device; use cpu") from error
    seen = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= seen:
        raise UsageError(
            f"device {place}: this torch sees {f'{seen} of CUDA, from cuda:0' if seen else 'no CUDA; use cpu'}"
        )
    return place


def _load_group(
    group: Mapping[str, StoredTensor], turned: frozenset[str], kind: torch.dtype, samples: dict[str, bytes]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one block, finite, in our layout and type; where one is a copy all are, so the mapping ends."""
    copied = any(name in turned or source.spec.dtype != kind for name, source in group.items())
    for path in {source.path for source in group.values()}:
        here = {name: source.name for name, source in group.items() if source.path == path}
        mapped = atomic.open_tensors(path, here.values())
        for name, stored in here.items():
            samples[name] = _sample_tensor(name, mapped[stored])
            atomic.check_finite(name, mapped[stored])
            tensor = mapped[stored].t() if name in turned else mapped[stored]
            if copied:
                tensor = torch.empty(tensor.shape, dtype=kind).copy_(tensor)
            if torch.finfo(kind).max < torch.finfo(mapped[stored].dtype).max:
                atomic.check_finite(name, tensor)
            yield name, tensor


def group_by_layer(found: Mapping[str, StoredTensor], config: DecoderConfig) -> list[dict[str, StoredTensor]]:
    """The tensors of each block together, all others one by one."""
    start = re.compile(rf"{re.escape(WEIGHT_NAMES[config.family].layers)}\.\d+\.")
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, source in found.items():
        block = start.match(name)
        groups.setdefault(block[0] if block else name, {})[name] = source
    return list(groups.values())


def default_dtype(found: Mapping[str, StoredTensor], config: DecoderConfig, device: torch.device) -> torch.dtype:
    """The type of the words as stored; on a CPU float32, unless it is bfloat16 and the CPU is fast at that."""
    words = found.get(f"{WEIGHT_NAMES[config.family].token_embedding}.weight")
    stored = words.spec.dtype if words else config.dtype
    fast = stored == torch.bfloat16 and any(
        getattr(torch.cpu, probe, bool)() for probe in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return stored if device.type != "cpu" or fast else torch.float32


def stored_dtype(folder: Path) -> torch.dtype:
    """The type of most bytes of a checkpoint."""
    held: dict[torch.dtype, int] = {}
    for source in index_tensors(folder).values():
        held[source.spec.dtype] = held.get(source.spec.dtype, 0) + math.prod(source.spec.shape)
    return max(held, key=lambda kind: held[kind])


def checkpoint_tensors(module: nn.Module, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """The module's tensors as they lie on disk: GPT-2's maps as [in, out]."""
    turned = transposed_weights(config)
    for name, tensor in module.state_dict().items():
        yield name, tensor.t() if name in turned else tensor


def weights_fingerprint(state: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over sorted names, shapes and 1,024 evenly strided elements each, in float32, of tensors as on disk."""
    return _combine_samples({name: _sample_tensor(name, tensor) for name, tensor in state})


def _sample_tensor(name: str, tensor: Tensor) -> bytes:
    n = tensor.numel()
    places = (
        torch.arange(min(n, FINGERPRINT_SAMPLES), device=tensor.device) * n // min(n, FINGERPRINT_SAMPLES)
        if n
        else torch.arange(0)
    )
    at: list[Tensor] = []  # torch.unravel_index would import sympy
    for width in reversed(tensor.shape):
        at.insert(0, places % width)
        places = places // width
    flat = tensor.detach()[tuple(at)] if at else tensor.detach().reshape(1)
    return (
        f"{strict_json.to_canonical_json([name, list(tensor.shape)])}\n".encode() + flat.float().cpu().numpy().tobytes()
    )


def _combine_samples(samples: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()


def save_weights(
    module: nn.Module,
    folder: Path,
    config: DecoderConfig,
    *,
    max_shard_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
    source_folder: Path | None = None,
    extra_fields: Mapping[str, object] | None = None,
) -> None:
    """A whole Hugging Face folder: config.json, shards and index, and the companions that `source_folder` has.

    `more` are fields of config.json beside the decoder's, or in their place.
    """
    if not max_shard_bytes > 0:
        raise UsageError(f"shard_bytes {max_shard_bytes:g}: must be > 0")
    state = dict(checkpoint_tensors(module, config))
    adapter = next((name for name in state if ".lora_" in name or ".base_layer." in name), None)
    if adapter:
        raise UsageError(f"{adapter} is of an adapter; merge it first")
    width = {name: (dtype or tensor.dtype).itemsize * tensor.numel() for name, tensor in state.items()}
    shards = plan_shards(width, max_shard_bytes)
    fields = {
        **replace(config, dtype=dtype or next(iter(state.values())).dtype).to_config_json(),
        **(extra_fields or {}),
    }
    source = json.dumps(fields, indent=2) + "\n"

    def write(new: Path) -> None:
        (new / "config.json").write_text(source, encoding="utf-8")
        for file, names in shards.items():
            held = {name: state[name].to(dtype or state[name].dtype) for name in names}
            atomic.save_tensors(new / file, held, {"format": "pt"})
        if len(shards) > 1:
            (new / INDEX_FILE).write_text(_index(shards, width, state), encoding="utf-8")
        for name in COMPANION_FILES:
            if source_folder and (source_folder / name).is_file():
                shutil.copyfile(strict_json.resolve_inside(source_folder, name), new / name)

    atomic.write_folder_atomically(folder, write, sum(width.values()))


def _index(shards: Mapping[str, list[str]], width: Mapping[str, int], state: Mapping[str, Tensor]) -> str:
    total = {"total_size": sum(width.values()), "total_parameters": sum(t.numel() for t in state.values())}
    places = {name: file for file, names in shards.items() for name in names}
    return json.dumps({"metadata": total, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def half_split(w: Shaped[Tensor, "NE *rest"], heads: int) -> Shaped[Tensor, "NE *rest"]:
    """Eq. C7: out[h, j E/2 + i] = w[h, 2 i + j], j in {0, 1}: neighbours as pairs become halves as pairs."""
    return w.reshape(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def interleave(w: Shaped[Tensor, "NE *rest"], heads: int) -> Shaped[Tensor, "NE *rest"]:
    """Eq. C7: out[h, 2 i + j] = w[h, j E/2 + i], j in {0, 1}: the inverse of `half_split`."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)
