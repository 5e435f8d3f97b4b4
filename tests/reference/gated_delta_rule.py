"""The gated delta rule token by token, the definition of `chunk_gated_delta_rule`."""

import torch
from torch import Tensor

from laconic.nested.recurrence.gated_delta_rule import ChunkOutput, Gates


def recurrent_gated_delta_rule(
    S: Tensor,
    k: Tensor,
    u: Tensor,
    q: Tensor | None,
    gates: Gates,
    *,
    N: Tensor | None = None,
    anchor: Tensor | None = None,
    read: str = "after",
) -> ChunkOutput:
    """Run the recurrence; arguments as in `chunk_gated_delta_rule`."""
    valid, erase = gates.valid, gates.erase
    on_tokens = torch.ones_like(gates.decay) if valid is None else valid[:, None].expand_as(gates.decay).to(S.dtype)
    outputs: list[Tensor] = []
    for t in range(k.shape[2]):
        on, decay, step = (x[:, :, t, None, None] for x in (on_tokens, gates.decay, gates.step_size))
        key, value, before = k[:, :, t, :, None], u[:, :, t, :, None], S
        S = on * decay * before + (1 - on) * before
        if gates.momentum is None:
            S = S + on * step * value @ key.mT
        elif N is not None:
            momentum = gates.momentum[:, :, t, None, None]
            N = on * (momentum * N + step * value @ key.mT) + (1 - on) * N
            S = S + on * N
        if erase is not None:
            stored = before @ key if anchor is None else anchor[:, :, t, :, None] + before @ key
            S = S - on * erase[:, :, t, None, None] * stored @ key.mT
        if q is not None:
            outputs.append(((before if read == "before" else S) @ q[:, :, t, :, None])[..., 0])
    return ChunkOutput(S, N if gates.momentum is not None else None, torch.stack(outputs, 2) if outputs else None)
