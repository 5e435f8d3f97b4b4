"""What lies in a checkpoint folder: its shards, whose tensors are whose, and what is missing or too much."""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from laconic.core import artifact
from laconic.core.artifact import BadInput, Entry, Unsafe
from laconic.core.families import NAMES, DecoderConfig
from laconic.core.strict import plain

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pth", ".pt", ".ckpt")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LISTED = 10  # names of a kind in one error


class Source(NamedTuple):
    """Where a tensor lies: its file, its name there, and what the header promises."""

    path: Path
    name: str
    entry: Entry

    def read(self) -> Tensor:
        return artifact.open_tensors(self.path, [self.name])[self.name]


def plan(
    module: nn.Module,
    folder: Path,
    config: DecoderConfig,
    allow_missing: tuple[str, ...],
    beside: tuple[str, ...] = (),
) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Where each tensor of the module lies, and the allowed names that lie nowhere; else `BadInput` names them all.

    Tensors named in `beside` are another's, and may be there.
    """
    turned = transposed(config)
    shapes = {
        name: tuple(tensor.shape)[::-1] if name in turned else tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
    }
    _check_names(allow_missing, list(shapes))
    own = {name: source for name, source in sources(folder).items() if name not in beside}
    found = prefixed(own, set(shapes), config)
    extra = {name: source for name, source in found.items() if name not in shapes}
    unexpected = [name for name, source in extra.items() if not droppable(name, source, found, config)]
    absent = [name for name in shapes if name not in found]
    missing = [name for name in absent if name not in allow_missing]
    kept = {name: source for name, source in found.items() if name in shapes}
    odd = [name for name, source in kept.items() if source.entry.dtype not in FLOATS]
    wrong = [
        f"{name} {list(source.entry.shape)}, config says {list(shapes[name])}"
        for name, source in kept.items()
        if source.entry.shape != shapes[name]
    ]
    _refuse(missing, unexpected, wrong, [f"{name} {found[name].entry.dtype}" for name in odd])
    return kept, tuple(name for name in absent if name in allow_missing)


def _check_names(names: Sequence[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise BadInput(f"{name}: no such tensor; did you mean {near}?")


def _refuse(missing: list[str], unexpected: list[str], wrong: list[str], odd: list[str]) -> None:
    said = [
        f"{len(names):,} {what} ({_list(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    said += [f"{len(wrong):,} of wrong shape: {_list(wrong, '; ')}"] if wrong else []
    said += [f"{len(odd):,} of no float type: {_list(odd)}"] if odd else []
    if said:
        first, rest = said[0].split(" ", 1)
        raise BadInput(", ".join([f"{first} tensor{'' if first == '1' else 's'} {rest}", *said[1:]]))


def say_drawn(names: Sequence[str]) -> None:
    """Warns of tensors that were absent and allowed to be, if there are any."""
    if len(names) == 1:
        warnings.warn(f"{names[0]} was not in the checkpoint and is drawn anew", stacklevel=3)
    elif names:
        many = f"{len(names):,} tensors were not in the checkpoint and are drawn anew ({_list(names)})"
        warnings.warn(many, stacklevel=3)


def _list(names: Sequence[str], comma: str = ", ") -> str:
    return comma.join([*names[:LISTED], *(["…"] if len(names) > LISTED else [])])


def sources(folder: Path) -> dict[str, Source]:
    """Every tensor of a folder by its name on disk, from headers that were checked."""
    if (folder / WHOLE).exists() or (folder / WHOLE).is_symlink():
        files = {WHOLE: [""]}
    elif (folder / INDEX).exists():
        files = _shards_of(artifact.read_json(artifact.inside(folder, INDEX)))
    else:
        refuse_pickle(folder)
        raise BadInput(f"{folder} has config.json but no model.safetensors and no index; was the download cut?")
    found: dict[str, Source] = {}
    for shard, names in files.items():
        refuse_pickle(folder, shard)
        path = artifact.inside(folder, shard)
        if not path.exists():
            raise BadInput(f"{shard} is named by the index and not there ({len(names)} tensors, first {names[0]})")
        for name, entry in artifact.check_header(path).tensors.items():
            if name in found:
                raise BadInput(f"{name} lies in {found[name].path.name} and in {shard}; fetch them again")
            found[name] = Source(path, name, entry)
    return found


def _shards_of(index: dict[str, Any]) -> dict[str, list[str]]:
    places = index.get("weight_map")
    sound = isinstance(places, dict) and all(
        plain(name) and type(shard) is str for name, shard in cast(dict[str, Any], places).items()
    )
    if not sound:
        raise BadInput(f"{INDEX}: weight_map is no table of tensor names and file names")
    files: dict[str, list[str]] = {}
    for name, shard in cast(dict[str, str], places).items():
        files.setdefault(shard, []).append(name)
    return files


def refuse_pickle(folder: Path, name: str | None = None) -> None:
    """Raises `Unsafe` (77) if the file named, or any of the folder, is a pickle by its name."""
    names = sorted(path.name for path in folder.iterdir()) if name is None else [name]
    pickle = next((name for name in names if name.endswith(PICKLES)), None)
    if pickle:
        raise Unsafe(
            f"{pickle} is a pickle and can run code; not opened. "
            "Save it as safetensors with transformers' save_pretrained in an environment you trust"
        )


def prefixed(found: dict[str, Source], wanted: set[str], config: DecoderConfig) -> dict[str, Source]:
    """The same tensors under the module's names: a base model's file lacks `model.` or the like."""
    parts = NAMES[config.family].base.split(".")
    head = f"{NAMES[config.family].head}.weight"
    variants = [found]
    for i in range(len(parts)):
        base = ".".join(parts[: i + 1])
        variants.append({f"{base}.{name}" if name != head else name: source for name, source in found.items()})
    return min(variants, key=lambda variant: len(wanted ^ variant.keys()))


def droppable(name: str, source: Source, found: Mapping[str, Source], config: DecoderConfig) -> bool:
    """Whether a tensor that the module has no place for says nothing: causal triangles, RoPE tables, a tied head."""
    names = NAMES[config.family]
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if config.family == "gpt2" and name.endswith(".attn.masked_bias"):
        return source.entry.shape == ()
    if config.family == "gpt2" and name.endswith(".attn.bias"):
        square = source.read().squeeze()
        return square.ndim == 2 and torch.equal(square.bool(), torch.ones(square.shape, dtype=torch.bool).tril())
    words = found.get(f"{names.words}.weight")
    if not config.tie_word_embeddings or name != f"{names.head}.weight" or words is None:
        return False
    if source.entry.shape != words.entry.shape or not torch.equal(source.read(), words.read()):
        raise BadInput(f"tie_word_embeddings is true but {name} differs from {names.words}.weight; set it to false")
    return True


def transposed(config: DecoderConfig) -> frozenset[str]:
    """The names of the maps that lie as [in, out] on disk: GPT-2's."""
    names = NAMES[config.family]
    layers = range(config.num_hidden_layers)
    return frozenset(f"{names.blocks}.{l}.{name}.weight" for l in layers for name in names.transposed)


def split(width: Mapping[str, int], shard_bytes: float) -> dict[str, list[str]]:
    """File names and their tensors, in order, each file at most `shard_bytes` unless one tensor alone is larger."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in width.items():
        if files[-1] and held + size > shard_bytes:
            files, held = [*files, []], 0
        files[-1].append(name)
        held += size
    if len(files) == 1:
        return {WHOLE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}
