"""Oracles of C1, C2, C10 and C17 to C19: norms, feed-forward and the whole block as loops, and misreadings of them."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles import llama_attention, llama_rotation
from tests.oracles.llama_attention import linear, tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, g = [], weight.tolist()
    for u in x.reshape(-1, x.shape[-1]).tolist():
        mean = sum(value * value for value in u) / len(u)
        rows.append([g[d] * (u[d] / math.sqrt(mean + eps)) for d in range(len(u))])
    return tensor(rows).reshape(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    rows, g, c = [], weight.tolist(), bias.tolist()
    for u in x.reshape(-1, x.shape[-1]).tolist():
        mean = sum(u) / len(u)
        var = sum((value - mean) ** 2 for value in u) / len(u)
        rows.append([(u[d] - mean) / math.sqrt(var + eps) * g[d] + c[d] for d in range(len(u))])
    return tensor(rows).reshape(x.shape)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    for n in range(x.shape[1]):
        out[:, n] = rms_norm(x[:, n], weight, eps)
    return out


TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_python": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    **dict.fromkeys(TANH_GELUS, gelu_tanh),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "linear": lambda x: x,
    "gelu_10": lambda x: min(max(0.5 * x * (1 + math.erf(x / math.sqrt(2))), -10.0), 10.0),
}


def act(x: Tensor, name: str) -> Tensor:
    return tensor([ACTIVATIONS[name](value) for value in x.flatten().tolist()]).reshape(x.shape)


def gated_mid(gate: Tensor, up: Tensor, name: str) -> Tensor:
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    return tensor([ACTIVATIONS[name](g) * u for g, u in pairs]).reshape(up.shape)


def plain_mid(up: Tensor, name: str) -> Tensor:
    return act(up, name)


def norm(x: Tensor, w: dict[str, Any], eps: float) -> Tensor:
    return layer_norm(x, w["weight"], w["bias"], eps) if "bias" in w else rms_norm(x, w["weight"], eps)


def attention(y: Tensor, w: dict[str, Any], c: dict[str, Any]) -> Tensor:
    """Compute C9 to C16 without a cache or padding; `w` has weight and bias by role, `c` sizes and tables."""
    q, k, v = llama_attention.projections(y, w["q"], w["k"], w["v"], c["H"], c["G"])
    if c["cos"] is not None:
        q, k = (llama_rotation.rotate(x, c["cos"], c["sin"]) for x in (q, k))
    a = llama_attention.scores(q, k, c["scale"])
    visible = llama_attention.seen(torch.ones(y.shape[:2], dtype=torch.bool), 0, None)
    p = llama_attention.probabilities(llama_attention.biased(a, visible, None))
    return linear(llama_attention.context(p, v), *w["o"])


def feed(y: Tensor, w: dict[str, Any], c: dict[str, Any]) -> Tensor:
    up = linear(y, *w["up"])
    mid = gated_mid(linear(y, *w["gate"]), up, c["act"]) if "gate" in w else plain_mid(up, c["act"])
    return linear(mid, *w["down"])


def block(x: Tensor, w: dict[str, Any], c: dict[str, Any]) -> Tensor:
    r = x + attention(norm(x, w["norm1"], c["eps"]), w, c)
    return r + feed(norm(r, w["norm2"], c["eps"]), w, c)


def with_residuals(first: bool = True, second: bool = True, raw: bool = True) -> Any:
    """Misread the block without residuals, or with residuals from the outputs of the norms."""

    def misread(x: Tensor, w: dict[str, Any], c: dict[str, Any]) -> Tensor:
        y = norm(x, w["norm1"], c["eps"])
        r = attention(y, w, c) + first * (x if raw else y)
        z = norm(r, w["norm2"], c["eps"])
        return feed(z, w, c) + second * (r if raw else z)

    return misread


def parallel(x: Tensor, w: dict[str, Any], c: dict[str, Any]) -> Tensor:
    attended = attention(norm(x, w["norm1"], c["eps"]), w, c)
    return x + attended + feed(norm(x, w["norm2"], c["eps"]), w, c)


def post_norm(x: Tensor, w: dict[str, Any], c: dict[str, Any]) -> Tensor:
    r = norm(x + attention(x, w, c), w["norm1"], c["eps"])
    return norm(r + feed(r, w, c), w["norm2"], c["eps"])


def sandwich(x: Tensor, w: dict[str, Any], c: dict[str, Any]) -> Tensor:
    """Misread the block with norms after the branches instead of before them."""
    r = x + norm(attention(x, w, c), w["norm1"], c["eps"])
    return r + norm(feed(r, w, c), w["norm2"], c["eps"])


def exchanged(a: str, b: str) -> Any:
    return lambda x, w, c: block(x, {**w, a: w[b], b: w[a]}, c)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def mean_square(x: Tensor, keep: int | tuple[int, ...] = -1) -> Tensor:
    return x.square().mean(keep, keepdim=True)


ORACLE = {
    "C1": rms_norm,
    "C2": layer_norm,
    "C10": head_norm,
    "C17": gated_mid,
    "C18": plain_mid,
    "C19": block,
}

MISREAD = {
    "C1": {
        "centred": lambda x, w, eps: rms_norm(centred(x), w, eps),
        "sum for mean": lambda x, w, eps: w * x / (x.square().sum(-1, keepdim=True) + eps).sqrt(),
        "eps outside the root": lambda x, w, eps: w * x / (mean_square(x).sqrt() + eps),
        "no eps": lambda x, w, eps: rms_norm(x, w, 0.0),
        "eps 1e-6": lambda x, w, eps: rms_norm(x, w, 1e-6),
        "no root": lambda x, w, eps: w * x / (mean_square(x) + eps),
        "weight counted from 1": lambda x, w, eps: rms_norm(x, 1 + w, eps),
        "weight left out": lambda x, w, eps: rms_norm(x, torch.ones_like(w), eps),
        "over positions": lambda x, w, eps: w * x / (mean_square(x, 1) + eps).sqrt(),
    },
    "C2": {
        "not centred": lambda x, w, b, eps: w * x / (x.var(-1, keepdim=True, correction=0) + eps).sqrt() + b,
        "var with 1/(D - 1)": lambda x, w, b, eps: w * centred(x) / (x.var(-1, keepdim=True) + eps).sqrt() + b,
        "eps outside the root": lambda x, w, b, eps: w * centred(x) / (x.std(-1, keepdim=True, correction=0) + eps) + b,
        "eps 1e-6": lambda x, w, b, eps: layer_norm(x, w, b, 1e-6),
        "mean square for var": lambda x, w, b, eps: w * centred(x) / (mean_square(x) + eps).sqrt() + b,
        "bias left out": lambda x, w, b, eps: layer_norm(x, w, 0 * b, eps),
        "bias before weight": lambda x, w, b, eps: w * layer_norm(x, torch.ones_like(w), b, eps),
    },
    "C10": {
        "over all heads": lambda x, w, eps: w * x / (mean_square(x, (1, 3)) + eps).sqrt(),
        "over positions": lambda x, w, eps: w * x / (mean_square(x, 2) + eps).sqrt(),
        "length 1": lambda x, w, eps: w * x / (x.square().sum(-1, keepdim=True) + eps).sqrt(),
        "centred": lambda x, w, eps: head_norm(centred(x), w, eps),
        "weight left out": lambda x, w, eps: head_norm(x, torch.ones_like(w), eps),
        "no norm": lambda x, w, eps: w * x,
    },
    "C17": {
        "gate and up exchanged": lambda gate, up, name: gated_mid(up, gate, name),
        "sigmoid": lambda gate, up, name: gate.sigmoid() * up,
        "GELU": lambda gate, up, name: gated_mid(gate, up, "gelu"),
        "act of the product": lambda gate, up, name: act(gate * up, name),
        "act of both": lambda gate, up, name: act(gate, name) * act(up, name),
        "sum for product": lambda gate, up, name: act(gate, name) + up,
        "no act": lambda gate, up, name: gate * up,
    },
    "C18": {
        "erf form": lambda up, name: act(up, "gelu"),
        "sigmoid form": lambda up, name: up * (1.702 * up).sigmoid(),
        "relu": lambda up, name: up.relu(),
        "no 1/2": lambda up, name: 2 * act(up, name),
        "no act": lambda up, name: up,
    },
    "C19": {
        "no first residual": with_residuals(first=False),
        "no second residual": with_residuals(second=False),
        "residuals of the norms": with_residuals(raw=False),
        "MLP beside attention": parallel,
        "norms after the sums": post_norm,
        "norms after the branches": sandwich,
        "norms exchanged": exchanged("norm1", "norm2"),
        "keys and values exchanged": exchanged("k", "v"),
    },
}
