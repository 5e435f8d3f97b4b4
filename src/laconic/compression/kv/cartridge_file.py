"""Cartridges as peft stores them (`CartridgeConfig`): a folder that `peft.PeftModel.from_pretrained` loads.

The tensor `prompt_embeddings` [M, 2 L G E] has, for each slot, the rotated keys and then the values of every layer.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.memory_file import KVMemoryMetadata
from laconic.errors import CorruptArtifactError, InputError, UsageError
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.storage import atomic
from laconic.storage.safetensors_header import read_safetensors_header
from laconic.storage.strict_json import read_foreign_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TENSOR = "prompt_embeddings"
DIGEST = "digest"  # key of the header's metadata, which peft ignores
MAX_SLOTS = 1 << 20


def save_cartridge(memory: KVMemory, folder: str | Path, base_model: str | None = None) -> None:
    """Write a memory as a peft adapter.

    Args:
        memory: One document whose slots have consecutive positions, as `fit_cartridge` returns it.
        folder: Must not exist, or be empty.
        base_model: Name or folder of the model, for information.

    Raises:
        UsageError: If the memory has several documents, or other positions, as one that was not fitted.
        BusyError: If the folder is not empty.
    """
    if memory.B != 1:
        raise UsageError(f"a memory of {memory.B} texts cannot be a peft cartridge, which holds one text")
    if not memory.has_equal_heads or int(memory.num_tokens) != memory.M:
        raise UsageError(
            f"a memory of {int(memory.num_tokens):,} tokens in {int(memory.slots.min()):,} to {memory.M:,} slots "
            "cannot be a peft cartridge, whose heads have equally many slots, right before the next token; give one "
            "that laconic compress --fit --equal-heads has written"
        )
    cache = memory.to_cache()
    pairs = torch.stack([x[0].transpose(0, 1) for kv in zip(cache.keys, cache.values, strict=True) for x in kv], 1)
    (L, G, E), M = cache.shape_summary, memory.M
    config = {
        "peft_type": "CARTRIDGE",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "num_virtual_tokens": M,
        "num_frozen_tokens": 0,
        "num_layers": L,
        "num_attention_heads": G,
        "token_dim": G * E,
        "num_transformer_submodules": 1,
    }

    def write(target: Path) -> None:
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = atomic.unshare_tensors({TENSOR: pairs.reshape(M, -1)})
        metadata = {"format": "pt", DIGEST: atomic.hash_artifact("", tensors)}
        atomic.save_tensors(target / WEIGHTS_FILE, tensors, metadata)

    atomic.write_folder_atomically(Path(folder), write, pairs.nbytes)


def is_cartridge(path: str | Path) -> bool:
    file = Path(path) / CONFIG_FILE
    return file.is_file() and read_foreign_json(file).get("peft_type") == "CARTRIDGE"


def load_cartridge(folder: str | Path, decoder: Decoder, metadata: KVMemoryMetadata | None = None) -> KVMemory:
    """Load a peft cartridge as a memory. The files do not name the decoder's weights; only shapes are checked."""
    folder = Path(folder)
    config = decoder.config
    if not is_cartridge(folder):
        raise InputError(f"{folder}: no peft cartridge; expected {CONFIG_FILE} with peft_type CARTRIDGE")
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise InputError(f"{folder}: has no {WEIGHTS_FILE}; a cartridge saved with pickle is not read")
    header = read_safetensors_header(path)
    spec = header.tensors.get(TENSOR)
    L, G, E = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    if spec is None or len(spec.shape) != 2 or spec.shape[1] != 2 * L * G * E or not 1 <= spec.shape[0] <= MAX_SLOTS:
        shape = None if spec is None else list(spec.shape)
        raise InputError(f"{path}: {TENSOR} is {shape}, expected [slots, {2 * L * G * E}] for {L} layers of {G} x {E}")
    tensors = atomic.open_tensors(path, [TENSOR])
    if header.metadata.get(DIGEST, "") not in ("", atomic.hash_artifact("", tensors)):  # peft writes none
        raise CorruptArtifactError(f"{path} was changed after it was written; use an intact copy")
    pairs: Tensor = tensors[TENSOR].to(decoder.token_embedding.weight)
    atomic.check_finite(f"{path}: {TENSOR}", pairs)
    M = len(pairs)
    keys_and_values = pairs.view(M, L, 2, G, E).permute(1, 2, 3, 0, 4)[:, :, None]  # [L, 2, 1, G, M, E]
    positions = torch.arange(M, device=pairs.device)[None]
    keys = tuple(keys_and_values[:, 0].contiguous())
    values = tuple(keys_and_values[:, 1].contiguous())
    return KVMemory.from_cache(KVCache(keys, values, positions, torch.ones_like(positions, dtype=torch.bool)), metadata)
