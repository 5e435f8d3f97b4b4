"""What a model says of labels: the mean log-probability of their words after a prompt, each read on a fork of a state.

Where only the best label is asked for, few of them are read: log-probabilities are at most 0, so what is known of a
label's first words bounds its mean from above, and a label whose bound is below a read one's mean cannot be the best.

Symbols: N prompts in all, b of them at once, K labels, V ids.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from laconic.core import finite
from laconic.core import state as values
from laconic.core.contract import Learner
from laconic.core.state import State
from laconic.core.tasks import Ids

Scores = NDArray[np.float64]
PROMPTS, ROWS, TRIED = 16, 96, 48  # utterances read at once; labels said at once, and where few are to be said


def grid(rows: Sequence[Ids], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids padded right, and where they are live."""
    T = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)
    live = torch.tensor([[t < len(row) for t in range(T)] for row in rows], device=device)
    return ids, live


def forked(state: State, n: int) -> State:
    """Every row `n` times, side by side; what all rows share is not copied."""
    return values.mapped(state, lambda x: spread(x, n))


def spread(x: Tensor, n: int) -> Tensor:
    """Rows repeated; a row that stands for the whole batch goes on doing so."""
    if len(x) == 1 or x.stride(0) == 0:
        return x[:1].expand(len(x) * n, *x.shape[1:])
    return x.repeat_interleave(n, 0)


def label_scores(
    model: Learner, state: State, prompts: Sequence[Ids], words: Sequence[Ids], among: Sequence[int] | None = None
) -> Scores:
    """[N, K]: the mean log-probability of the words of every label after every prompt, each read on its own fork.

    `state` has one row, of which the forks are made; nothing is learned from prompts and labels. With `among`, only the
    best of those labels and the best of all are meant: what cannot be either has a bound from above for its score.
    """
    found = np.empty((len(prompts), len(words)))
    with torch.no_grad():
        for at in runs(sorted(range(len(prompts)), key=lambda i: len(prompts[i])), PROMPTS):
            ids, live = grid([prompts[i] for i in at], device_of(model))
            seen = read(model, ids, forked(state, len(at)), live)
            ends = seen.hidden[torch.arange(len(at)), live.sum(1) - 1]
            first = F.log_softmax(model.logits(ends).float(), -1).double()
            scores = every if among is None else partial(likeliest, among=among)
            told = scores(model, seen.state, first, words)
            found[at] = told.cpu().numpy()
    return found


class Read(NamedTuple):
    """What a reading gave: vectors after the last norm, and the new state."""

    hidden: Tensor
    state: State


def read(model: Learner, ids: Tensor, state: State, live: Tensor | None = None) -> Read:
    """Ids on a state, from which nothing is learned but by models that could not see them otherwise."""
    seen = finite.read(model, ids, state, live=live, learn=blind(state))
    return Read(seen.hidden, cast(State, cast(Any, seen.state)))


def runs(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Numbers in runs of at most `size`."""
    return [order[i : i + size] for i in range(0, len(order), size)]


def module_of(model: Any) -> nn.Module:
    """The weights: a learner's own, or those of the decoder that stands for one."""
    return model if isinstance(model, nn.Module) else model.decoder


def device_of(model: Learner) -> torch.device:
    """Where a model's weights lie."""
    return next(module_of(model).parameters()).device


def blind(state: State) -> bool:
    """Whether a model sees what it reads in its fast weights alone, so that they have to move on each fork too."""
    return state.layers[0].cache is None


def every(model: Learner, state: State, first: Tensor, words: Sequence[Ids]) -> Tensor:
    """[b, K]: all labels after b prompts, whose next-token log-probabilities are `first`; short ones together."""
    told = torch.empty(len(first), len(words), dtype=first.dtype, device=first.device)
    for group in runs(sorted(range(len(words)), key=lambda k: len(words[k])), ROWS // 4):
        told[:, group] = said(model, state, first, [words[k] for k in group])
    return told


def said(model: Learner, state: State, first: Tensor, words: Sequence[Ids]) -> Tensor:
    """[b, k]: of labels after b prompts, whose next-token log-probabilities are `first`."""
    b, k = len(first), len(words)
    ids, live = grid(words, first.device)
    total = first[:, ids[:, 0]]
    if ids.shape[1] > 1:
        rows = ids[:, :-1].repeat(b, 1), live[:, 1:].repeat(b, 1)
        parts = [model.logits(read(model, part, own, alive).hidden) for part, alive, own in pieces(*rows, state, k)]
        logits = torch.cat(parts).float().view(b, k, ids.shape[1] - 1, -1)
        next = logits.gather(3, ids[:, 1:].expand(b, -1, -1)[..., None])[..., 0] - logits.logsumexp(-1)
        total = total + next.double().masked_fill(~live[:, 1:], 0).sum(2)
    return total / live.sum(1)


def pieces(ids: Tensor, live: Tensor, state: State, k: int) -> Iterator[tuple[Tensor, Tensor, State]]:
    """The rows in runs of whole prompts that are read at once, with their forks."""
    each = max(1, ROWS // k)
    for begin in range(0, len(ids) // k, each):
        end = min(begin + each, len(ids) // k)
        own = forked(values.mapped(state, lambda x, a=begin, b=end: x[a:b]), k)
        yield ids[begin * k : end * k], live[begin * k : end * k], own


def likeliest(model: Learner, state: State, first: Tensor, words: Sequence[Ids], among: Sequence[int]) -> Tensor:
    """As `every`, of labels that may be the best of all or of some; of the others a bound. The likeliest come first."""
    K = len(words)
    ids, live = grid(words, first.device)
    size = live.sum(1)
    some = torch.tensor([k in among for k in range(K)], device=first.device)
    bound = first[:, ids[:, 0]] / size
    done = (size == 1).repeat(len(first), 1)
    while bool((open := rivals(bound, done, some) | rivals(bound, done, torch.ones_like(some))).any()):
        each = min(K, max(1, TRIED // int(open.any(1).sum())))
        tried = bound.masked_fill(~open, -torch.inf).topk(each, 1).indices
        row, place = open.gather(1, tried).nonzero(as_tuple=True)
        label = tried[row, place]
        told = bounds(model, state, first, ids, size, row, label)
        bound.scatter_reduce_(0, row[:, None].expand_as(told), told, "amin")
        done[row, label] = True
    return bound


def rivals(bound: Tensor, done: Tensor, some: Tensor) -> Tensor:
    """[b, K]: labels not yet read, of some, that may be as good as the best of those that were."""
    reached = bound.masked_fill(~(done & some), -torch.inf).amax(1, keepdim=True)
    return ~done & some & (bound >= reached)


def bounds(
    model: Learner, state: State, first: Tensor, ids: Tensor, size: Tensor, row: Tensor, label: Tensor
) -> Tensor:
    """[R, K]: what R labels, each after the prompt of its row, say of all labels: of their own, the mean itself.

    A label shares c words with the one that is read; its log-probability is at most that of the c words and of its own
    next one. Infinity where it shares none, which tells nothing new.
    """
    longest = int(size[label].max())
    told, live = ids[label, :longest], torch.arange(longest, device=ids.device) < size[label, None]
    seen = read(model, told[:, :-1], values.mapped(state, lambda x: chosen(x, row)), live[:, 1:])
    logits = model.logits(seen.hidden).float()
    total = logits.logsumexp(-1)
    words = (logits.gather(2, told[:, 1:, None])[..., 0] - total).double().masked_fill(~live[:, 1:], 0)
    sums = F.pad(torch.cat([first[row, told[:, 0]][:, None], words], 1).cumsum(1), (1, 0))  # of 0, 1, ... words
    c = shared(ids, size)[label]
    next, at = ids.gather(1, c.T.clamp(max=ids.shape[1] - 1)).T, (c - 1).clamp(0, longest - 2)
    more = (logits[torch.arange(len(row))[:, None], at, next] - total.gather(1, at)).double()
    known = sums.gather(1, c) + more.where((c < size[label, None]) & (c < size), 0)
    return known.where(c > 0, torch.inf) / size


def shared(ids: Tensor, size: Tensor) -> Tensor:
    """[K, K]: with how many equal words two labels begin."""
    same = (ids[:, None] == ids).cumprod(2).sum(2)
    return same.minimum(size[:, None]).minimum(size)


def chosen(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows; one that stands for the whole batch goes on doing so."""
    return spread(x[:1], len(rows)) if len(x) == 1 or x.stride(0) == 0 else x[rows]
