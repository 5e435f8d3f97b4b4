"""What is added to the nats of a window so that the number of vectors is learned: price, prior and estimator.

The formulas stand in estimators.py; here they meet the runs over a window. B rows, w segments. A row's nats count
`weight` in the loss, and so does whatever is in nats beside them.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.compression.halting.estimators import (
    best_length_label,
    cost_to_go,
    entropy_floor_penalty,
    kl_geometric,
    length_penalty,
    mark_priced_everywhere,
    mark_priced_if_read,
    ponder_loss,
    ratio_penalty,
    reinforce_row_baseline,
    reinforce_two_samples,
)
from laconic.compression.halting.stop_distribution import expected_length
from laconic.compression.summary_tokens import SummaryParameters
from laconic.compression.training_window import WindowRun
from laconic.config.methods import StopHeadConfig

Weight = Float[Tensor, " B"]


def mark_priced_segments(window: WindowRun) -> Bool[Tensor, "B w"]:
    """Compressions that have a price: read by scored segments of their window, or all that have a text."""
    if window.stop_head_config is not None and window.stop_head_config.cost_on == "all":
        return mark_priced_everywhere(window.num_tokens) & ~window.is_read_hard[:, None]
    return mark_priced_if_read(window.has_targets, window.is_read_hard) & (window.num_tokens > 0)


def length_loss(
    windows: list[WindowRun],
    config: StopHeadConfig,
    beta: float,
    omega: float,
    weight: Weight,
    denominators: Mapping[str, float],
) -> Float[Tensor, ""]:
    """The classifier's loss, or price and estimator of the stop head."""
    if windows[0].config.length_policy == "classifier":
        return classifier_loss(windows[0], windows[0].model.summaries, beta, denominators["compressions"])
    price = torch.stack(
        [length_cost(c, config, beta, omega, weight, denominators["compressions"]) for c in windows]
    ).mean()
    if config.estimator == "ponder":
        return price + ponder_correction(windows[0], config, weight)
    if config.estimator == "reinforce":
        score = reinforce_loss(windows, config, omega * beta, weight)
        return price + score - score.detach()  # its value means nothing
    return price


def length_cost(
    window: WindowRun, config: StopHeadConfig, beta: float, omega: float, weight: Weight, num_compressions: float
) -> Float[Tensor, ""]:
    """omega beta sum over k of E[N_k], or the mean ratio; with the prior and the floor of the law, which are whole."""
    here, lengths = (
        mark_priced_segments(window),
        window.map_stop_logits(partial(expected_length, stop_position=config.stop_position)),
    )
    if config.cost_kind == "ratio":
        found = omega * ratio_penalty(
            lengths, window.num_tokens, window.memory_sizes, here, beta, config.ratio_memory_weight, num_compressions
        )
    else:
        found = length_penalty(lengths * weight[:, None], here, beta, omega)
    if config.prior_kl_weight:
        kl = window.map_stop_logits(
            partial(
                kl_geometric,
                stop_prob=config.prior_stop_prob,
                tail=config.prior_tail,
                stop_position=config.stop_position,
            )
        )
        found = found + length_penalty(kl * weight[:, None], here, config.prior_kl_weight)
    if config.entropy_weight:
        floor = window.map_stop_logits(
            partial(
                entropy_floor_penalty,
                weight=config.entropy_weight,
                floor=config.entropy_floor,
                stop_position=config.stop_position,
            )
        )
        found = found + length_penalty(floor * weight[:, None], here, 1.0)
    return found


def ponder_correction(window: WindowRun, config: StopHeadConfig, weight: Weight) -> Float[Tensor, ""]:
    """The law's mean of the next segment's nats, less those that were read and stand in the loss already."""
    here, found = mark_priced_segments(window), weight.new_zeros(())
    for k, (a, trials) in enumerate(zip(window.a, window.trial_losses, strict=True)):
        if a is not None and trials is not None:
            more = trials - window.segment_losses[k + 1].detach()[:, None]
            each = ponder_loss(a, more, window.candidate_lengths, 0.0, config.stop_position)
            found = found + (each * weight).masked_fill(~here[:, k], 0.0).sum()
    return found


def reinforce_loss(windows: list[WindowRun], config: StopHeadConfig, beta: float, weight: Weight) -> Float[Tensor, ""]:
    """The score of the lengths drawn, against a second draw or the other rows."""
    here = mark_priced_segments(windows[0])
    price = torch.stack(
        [beta * c.map_stop_logits(partial(expected_length, stop_position=config.stop_position)) for c in windows]
    )
    G = cost_to_go(torch.stack([c.losses for c in windows]), price.masked_fill(~here, 0.0)) * weight[:, None]
    log_p = torch.stack([torch.stack(c.length_log_probs, 1) for c in windows])
    ratios = torch.stack([torch.stack(c.importance_weights, 1) for c in windows])
    if len(windows) == 2:
        return reinforce_two_samples(log_p, G, here, ratios)
    return reinforce_row_baseline(log_p[0], G[0], here, ratios[0])


def classifier_loss(
    window: WindowRun, summaries: SummaryParameters, beta: float, num_compressions: float
) -> Float[Tensor, ""]:
    """Cross-entropy of the classifier to the cheapest length found by trial, a mean over compressions."""
    here, found = mark_priced_segments(window), torch.zeros((), device=window.num_tokens.device)
    for k, (state, trials) in enumerate(zip(window.first_states, window.trial_losses, strict=True)):
        if state is not None and trials is not None:
            label = best_length_label(trials, window.candidate_lengths, beta)
            each = F.cross_entropy(summaries.length_logits(state), label, reduction="none")
            found = found + each.masked_fill(~here[:, k], 0.0).sum()
    return found / (num_compressions or 1.0)
