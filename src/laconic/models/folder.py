"""What lies in a checkpoint folder: its shards, whose tensors are whose, and what is missing or too much."""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from laconic.errors import InputError, UnsafeFileError
from laconic.models.config import WEIGHT_NAMES, DecoderConfig
from laconic.storage import atomic, strict_json
from laconic.storage.strict_json import TensorSpec, is_printable

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pth", ".pt", ".ckpt")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_LISTED = 10  # names of a kind in one error


class StoredTensor(NamedTuple):
    """Where a tensor lies: its file, its name there, and what the header promises."""

    path: Path
    name: str
    spec: TensorSpec

    def load(self) -> Tensor:
        return atomic.open_tensors(self.path, [self.name])[self.name]


def match_tensors(
    module: nn.Module,
    folder: Path,
    config: DecoderConfig,
    allow_missing: tuple[str, ...],
    ignore_tensors: tuple[str, ...] = (),
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Where each tensor of the module lies, and the allowed names that lie nowhere; else `BadInput` names them all.

    Tensors named in `beside` are another's, and may be there.
    """
    turned = transposed_weights(config)
    shapes = {
        name: tuple(tensor.shape)[::-1] if name in turned else tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
    }
    _check_names(allow_missing, list(shapes))
    own = {name: source for name, source in index_tensors(folder).items() if name not in ignore_tensors}
    found = match_prefix(own, set(shapes), config)
    extra = {name: source for name, source in found.items() if name not in shapes}
    unexpected = [name for name, source in extra.items() if not is_redundant(name, source, found, config)]
    absent = [name for name in shapes if name not in found]
    missing = [name for name in absent if name not in allow_missing]
    kept = {name: source for name, source in found.items() if name in shapes}
    odd = [name for name, source in kept.items() if source.spec.dtype not in FLOAT_DTYPES]
    wrong = [
        f"{name} {list(source.spec.shape)}, config says {list(shapes[name])}"
        for name, source in kept.items()
        if source.spec.shape != shapes[name]
    ]
    _raise_mismatch(missing, unexpected, wrong, [f"{name} {found[name].spec.dtype}" for name in odd])
    return kept, tuple(name for name in absent if name in allow_missing)


def _check_names(names: Sequence[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise InputError(f"{name}: no such tensor; did you mean {near}?")


def _raise_mismatch(missing: list[str], unexpected: list[str], wrong: list[str], odd: list[str]) -> None:
    said = [
        f"{len(names):,} {what} ({_join_names(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    said += [f"{len(wrong):,} of wrong shape: {_join_names(wrong, '; ')}"] if wrong else []
    said += [f"{len(odd):,} of no float type: {_join_names(odd)}"] if odd else []
    if said:
        first, rest = said[0].split(" ", 1)
        raise InputError(", ".join([f"{first} tensor{'' if first == '1' else 's'} {rest}", *said[1:]]))


def warn_randomly_initialized(names: Sequence[str]) -> None:
    """Warns of tensors that were absent and allowed to be, if there are any."""
    if len(names) == 1:
        warnings.warn(f"{names[0]} was not in the checkpoint and is drawn anew", stacklevel=3)
    elif names:
        many = f"{len(names):,} tensors were not in the checkpoint and are drawn anew ({_join_names(names)})"
        warnings.warn(many, stacklevel=3)


def _join_names(names: Sequence[str], comma: str = ", ") -> str:
    return comma.join([*names[:MAX_LISTED], *(["…"] if len(names) > MAX_LISTED else [])])


def index_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by its name on disk, from headers that were checked."""
    if (folder / SINGLE_FILE).exists() or (folder / SINGLE_FILE).is_symlink():
        files = {SINGLE_FILE: [""]}
    elif (folder / INDEX_FILE).exists():
        files = _read_index(strict_json.read_json(strict_json.resolve_inside(folder, INDEX_FILE)))
    else:
        refuse_pickle(folder)
        raise InputError(f"{folder} has config.json but no model.safetensors and no index; was the download cut?")
    found: dict[str, StoredTensor] = {}
    for shard, names in files.items():
        refuse_pickle(folder, shard)
        path = strict_json.resolve_inside(folder, shard)
        if not path.exists():
            raise InputError(f"{shard} is named by the index and not there ({len(names)} tensors, first {names[0]})")
        for name, entry in strict_json.read_safetensors_header(path).tensors.items():
            if name in found:
                raise InputError(f"{name} lies in {found[name].path.name} and in {shard}; fetch them again")
            found[name] = StoredTensor(path, name, entry)
    return found


def _read_index(index: dict[str, Any]) -> dict[str, list[str]]:
    places = index.get("weight_map")
    sound = isinstance(places, dict) and all(
        is_printable(name) and type(shard) is str for name, shard in cast(dict[str, Any], places).items()
    )
    if not sound:
        raise InputError(f"{INDEX_FILE}: weight_map is no table of tensor names and file names")
    files: dict[str, list[str]] = {}
    for name, shard in cast(dict[str, str], places).items():
        files.setdefault(shard, []).append(name)
    return files


def refuse_pickle(folder: Path, name: str | None = None) -> None:
    """Raises `Unsafe` (77) if the file named, or any of the folder, is a pickle by its name."""
    names = sorted(path.name for path in folder.iterdir()) if name is None else [name]
    pickle = next((name for name in names if name.endswith(PICKLE_SUFFIXES)), None)
    if pickle:
        raise UnsafeFileError(
            f"{pickle} is a pickle and can run code; not opened. "
            "Save it as safetensors with transformers' save_pretrained in an environment you trust"
        )


def match_prefix(stored: dict[str, StoredTensor], names: set[str], config: DecoderConfig) -> dict[str, StoredTensor]:
    """The same tensors under the module's names: a base model's file lacks `model.` or the like."""
    parts = WEIGHT_NAMES[config.family].base_prefix.split(".")
    head = f"{WEIGHT_NAMES[config.family].head}.weight"
    variants = [stored]
    for i in range(len(parts)):
        base = ".".join(parts[: i + 1])
        variants.append({f"{base}.{name}" if name != head else name: source for name, source in stored.items()})
    return min(variants, key=lambda variant: len(names ^ variant.keys()))


def is_redundant(name: str, source: StoredTensor, stored: Mapping[str, StoredTensor], config: DecoderConfig) -> bool:
    """Whether a tensor that the module has no place for says nothing: causal triangles, RoPE tables, a tied head."""
    names = WEIGHT_NAMES[config.family]
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if config.family == "gpt2" and name.endswith(".attn.masked_bias"):
        return source.spec.shape == ()
    if config.family == "gpt2" and name.endswith(".attn.bias"):
        square = source.load().squeeze()
        return square.ndim == 2 and torch.equal(square.bool(), torch.ones(square.shape, dtype=torch.bool).tril())
    words = stored.get(f"{names.token_embedding}.weight")
    if not config.tie_word_embeddings or name != f"{names.head}.weight" or words is None:
        return False
    if source.spec.shape != words.spec.shape or not torch.equal(source.load(), words.load()):
        raise InputError(
            f"tie_word_embeddings is true but {name} differs from {names.token_embedding}.weight; set it to false"
        )
    return True


def transposed_weights(config: DecoderConfig) -> frozenset[str]:
    """The names of the maps that lie as [in, out] on disk: GPT-2's."""
    names = WEIGHT_NAMES[config.family]
    layers = range(config.num_hidden_layers)
    return frozenset(f"{names.layers}.{l}.{name}.weight" for l in layers for name in names.transposed)


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: float) -> dict[str, list[str]]:
    """File names and their tensors, in order, each file at most `shard_bytes` unless one tensor alone is larger."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > max_shard_bytes:
            files, held = [*files, []], 0
        files[-1].append(name)
        held += size
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}
