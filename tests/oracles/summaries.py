"""Oracles of VL1, VL2, VL25 to VL30 and CP1, as loops over rows and tokens, and misreadings of them.

`decoder(inputs_embeds [1, S, D], position_ids=[1, S])` is any model; the loop of VL2 reads the whole sequence again at
every step, without a cache, row by row without padding.
"""

from typing import Any

import torch
from torch import Tensor


def map_of(
    z: Tensor, c: Tensor, r: float, *, norm: str = "rms", scaled: bool = True,
) -> Tensor:  # fmt: skip
    """VL1, state by state: the scale map."""
    result: list[Tensor] = []
    for x in z:
        square = (x * x).sum()
        size = {"rms": torch.sqrt(square / len(x)), "l2": torch.sqrt(square), "none": 1.0}[norm]
        result.append(c * (r if scaled else 1.0) * x / size)
    return torch.stack(result)


def loop(
    decoder: Any, memory: Tensor, memory_mask: Tensor, embeds: Tensor, mask: Tensor, trigger: Tensor, steps: Tensor,
    c: Tensor, r: float, K: int, zero: bool,
    *, gated: float = 1.0, pads: bool = False, raw: bool = False, stepless: bool = False, written: bool = False,
    forgets: bool = False, shifted: int = 0,
) -> Tensor:  # fmt: skip
    """VL2: z_1..z_K of each row."""
    result: list[Tensor] = []
    for b in range(len(embeds)):
        exists = torch.ones_like(mask[b]) if pads else mask[b]
        M, text = memory[b, memory_mask[b]], embeds[b, exists]
        fed: list[Tensor] = [trigger]
        states: list[Tensor] = []
        for t in range(K + 1):
            columns = [M, text, torch.stack(fed)] if not (forgets and t) else [torch.stack(fed)]
            vectors = torch.cat(columns)
            n = len(fed)
            position_list = [-1] * len(M) + list(range(len(text))) + [-1] * n if zero else list(range(len(vectors)))
            if forgets and t:
                position_list = [-1] * n if zero else list(range(n))
            z = decoder(vectors[None], position_ids=torch.tensor([position_list])).hidden_states[0, -1]
            states.append(z)
            size = torch.sqrt((z * z).sum() / len(z))
            scaled_state = z if raw else c * r * z / size
            step = steps[(t + shifted) % K] if t < K and not stepless else torch.zeros_like(z)
            fed.append(gated * scaled_state + step)
        result.append(torch.stack(states[:K] if written else states[1:]))
    return torch.stack(result)


def with_gradient(function: Any) -> Any:
    """VL2 with the gradients of its sum to memory, text, trigger, steps and c."""

    def run(
        decoder: Any,
        memory: Tensor,
        memory_mask: Tensor,
        embeds: Tensor,
        mask: Tensor,
        trigger: Tensor,
        steps: Tensor,
        c: Tensor,
        r: float,
        K: int,
        zero: bool,
    ) -> Any:
        leaves = [x.detach().requires_grad_() for x in (memory, embeds, trigger, steps, c)]
        z = function(decoder, leaves[0], memory_mask, leaves[1], mask, *leaves[2:], r, K, zero)
        weighted = (z * torch.arange(z.shape[1])[:, None].add(1)).sum()
        result = torch.autograd.grad(weighted, leaves, allow_unused=True)
        return z, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, result, strict=True))

    return run


def pooled(
    h: Tensor, mask: Tensor, N: Tensor, K: int, *, columns: bool = False, ceil: bool = False, empty: bool = False
) -> tuple[Tensor, Tensor]:
    """VL25: means and which of them exist, K columns; rows of c tokens."""
    B, _, D = h.shape
    result, exists = torch.zeros(B, K, D, dtype=h.dtype), torch.zeros(B, K)
    for b in range(B):
        at = [j for j in range(h.shape[1]) if columns or mask[b, j]]
        c, n = len(at), int(N[b])
        kappa = n if empty else min(n, c)
        for t in range(1, kappa + 1):
            ends = [(i * c + (kappa - 1) * ceil) // kappa for i in (t - 1, t)]
            inside = at[ends[0] : ends[1]]
            if inside:
                result[b, t - 1] = sum(h[b, j] for j in inside) / len(inside)
            exists[b, t - 1] = 1
    return result, exists


def pooled_with_gradient(function: Any) -> Any:
    def run(h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        h = h.detach().requires_grad_()
        means, exists = function(h, *rest)
        return means, exists.double(), torch.autograd.grad((means * torch.arange(h.shape[2])).sum(), h)[0]

    return run


def selected(
    r: Tensor, mask: Tensor, N: Tensor, K: int, *, ranked: bool = False, least: bool = False, pads: bool = False
) -> tuple[Tensor, Tensor]:
    """VL26: columns of the N best tokens in text order, -1 if there are fewer, and their number."""
    result, n = torch.full((len(r), K), -1.0), torch.zeros(len(r))
    for b in range(len(r)):
        at = [j for j in range(r.shape[1]) if pads or mask[b, j]]
        best = sorted(at, key=lambda j: float(r[b, j]) if least else -float(r[b, j]))[: int(N[b])]
        remaining = best if ranked else sorted(best)
        n[b] = len(remaining)
        for t, j in enumerate(remaining):
            result[b, t] = j
    return result, n


def over(lengths: list[int], new: list[int], budget: int, *, late: bool = False, slots: int = 0) -> list[bool]:
    """VL27: rows whose memory is recompressed first."""
    return [m > 0 and ((slots or m) + (0 if late else n) > budget) for m, n in zip(lengths, new, strict=True)]


def condensed(
    decoder: Any, memory: list[Tensor], e: Tensor, rows: list[bool], zero: bool, *, remaining: bool = False,
    everyone: bool = False,
) -> list[Tensor]:  # fmt: skip
    """VL27: in the marked rows, the states at e_1..e_K after M."""
    result: list[Tensor] = []
    for M, marked in zip(memory, rows, strict=True):
        n = len(M) + len(e)
        position_list = torch.tensor([[-1] * n if zero else list(range(n))])
        z = decoder(torch.cat([M, e])[None], position_ids=position_list).hidden_states[0, len(M) :]
        result.append((torch.cat([M, z]) if remaining else z) if marked or everyone else M)
    return result


def fifo(blocks: list[list[int]], budget: int, *, slots: bool = False, newest: bool = False) -> list[list[int]]:
    """VL28: the segment ids of the remaining slots, row by row."""
    result: list[list[int]] = []
    for row in blocks:
        remaining = list(row)
        while len(remaining) > budget:
            if slots:
                remaining = remaining[1:]
            else:
                gone = remaining[-1] if newest else remaining[0]
                remaining = [block for block in remaining if block != gone]
        result.append(remaining)
    return result


def begun_as_last_tokens(
    x: Tensor, mask: Tensor, z: Tensor, W: Tensor, r: float, K: int,
    *, first: bool = False, pads: bool = False, norm: str = "l2", scaled: bool = True, transposed: bool = False,
    alone: bool = False,
) -> Tensor:  # fmt: skip
    """VL29: the vectors of each row; a text of c < K tokens is followed by repetitions of its last one."""
    result = torch.zeros_like(z)
    for b in range(len(x)):
        at = [j for j in range(x.shape[1]) if pads or mask[b, j]]
        for t in range(z.shape[1]):
            place = (0 if first else max(len(at) - K, 0)) + t
            square = (z[b, t] * z[b, t]).sum()
            size = torch.sqrt(square / z.shape[2]) if norm == "rms" else torch.sqrt(square)
            state = (r if scaled else 1.0) * z[b, t] / size
            more = torch.stack([((W[:, i] if transposed else W[i]) * state).sum() for i in range(len(W))])
            result[b, t] = more if alone else x[b, at[min(place, len(at) - 1)]] + more
    return result


def divergence(
    q: Tensor, p: Tensor, tau: float, *, reverse: bool = False, unscaled: bool = False, entropy: bool = False,
    teacher_only: bool = False, mean: bool = False,
) -> Tensor:  # fmt: skip
    """VL30: tau^2 KL(p || q) of each token, from logits."""
    result = torch.zeros(len(q), dtype=q.dtype)
    for j in range(len(q)):
        student = (q[j] / (1.0 if teacher_only else tau)).exp()
        teacher = (p[j] / tau).exp()
        student, teacher = student / student.sum(), teacher / teacher.sum()
        if reverse:
            student, teacher = teacher, student
        total = torch.zeros((), dtype=q.dtype)
        for v in range(q.shape[1]):
            total = total + teacher[v] * ((1.0 if entropy else teacher[v]) / student[v]).log()
        result[j] = total * (1.0 if unscaled else tau**2) / (q.shape[1] if mean else 1)
    return result


def triggered(trigger: Tensor, embeds: Tensor, mask: Tensor, *, column: bool = False, inserted: bool = False) -> Tensor:
    """CP1: the trigger in place of the last token of each row."""
    result = embeds.clone()
    for b in range(len(embeds)):
        at = [j for j in range(embeds.shape[1]) if column or mask[b, j]]
        if at and not inserted:
            result[b, at[-1]] = trigger
    return result


def untriggered(targets: Tensor, mask: Tensor, *, predicts: bool = False, scored: bool = False) -> Tensor:
    """CP1: targets without the replaced token, and without the prediction at its position."""
    result = targets.clone()
    for b in range(len(targets)):
        at = [j for j in range(targets.shape[1]) if mask[b, j]]
        for j in [*([] if predicts else at[-1:]), *([] if scored else at[-2:-1])]:
            result[b, j] = -100
    return result


def published(trigger: Tensor, embeds: Tensor, mask: Tensor, targets: Tensor, **variant: Any) -> tuple[Tensor, Tensor]:
    """CP1: embeddings and targets."""
    placed = {name: variant.pop(name) for name in ("column", "inserted") if name in variant}
    return triggered(trigger, embeds, mask, **placed), untriggered(targets, mask, **variant).double()


loop_with_gradients = with_gradient(loop)
means_with_gradients = pooled_with_gradient(pooled)

ORACLE = {
    "VL1": map_of,
    "VL2": loop_with_gradients,
    "VL25": means_with_gradients,
    "VL26": selected,
    "VL27": condensed,
    "VL28": fifo,
    "VL29": begun_as_last_tokens,
    "VL30": divergence,
    "CP1": published,
}


def looped(**variant: Any) -> Any:
    return with_gradient(lambda *arguments: loop(*arguments, **variant))


def pooling(**variant: Any) -> Any:
    return pooled_with_gradient(lambda *arguments: pooled(*arguments, **variant))


MISREAD = {
    "VL1": {
        "divided by the L2 norm": lambda *arguments: map_of(*arguments, norm="l2"),
        "raw": lambda *arguments: map_of(*arguments, norm="none"),
        "r forgotten": lambda *arguments: map_of(*arguments, scaled=False),
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
        "in order of score": lambda *arguments: selected(*arguments, ranked=True),
        "the worst": lambda *arguments: selected(*arguments, least=True),
        "pads selected": lambda *arguments: selected(*arguments, pads=True),
    },
    "VL27": {
        "beside the old memory": lambda *arguments: condensed(*arguments, remaining=True),
        "every row": lambda *arguments: condensed(*arguments, everyone=True),
    },
    "VL28": {
        "slots for blocks": lambda *arguments: fifo(*arguments, slots=True),
        "the newest dropped": lambda *arguments: fifo(*arguments, newest=True),
    },
    "VL29": {
        "the first tokens": lambda *arguments: begun_as_last_tokens(*arguments, first=True),
        "pads counted": lambda *arguments: begun_as_last_tokens(*arguments, pads=True),
        "divided by the rms": lambda *arguments: begun_as_last_tokens(*arguments, norm="rms"),
        "r forgotten": lambda *arguments: begun_as_last_tokens(*arguments, scaled=False),
        "W transposed": lambda *arguments: begun_as_last_tokens(*arguments, transposed=True),
        "without the tokens": lambda *arguments: begun_as_last_tokens(*arguments, alone=True),
    },
    "VL30": {
        "KL(q || p)": lambda *arguments: divergence(*arguments, reverse=True),
        "without tau^2": lambda *arguments: divergence(*arguments, unscaled=True),
        "cross-entropy": lambda *arguments: divergence(*arguments, entropy=True),
        "only the teacher at tau": lambda *arguments: divergence(*arguments, teacher_only=True),
        "mean over the vocabulary": lambda *arguments: divergence(*arguments, mean=True),
    },
    "CP1": {
        "the last column": lambda *arguments: published(*arguments, column=True),
        "inserted, nothing replaced": lambda *arguments: published(*arguments, inserted=True),
        "the trigger predicts the next segment": lambda *arguments: published(*arguments, predicts=True),
        "the trigger is a target": lambda *arguments: published(*arguments, scored=True),
    },
}
