"""iCoT: remove the chain token by token from its left end until the model answers without it.

iCoT arXiv:2405.14838. Symbols: s tokens removed by the schedule, o further ones drawn for each row, r removed, N_C the
length of the chain.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import IcotConfig
from laconic.latent.cot import WrittenReasoning, drop_chain_prefix
from laconic.models.decoder import Decoder
from laconic.rng import uniform

MAX_EXTRA_REMOVAL = 99


def tokens_to_remove(
    s: float, u: Float[Tensor, " B"], chain_length: Int[Tensor, " B"], smoothing: float
) -> Int[Tensor, " B"]:
    """Eq. 1: r = min(s + o, N_C), o the quantile u of P(o) ~ e^(-smoothing o) on 0 … 99, the rest on the last."""
    o = (torch.log1p(-u) / -smoothing).floor().clamp(max=MAX_EXTRA_REMOVAL)
    return torch.minimum(s + o, chain_length.to(o.dtype)).long()


class Icot(WrittenReasoning):
    """iCoT: question, the rest of the chain, answer; everything after the question is scored.

    Args:
        decoder: The model.
        config: Speed of the removal.
        steps_per_epoch: Optimizer steps in an epoch.
        max_chain_length: Tokens of the longest chain; once that many are removed, the optimizer is not reset any more.
        seed: Seed of the further tokens removed.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.config.methods import IcotConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> method = laconic.Icot(decoder, IcotConfig(), steps_per_epoch=10)
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['student', 'student_token_accuracy']
    """

    def __init__(
        self,
        decoder: Decoder,
        config: IcotConfig,
        *,
        steps_per_epoch: int,
        max_chain_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(decoder)
        self.config, self.seed = config, seed
        self.steps_per_removal = max(1, round(steps_per_epoch / config.tokens_removed_per_epoch))
        self.max_chain_length = math.inf if max_chain_length is None else max_chain_length

    def scheduled_removal(self, step: int) -> float:
        """Return s at an optimizer step from 0: one more every `steps_per_removal`, all from `remove_all_after` on."""
        s = float(step // self.steps_per_removal)
        return math.inf if self.config.remove_all_after is not None and s >= self.config.remove_all_after else s

    def drop_removed(self, batch: ReasoningBatch) -> ReasoningBatch:
        """Return the batch without the tokens removed at this step; further ones only in training."""
        u = torch.zeros(batch.B, dtype=torch.float64)
        if self.training:
            u = torch.as_tensor(uniform(self.seed, batch.epoch, batch.row_index.cpu().numpy()))
        length = batch.chain_mask.sum(1)
        s = self.scheduled_removal(batch.step)
        r = tokens_to_remove(s, u.to(length.device), length, self.config.removal_smoothing)
        return drop_chain_prefix(batch, batch.chain_mask.cumsum(1) > r[:, None])

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Return whether more tokens are removed than one step before, unless all chains were gone already."""
        before = self.scheduled_removal(max(0, batch.step - 1))
        return before < self.max_chain_length and self.scheduled_removal(batch.step) > before
