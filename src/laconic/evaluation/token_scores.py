"""Score target tokens by a language model, a few logits at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX

MAX_LOGITS = 1 << 22  # logits computed at once


def score_targets(
    compute_logits: Callable[[Tensor], Tensor], hidden_states: Float[Tensor, "N D"], targets: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """Return the NLL of each target in nats, and whether it was the most likely token."""
    nll = torch.zeros(len(targets), device=targets.device)
    is_correct = torch.zeros_like(targets, dtype=torch.bool)
    step = max(MAX_LOGITS // compute_logits(hidden_states[:1]).shape[-1], 1)
    for i in range(0, len(targets), step):
        logits, some = compute_logits(hidden_states[i : i + step]).float(), targets[i : i + step]
        nll[i : i + step] = F.cross_entropy(logits, some, reduction="none")
        is_correct[i : i + step] = logits.argmax(-1) == some
    return nll, is_correct


def score_grid(
    compute_logits: Callable[[Tensor], Tensor], hidden_states: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return the NLL of each target and whether it was the most likely token; 0 and False for `IGNORE_INDEX`."""
    has_target = targets != IGNORE_INDEX
    nll, is_correct = torch.zeros(targets.shape, device=targets.device), torch.zeros_like(has_target)
    scores = score_targets(compute_logits, hidden_states[has_target], targets[has_target])
    nll[has_target], is_correct[has_target] = scores
    return nll, is_correct
