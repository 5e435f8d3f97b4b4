"""flash-linear-attention's gated delta rule for one chunk of the recurrence of `delta`, where it is installed.

Its recurrent kernel computes in float32 and has no backward, so it stands for chunks that are only read. As it says of
itself (fla.ops.gated_delta_rule), with h [K, V] and exp g, beta of every token:

    h = exp(g) h     h = h + beta k (v - hᵀ k)ᵀ     o = hᵀ q scale

which is ours transposed, S = hᵀ, with exp g = keep, beta = step / keep and v = keep (u - anchor).
"""

import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WIDEST = 256  # keys and values that it takes
Kernel = Callable[..., tuple[Tensor, Tensor]]


def found() -> Kernel | None:
    """The kernel, where its package and a CUDA device are, and it takes what is said above, tokens before heads."""
    if find_spec("fla") is None or not torch.cuda.is_available():
        return None
    module: Any = importlib.import_module("fla.ops.gated_delta_rule")
    kernel: Kernel = module.fused_recurrent_gated_delta_rule
    takes = set(inspect.signature(kernel).parameters)
    return kernel if takes >= {"g", "beta", "scale", "initial_state"} and "head_first" not in takes else None


KERNEL = found()


def fits(S: Tensor, k: Tensor, u: Tensor, *others: Tensor | None) -> bool:
    """Whether a chunk can be the kernel's: in float32 on a GPU, small enough, and no gradient is asked of it."""
    asked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (S, k, u, *others))
    return S.is_cuda and S.dtype == torch.float32 and max(S.shape[-2:]) <= WIDEST and not asked


def by_kernel(
    kernel: Kernel, S: Tensor, k: Tensor, u: Tensor, q: Tensor | None, keep: Tensor, step: Tensor, anchor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The state [B, H, O, I] after a chunk whose erase is the step of its write, and what queries read after tokens."""
    value = keep[..., None] * (u if anchor is None else u - anchor)
    query, key, value, g, beta = (
        x.transpose(1, 2).contiguous() for x in (k if q is None else q, k, value, keep.log(), step / keep)
    )
    y, h = kernel(
        q=query, k=key, v=value, g=g, beta=beta, scale=1.0, initial_state=S.mT.contiguous(), output_final_state=True
    )
    return h.mT, None if q is None else y.transpose(1, 2)
