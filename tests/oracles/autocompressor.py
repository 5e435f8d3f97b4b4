"""Oracles of AC1 to AC6 and AC8 to AC11, as loops over rows, segments and tokens, and misreadings of them.

`decoder(inputs_embeds [1, S, D], position_ids=[1, S])` is any model; every row is read on its own, without padding. A
document is a list of segments, each a list of ids; a window is a list of segment indices, some of which are scored.
"""

import math
from typing import Any

import torch
from torch import Tensor


def reader(
    decoder: Any, memory: Tensor, embeds: Tensor, e: Tensor, zero: bool, **variant: Any
) -> tuple[Tensor, Tensor]:
    """Return the states of the text and of the summary positions of one row: [M; text; e_1..e_K]."""
    m, T, K = len(memory), len(embeds), len(e)
    parts, position_list = [memory, embeds, e], [-1] * m + list(range(T)) + [-1] * K
    if variant.get("newest"):
        parts[0] = memory.flip(0)
    if variant.get("behind"):
        parts = [embeds, memory, e]
    if variant.get("shifted"):
        position_list = [-1] * m + list(range(m, m + T)) + [-1] * K
    if variant.get("row 0"):
        position_list = [0] * m + list(range(T)) + [-1] * K
    if variant.get("counted"):
        position_list = list(range(m + T + K))
    positions = torch.tensor([position_list if zero or variant.get("counted") else list(range(m + T + K))])
    L = decoder.config.num_hidden_layers
    seen = decoder(torch.cat(parts)[None], position_ids=positions, capture=(f"resid2.{L - 1}",))
    hidden = seen.activations[f"resid2.{L - 1}"][0] if variant.get("unnormed") else seen.hidden_states[0]
    first = m - int(bool(variant.get("early")))
    return hidden[m : m + T], hidden[first + T : first + T + K]


def read(
    decoder: Any,
    memory: Tensor,
    memory_mask: Tensor,
    embeds: Tensor,
    mask: Tensor,
    e: Tensor,
    zero: bool,
    **variant: Any,
) -> tuple[Tensor, Tensor]:
    """AC2 of rows with padding; the text's states are 0 where it is padded."""
    text, position_list = torch.zeros_like(embeds), []
    for b in range(len(embeds)):
        pads = torch.ones_like(mask[b]) if variant.get("pads") else mask[b]
        result, z = reader(decoder, memory[b, memory_mask[b]], embeds[b, pads], e, zero, **variant)
        text[b, mask[b]] = result[mask[b][pads]]
        position_list.append(z)
    return torch.stack(position_list), text


def differentiated(function: Any) -> Any:
    """Return the values of AC2 and the gradients of their sum to memory, text and summary tokens."""

    def run(
        decoder: Any, memory: Tensor, memory_mask: Tensor, embeds: Tensor, mask: Tensor, e: Tensor, zero: bool
    ) -> Any:
        leaves = [x.detach().requires_grad_() for x in (memory, embeds, e)]
        z, text = function(decoder, leaves[0], memory_mask, leaves[1], mask, leaves[2], zero)
        weighted = z.sum() + (text * torch.arange(text.shape[2])).sum()
        return z, text, *torch.autograd.grad(weighted, leaves)

    return run


def joined(memory: list[Tensor], sigma: list[Tensor], keeps: list[bool], *, newest: bool = False) -> list[Tensor]:
    """AC3, and AC4 if the old memory is dropped, row by row."""
    result: list[Tensor] = []
    for m, s, keep in zip(memory, sigma, keeps, strict=True):
        rows = [*(list(m) if keep else []), *list(s)]
        result.append(torch.stack([*list(s), *list(m)] if newest else rows) if rows else m[:0])
    return result


def room(
    positions: int, window: int | None, zero: bool, bos: int, segment: int, K: int, trigger: bool,
    *, position_list: bool = True, triggered: bool = True, nowhere: bool = True,
) -> int:  # fmt: skip
    """AC1: the largest memory before a segment, -1 if none fits; 10,000 means no limit."""
    n = (K if position_list else 0) + (trigger if triggered else 0)
    for m in range(10_001):
        columns = bos + m + segment + n
        expected = bos + segment if zero and nowhere else columns
        if expected > positions or (window is not None and columns > window):
            return m - 1
    return 10_000


def document(
    decoder: Any, text: list[list[int]], windows: list[list[int]], again: list[int], e: Tensor, zero: bool,
    replace: bool, **variant: Any,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """AC5 and AC6 of one document: summed nats and number of scored tokens of each window.

    Each window begins with the memory before its first segment, a constant; `again` says how many of its segments
    are read again unscored.
    """
    D = decoder.token_embedding.weight.shape[1]
    memory_mask: dict[int, Tensor] = {0: torch.zeros(0, D, dtype=e.dtype)}
    sums, counts = [], []
    for window, repeated in zip(windows, again, strict=True):
        M, nats, n = memory_mask[window[0]].detach(), torch.zeros((), dtype=e.dtype), 0
        for place, i in enumerate(window):
            ids = torch.tensor(text[i], dtype=torch.long)
            before = M[:0] if variant.get("forgets") else M
            if not len(ids):
                memory_mask[i + 1] = M
                continue
            h, _ = reader(decoder, M, decoder.token_embedding(ids), e, zero)
            _, z = reader(decoder, before, decoder.token_embedding(ids), e, zero)
            log_p = decoder.logits(h).log_softmax(-1)
            following = next((text[j] for j in window[place + 1 :] if text[j]), [])
            targets = [*text[i][1:], *([] if variant.get("severed") else following[:1])]
            unscored = place < repeated
            for j, target in enumerate(targets):
                if unscored and not (place == repeated - 1 and j == len(text[i]) - 1) and not variant.get("rescored"):
                    continue
                nats, n = nats - log_p[j, target], n + 1
            if variant.get("first scored") and place == 0:
                nats, n = nats - log_p[0, text[i][0]], n + 1
            z = z.detach() if variant.get("cut") else z
            M = z if replace else torch.cat([z, M] if variant.get("newest") else [M, z])
            memory_mask[i + 1] = M
        sums.append(nats)
        counts.append(n)
    return torch.stack(sums), counts


def loss(decoder: Any, rows: list[Any], e: Tensor, zero: bool, replace: bool, **variant: Any) -> Tensor:
    """AC5: nats of all documents per scored token."""
    result = [document(decoder, *row, e, zero, replace, **variant) for row in rows]
    if variant.get("means"):
        return sum(n for s, c in result for n in s / torch.tensor(c).clamp(min=1)) / len(rows)  # type: ignore[return-value]
    return sum(s.sum() for s, _ in result) / sum(sum(c) for _, c in result)  # type: ignore[return-value]


def with_gradient(function: Any) -> Any:
    """Return the loss with its gradients to the token embedding and the summary tokens."""

    def run(decoder: Any, rows: list[Any], e: Tensor, zero: bool, replace: bool) -> tuple[Tensor, ...]:
        leaves = [decoder.token_embedding.weight, e]
        value = function(decoder, rows, e, zero, replace)
        result = torch.autograd.grad(value, leaves, allow_unused=True)
        return value, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, result, strict=True))

    return run


def misread(**variant: Any) -> Any:
    return with_gradient(lambda *arguments: loss(*arguments, **variant))


def detached(x: Tensor, y: Tensor, *, flows: bool = False, gone: bool = False) -> tuple[Tensor, Tensor]:
    """AC6: the value of sum(sg(x) y) + sum(x^2), and its gradient to x."""
    value, slope = torch.zeros((), dtype=x.dtype), torch.zeros_like(x)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist():
        i = tuple(at)
        value = value + x[i] * (0.0 if gone else y[i]) + x[i] ** 2
        slope[i] = 2 * x[i] + (y[i] if flows else 0.0)
    return value, slope


def fused(with_memory: Tensor, alone: Tensor, *, logs: bool = False, halved: bool = True) -> Tensor:
    """AC8 token by token."""
    result = torch.zeros_like(alone)
    for t, (a, b) in enumerate(zip(with_memory.tolist(), alone.tolist(), strict=True)):
        total = math.exp(a) + math.exp(b)
        result[t] = (a + b) / 2 if logs else math.log(total / (2 if halved else 1))
    return result


def replug(log_p: Tensor, scores: Tensor, *, even: bool = False, logs: bool = False) -> Tensor:
    """AC9 token by token."""
    raised = [1.0 if even else math.exp(s) for s in scores.tolist()]
    weight, result = [r / sum(raised) for r in raised], torch.zeros_like(log_p[0])
    for t in range(log_p.shape[1]):
        conditions = [log_p[d, t].item() for d in range(len(weight))]
        mixed = sum(w * (x if logs else math.exp(x)) for w, x in zip(weight, conditions, strict=True))
        result[t] = mixed if logs else math.log(mixed)
    return result


def order(passages: Tensor, query: Tensor, *, nearest: bool = False, cosine: bool = False) -> Tensor:
    """AC10: the farthest first."""
    far: list[float] = []
    for sigma in passages:
        if cosine:
            a, b = sigma.flatten(), query.flatten()
            far.append(-float(a @ b / (a.norm() * b.norm())))
        else:
            far.append(
                math.sqrt(
                    sum((x - y) ** 2 for x, y in zip(sigma.flatten().tolist(), query.flatten().tolist(), strict=True))
                )
            )
    ranked = sorted(range(len(far)), key=lambda d: far[d] if nearest else -far[d])
    return torch.tensor(ranked).double()


def choice(
    nats: Tensor, tokens: Tensor, without: Tensor | None, *, summed: bool = False, added: bool = False
) -> Tensor:
    """AC11, question by question."""
    result: list[float] = []
    for b in range(len(nats)):
        scores: list[float] = []
        for c in range(nats.shape[1]):
            n = 1 if summed else int(tokens[b, c])
            plain = 0.0 if without is None else float(without[b, c]) / n
            scores.append(float(nats[b, c]) / n + (plain if added else -plain))
        result.append(scores.index(min(scores)))
    return torch.tensor(result).double()


def accumulated(memory: list[Tensor], sigma: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(joined(memory, sigma, [True] * len(memory)))


def replaced(memory: list[Tensor], sigma: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(joined(memory, sigma, [not len(s) for s in sigma]))


def emptied(memory: list[Tensor], sigma: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(joined(memory, sigma, [False] * len(memory)))


read_with_gradients = differentiated(read)
loss_with_gradients = with_gradient(loss)

ORACLE = {
    "AC1": room,
    "AC2": read_with_gradients,
    "AC3": accumulated,
    "AC4": replaced,
    "AC5": loss_with_gradients,
    "AC6": detached,
    "AC8": fused,
    "AC9": replug,
    "AC10": order,
    "AC11": choice,
}


def reading(**variant: Any) -> Any:
    return differentiated(lambda *arguments: read(*arguments, **variant))


MISREAD = {
    "AC1": {
        "places forgotten": lambda *arguments: room(*arguments, position_list=False),
        "trigger forgotten": lambda *arguments: room(*arguments, triggered=False),
        "memory counted where it has no positions": lambda *arguments: room(*arguments, nowhere=False),
    },
    "AC2": {
        "state before the final norm": reading(unnormed=True),
        "newest block first": reading(newest=True),
        "memory behind the text": reading(behind=True),
        "state one place early": reading(early=True),
        "pads read": reading(pads=True),
        "text shifted by the memory where that has no positions": reading(shifted=True),
        "memory on row 0 of the table": reading(**{"row 0": True}),
        "everything counted": reading(counted=True),
    },
    "AC3": {
        "newest first": lambda memory, sigma: tuple(joined(memory, sigma, [True] * len(memory), newest=True)),
        "replaced": emptied,
    },
    "AC4": {
        "accumulated": accumulated,
        "a row that has ended is emptied": emptied,
    },
    "AC5": {
        "first token of a window scored": misread(**{"first scored": True}),
        "sum of window means": misread(means=True),
        "memory cut before the next segment": misread(cut=True),
        "newest block first": misread(newest=True),
        "compressed without the old memory in the prompt": misread(forgets=True),
        "segments severed": misread(severed=True),
        "what is read again scored again": misread(rescored=True),
    },
    "AC6": {
        "gradient through the edge": lambda x, y: detached(x, y, flows=True),
        "memory dropped": lambda x, y: detached(x, y, gone=True),
    },
    "AC8": {
        "mean of logarithms": lambda a, b: fused(a, b, logs=True),
        "not halved": lambda a, b: fused(a, b, halved=False),
    },
    "AC9": {
        "even weights": lambda p, s: replug(p, s, even=True),
        "mean of logarithms": lambda p, s: replug(p, s, logs=True),
    },
    "AC10": {
        "nearest first": lambda p, q: order(p, q, nearest=True),
        "cosine": lambda p, q: order(p, q, cosine=True),
    },
    "AC11": {
        "sums over tokens": lambda *arguments: choice(*arguments, summed=True),
        "calibration added": lambda *arguments: choice(*arguments, added=True),
    },
}
