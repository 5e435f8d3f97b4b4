"""Reference implementation of a Titans layer: one reading step, token by token, with every matrix written out.

Titans arXiv:2501.00663 (Eq. 11 to 19). Start reading here: `layer.py` computes the outputs and
gradients chunk by chunk, and a test checks in float64 that they equal those of this file. There is no state and no
mask: a text is read from its beginning.

Symbols: k, v, q keys, values and queries of a head [E]; M memory, M_c the same at its chunk's first token, S momentum
of its writes; C tokens of a chunk.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.nested.titans.equations import TitansParams

Matrices = list[Tensor]  # M, or W1 and W2 of a two-layer memory; each [B, H, O, I]


def titans_reference(params: TitansParams, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """Read vectors through a Titans layer and return its outputs without the residual."""
    shape, w = params
    o, T = shape.options, x.shape[1]
    if o.num_persistent_tokens:  # Eq. 19
        x = torch.cat([w["persistent"].expand(len(x), -1, -1), x], 1)
    q, k, v = (split_heads(F.silu(convolve(x @ w[f"{n}_proj.weight"].mT, w[f"{n}_conv.weight"])), shape.num_heads)
               for n in "qkv")  # fmt: skip
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)  # Eq. 11
    y = read_memory(params, q, k, v, gates_by_token(params, x))
    y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    y = y.transpose(1, 2).flatten(2) * w["norm.weight"]
    return (y * F.silu(x @ w["g_proj.weight"].mT))[:, x.shape[1] - T :] @ w["o_proj.weight"].mT


def split_heads(x: Float[Tensor, "B T D"], num_heads: int) -> Float[Tensor, "B H T E"]:
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


def convolve(x: Float[Tensor, "B T D"], taps: Float[Tensor, "D W"]) -> Float[Tensor, "B T D"]:
    """Sum the last W tokens of every channel, weighted by its taps; tokens before the first are zero."""
    W = taps.shape[1]
    padded = F.pad(x, (0, 0, W - 1, 0))
    return torch.stack([(padded[:, t : t + W] * taps.mT).sum(1) for t in range(x.shape[1])], 1)


def gates_by_token(params: TitansParams, x: Float[Tensor, "B T D"]) -> Mapping[str, Float[Tensor, "B H T"]]:
    """Return the gates of every token: "decay", the factor on M (1: none is lost), whose weights are called `keep`;
    "step", the step size; and "momentum" if it is used."""
    shape, w = params
    o = shape.options
    names = {"decay": "keep", "step": "step"} | ({"momentum": "momentum"} if o.momentum else {})
    return {gate: (x @ w[f"{name}.weight"].mT + w[f"{name}.bias"]).mT.sigmoid() for gate, name in names.items()}


def read_memory(
    params: TitansParams, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]
) -> Float[Tensor, "B H T E"]:
    """Write every pair (k, v) into the memory and return what the queries read from it."""
    shape, w = params
    o, C, B, T = shape.options, shape.chunk_size, len(q), q.shape[2]
    names = ["memory.M"] if o.memory_depth == 1 else ["memory.W1", "memory.W2"]
    starts = [w[n].expand(B, *w[n].shape) for n in names]
    zeros = [torch.zeros_like(W) for W in starts]
    memory, at_boundary, surprise, outputs = starts, starts, zeros, list[Tensor]()  # M, M_c, S
    for t in range(T):
        if t and t % C == 0:
            memory = at_boundary = [clip_norm(W, o.max_memory_norm) for W in memory]
        before = memory
        decay, step = (gates[n][:, :, t, None, None] for n in ("decay", "step"))  # 1 - alpha and theta of the paper
        gradients = inner_gradient(at_boundary, k[:, :, t], v[:, :, t], o.loss_factor)
        momentum = gates["momentum"][:, :, t, None, None] if o.momentum else 0.0  # eta
        surprise = [momentum * S - step * g for S, g in zip(surprise, gradients, strict=True)]  # Eq. 14
        memory = [decay * W + S for W, S in zip(memory, surprise, strict=True)]  # Eq. 13
        read = {"after": memory, "before": before, "boundary": at_boundary}[o.read_at]
        outputs.append(apply_memory(read, q[:, :, t]))  # Eq. 15
    return torch.stack(outputs, 2)


def apply_memory(M: Matrices, x: Float[Tensor, "B H E"]) -> Float[Tensor, "B H E"]:
    """Return M x, or x + W1 SiLU(W2 x)."""
    if len(M) == 1:
        return (M[0] @ x[..., None])[..., 0]
    return x + (M[0] @ F.silu(M[1] @ x[..., None]))[..., 0]


def inner_gradient(M: Matrices, k: Float[Tensor, "B H E"], v: Float[Tensor, "B H E"], factor: int) -> Matrices:
    """Compute Eq. 12 by autograd: the gradient of factor/2 ‖M(k) - v‖² with respect to every matrix."""
    leaves = [W if W.requires_grad else W.detach().requires_grad_() for W in M]  # frozen ones are written to as well
    with torch.enable_grad():
        loss = factor / 2 * (apply_memory(leaves, k) - v).square().sum()
        return list(torch.autograd.grad(loss, leaves, create_graph=True))


def clip_norm(M: Float[Tensor, "B H O I"], max_norm: float) -> Float[Tensor, "B H O I"]:
    """Clip the Frobenius norm over the root of the smaller side to `max_norm` (0: no bound)."""
    bound = max_norm * min(M.shape[-2:]) ** 0.5
    return M * (bound / M.square().sum((-2, -1), keepdim=True).sqrt()).clamp(max=1.0) if max_norm else M
