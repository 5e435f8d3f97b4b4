"""What a file of a KV cache must hold."""

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.models.config import DecoderConfig


def find_invalid_tensor(tensors: Mapping[str, Tensor], config: DecoderConfig) -> str | None:
    """Return the name of a tensor that is missing, unexpected, or of another shape or dtype than the decoder needs."""
    L, G, E = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    valid, sizes = tensors.get("valid"), tensors.get("prefix_sizes")
    if valid is None or valid.ndim != 2:
        return "valid"
    B, S = valid.shape
    expected: dict[str, tuple[tuple[int, ...], object]] = {  # shape, and dtype; True is any floating-point dtype
        **{f"{kind}.{i}": ((B, G, S, E), True) for kind in ("keys", "values") for i in range(L)},
        "positions": ((B, S), torch.long),
        "valid": ((B, S), torch.bool),
    }
    if sizes is not None:
        if sizes.shape != (L, G) or sizes.dtype != torch.long or bool((sizes < 0).any()):
            return "prefix_sizes"
        expected |= {"prefix_sizes": ((L, G), torch.long), "prefix_tokens": ((B,), torch.long)}
        for i, N in enumerate(map(int, sizes.sum(1))):
            expected |= {f"prefix_{kind}.{i}": ((B, N, E), True) for kind in ("keys", "values")}
            if "prefix_valid.0" in tensors:
                expected[f"prefix_valid.{i}"] = ((B, N), torch.bool)
    actual = {name: (tuple(x.shape), x.is_floating_point() or x.dtype) for name, x in tensors.items()}
    return min((name for name, _ in expected.items() ^ actual.items()), default=None)
