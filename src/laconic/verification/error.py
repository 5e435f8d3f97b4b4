"""How far two tensors are apart where slots are live, added up over the pieces of a case.

Symbols: x ours, y the reference's; T new slots, S slots held, P = S + T.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TINY_RMS, TINY_ABS_ERROR = 1e-6, 1e-7
"""Where the reference's rms lies below the first, rms(x - y) may be the second, whatever the floor."""


CHUNK_NUMEL = 1 << 20
"""Numbers that are compared at once; more are taken a few slots at a time."""


@dataclass
class ErrorAccumulator:
    """‖x − y‖, ‖y‖ and what stands beside them, added up over the pieces of a case."""

    squared_error: float = 0.0
    reference_square: float = 0.0
    own_square: float = 0.0
    dot: float = 0.0
    count: int = 0
    max_abs: float = -1.0
    index: tuple[int, ...] = ()
    is_bitwise_equal: bool = True
    shape_note: str = ""

    def add(self, x: Tensor, y: Tensor, mask: Tensor, S: int, axes: str) -> None:
        """Counts one piece, over live slots only; both sides must hide the same scores."""
        if x.shape != y.shape:
            self.shape_note = f"shape {list(x.shape)}, reference {list(y.shape)}"
            self.squared_error, self.is_bitwise_equal = math.inf, False
            return
        along = axes.split().index("T") if "T" in axes.split() else 0
        if x.numel() > CHUNK_NUMEL and x.shape[along] > 1:
            size = max(1, CHUNK_NUMEL * x.shape[along] // x.numel())
            for start in range(0, x.shape[along], size):
                part = [t.narrow(along, start, min(size, x.shape[along] - start)) for t in (x, y, mask)]
                self.add(part[0], part[1], part[2], S + start, axes)
            return
        if axes.endswith("P"):
            mask = mask & ~((x == -math.inf) & (y == -math.inf))
        whole = bool(mask.all())
        a, b = (t.flatten().double() if whole else t[mask].double() for t in (x.detach(), y.detach()))
        d = a - b
        gap, worst = float(d.dot(d)), float(d.abs().max()) if len(d) else 0.0
        if not math.isfinite(gap):
            d, gap, worst = d.nan_to_num(math.inf, math.inf, math.inf), math.inf, math.inf
            a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
        self.is_bitwise_equal &= gap == 0
        self.squared_error += gap
        self.reference_square += float(b.dot(b))
        self.own_square += float(a.dot(a))
        self.dot += float(a.dot(b))
        self.count += len(d)
        if worst > self.max_abs:
            self.max_abs, self.index = worst, ()
            if len(d):
                far = int(d.abs().argmax())
                at = np.unravel_index(far if whole else int(mask.flatten().nonzero()[far, 0]), x.shape)
                offset = [S if axis == "T" else 0 for axis in axes.split()]
                self.index = tuple(int(i) + o for i, o in zip(at, offset, strict=False))

    @property
    def is_tiny(self) -> bool:
        """Whether the reference is so small that only an absolute error means anything."""
        return self.reference_square < TINY_RMS**2 * max(self.count, 1)

    @property
    def error(self) -> float:
        """Relative L2, or the root of the mean square where the reference is faint."""
        return math.sqrt(self.squared_error / (max(self.count, 1) if self.is_tiny else self.reference_square))

    @property
    def cosine(self) -> float:
        """The angle between both, as a cosine; 1 where both are nothing."""
        length = math.sqrt(self.reference_square * self.own_square)
        return self.dot / length if length else float(self.reference_square == self.own_square)


MASK_SENSITIVE_STAGES = ("scores_seen", "probs")
"""Stages in which a dead key has a value that both sides must give: minus infinity, and 0."""


def valid_mask(axes: str, shape: torch.Size, valid: Tensor, S: int, *, include_masked_keys: bool = False) -> Tensor:
    """True where a stage stands on live slots only: queries along T, keys along P unless `dead_keys` count too."""
    where = torch.ones((), dtype=torch.bool)
    for i, axis in enumerate(axes.split()):
        if axis == "T" or (axis == "P" and not include_masked_keys):
            slots = valid[:, S:] if axis == "T" else valid
            view = [1] * len(shape)
            view[0], view[i] = slots.shape
            where = where & slots.reshape(view)
    return where.expand(shape)


@dataclass
class PredictionAgreement:
    """What two sets of logits say comes next: KL(y | x) in nats a slot, and the share of equal most likely ids."""

    kl: float = 0.0
    top1_matches: int = 0
    count: int = 0

    def add(self, x: Tensor, y: Tensor, valid: Tensor) -> None:
        """Counts the live slots of one piece; `x` ours, `y` the reference's."""
        if x.shape != y.shape:
            self.kl = math.inf
            return
        for mine, theirs in zip(x[valid].split(64), y[valid].split(64), strict=True):
            p, q = theirs.double().log_softmax(-1), mine.double().log_softmax(-1)
            self.kl += float((p.exp() * (p - q)).sum())
            self.top1_matches += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
            self.count += len(mine)

    @property
    def kl_and_top1(self) -> tuple[float, float]:
        """KL and share."""
        return self.kl / max(self.count, 1), self.top1_matches / max(self.count, 1)
