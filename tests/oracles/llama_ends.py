"""Oracles of C8 and C20 to C22 as loops: position embeddings, head, next token, position ids; and misreadings."""

import torch
from torch import Tensor

from tests.oracles.llama_attention import linear, probabilities, tensor


def places(table: Tensor, p: Tensor, offset: int) -> Tensor:
    rows, D = table.tolist(), table.shape[1]
    return tensor([[[0.0] * D if n == -1 else rows[n + offset] for n in row] for row in p.tolist()])


def logits(hidden: Tensor, words: Tensor) -> Tensor:
    return linear(hidden, words, None)


def last_valid(x: Tensor, mask: Tensor) -> Tensor:
    rows = []
    for values, alive in zip(x.tolist(), mask.tolist(), strict=True):
        last = None
        for t, yes in enumerate(alive):
            last = values[t] if yes else last
        rows.append(last)
    return tensor(rows)


def next_token(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id and the probabilities after the last real token."""
    last = last_valid(x, mask)
    ids = []
    for row in last.tolist():
        best = 0
        for v in range(len(row)):
            best = v if row[v] > row[best] else best
        ids.append(best)
    return torch.tensor(ids), probabilities(last)


def default_positions(mask: Tensor, past: Tensor, past_valid: Tensor) -> Tensor:
    out = torch.zeros_like(mask, dtype=torch.long)
    for b in range(mask.shape[0]):
        largest = -1
        for s in range(past.shape[1]):
            if past_valid[b, s] and past[b, s] >= 0:
                largest = max(largest, int(past[b, s]))
        for t in range(mask.shape[1]):
            if mask[b, t]:
                largest += 1
                out[b, t] = largest
    return out


def at(function: str) -> object:
    """Misread the next token: another choice on a tie, or another column."""

    def misread(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if function == "last column":
            return next_token(x, torch.ones_like(mask))
        if function == "number of real slots":
            last = x[torch.arange(x.shape[0]), mask.sum(1) - 1]
            return last.argmax(-1), last.softmax(-1)
        ids, p = next_token(x, mask)
        if function == "highest id on a tie":
            return p.shape[1] - 1 - p.flip(-1).argmax(-1), p
        return (ids, p.bfloat16().double()) if function == "in bfloat16" else (ids, p.log())

    return misread


def counted(mask: Tensor, past: Tensor, past_valid: Tensor, start: Tensor) -> Tensor:
    return (start[:, None] + mask.long().cumsum(1) - 1) * mask


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
        "number of real slots": at("number of real slots"),
        "highest id on a tie": at("highest id on a tie"),
        "in bfloat16": at("in bfloat16"),
        "logarithm": at("logarithm"),
    },
    "C22": {
        "slots": lambda mask, past, past_valid: past.shape[1] + torch.arange(mask.shape[1]).expand_as(mask) * mask,
        "from 1": lambda mask, past, past_valid: (default_positions(mask, past, past_valid) + 1) * mask,
        "padding counted": lambda mask, past, past_valid: default_positions(torch.ones_like(mask), past, past_valid),
        "invalid cached slots counted": lambda mask, past, past_valid: default_positions(
            mask, past, torch.ones_like(past_valid)
        ),
        "valid slots of the state counted": lambda mask, past, past_valid: counted(
            mask, past, past_valid, past_valid.sum(1)
        ),
        "no position counted": lambda mask, past, past_valid: counted(
            mask, past, past_valid, (past_valid & (past < 0)).sum(1) + (past * past_valid).amax(1) + 1
        ),
        "the last slot's position": lambda mask, past, past_valid: counted(mask, past, past_valid, past[:, -1] + 1),
        "from 0 again": lambda mask, past, past_valid: default_positions(mask, past[:, :0], past_valid[:, :0]),
        "padding counts on": lambda mask, past, past_valid: (
            default_positions(mask, past, past_valid)[:, :1] + mask.long().cumsum(1) - 1
        ),
    },
}
