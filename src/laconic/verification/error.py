"""Accumulate the difference of two tensors at valid positions over the pieces of a case.

Symbols: x ours, y the reference's; T new positions, S cached positions, P = S + T.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# If the reference's rms is below TINY_RMS, rms(x - y) may be up to TINY_ABS_ERROR, whatever the floor is.
TINY_RMS, TINY_ABS_ERROR = 1e-6, 1e-7
MASK_SENSITIVE_STAGES = ("scores_seen", "probs")  # stages that are compared at masked keys too: -inf, and 0


@dataclass
class ErrorAccumulator:
    """Sums over the pieces of a case: |x - y|^2, |y|^2, |x|^2, x·y, and the largest difference with its position."""

    squared_error: float = 0.0
    reference_square: float = 0.0
    decoder_square: float = 0.0
    dot: float = 0.0
    count: int = 0
    max_abs: float = -1.0
    index: tuple[int, ...] = ()
    is_bitwise_equal: bool = True
    shape_note: str = ""

    def add(self, x: Tensor, y: Tensor, mask: Tensor, S: int, axes: str) -> None:
        """Add one piece, whose axes have names such as "B H T P".

        Both are compared where the mask is True; scores that are -inf on both sides are left out.
        """
        if x.shape != y.shape:
            self.shape_note = f"shape {list(x.shape)}, reference {list(y.shape)}"
            self.squared_error, self.is_bitwise_equal = math.inf, False
            return
        if axes.endswith("P"):
            mask = mask & ~((x == -math.inf) & (y == -math.inf))
        is_complete = bool(mask.all())
        a, b = (t.flatten().double() if is_complete else t[mask].double() for t in (x.detach(), y.detach()))
        difference = a - b
        squared = float(difference.dot(difference))
        largest = float(difference.abs().max()) if len(difference) else 0.0
        if not math.isfinite(squared):
            squared = largest = math.inf
            difference = difference.nan_to_num(math.inf, math.inf, math.inf)
            a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
        self.is_bitwise_equal &= squared == 0
        self.squared_error += squared
        self.reference_square += float(b.dot(b))
        self.decoder_square += float(a.dot(a))
        self.dot += float(a.dot(b))
        self.count += len(difference)
        if largest > self.max_abs:
            self.max_abs, self.index = largest, ()
            if len(difference):
                flat = int(difference.abs().argmax())
                position = flat if is_complete else int(mask.flatten().nonzero()[flat, 0])
                indices = zip(axes.split(), np.unravel_index(position, x.shape), strict=False)
                self.index = tuple(int(i) + (S if name == "T" else 0) for name, i in indices)

    @property
    def is_tiny(self) -> bool:
        return self.reference_square < TINY_RMS**2 * max(self.count, 1)

    @property
    def error(self) -> float:
        """Relative L2 error; the root mean square error if the reference is tiny."""
        return math.sqrt(self.squared_error / (max(self.count, 1) if self.is_tiny else self.reference_square))

    @property
    def cosine(self) -> float:
        """Cosine similarity; 1 if both are zero."""
        norms = math.sqrt(self.reference_square * self.decoder_square)
        return self.dot / norms if norms else float(self.reference_square == self.decoder_square)


def valid_mask(axes: str, shape: torch.Size, valid: Tensor, S: int, *, include_masked_keys: bool = False) -> Tensor:
    """Return the mask of an activation's defined elements, those at valid queries (T) and keys (P).

    `axes` are names such as "B H T P", `valid` slots [B, P]. With `include_masked_keys` masked keys are defined too.
    """
    mask = torch.ones((), dtype=torch.bool, device=valid.device)
    for i, axis in enumerate(axes.split()):
        if axis == "T" or (axis == "P" and not include_masked_keys):
            slots = valid[:, S:] if axis == "T" else valid
            view = [1] * len(shape)
            view[0], view[i] = slots.shape
            mask = mask & slots.reshape(view)
    return mask.expand(shape)


@dataclass
class PredictionAgreement:
    """Agreement of two sets of logits: KL(reference | ours) in nats, and equal most likely tokens."""

    kl: float = 0.0
    top1_matches: int = 0
    count: int = 0

    def add(self, x: Tensor, y: Tensor, valid: Tensor) -> None:
        """Add the valid positions of one piece; `x` ours, `y` the reference's."""
        if x.shape != y.shape:
            self.kl = math.inf
            return
        for ours, theirs in zip(x[valid].split(64), y[valid].split(64), strict=True):
            p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
            self.kl += float((p.exp() * (p - q)).sum())
            self.top1_matches += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            self.count += len(ours)

    @property
    def kl_and_top1(self) -> tuple[float, float]:
        return self.kl / max(self.count, 1), self.top1_matches / max(self.count, 1)
