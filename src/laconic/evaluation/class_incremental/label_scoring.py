"""Score labels by the mean log-probability of their tokens after a prompt, each on a fork of a model's state.

When only the best label is needed, few labels are read in full. Log-probabilities are at most 0, so the first tokens of
a label bound its mean from above, and a label whose bound is below the mean of another cannot be the best.

Symbols: N prompts in all, b of them at once, K labels, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from laconic.batches.padding import pad_rows
from laconic.evaluation.class_incremental.tasks import TokenIds
from laconic.interfaces import StatefulLM
from laconic.models.decoder import Decoder
from laconic.nested.nan_check import ReadOutput, read_tokens_checked
from laconic.nested.state import FastWeightState, map_tensors

ScoreArray = NDArray[np.float64]
PROMPT_BATCH = 16  # prompts read at once
LABEL_BATCH = 48  # pairs of prompt and label read at once; with more, labels are read that cannot be the best
MAX_CACHED_TOKENS = 16_384  # of all rows read at once; each has its own copy of the context's keys and values


def score_labels(
    model: StatefulLM,
    state: FastWeightState,
    prompts: Sequence[TokenIds],
    label_ids: Sequence[TokenIds],
    candidates: Sequence[int] | None = None,
) -> ScoreArray:
    """Return the mean log-probability of every label after every prompt, [N, K].

    The state of one row is forked for each prompt and label; nothing is learned from them. With `candidates`, only the
    best of these labels is certain to have its score; the others may have upper bounds.
    """
    scores = np.empty((len(prompts), len(label_ids)))
    with torch.no_grad():
        for batch, last, states in read_prompts(model, state, prompts):
            next_log_probs = F.log_softmax(model.logits(last).float(), -1).double()
            scores[batch] = score_prompts(model, states, next_log_probs, label_ids, candidates).cpu().numpy()
    return scores


def read_prompts(
    model: StatefulLM, state: FastWeightState, prompts: Sequence[TokenIds]
) -> Iterator[tuple[Sequence[int], Tensor, FastWeightState]]:
    """Read prompts on forks of a state of one row, and yield the indices of some of similar length, their last hidden
    states [b, D], and the states after them.
    """
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    size = limit_batch(PROMPT_BATCH, state)
    for batch in (by_length[i : i + size] for i in range(0, len(by_length), size)):
        ids, mask = pad_rows([prompts[i] for i in batch], device=get_device(model))
        output = read_ids(model, ids, fork_rows(state, torch.zeros(len(batch), dtype=torch.long)), mask)
        yield batch, output.hidden_states[torch.arange(len(batch)), mask.sum(1) - 1], output.state


def score_prompts(
    model: StatefulLM,
    state: FastWeightState,
    next_log_probs: Tensor,
    label_ids: Sequence[TokenIds],
    candidates: Sequence[int] | None,
) -> Tensor:
    """Return the scores of all labels after b prompts, [b, K], or with candidates that of the best and upper bounds.

    The labels with the highest bounds are read first. With candidates, reading ends when no other can be better.
    """
    K = len(label_ids)
    ids, mask = pad_rows(label_ids, device=next_log_probs.device)
    size = mask.sum(1)
    is_candidate = torch.tensor([candidates is None or k in candidates for k in range(K)], device=ids.device)
    bound = next_log_probs[:, ids[:, 0]] / size
    is_scored = (size == 1).repeat(len(next_log_probs), 1)
    pairs_at_once = limit_batch(LABEL_BATCH, state)
    while True:
        is_open = ~is_scored & is_candidate
        if candidates is not None:
            is_open &= bound >= bound.masked_fill(~(is_scored & is_candidate), -torch.inf).amax(1, keepdim=True)
        if not is_open.any():
            return bound
        labels_per_prompt = min(K, max(1, pairs_at_once // int(is_open.any(1).sum())))
        most_likely = bound.masked_fill(~is_open, -torch.inf).topk(labels_per_prompt, 1).indices
        row, column = is_open.gather(1, most_likely).nonzero(as_tuple=True)
        label = most_likely[row, column]
        new_bounds = bound_scores(model, state, next_log_probs, ids, size, row, label)
        bound.scatter_reduce_(0, row[:, None].expand_as(new_bounds), new_bounds, "amin")
        is_scored[row, label] = True


def bound_scores(
    model: StatefulLM,
    state: FastWeightState,
    next_log_probs: Tensor,
    ids: Tensor,
    size: Tensor,
    row: Tensor,
    label: Tensor,
) -> Tensor:
    """Read R labels, each after the prompt of its row, and return the bounds that follow for all labels, [R, K].

    The bound of the label itself is its score. Another label that shares c tokens with it has at most the
    log-probability of these and of its own next token. If c is 0, the bound is infinite.
    """
    longest = int(size[label].max())
    read = ids[label, :longest]
    mask = torch.arange(longest, device=ids.device) < size[label, None]
    output = read_ids(model, read[:, :-1], fork_rows(state, row), mask[:, 1:])
    logits = model.logits(output.hidden_states).float()
    log_total = logits.logsumexp(-1)
    log_probs = (logits.gather(2, read[:, 1:, None])[..., 0] - log_total).double().masked_fill(~mask[:, 1:], 0)
    first = next_log_probs[row, read[:, 0]][:, None]
    sums = F.pad(torch.cat([first, log_probs], 1).cumsum(1), (1, 0))  # of 0, 1, ... tokens
    c = count_common_prefix(ids, size)[label]
    next_id = ids.gather(1, c.T.clamp(max=ids.shape[1] - 1)).T
    position = (c - 1).clamp(0, longest - 2)
    next_log_prob = (
        logits[torch.arange(len(row))[:, None], position, next_id] - log_total.gather(1, position)
    ).double()
    diverges = (c < size[label, None]) & (c < size)
    return (sums.gather(1, c) + next_log_prob.where(diverges, 0)).where(c > 0, torch.inf) / size


def count_common_prefix(ids: Tensor, size: Tensor) -> Tensor:
    """Return the number of equal tokens with which each pair of labels begins, [K, K]."""
    equal = (ids[:, None] == ids).cumprod(2).sum(2)
    return equal.minimum(size[:, None]).minimum(size)


def read_ids(
    model: StatefulLM, ids: Tensor, state: FastWeightState, attention_mask: Tensor | None = None
) -> ReadOutput:
    """Read ids on a state without learning, except for models that can see them only through their fast weights."""
    return read_tokens_checked(
        model, ids, state, attention_mask=attention_mask, update_weights=state.attention_cache is None
    )


def fork_rows(state: FastWeightState, rows: Tensor) -> FastWeightState:
    """Return the given rows of a state, with repetitions; tensors that all rows share are expanded, not copied."""

    def select(x: Tensor) -> Tensor:
        is_shared = len(x) == 1 or x.stride(0) == 0
        return x[:1].expand(len(rows), *x.shape[1:]) if is_shared else x[rows.to(x.device)]

    return map_tensors(state, select)


def limit_batch(size: int, state: FastWeightState) -> int:
    """Return how many rows to read at once after a state: fewer than `size` after a long context."""
    cache = state.attention_cache
    return size if cache is None else min(size, max(1, MAX_CACHED_TOKENS // max(1, cache.S)))


def get_module(model: Any) -> Decoder:
    return model if isinstance(model, Decoder) else model.decoder


def get_device(model: StatefulLM) -> torch.device:
    return next(get_module(model).parameters()).device
