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

from laconic.evaluation.class_incremental.tasks import TokenIds
from laconic.interfaces import StatefulLM
from laconic.nested import nan_check
from laconic.nested import state as values
from laconic.nested.state import FastWeightState

ScoreArray = NDArray[np.float64]
PROMPT_BATCH, LABEL_BATCH, CANDIDATE_BATCH = (
    16,
    96,
    48,
)  # utterances read at once; labels said at once, and where few are to be said


def pad_right(rows: Sequence[TokenIds], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids padded right, and where they are live."""
    T = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)
    live = torch.tensor([[t < len(row) for t in range(T)] for row in rows], device=device)
    return ids, live


def repeat_state(state: FastWeightState, n: int) -> FastWeightState:
    """Every row `n` times, side by side; what all rows share is not copied."""
    return values.map_tensors(state, lambda x: repeat_tensor_rows(x, n))


def repeat_tensor_rows(x: Tensor, n: int) -> Tensor:
    """Rows repeated; a row that stands for the whole batch goes on doing so."""
    if len(x) == 1 or x.stride(0) == 0:
        return x[:1].expand(len(x) * n, *x.shape[1:])
    return x.repeat_interleave(n, 0)


def score_labels(
    model: StatefulLM,
    state: FastWeightState,
    prompts: Sequence[TokenIds],
    label_ids: Sequence[TokenIds],
    candidates: Sequence[int] | None = None,
) -> ScoreArray:
    """[N, K]: the mean log-probability of the words of every label after every prompt, each read on its own fork.

    `state` has one row, of which the forks are made; nothing is learned from prompts and labels. With `among`, only the
    best of those labels and the best of all are meant: what cannot be either has a bound from above for its score.
    """
    found = np.empty((len(prompts), len(label_ids)))
    with torch.no_grad():
        for at in split_into_batches(sorted(range(len(prompts)), key=lambda i: len(prompts[i])), PROMPT_BATCH):
            ids, live = pad_right([prompts[i] for i in at], get_device(model))
            seen = read_ids(model, ids, repeat_state(state, len(at)), live)
            ends = seen.hidden_states[torch.arange(len(at)), live.sum(1) - 1]
            first = F.log_softmax(model.logits(ends).float(), -1).double()
            scores = score_all if candidates is None else partial(score_candidates, candidates=candidates)
            told = scores(model, seen.state, first, label_ids)
            found[at] = told.cpu().numpy()
    return found


class ReadOutput(NamedTuple):
    """What a reading gave: vectors after the last norm, and the new state."""

    hidden_states: Tensor
    state: FastWeightState


def read_ids(
    model: StatefulLM, ids: Tensor, state: FastWeightState, attention_mask: Tensor | None = None
) -> ReadOutput:
    """Ids on a state, from which nothing is learned but by models that could not see them otherwise."""
    seen = nan_check.read_tokens_checked(
        model, ids, state, attention_mask=attention_mask, update_weights=has_no_attention(state)
    )
    return ReadOutput(seen.hidden_states, cast(FastWeightState, cast(Any, seen.cache)))


def split_into_batches(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Numbers in runs of at most `size`."""
    return [order[i : i + size] for i in range(0, len(order), size)]


def get_module(model: Any) -> nn.Module:
    """The weights: a learner's own, or those of the decoder that stands for one."""
    return model if isinstance(model, nn.Module) else model.decoder


def get_device(model: StatefulLM) -> torch.device:
    """Where a model's weights lie."""
    return next(get_module(model).parameters()).device


def has_no_attention(state: FastWeightState) -> bool:
    """Whether a model sees what it reads in its fast weights alone, so that they have to move on each fork too."""
    return state.layers[0].cache is None


def score_all(
    model: StatefulLM, state: FastWeightState, next_log_probs: Tensor, label_ids: Sequence[TokenIds]
) -> Tensor:
    """[b, K]: all labels after b prompts, whose next-token log-probabilities are `first`; short ones together."""
    told = torch.empty(len(next_log_probs), len(label_ids), dtype=next_log_probs.dtype, device=next_log_probs.device)
    for group in split_into_batches(sorted(range(len(label_ids)), key=lambda k: len(label_ids[k])), LABEL_BATCH // 4):
        told[:, group] = score_group(model, state, next_log_probs, [label_ids[k] for k in group])
    return told


def score_group(
    model: StatefulLM, state: FastWeightState, next_log_probs: Tensor, label_ids: Sequence[TokenIds]
) -> Tensor:
    """[b, k]: of labels after b prompts, whose next-token log-probabilities are `first`."""
    b, k = len(next_log_probs), len(label_ids)
    ids, live = pad_right(label_ids, next_log_probs.device)
    total = next_log_probs[:, ids[:, 0]]
    if ids.shape[1] > 1:
        rows = ids[:, :-1].repeat(b, 1), live[:, 1:].repeat(b, 1)
        parts = [
            model.logits(read_ids(model, part, own, alive).hidden_states)
            for part, alive, own in iter_prompt_batches(*rows, state, k)
        ]
        logits = torch.cat(parts).float().view(b, k, ids.shape[1] - 1, -1)
        next = logits.gather(3, ids[:, 1:].expand(b, -1, -1)[..., None])[..., 0] - logits.logsumexp(-1)
        total = total + next.double().masked_fill(~live[:, 1:], 0).sum(2)
    return total / live.sum(1)


def iter_prompt_batches(
    ids: Tensor, attention_mask: Tensor, state: FastWeightState, k: int
) -> Iterator[tuple[Tensor, Tensor, FastWeightState]]:
    """The rows in runs of whole prompts that are read at once, with their forks."""
    each = max(1, LABEL_BATCH // k)
    for begin in range(0, len(ids) // k, each):
        end = min(begin + each, len(ids) // k)
        own = repeat_state(values.map_tensors(state, lambda x, a=begin, b=end: x[a:b]), k)
        yield ids[begin * k : end * k], attention_mask[begin * k : end * k], own


def score_candidates(
    model: StatefulLM,
    state: FastWeightState,
    next_log_probs: Tensor,
    label_ids: Sequence[TokenIds],
    candidates: Sequence[int],
) -> Tensor:
    """As `every`, of labels that may be the best of all or of some; of the others a bound. The likeliest come first."""
    K = len(label_ids)
    ids, live = pad_right(label_ids, next_log_probs.device)
    size = live.sum(1)
    some = torch.tensor([k in candidates for k in range(K)], device=next_log_probs.device)
    bound = next_log_probs[:, ids[:, 0]] / size
    done = (size == 1).repeat(len(next_log_probs), 1)
    while bool(
        (open := find_open_labels(bound, done, some) | find_open_labels(bound, done, torch.ones_like(some))).any()
    ):
        each = min(K, max(1, CANDIDATE_BATCH // int(open.any(1).sum())))
        tried = bound.masked_fill(~open, -torch.inf).topk(each, 1).indices
        row, place = open.gather(1, tried).nonzero(as_tuple=True)
        label = tried[row, place]
        told = bound_scores(model, state, next_log_probs, ids, size, row, label)
        bound.scatter_reduce_(0, row[:, None].expand_as(told), told, "amin")
        done[row, label] = True
    return bound


def find_open_labels(bound: Tensor, done: Tensor, some: Tensor) -> Tensor:
    """[b, K]: labels not yet read, of some, that may be as good as the best of those that were."""
    reached = bound.masked_fill(~(done & some), -torch.inf).amax(1, keepdim=True)
    return ~done & some & (bound >= reached)


def bound_scores(
    model: StatefulLM,
    state: FastWeightState,
    next_log_probs: Tensor,
    ids: Tensor,
    size: Tensor,
    row: Tensor,
    label: Tensor,
) -> Tensor:
    """[R, K]: what R labels, each after the prompt of its row, say of all labels: of their own, the mean itself.

    A label shares c words with the one that is read; its log-probability is at most that of the c words and of its own
    next one. Infinity where it shares none, which tells nothing new.
    """
    longest = int(size[label].max())
    told, live = ids[label, :longest], torch.arange(longest, device=ids.device) < size[label, None]
    seen = read_ids(model, told[:, :-1], values.map_tensors(state, lambda x: select_tensor_rows(x, row)), live[:, 1:])
    logits = model.logits(seen.hidden_states).float()
    total = logits.logsumexp(-1)
    words = (logits.gather(2, told[:, 1:, None])[..., 0] - total).double().masked_fill(~live[:, 1:], 0)
    sums = F.pad(
        torch.cat([next_log_probs[row, told[:, 0]][:, None], words], 1).cumsum(1), (1, 0)
    )  # of 0, 1, ... words
    c = count_common_prefix(ids, size)[label]
    next, at = ids.gather(1, c.T.clamp(max=ids.shape[1] - 1)).T, (c - 1).clamp(0, longest - 2)
    more = (logits[torch.arange(len(row))[:, None], at, next] - total.gather(1, at)).double()
    known = sums.gather(1, c) + more.where((c < size[label, None]) & (c < size), 0)
    return known.where(c > 0, torch.inf) / size


def count_common_prefix(ids: Tensor, size: Tensor) -> Tensor:
    """[K, K]: with how many equal words two labels begin."""
    same = (ids[:, None] == ids).cumprod(2).sum(2)
    return same.minimum(size[:, None]).minimum(size)


def select_tensor_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows; one that stands for the whole batch goes on doing so."""
    return repeat_tensor_rows(x[:1], len(rows)) if len(x) == 1 or x.stride(0) == 0 else x[rows]
