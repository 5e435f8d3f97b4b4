"""Oracles of Titans 21 to 31, a memory with attention, as loops in float64, and misreadings.

`memory(x, state)` returns the outputs of the memory for one row of vectors, and the state after learning from them;
`read(x, state)` returns the outputs without learning.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.titans import times, zeros


def attention(w: Any, rows: list[Tensor], queries: list[Tensor], heads: int, sees: Any) -> list[Tensor]:
    """Return softmax attention of each query over the rows j with sees(i, j)."""
    q, k, v = ([times(w[f"{n}_proj.weight"], x) for x in xs] for n, xs in (("q", queries), ("k", rows), ("v", rows)))
    E, out = len(rows[0]) // heads, []
    for i in range(len(queries)):
        y = zeros(len(rows[0]))
        for h in range(heads):
            at = slice(h * E, (h + 1) * E)
            weights = {j: math.exp(float(q[i][at] @ k[j][at]) / math.sqrt(E)) for j in range(len(rows)) if sees(i, j)}
            for j, share in weights.items():
                y[at] = y[at] + share / sum(weights.values()) * v[j][at]
        out.append(times(w["o_proj.weight"], y))
    return out


def normalised(x: Tensor, gain: Tensor) -> Tensor:
    size = math.sqrt(sum(a * a for a in x.tolist()) / len(x) + 1e-6)
    return x / size * gain


def gate(y: Tensor, m: Tensor, w: Any, bent: bool = True, plain: bool = False) -> Tensor:
    z = y * m if plain else normalised(y, w["attention_norm.weight"]) * normalised(m, w["memory_norm.weight"])
    return torch.stack([a / (1 + math.exp(-float(a))) for a in z]) if bent else z


def mal(memory: Any, read: Any, w: Any, x: Tensor, heads: int, window: int, **variant: Any) -> Tensor:
    out = torch.empty_like(x)
    for b in range(len(x)):
        y = list(x[b]) if variant.get("turned") else list(memory(x[b : b + 1])[0][0])
        o = attention(w, y, y, heads, lambda i, j: i - window - variant.get("wide", 0) < j <= i)
        out[b] = memory(torch.stack(o)[None])[0][0] if variant.get("turned") else torch.stack(o)
    return out


def mag(memory: Any, read: Any, w: Any, x: Tensor, heads: int, window: int, **variant: Any) -> Tensor:
    out = torch.empty_like(x)
    for b in range(len(x)):
        y = attention(w, list(x[b]), list(x[b]), heads, lambda i, j: i - window < j <= i)
        m = list(memory((torch.stack(y) if variant.get("after") else x[b])[None])[0][0])
        rest = {name: variant[name] for name in ("bent", "plain") if name in variant}
        out[b] = torch.stack([gate(p, r, w, **rest) for p, r in zip(y, m, strict=True)])
    return out


def mac(memory: Any, read: Any, w: Any, x: Tensor, heads: int, window: int, **variant: Any) -> Tensor:
    """Process segments of `window` tokens."""
    out = torch.empty_like(x)
    for b in range(len(x)):
        state = None
        for a in range(0, x.shape[1], window):
            segment = x[b, a : a + window]
            h = list((memory(segment[None], state)[0] if variant.get("writes") else read(segment[None], state))[0])
            p, T = list(w["persistent"]), len(segment)
            rows = [*p, *([] if variant.get("alone") else h), *segment]
            N, H = len(p), 0 if variant.get("alone") else T

            def sees(i: int, j: int, N: int = N, H: int = H) -> bool:
                if j < N:
                    return not variant.get("forgets")
                return variant.get("ahead", False) or (j - N if j < N + H else j - N - H) <= i

            y = torch.stack(attention(w, rows, list(segment), heads, sees))
            m, state = memory((segment if variant.get("inputs") else y)[None], state)
            out[b, a : a + window] = torch.stack([gate(r, s, w) for r, s in zip(y, m[0], strict=True)])
    return out


ORACLE = {"21-25": mac, "26-28": mag, "29-31": mal}

MISREAD = {
    "21-25": {
        "without what the memory recalls": lambda *a: mac(*a, alone=True),
        "without persistent vectors": lambda *a: mac(*a, forgets=True),
        "tokens see later ones": lambda *a: mac(*a, ahead=True),
        "the inputs written": lambda *a: mac(*a, inputs=True),
    },
    "26-28": {
        "the memory reads the output of attention": lambda *a: mag(*a, after=True),
        "no activation": lambda *a: mag(*a, bent=False),
        "neither normalised": lambda *a: mag(*a, plain=True),
    },
    "29-31": {
        "attention first": lambda *a: mal(*a, turned=True),
        "one more in the window": lambda *a: mal(*a, wide=1),
    },
}
