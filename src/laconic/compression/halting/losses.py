"""Loss terms that train the number of vectors: price and gradient estimator.

The formulas are in `estimators`; this module applies them to the passes over a window. B rows, w segments. Terms in
nats are multiplied by `weight`, 1 / scored tokens of the step, as the text's nats are.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.compression.training_window import WindowRun
from laconic.config.methods import StopHeadConfig
from laconic.halting.estimators import (
    best_length_label,
    length_penalty,
    mark_priced_everywhere,
    mark_priced_if_read,
    ponder_loss,
    ratio_penalty,
)
from laconic.halting.stop_distribution import expected_length


def mark_priced_segments(window: WindowRun) -> Bool[Tensor, "B w"]:
    """Mark compressions with a price: those that scored segments of the window read, or all that have text."""
    if window.stop_head_config is not None and window.stop_head_config.cost_on == "all":
        return mark_priced_everywhere(window.num_tokens) & ~window.is_read_hard[:, None]
    return mark_priced_if_read(window.has_targets, window.is_read_hard) & (window.num_tokens > 0)


def length_loss(
    window: WindowRun, config: StopHeadConfig, omega: float, weight: float, denominators: Mapping[str, float]
) -> Float[Tensor, ""]:
    """Compute the classifier's loss, or price and gradient estimator of the stop head.

    `omega` is the share of the price of a vector, beta, that is in effect.
    """
    num_compressions = denominators["compressions"]
    if window.config.length_policy == "classifier":
        return classifier_loss(window, config.length_cost, num_compressions)
    cost = length_cost(window, config, omega, weight, num_compressions)
    return cost + ponder_correction(window, config, weight) if config.estimator == "ponder" else cost


def length_cost(
    window: WindowRun, config: StopHeadConfig, omega: float, weight: float, num_compressions: float
) -> Float[Tensor, ""]:
    """Compute omega beta sum over k of E[N_k], or the mean ratio."""
    is_priced = mark_priced_segments(window)
    alpha, beta = config.ratio_memory_weight, config.length_cost
    lengths = window.map_stop_logits(partial(expected_length, stop_position=config.stop_position))
    if config.cost_kind == "per_vector":
        return length_penalty(lengths * weight, is_priced, beta, omega)
    sizes = window.num_tokens, window.memory_sizes
    return omega * ratio_penalty(lengths, *sizes, is_priced, beta, alpha, num_compressions)


def ponder_correction(window: WindowRun, config: StopHeadConfig, weight: float) -> Float[Tensor, ""]:
    """Return the expected loss of each next segment minus its loss after the sampled length, which is in the sum."""
    is_priced = mark_priced_segments(window)
    total = torch.zeros((), dtype=window.losses.dtype, device=window.num_tokens.device)
    for k, (a, trials) in enumerate(zip(window.a, window.trial_losses, strict=True)):
        if a is not None and trials is not None:
            excess = trials - window.segment_losses[k + 1].detach()[:, None]
            expectation = ponder_loss(a, excess, window.candidate_lengths, 0.0, config.stop_position)
            total = total + (expectation * weight).masked_fill(~is_priced[:, k], 0.0).sum()
    return total


def classifier_loss(window: WindowRun, beta: float, num_compressions: float) -> Float[Tensor, ""]:
    """Compute the classifier's mean cross-entropy to the cheapest length found by trial."""
    is_priced = mark_priced_segments(window)
    total = torch.zeros((), device=window.num_tokens.device)
    for k, (state, trials) in enumerate(zip(window.first_states, window.trial_losses, strict=True)):
        if state is not None and trials is not None:
            label = best_length_label(trials, window.candidate_lengths, beta)
            nll = F.cross_entropy(window.model.summaries.length_logits(state), label, reduction="none")
            total = total + nll.masked_fill(~is_priced[:, k], 0.0).sum()
    return total / (num_compressions or 1.0)
