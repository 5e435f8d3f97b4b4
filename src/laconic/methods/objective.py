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

from laconic.methods.estimators import (
    entropy_floor,
    everywhere,
    kl_geometric,
    penalty,
    ponder,
    ratio_label,
    ratio_penalty,
    read,
    score_rows,
    score_term,
    to_go,
)
from laconic.methods.halting import expected
from laconic.methods.settings import Halting
from laconic.methods.summaries import Summaries
from laconic.methods.windows import Course

Weight = Float[Tensor, " B"]


def counted(course: Course) -> Bool[Tensor, "B w"]:
    """Compressions that have a price: read by scored segments of their window, or all that have a text."""
    if course.how is not None and course.how.penalise == "all":
        return everywhere(course.tokens) & ~course.read_hard[:, None]
    return read(course.scored, course.read_hard) & (course.tokens > 0)


def learned(
    courses: list[Course], how: Halting, beta: float, omega: float, weight: Weight, sums: Mapping[str, float]
) -> Float[Tensor, ""]:
    """The classifier's loss, or price and estimator of the stop head."""
    if courses[0].reading.length == "ratio":
        return labelled(courses[0], courses[0].unit.summaries, beta, sums["compressions"])
    price = torch.stack([priced(c, how, beta, omega, weight, sums["compressions"]) for c in courses]).mean()
    if how.estimator == "ponder":
        return price + pondered(courses[0], how, weight)
    if how.estimator == "sample":
        score = scored(courses, how, omega * beta, weight)
        return price + score - score.detach()  # its value means nothing
    return price


def priced(
    course: Course, how: Halting, beta: float, omega: float, weight: Weight, compressions: float
) -> Float[Tensor, ""]:
    """omega beta sum over k of E[N_k], or the mean ratio; with the prior and the floor of the law, which are whole."""
    here, lengths = counted(course), course.each(partial(expected, index=how.index))
    if how.penalty == "ratio":
        found = omega * ratio_penalty(lengths, course.tokens, course.old, here, beta, how.alpha, compressions)
    else:
        found = penalty(lengths * weight[:, None], here, beta, omega)
    if how.kl:
        kl = course.each(partial(kl_geometric, prior=how.prior, form=how.geometric, index=how.index))
        found = found + penalty(kl * weight[:, None], here, how.kl)
    if how.entropy:
        floor = course.each(partial(entropy_floor, weight=how.entropy, floor=how.floor, index=how.index))
        found = found + penalty(floor * weight[:, None], here, 1.0)
    return found


def pondered(course: Course, how: Halting, weight: Weight) -> Float[Tensor, ""]:
    """The law's mean of the next segment's nats, less those that were read and stand in the loss already."""
    here, found = counted(course), weight.new_zeros(())
    for k, (a, trials) in enumerate(zip(course.a, course.trials, strict=True)):
        if a is not None and trials is not None:
            more = trials - course.nats[k + 1].detach()[:, None]
            each = ponder(a, more, course.lengths, 0.0, how.index)
            found = found + (each * weight).masked_fill(~here[:, k], 0.0).sum()
    return found


def scored(courses: list[Course], how: Halting, beta: float, weight: Weight) -> Float[Tensor, ""]:
    """The score of the lengths drawn, against a second draw or the other rows."""
    here = counted(courses[0])
    price = torch.stack([beta * c.each(partial(expected, index=how.index)) for c in courses])
    G = to_go(torch.stack([c.all_nats for c in courses]), price.masked_fill(~here, 0.0)) * weight[:, None]
    log_p = torch.stack([torch.stack(c.log_p, 1) for c in courses])
    ratios = torch.stack([torch.stack(c.weight, 1) for c in courses])
    if len(courses) == 2:
        return score_term(log_p, G, here, ratios)
    return score_rows(log_p[0], G[0], here, ratios[0])


def labelled(course: Course, summaries: Summaries, beta: float, compressions: float) -> Float[Tensor, ""]:
    """Cross-entropy of the classifier to the cheapest length found by trial, a mean over compressions."""
    here, found = counted(course), torch.zeros((), device=course.tokens.device)
    for k, (state, trials) in enumerate(zip(course.first, course.trials, strict=True)):
        if state is not None and trials is not None:
            label = ratio_label(trials, course.lengths, beta)
            each = F.cross_entropy(summaries.ratios(state), label, reduction="none")
            found = found + each.masked_fill(~here[:, k], 0.0).sum()
    return found / (compressions or 1.0)
