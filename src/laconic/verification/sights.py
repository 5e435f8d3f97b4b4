"""What is wrong with scores, with who sees whom, and with probabilities.

Symbols: a scores; S slots held, P = S + T; n live slots up to one; W window.
"""

import math

import torch
from torch import Tensor

from laconic.models.attention import repeat_heads
from laconic.verification.evidence import Evidence, constant, distance, fitted


def scores(e: Evidence) -> str | None:
    """The scale, and which key head a query head reads."""
    q, k, config = e.reference["q_rot"].double(), e.reference["k_cache"].double(), e.decoder.config
    raw = q @ repeat_heads(k, q.shape[1]).mT
    alive = e.new[:, None, :, None]
    ours, theirs = (float(fitted(raw * alive, a, (0, 1, 2, 3))) for a in (e.got, e.want))
    if e.explains(raw * ours * alive):
        return f"scale: scores are times {ours:.6g}, the reference's {theirs:.6g}" + known(e, ours / theirs, theirs)
    each = q[:, :, None] @ k[:, None].mT * theirs * alive[:, None]
    read = [min(range(k.shape[1]), key=lambda g: distance(e.got[:, h], each[:, h, g])) for h in range(q.shape[1])]
    meant = [h * k.shape[1] // config.num_attention_heads for h in range(q.shape[1])]
    if read != meant:
        return f"grouping: query heads read key heads {read}, not {meant}"
    return None


def known(e: Evidence, ratio: float, theirs: float) -> str:
    """Ratios that have a name."""
    config, l = e.decoder.config, e.layer or 0
    names = {
        "scaled twice": theirs,
        "not scaled": 1 / theirs,
        "D^-1/2 for E^-1/2": math.sqrt(config.head_dim / config.hidden_size),
        f"not divided by layer {l} + 1": l + 1.0,
        f"divided by layer {l} + 1": 1 / (l + 1.0),
    }
    return next((f"; {name}" for name, r in names.items() if r != 1 and abs(ratio / r - 1) < 1e-3), "")


def scores_seen(e: Evidence) -> str | None:
    """Who is seen, what stands where nobody is, and the bias."""
    alive = e.new[:, None, :, None]
    ours, theirs = e.got > -math.inf, e.want > -math.inf
    both = ours & theirs & alive
    extra = ours & ~theirs & alive
    bare = e.reference["scores"]
    if bool(extra.any()) and not bool((~ours & alive).any()):
        low = e.got[extra]
        value = constant(low)
        sure = value if value is not None else constant((e.got - bare)[extra])
        if sure is not None and sure < -1:
            return f"unseen scores are {'set to' if value is not None else 'lowered by'} {sure:.4g}, not minus infinity"
    found = sight(e, (ours & alive).any(1), (theirs & alive).any(1))
    if found or e.bias is None:
        return found
    bias = e.bias[:, None].double().expand(e.want.shape) * both
    factor = float(fitted(bias, (e.got - bare).masked_fill(~both, 0), (0, 1, 2, 3)))
    if distance((e.got - bare).masked_fill(~both, 0), factor * bias) < 0.1 * distance(
        e.got.masked_fill(~both, 0), e.want
    ):
        if abs(factor + 1) < 1e-2:
            return "bias sign: subtracted"
        scale = e.decoder.attention_scale(e.layer or 0)
        before = ", that is before the scale" if abs(factor / scale - 1) < 1e-2 else ""
        return f"bias: added times {factor:.4g}{before}"
    return None


def sight(e: Evidence, ours: Tensor, theirs: Tensor) -> str | None:
    """What a wrong set of seen slots [B, T, P] looks like."""
    slot = torch.arange(ours.shape[2])
    query = slot[e.S :, None]
    n = e.live.cumsum(1)
    apart = n[:, e.S :, None] - n[:, None, :]
    extra, lost = ours & ~theirs, theirs & ~ours
    if not bool((extra | lost).any()):
        return None
    if bool(extra.any()) and bool((extra <= (slot > query)).all()):
        ahead = int((slot - query).expand_as(extra)[extra].max())
        return f"causality: columns above the diagonal are seen, {ahead} ahead"
    if bool(extra.any()) and not bool((extra & e.live[:, None]).any()):
        return "padding: dead slots are seen"
    itself = (slot == query).expand_as(lost)
    if torch.equal(lost, theirs & itself) and not bool(extra.any()):
        return "hidden self: the diagonal is empty"
    for W in range(1, int(apart.max()) + 2):
        if torch.equal(ours, (slot <= query) & (apart < W) & e.live[:, None] & e.new[..., None]):
            reach = int(apart[theirs].max()) + 1
            return f"window: {W} slots are seen, the reference's {reach}"
    return None


def probs(e: Evidence) -> str | None:
    """Precision of the softmax."""
    for dtype in (torch.bfloat16, torch.float16):
        if bool((e.got.to(dtype).double() == e.got.double()).all()):
            return f"softmax precision: probabilities are {str(dtype)[6:]} numbers"
    return None
