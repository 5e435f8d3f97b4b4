"""Selections by kvpress with transformers, as KV caches that our decoder continues from."""

from pathlib import Path
from typing import Any

import torch

from laconic import KVCache


def load_pipeline_model(folder: Path) -> Any:
    """Load a model with transformers."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def select_with_kvpress(model: Any, ids: list[int], divisor: int) -> dict[str, KVCache]:
    """Return kvpress's selections of a document's keys and values by SnapKV and expected attention."""
    from kvpress import ExpectedAttentionPress, SnapKVPress  # type: ignore[import-not-found]
    from transformers import DynamicCache

    caches = dict[str, KVCache]()
    presses = {"snapkv": SnapKVPress(), "expected": ExpectedAttentionPress()}
    for name, press in presses.items():
        press.compression_ratio = 1 - 1 / divisor
        pressed = DynamicCache()
        with press(model):  # kvpress reads cache_position, which transformers 5 no longer passes to its layers
            model.model(torch.tensor([ids]), past_key_values=pressed, cache_position=torch.arange(len(ids)))
        keys, values = ([getattr(layer, part) for layer in pressed.layers] for part in ("keys", "values"))
        M, N = keys[0].shape[2], len(ids)
        # only the last position matters: the next token follows at N, and keys are stored rotated
        positions = torch.arange(N - M, N)[None]
        caches[f"kvpress {name}"] = KVCache(tuple(keys), tuple(values), positions, torch.ones_like(positions).bool())
    return caches
