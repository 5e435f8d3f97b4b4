"""Choose the next token: repetition penalty, temperature, top-k, top-p, min-p, then one sample, in this order.

top-p (arXiv:1904.09751), min-p (arXiv:2407.01082), repetition penalty (arXiv:1909.05858).
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.generation.config import GenerationConfig, Number
from laconic.models.next_token import next_token

TOP_P_CANDIDATES = 256  # ids among which top-p is decided, where they have enough probability


def apply_repetition_penalty(
    logits: Float[Tensor, "B V"], present: Bool[Tensor, "B V"], penalty: Number
) -> Float[Tensor, "B V"]:
    """Divide positive logits of the ids that are present by the penalty, and multiply negative ones by it."""
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_top_k(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """Set all but the k largest logits, and whatever ties with the last of them, to minus infinity."""
    least = logits.topk(min(k, logits.shape[1])).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def filter_top_p(logits: Float[Tensor, "B V"], p: Number) -> Float[Tensor, "B V"]:
    """Keep the smallest set of most likely ids whose total probability is at least p (at least one id)."""
    top, ids = logits.softmax(-1).topk(min(TOP_P_CANDIDATES, logits.shape[1]))
    mass = top.cumsum(-1)
    is_enough = mass[:, -1:] >= p  # decided for each row, whose result must not depend on other rows
    likely = logits.gather(1, ids).masked_fill(mass - top >= p, -math.inf)
    likely[:, 0] = logits.gather(1, ids[:, :1])[:, 0]
    filtered = torch.full_like(logits, -math.inf).scatter(1, ids, likely)
    if bool(is_enough.all()):  # sorting the whole vocabulary takes ten times as long
        return filtered
    ascending, order = logits.sort()
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - p
    removed[:, -1] = False
    return torch.where(is_enough, filtered, logits.masked_fill(removed.scatter(1, order, removed), -math.inf))


def filter_min_p(logits: Float[Tensor, "B V"], p: Number) -> Float[Tensor, "B V"]:
    """Keep the ids at least p times as likely as the most likely one."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def apply_filters(logits: Float[Tensor, "B V"], config: GenerationConfig) -> Float[Tensor, "B V"]:
    """Apply temperature, top-k, top-p and min-p."""
    # Subtracting the maximum first keeps the most likely logit at 0 for any temperature.
    # A temperature that rounds to 0 in the logits' dtype would divide 0 by 0.
    temperature = max(config.temperature, torch.finfo(logits.dtype).tiny)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if config.top_k:
        logits = filter_top_k(logits, config.top_k)
    if config.top_p < 1:
        logits = filter_top_p(logits, config.top_p)
    return filter_min_p(logits, config.min_p) if config.min_p else logits


def sample_from_uniform(logits: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"]) -> Int[Tensor, " B"]:
    """Return, per row, the first id whose cumulative probability exceeds a number in [0, 1)."""
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    ids = torch.searchsorted(mass, uniform.to(mass) * mass[:, -1:], right=True)[:, 0]
    return ids.clamp(max=mass.shape[1] - 1)  # NaN logits: the caller refuses their log probabilities


class Sampler:
    """Choose one id per row and call. Each row has its own random generator and its own set of previous ids.

    `eos_token_ids` are not taken while `block_eos` is set, `suppress_token_ids` never.
    """

    def __init__(
        self,
        config: GenerationConfig,
        seeds: Sequence[int],
        prompt_ids: Sequence[Sequence[int]],
        eos_token_ids: Sequence[int],
        suppress_token_ids: Sequence[int] = (),
    ) -> None:
        self.config, self.prompt_ids = config, prompt_ids
        self.generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        self.eos_token_ids, self.suppress_token_ids = list(eos_token_ids), list(suppress_token_ids)
        self.present: Tensor | None = None

    def __call__(self, logits: Float[Tensor, "B V"], block_eos: bool) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Return the ids, and their log probabilities in nats under the unmodified logits."""
        raw = logits.float()
        logits = self.penalize_repetition(raw)
        blocked = self.suppress_token_ids + (self.eos_token_ids if block_eos else [])
        if blocked:
            logits = logits.index_fill(1, torch.tensor(blocked, device=logits.device), -math.inf)
        if self.config.temperature:
            uniform = torch.stack(
                [torch.rand(1, generator=g, dtype=torch.float64, device="cpu") for g in self.generators]
            )
            ids = sample_from_uniform(apply_filters(logits, self.config), uniform)
        else:
            ids = next_token(logits)
        if self.present is not None:
            self.present.scatter_(1, ids[:, None], True)
        return ids, raw.log_softmax(-1).gather(1, ids[:, None])[:, 0]

    def penalize_repetition(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Apply the repetition penalty to the ids of prompt and output so far."""
        if self.config.repetition_penalty == 1:
            return logits
        if self.present is None:
            self.present = torch.zeros_like(logits, dtype=torch.bool)
            for b, ids in enumerate(self.prompt_ids):
                self.present[b, list(ids)] = True
        return apply_repetition_penalty(logits, self.present, self.config.repetition_penalty)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.generators = [self.generators[row] for row in rows]
        self.present = None if self.present is None else self.present[list(rows)]
