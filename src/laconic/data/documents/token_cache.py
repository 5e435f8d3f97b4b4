"""Token ids of large corpora on disk, so that a corpus is tokenized once and not at every start."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import tokenizers
import torch

from laconic.console import ProgressFn
from laconic.data.documents.tokenize import TokenArray, tokenize_texts
from laconic.data.tokenizer import Tokenizer
from laconic.errors import LaconicError
from laconic.storage import atomic
from laconic.storage.cache_dir import cache_dir

MIN_CHARS = 1_000_000  # smaller corpora take less than a second or two
KIND = "tokens"


def tokenize_with_cache(
    texts: Sequence[str], tokenizer: Tokenizer, progress: ProgressFn | None = None
) -> list[TokenArray]:
    """Tokenize texts as `tokenize_texts` does, or read their ids from the cache.

    A file of the cache belongs to these texts, this tokenizer and this version of the tokenizers library. A damaged
    file is written again; if the cache cannot be written, nothing is lost but time.
    """
    if sum(map(len, texts)) < MIN_CHARS:
        return tokenize_texts(texts, tokenizer, progress)
    path = cache_dir() / "tokens" / f"{hash_texts(texts, tokenizer)}.safetensors"
    with suppress(LaconicError):  # there is no file, or a damaged one
        tensors, _ = atomic.load_artifact(path, KIND)
        return np.split(tensors["ids"].numpy(), tensors["lengths"].cumsum(0)[:-1].numpy())
    ids = tokenize_texts(texts, tokenizer, progress)
    with suppress(LaconicError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths = torch.tensor([len(text) for text in ids])
        atomic.save_artifact(path, {"ids": torch.from_numpy(np.concatenate(ids)), "lengths": lengths}, KIND, {})
    return ids


def hash_texts(texts: Sequence[str], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(f"{tokenizers.__version__} {tokenizer.fingerprint}".encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
