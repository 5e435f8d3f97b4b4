"""From the logits of a row to its next id: penalty, temperature, three filters, one draw, in this order.

top-p (arXiv:1904.09751), min-p (arXiv:2407.01082), repetition penalty (arXiv:1909.05858).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.positions import next_token

Number = float | int


@dataclass(frozen=True)
class SamplingConfig:
    """How the next id is chosen. Raises `Usage` for a setting that cannot be meant."""

    temperature: Number = 0.0
    top_k: int = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0 <= self.temperature < math.inf, "≥ 0")
        check_range("top_k", self.top_k, self.top_k >= 0, "≥ 0")
        check_range("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        check_range("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        check_range("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "> 0")


def check_range(name: str, value: Number, is_valid: bool, rule: str) -> None:
    """Raises `Usage` with the setting, its value and what it must be."""
    if not is_valid:
        raise UsageError(f"{name} {value:g}: must be {rule}".replace(" -", " −"))


def apply_repetition_penalty(
    logits: Float[Tensor, "B V"], present: Bool[Tensor, "B V"], penalty: Number
) -> Float[Tensor, "B V"]:
    """Logits of the ids that are there, divided by the penalty if positive, else multiplied."""
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_top_k(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """The k largest, and whatever ties with the last of them; the others minus infinity."""
    least = logits.topk(min(k, logits.shape[1])).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def filter_top_p(logits: Float[Tensor, "B V"], p: Number) -> Float[Tensor, "B V"]:
    """The smallest set of likeliest ids whose mass is at least p, one at least."""
    ascending, order = logits.sort()
    out = ascending.softmax(-1).cumsum(-1) <= 1 - p
    out[:, -1] = False
    return logits.masked_fill(out.scatter(1, order, out), -math.inf)


def filter_min_p(logits: Float[Tensor, "B V"], p: Number) -> Float[Tensor, "B V"]:
    """The ids at least p times as likely as the likeliest."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def apply_filters(logits: Float[Tensor, "B V"], config: SamplingConfig) -> Float[Tensor, "B V"]:
    """Temperature, top-k, top-p, min-p."""
    logits = (logits - logits.amax(-1, keepdim=True)) / config.temperature  # the likeliest stays 0 however small it is
    if config.top_k:
        logits = filter_top_k(logits, config.top_k)
    if config.top_p < 1:
        logits = filter_top_p(logits, config.top_p)
    return filter_min_p(logits, config.min_p) if config.min_p else logits


def sample_from_uniform(logits: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"]) -> Int[Tensor, " B"]:
    """The first id at which the cumulative probability passes a number in [0, 1), by row."""
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    place = torch.searchsorted(mass, uniform.to(mass) * mass[:, -1:], right=True)[:, 0]
    return place.clamp(max=mass.shape[1] - 1)  # logits that are no numbers: their logprobs are none, and refused


class Sampler:
    """Chooses one id a row and call; each row has its own generator and remembers its own ids.

    `held` are the ids kept back while `hold` is asked for, `banned` those that are never taken.
    """

    def __init__(
        self,
        config: SamplingConfig,
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
        """The ids, and their log probabilities before any change to the logits, in nats."""
        raw = logits.float()
        logits = self.penalize_repetition(raw)
        out = self.suppress_token_ids + (self.eos_token_ids if block_eos else [])
        if out:
            logits = logits.index_fill(1, torch.tensor(out, device=logits.device), -math.inf)
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
        """Logits after the repetition penalty, which needs the ids of prompt and continuation."""
        if self.config.repetition_penalty == 1:
            return logits
        if self.present is None:
            self.present = torch.zeros_like(logits, dtype=torch.bool)
            for b, ids in enumerate(self.prompt_ids):
                self.present[b, list(ids)] = True
        return apply_repetition_penalty(logits, self.present, self.config.repetition_penalty)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only."""
        self.generators = [self.generators[place] for place in rows]
        self.present = None if self.present is None else self.present[list(rows)]
