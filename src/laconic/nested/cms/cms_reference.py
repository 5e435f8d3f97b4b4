"""Reference implementation of a continuum memory system: one reading step, row by row and token by token.

Nested Learning arXiv:2512.24695, Eq. 70 to 74. Start reading here: `layer.py` and `updates.py` compute the same in
chunks, with low-rank changes, and a test holds them to this file in float64. Every row has its own copy of all weights,
and autograd computes the gradient of each token's inner loss. Updates are plain gradient descent on the associative
loss; a nested level's start moves by its first-order gradient. There is no state and no mask.

Symbols: l levels, C_l tokens between two updates of level l; theta its weights; z its input; κ, ν key and value.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.nested.cms.level import CMSParams

Weights = dict[str, Tensor]  # weights of one level: `up_proj.weight` and so on


def cms_reference(params: CMSParams, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """Read vectors through the levels, which learn from them, and return the outputs without the residual."""
    return torch.stack([read_row(params, row) for row in x])


def read_row(params: CMSParams, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    """Read one text."""
    shape, outputs = params.shape, list[Tensor]()
    K, is_nested = len(shape.chunk_sizes), shape.options.structure == "nested"
    starts = [start_weights(params, l) for l in range(K)]  # theta_0
    theta = [{name: w.clone() for name, w in start.items()} for start in starts]  # a clone: ν may hold theta_0
    chunk_terms = [zero_terms(start) for start in starts]  # sums over the open chunk of each level
    slower_terms = [zero_terms(start) for start in starts]  # the same with the slower level's steps and chunk
    for i, z in enumerate(x, 1):
        y, inputs = run_levels(params, theta, z)
        outputs.append(y)
        steps = [step_size(params, l, inputs[l]) for l in range(K)]
        for l in range(K):
            gradient = inner_gradient(params, l, theta[l], inputs[l])
            for name, g in gradient.items():
                chunk_terms[l][name] = chunk_terms[l][name] + steps[l] * g
                if l + 1 < K:
                    slower_terms[l][name] = slower_terms[l][name] + steps[l + 1] * g
        for l, C in enumerate(shape.chunk_sizes):  # Eq. 71
            if i % C == 0:
                theta[l] = descend(params, l, theta[l], chunk_terms[l])
                chunk_terms[l] = zero_terms(theta[l])
        for l in range(K - 1 if is_nested else 0):  # Eq. 72
            if i % shape.chunk_sizes[l + 1] == 0:
                theta[l] = starts[l] = descend(params, l, starts[l], slower_terms[l])
                slower_terms[l] = zero_terms(theta[l])
    return torch.stack(outputs)


def start_weights(params: CMSParams, l: int) -> Weights:
    """Return the trained start of a level's MLP."""
    prefix = f"levels.{l}."
    names = [f"{name}.{kind}" for name in params.shape.projections for kind in ("weight", "bias")]
    return {name: params.weights[prefix + name] for name in names if prefix + name in params.weights}


def zero_terms(weights: Weights) -> Weights:
    """Return zeros of the shapes of a level's weights."""
    return {name: torch.zeros_like(w) for name, w in weights.items()}


def mlp(params: CMSParams, w: Weights, z: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
    """Apply one level's MLP, SiLU with or without a gate, to one token."""
    maps = [(w[f"{name}.weight"], w.get(f"{name}.bias")) for name in params.shape.projections]
    up = F.linear(z, *maps[-2])
    hidden = F.silu(F.linear(z, *maps[0])) * up if len(maps) == 3 else F.silu(up)
    return F.linear(hidden, *maps[-1])


def run_levels(params: CMSParams, theta: list[Weights], x: Float[Tensor, " D"]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the output of the levels for one token, and the input of each level (Eq. 70 or 74)."""
    shape, inputs = params.shape, dict[int, Tensor]()
    if shape.options.structure == "independent":
        inputs = dict.fromkeys(range(len(theta)), x)
        return torch.stack([params.weights["a"][l] * mlp(params, w, x) for l, w in enumerate(theta)]).sum(0), inputs
    y = torch.zeros_like(x)
    for l in range(len(shape.chunk_sizes)):
        z = x
        if l:
            z = x + y if shape.options.residual == "residual" else y
            z = F.rms_norm(z, z.shape, params.weights[f"levels.{l}.norm.weight"], shape.eps)
        inputs[l] = z
        y = mlp(params, theta[l], z) + (y if l and shape.options.residual == "residual" else 0)
    return y, inputs


def step_size(params: CMSParams, l: int, z: Float[Tensor, " D"]) -> Float[Tensor, ""]:
    """Return the learned step size of a level, or of a token."""
    w, o = params.weights, params.shape.options
    a = w[f"levels.{l}.step.bias"]
    if o.lr_granularity == "token":
        a = a + z @ w[f"levels.{l}.step.weight"]
    return F.softplus(a)


def inner_gradient(params: CMSParams, l: int, theta: Weights, z: Float[Tensor, " D"]) -> Weights:
    """Return the gradient of ½‖MLP(κ) - ν‖² by the level's weights, κ = W_κ z / ‖W_κ z‖ and ν = W_ν z."""
    key = F.normalize(params.weights[f"levels.{l}.key.weight"] @ z, dim=0)
    value = params.weights[f"levels.{l}.value.weight"] @ z
    if params.shape.options.associative_target == "start":
        value = value + mlp(params, start_weights(params, l), key)
    loss = (mlp(params, theta, key) - value).square().sum() / 2
    return dict(zip(theta, torch.autograd.grad(loss, list(theta.values()), create_graph=True), strict=True))


def descend(params: CMSParams, l: int, weights: Weights, terms: Weights) -> Weights:
    """Subtract the terms of a chunk; the update of a map is at most a share of its start's norm."""
    new, ratio, start = dict[str, Tensor](), params.shape.options.max_update_ratio, start_weights(params, l)
    for name in params.shape.projections:
        keys = [key for key in weights if key.startswith(f"{name}.")]
        norm, bound = (torch.stack([x[key].square().sum() for key in keys]).sum().sqrt() for x in (terms, start))
        factor = (ratio * bound / norm.clamp(min=1e-15)).clamp(max=1) if ratio else 1.0
        new |= {key: weights[key] - factor * terms[key] for key in keys}
    return new
