"""Convert a GGUF file to a Hugging Face folder, or find the folder of an earlier conversion."""

import hashlib
import itertools
import json
import math
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from laconic.console import ProgressFn, log_message, progress
from laconic.errors import BusyError, InputError, translate_os_errors
from laconic.models.checkpoints.checkpoint_files import save_shards
from laconic.models.config import DecoderConfig
from laconic.models.gguf.config import ROPE_FACTORS_TENSOR, build_config
from laconic.models.gguf.header import GGUFHeader, read_header
from laconic.models.gguf.tensors import check_quantizations, match_weights, read_tensor, read_weight
from laconic.models.gguf.tokenizer import build_tokenizer_files
from laconic.storage.atomic import write_folder_atomically, write_text_atomically
from laconic.storage.cache_dir import cache_dir
from laconic.storage.export_record import hash_file, write_export_record
from laconic.storage.file_names import check_is_file
from laconic.storage.strict_json import read_json

CONVERTER_VERSION = 3  # increase it when the converted folder of a file changes
SOURCE_FILE = "gguf_source.json"  # name, SHA-256 and quantisations of the file that a folder was converted from
MAX_SHARD_BYTES = 5e9  # of one safetensors file; about as much memory is needed
HALF_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def convert_gguf(
    path: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    digest: str | None = None,
    on_progress: ProgressFn | None = None,
) -> None:
    """Convert a GGUF file to a Hugging Face folder with weights, tokenizer and chat template; write nothing on errors.

    The weights are stored in `dtype`, by default in float16 or bfloat16 if all matrices in the file have it, with
    vectors in float32, else in float32. `digest` is the file's SHA-256, if it is known already.
    """
    header = read_header(path)
    check_quantizations(header)
    factors = header.tensors.get(ROPE_FACTORS_TENSOR)
    source = build_config(header, None if factors is None else read_tensor(header, factors, torch.float32))
    types = {tensor.quantization for tensor in header.tensors.values() if len(tensor.shape) > 1}
    stored = dtype or (HALF_TYPES.get(types.pop()) if len(types) == 1 else None) or torch.float32
    source["dtype"] = str(stored).removeprefix("torch.")
    try:
        config = DecoderConfig.from_dict(source)
    except InputError as error:
        raise InputError(f"{path.name}: {str(error).removeprefix('config.json: ')}") from None
    matched = match_weights(header, config)
    dtypes = {name: torch.float32 if dtype is None and len(t.shape) == 1 else stored for name, t in matched.items()}
    sizes = {name: math.prod(tensor.shape) * dtypes[name].itemsize for name, tensor in matched.items()}
    texts = build_tokenizer_files(header, config.vocab_size)
    texts["config.json"] = json.dumps(source, indent=2) + "\n"
    token_ids = {key: source[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    texts["generation_config.json"] = json.dumps(token_ids, indent=2) + "\n"
    texts[SOURCE_FILE] = json.dumps(describe_source(header, digest), indent=2) + "\n"

    num_written = itertools.count()

    def load(name: str) -> torch.Tensor:
        if on_progress:
            on_progress(name, next(num_written), len(matched))
        return read_weight(name, matched, header, config, dtypes[name])

    def write(target: Path) -> None:
        for name, text in texts.items():
            (target / name).write_text(text, encoding="utf-8")
        save_shards(target, sizes, load, MAX_SHARD_BYTES)
        write_export_record(target)

    write_folder_atomically(folder, write, sum(sizes.values()))


def describe_source(header: GGUFHeader, digest: str | None = None) -> dict[str, Any]:
    """Return name and SHA-256 of a file, and the number of weights of each quantisation, without those in vectors."""
    counts = Counter[str]()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:  # vectors, norms and biases, are F32 in files of any quantisation
            counts[tensor.quantization] += math.prod(tensor.shape)
    return {
        "file": header.path.name,
        "sha256": digest or hash_file(header.path),
        "quantization": dict(counts.most_common()),
        "converter": CONVERTER_VERSION,
    }


def describe_conversion(folder: Path) -> str:
    """Return a phrase with the GGUF file that a folder was converted from; "" for other folders."""
    if not (folder / SOURCE_FILE).is_file():
        return ""
    source = read_json(folder / SOURCE_FILE)
    return f"converted from {source['file']} (weights rounded to {next(iter(source['quantization']))})"


def find_or_convert_gguf(path: Path) -> Path:
    """Return the Hugging Face folder of a GGUF file in laconic's cache; convert the file on first use."""
    check_is_file(path)
    digest = find_digest(path)
    folder = cache_dir() / "gguf" / f"{digest}-{CONVERTER_VERSION}"
    if not (folder / "config.json").is_file():
        log_message(f"laconic: converting {path.name} once, into {folder}")
        with progress("converting") as on_progress, suppress(BusyError):  # another process may have been faster
            convert_gguf(path, folder, digest=digest, on_progress=on_progress)
    return folder


def find_digest(path: Path) -> str:
    """Return the SHA-256 of a file, from the cache if path, size and modification time are unchanged."""
    with translate_os_errors(path):
        status = path.stat()
    identity = f"{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    record = cache_dir() / "gguf" / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    if record.is_file():
        return record.read_text(encoding="ascii")
    read_header(path)  # raises for other files before they are read to the end
    digest = hash_file(path)
    with translate_os_errors(record):
        record.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(record, digest)
    return digest
