"""Loss terms that train the number of vectors: price and gradient estimator.

The formulas are in `estimators`; this module applies them to the passes over a window. B rows, w segments.

A row's nats enter the loss multiplied by `weight`, and so does every term measured in nats.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.compression.summary_tokens import SummaryParameters
from laconic.compression.training_window import WindowRun
from laconic.config.methods import StopHeadConfig
from laconic.halting.estimators import (
    best_length_label,
    cost_to_go,
    length_penalty,
    mark_priced_everywhere,
    mark_priced_if_read,
    ponder_loss,
    ratio_penalty,
    reinforce_two_samples,
)
from laconic.halting.stop_distribution import expected_length

Weight = Float[Tensor, " B"]


def mark_priced_segments(window: WindowRun) -> Bool[Tensor, "B w"]:
    """Mark compressions with a price: those that scored segments of the window read, or all that have text."""
    if window.stop_head_config is not None and window.stop_head_config.cost_on == "all":
        return mark_priced_everywhere(window.num_tokens) & ~window.is_read_hard[:, None]
    return mark_priced_if_read(window.has_targets, window.is_read_hard) & (window.num_tokens > 0)


def length_loss(
    windows: list[WindowRun], config: StopHeadConfig, omega: float, weight: Weight, denominators: Mapping[str, float]
) -> Float[Tensor, ""]:
    """Compute the classifier's loss, or price and gradient estimator of the stop head, of one or two passes.

    `omega` is the share of the price of a vector, beta, that is in effect.
    """
    num_compressions = denominators["compressions"]
    beta = config.length_cost
    if windows[0].config.length_policy == "classifier":
        return classifier_loss(windows[0], windows[0].model.summaries, beta, num_compressions)
    cost = torch.stack(
        [length_cost(window, config, beta, omega, weight, num_compressions) for window in windows]
    ).mean()
    if config.estimator == "ponder":
        return cost + ponder_correction(windows[0], config, weight)
    if config.estimator == "reinforce":
        score = reinforce_loss(windows, config, omega * beta, weight)
        return cost + score - score.detach()  # only its gradient is meaningful
    return cost


def length_cost(
    window: WindowRun, config: StopHeadConfig, beta: float, omega: float, weight: Weight, num_compressions: float
) -> Float[Tensor, ""]:
    """Compute omega beta sum over k of E[N_k], or the mean ratio."""
    is_priced = mark_priced_segments(window)
    alpha = config.ratio_memory_weight
    lengths = window.map_stop_logits(partial(expected_length, stop_position=config.stop_position))
    if config.cost_kind == "per_vector":
        return length_penalty(lengths * weight[:, None], is_priced, beta, omega)
    sizes = window.num_tokens, window.memory_sizes
    return omega * ratio_penalty(lengths, *sizes, is_priced, beta, alpha, num_compressions)


def ponder_correction(window: WindowRun, config: StopHeadConfig, weight: Weight) -> Float[Tensor, ""]:
    """Return the expected loss of each next segment minus its loss after the sampled length, which is in the sum."""
    is_priced = mark_priced_segments(window)
    total = weight.new_zeros(())
    for k, (a, trials) in enumerate(zip(window.a, window.trial_losses, strict=True)):
        if a is not None and trials is not None:
            excess = trials - window.segment_losses[k + 1].detach()[:, None]
            expectation = ponder_loss(a, excess, window.candidate_lengths, 0.0, config.stop_position)
            total = total + (expectation * weight).masked_fill(~is_priced[:, k], 0.0).sum()
    return total


def reinforce_loss(windows: list[WindowRun], config: StopHeadConfig, beta: float, weight: Weight) -> Float[Tensor, ""]:
    """Compute the score term of the sampled lengths, with a second sample as baseline."""
    is_priced = mark_priced_segments(windows[0])
    mean_length = partial(expected_length, stop_position=config.stop_position)
    price = torch.stack([beta * window.map_stop_logits(mean_length) for window in windows])
    losses = torch.stack([window.losses for window in windows])
    G = cost_to_go(losses, price.masked_fill(~is_priced, 0.0)) * weight[:, None]
    log_p = torch.stack([torch.stack(window.length_log_probs, 1) for window in windows])
    return reinforce_two_samples(log_p, G, is_priced)


def classifier_loss(
    window: WindowRun, summaries: SummaryParameters, beta: float, num_compressions: float
) -> Float[Tensor, ""]:
    """Compute the classifier's mean cross-entropy to the cheapest length found by trial."""
    is_priced = mark_priced_segments(window)
    total = torch.zeros((), device=window.num_tokens.device)
    for k, (state, trials) in enumerate(zip(window.first_states, window.trial_losses, strict=True)):
        if state is not None and trials is not None:
            label = best_length_label(trials, window.candidate_lengths, beta)
            nll = F.cross_entropy(summaries.length_logits(state), label, reduction="none")
            total = total + nll.masked_fill(~is_priced[:, k], 0.0).sum()
    return total / (num_compressions or 1.0)
