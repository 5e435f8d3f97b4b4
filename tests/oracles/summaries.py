"""Oracles of VL1, VL2, VL25 to VL28 and CP1, as loops over rows and tokens, and misreadings of them.

`decoder(inputs_embeds [1, S, D], position_ids=[1, S])` is any model; the loop of VL2 reads the whole sequence again at
every step, without a cache, row by row without padding.
"""

import math
from typing import Any

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return torch.stack([v * (1 + torch.erf(v / math.sqrt(2))) / 2 for v in x])


def map_of(
    z: Tensor, c: Tensor, r: float, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor,
    *, norm: str = "rms", rest: bool = True, scaled: bool = True, fed: str = "z",
) -> Tensor:  # fmt: skip
    """VL1, state by state, with the inner map; `c` and `r` alone are the scale map."""
    found: list[Tensor] = []
    for x in z:
        square = (x * x).sum()
        size = {"rms": torch.sqrt(square / len(x)), "l2": torch.sqrt(square), "none": 1.0}[norm]
        made = c * (r if scaled else 1.0) * x / size
        inner = made if fed == "scaled" else x
        more = torch.stack([W2[i] @ gelu(torch.stack([W1[j] @ inner + b1[j] for j in range(len(W1))])) + b2[i]
                            for i in range(len(W2))])  # fmt: skip
        found.append(made + more if rest else made)
    return torch.stack(found)


def loop(
    decoder: Any, memory: Tensor, held: Tensor, words: Tensor, live: Tensor, trigger: Tensor, steps: Tensor,
    c: Tensor, r: float, K: int, zero: bool,
    *, gated: float = 1.0, pads: bool = False, raw: bool = False, stepless: bool = False, written: bool = False,
    forgets: bool = False, shifted: int = 0,
) -> Tensor:  # fmt: skip
    """VL2: z_1..z_K of each row."""
    found: list[Tensor] = []
    for b in range(len(words)):
        there = torch.ones_like(live[b]) if pads else live[b]
        M, text = memory[b, held[b]], words[b, there]
        fed: list[Tensor] = [trigger]
        states: list[Tensor] = []
        for t in range(K + 1):
            columns = [M, text, torch.stack(fed)] if not (forgets and t) else [torch.stack(fed)]
            vectors = torch.cat(columns)
            n = len(fed)
            places = [-1] * len(M) + list(range(len(text))) + [-1] * n if zero else list(range(len(vectors)))
            if forgets and t:
                places = [-1] * n if zero else list(range(n))
            z = decoder(vectors[None], position_ids=torch.tensor([places])).hidden_states[0, -1]
            states.append(z)
            size = torch.sqrt((z * z).sum() / len(z))
            made = z if raw else c * r * z / size
            step = steps[(t + shifted) % K] if t < K and not stepless else torch.zeros_like(z)
            fed.append(gated * made + step)
        found.append(torch.stack(states[:K] if written else states[1:]))
    return torch.stack(found)


def with_gradient(function: Any) -> Any:
    """VL2 with the gradients of its sum to memory, text, trigger, steps and c."""

    def run(decoder: Any, memory: Tensor, held: Tensor, words: Tensor, live: Tensor, trigger: Tensor, steps: Tensor,
            c: Tensor, r: float, K: int, zero: bool) -> Any:  # fmt: skip
        leaves = [x.detach().requires_grad_() for x in (memory, words, trigger, steps, c)]
        z = function(decoder, leaves[0], held, leaves[1], live, *leaves[2:], r, K, zero)
        weighted = (z * torch.arange(z.shape[1])[:, None].add(1)).sum()
        found = torch.autograd.grad(weighted, leaves, allow_unused=True)
        return z, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))

    return run


def pooled(
    h: Tensor, live: Tensor, N: Tensor, K: int, *, columns: bool = False, ceil: bool = False, empty: bool = False
) -> tuple[Tensor, Tensor]:
    """VL25: means and which of them exist, K columns; rows of c tokens."""
    B, _, D = h.shape
    found, there = torch.zeros(B, K, D, dtype=h.dtype), torch.zeros(B, K)
    for b in range(B):
        at = [j for j in range(h.shape[1]) if columns or live[b, j]]
        c, n = len(at), int(N[b])
        kappa = n if empty else min(n, c)
        for t in range(1, kappa + 1):
            ends = [(i * c + (kappa - 1) * ceil) // kappa for i in (t - 1, t)]
            inside = at[ends[0] : ends[1]]
            if inside:
                found[b, t - 1] = sum(h[b, j] for j in inside) / len(inside)
            there[b, t - 1] = 1
    return found, there


def pooled_with_gradient(function: Any) -> Any:
    def run(h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        h = h.detach().requires_grad_()
        means, there = function(h, *rest)
        return means, there.double(), torch.autograd.grad((means * torch.arange(h.shape[2])).sum(), h)[0]

    return run


def selected(
    r: Tensor, live: Tensor, N: Tensor, K: int, *, ranked: bool = False, least: bool = False, pads: bool = False
) -> tuple[Tensor, Tensor]:
    """VL26: columns of the N best tokens in text order, -1 if there are fewer, and their number."""
    found, n = torch.full((len(r), K), -1.0), torch.zeros(len(r))
    for b in range(len(r)):
        at = [j for j in range(r.shape[1]) if pads or live[b, j]]
        best = sorted(at, key=lambda j: float(r[b, j]) if least else -float(r[b, j]))[: int(N[b])]
        kept = best if ranked else sorted(best)
        n[b] = len(kept)
        for t, j in enumerate(kept):
            found[b, t] = j
    return found, n


def over(lengths: list[int], new: list[int], budget: int, *, late: bool = False, slots: int = 0) -> list[bool]:
    """VL27: rows whose memory is recompressed first."""
    return [m > 0 and ((slots or m) + (0 if late else n) > budget) for m, n in zip(lengths, new, strict=True)]


def condensed(
    decoder: Any, memory: list[Tensor], e: Tensor, rows: list[bool], zero: bool, *, kept: bool = False,
    everyone: bool = False,
) -> list[Tensor]:  # fmt: skip
    """VL27: in the marked rows, the states at e_1..e_K after M."""
    found: list[Tensor] = []
    for M, marked in zip(memory, rows, strict=True):
        n = len(M) + len(e)
        places = torch.tensor([[-1] * n if zero else list(range(n))])
        z = decoder(torch.cat([M, e])[None], position_ids=places).hidden_states[0, len(M) :]
        found.append((torch.cat([M, z]) if kept else z) if marked or everyone else M)
    return found


def fifo(blocks: list[list[int]], budget: int, *, slots: bool = False, newest: bool = False) -> list[list[int]]:
    """VL28: the segment ids of the remaining slots, row by row."""
    found: list[list[int]] = []
    for row in blocks:
        kept = list(row)
        while len(kept) > budget:
            if slots:
                kept = kept[1:]
            else:
                gone = kept[-1] if newest else kept[0]
                kept = [block for block in kept if block != gone]
        found.append(kept)
    return found


def triggered(trigger: Tensor, words: Tensor, live: Tensor, *, column: bool = False, inserted: bool = False) -> Tensor:
    """CP1: the trigger in place of the last token of each row."""
    found = words.clone()
    for b in range(len(words)):
        at = [j for j in range(words.shape[1]) if column or live[b, j]]
        if at and not inserted:
            found[b, at[-1]] = trigger
    return found


def untriggered(targets: Tensor, live: Tensor, *, predicts: bool = False, scored: bool = False) -> Tensor:
    """CP1: targets without the replaced token, and without the prediction at its position."""
    found = targets.clone()
    for b in range(len(targets)):
        at = [j for j in range(targets.shape[1]) if live[b, j]]
        for j in [*([] if predicts else at[-1:]), *([] if scored else at[-2:-1])]:
            found[b, j] = -100
    return found


def published(trigger: Tensor, words: Tensor, live: Tensor, targets: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """CP1: embeddings and targets."""
    placed = {name: how.pop(name) for name in ("column", "inserted") if name in how}
    return triggered(trigger, words, live, **placed), untriggered(targets, live, **how).double()


loop_with_gradients = with_gradient(loop)
means_with_gradients = pooled_with_gradient(pooled)

ORACLE = {
    "VL1": map_of,
    "VL2": loop_with_gradients,
    "VL25": means_with_gradients,
    "VL26": selected,
    "VL27": condensed,
    "VL28": fifo,
    "CP1": published,
}


def looped(**how: Any) -> Any:
    return with_gradient(lambda *given: loop(*given, **how))


def pooling(**how: Any) -> Any:
    return pooled_with_gradient(lambda *given: pooled(*given, **how))


MISREAD = {
    "VL1": {
        "divided by the L2 norm": lambda *given: map_of(*given, norm="l2"),
        "raw": lambda *given: map_of(*given, norm="none"),
        "without the inner map": lambda *given: map_of(*given, rest=False),
        "r forgotten": lambda *given: map_of(*given, scaled=False),
        "inner map of what was scaled": lambda *given: map_of(*given, fed="scaled"),
    },
    "VL2": {
        "what is fed back is gated": looped(gated=0.5),
        "loop without the padding mask": looped(pads=True),
        "raw states fed back": looped(raw=True),
        "steps forgotten": looped(stepless=True),
        "step of the next place": looped(shifted=1),
        "z_0 written": looped(written=True),
        "cache dropped": looped(forgets=True),
    },
    "VL25": {
        "pads pooled": pooling(columns=True),
        "spans rounded up": pooling(ceil=True),
        "empty spans of a short text": pooling(empty=True),
    },
    "VL26": {
        "in order of score": lambda *given: selected(*given, ranked=True),
        "the worst": lambda *given: selected(*given, least=True),
        "pads selected": lambda *given: selected(*given, pads=True),
    },
    "VL27": {
        "beside the old memory": lambda *given: condensed(*given, kept=True),
        "every row": lambda *given: condensed(*given, everyone=True),
    },
    "VL28": {
        "slots for blocks": lambda *given: fifo(*given, slots=True),
        "the newest dropped": lambda *given: fifo(*given, newest=True),
    },
    "CP1": {
        "the last column": lambda *given: published(*given, column=True),
        "inserted, nothing replaced": lambda *given: published(*given, inserted=True),
        "the trigger predicts the next segment": lambda *given: published(*given, predicts=True),
        "the trigger is a target": lambda *given: published(*given, scored=True),
    },
}
