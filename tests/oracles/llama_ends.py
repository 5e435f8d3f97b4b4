"""Oracles of C8 and C20 to C22 as loops: position embeddings, head, next token, position ids; and misreadings."""

import torch
from torch import Tensor

from tests.oracles.llama_attention import linear, probabilities, tensor


def places(table: Tensor, p: Tensor, offset: int) -> Tensor:
    rows, D = table.tolist(), table.shape[1]
    return tensor([[[0.0] * D if n == -1 else rows[n + offset] for n in row] for row in p.tolist()])


def logits(hidden: Tensor, words: Tensor) -> Tensor:
    return linear(hidden, words, None)


def last_live(x: Tensor, live: Tensor) -> Tensor:
    rows = []
    for values, alive in zip(x.tolist(), live.tolist(), strict=True):
        last = None
        for t, yes in enumerate(alive):
            last = values[t] if yes else last
        rows.append(last)
    return tensor(rows)


def next_token(x: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id and the probabilities after the last real token."""
    last = last_live(x, live)
    ids = []
    for row in last.tolist():
        best = 0
        for v in range(len(row)):
            best = v if row[v] > row[best] else best
        ids.append(best)
    return torch.tensor(ids), probabilities(last)


def default_positions(live: Tensor, held: Tensor, held_live: Tensor) -> Tensor:
    out = torch.zeros_like(live, dtype=torch.long)
    for b in range(live.shape[0]):
        largest = -1
        for s in range(held.shape[1]):
            if held_live[b, s] and held[b, s] >= 0:
                largest = max(largest, int(held[b, s]))
        for t in range(live.shape[1]):
            if live[b, t]:
                largest += 1
                out[b, t] = largest
    return out


def at(function: str) -> object:
    """Misread the next token: another choice on a tie, or another column."""

    def misread(x: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        if function == "last column":
            return next_token(x, torch.ones_like(live))
        if function == "number of live slots":
            last = x[torch.arange(x.shape[0]), live.sum(1) - 1]
            return last.argmax(-1), last.softmax(-1)
        ids, p = next_token(x, live)
        if function == "highest id on a tie":
            return p.shape[1] - 1 - p.flip(-1).argmax(-1), p
        return (ids, p.bfloat16().double()) if function == "in bfloat16" else (ids, p.log())

    return misread


def counted(live: Tensor, held: Tensor, held_live: Tensor, start: Tensor) -> Tensor:
    return (start[:, None] + live.long().cumsum(1) - 1) * live


ORACLE = {"C8": places, "C20": logits, "C21": next_token, "C22": default_positions}

MISREAD = {
    "C8": {
        "offset 0": lambda table, p, offset: places(table, p, 0),
        "offset 1": lambda table, p, offset: places(table, p, 1),
        "row 1 for no position": lambda table, p, offset: table[p + offset],
        "row 0 of the positions for none": lambda table, p, offset: table[p.clamp(min=0) + offset],
        "last row for no position": lambda table, p, offset: table[torch.where(p < 0, -1, p + offset)],
        "slots for positions": lambda table, p, offset: table[torch.arange(p.shape[1]).expand_as(p) + offset],
    },
    "C20": {
        "head transposed": lambda hidden, words: hidden @ words.reshape(words.shape[::-1]),
        "scaled by D^-1/2": lambda hidden, words: hidden @ words.mT * words.shape[1] ** -0.5,
        "rows normed": lambda hidden, words: hidden @ (words / words.norm(dim=-1, keepdim=True)).mT,
        "in bfloat16": lambda hidden, words: (hidden.bfloat16() @ words.mT.bfloat16()).double(),
    },
    "C21": {
        "last column": at("last column"),
        "number of live slots": at("number of live slots"),
        "highest id on a tie": at("highest id on a tie"),
        "in bfloat16": at("in bfloat16"),
        "logarithm": at("logarithm"),
    },
    "C22": {
        "slots": lambda live, held, held_live: held.shape[1] + torch.arange(live.shape[1]).expand_as(live) * live,
        "from 1": lambda live, held, held_live: (default_positions(live, held, held_live) + 1) * live,
        "padding counted": lambda live, held, held_live: default_positions(torch.ones_like(live), held, held_live),
        "dead slots of the state counted": lambda live, held, held_live: default_positions(
            live, held, torch.ones_like(held_live)
        ),
        "live slots of the state counted": lambda live, held, held_live: counted(
            live, held, held_live, held_live.sum(1)
        ),
        "no position counted": lambda live, held, held_live: counted(
            live, held, held_live, (held_live & (held < 0)).sum(1) + (held * held_live).amax(1) + 1
        ),
        "the last slot's position": lambda live, held, held_live: counted(live, held, held_live, held[:, -1] + 1),
        "start anew": lambda live, held, held_live: default_positions(live, held[:, :0], held_live[:, :0]),
        "dead slots run on": lambda live, held, held_live: (
            default_positions(live, held, held_live)[:, :1] + live.long().cumsum(1) - 1
        ),
    },
}
