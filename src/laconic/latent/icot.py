"""iCoT: the chain is taken away from its left end, token by token, until the answer comes without it.

iCoT arXiv:2405.14838. Symbols: s tokens to remove on schedule, o more drawn for each row, r removed, N_C chain tokens.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laconic.batches import AnswerBatch, ReasoningBatch, StepOutput
from laconic.config.methods import ICoTConfig
from laconic.latent.answering import AnswerDecoding
from laconic.latent.cot import (
    build_teacher_targets,
    check_no_teacher,
    count_scored,
    drop_chain_prefix,
    encode_batch,
    generate_with_chain,
    make_single_loss_output,
    masked_cross_entropy,
)
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.rng import uniform

MAX_EXTRA_REMOVAL = 99  # of the tokens drawn in addition; what is beyond counts as this


def tokens_to_remove(
    s: float, u: Float[Tensor, " B"], chain_length: Int[Tensor, " B"], smoothing: float = 4.0
) -> Int[Tensor, " B"]:
    """Eq. 1: r = min(s + o, N_C), o the quantile u of P(o) ~ e^(-smoothing o) on 0 ... 99, the rest on the last."""
    o = (torch.log1p(-u) / -smoothing).floor().clamp(max=MAX_EXTRA_REMOVAL)
    return torch.minimum(s + o, chain_length.to(o.dtype)).long()


class Icot(nn.Module):
    """iCoT whole: question, what is left of the chain, answer; all after the question scored.

    `longest` is the number of tokens of the longest chain of the set: once all are gone nothing restarts any more.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: ICoTConfig,
        *,
        steps_per_epoch: int,
        max_chain_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.decoder, self.config, self.seed = decoder, config, seed
        self.steps_per_removal = max(1, round(steps_per_epoch / config.tokens_removed_per_epoch))
        self.max_chain_length = math.inf if max_chain_length is None else max_chain_length

    def scheduled_removal(self, step: int) -> float:
        """s at an optimizer step: one more each `every` steps, all from `remove_all_from` on."""
        s = float(step // self.steps_per_removal)
        return math.inf if self.config.remove_all_after is not None and s >= self.config.remove_all_after else s

    def drop_removed(self, batch: ReasoningBatch) -> ReasoningBatch:
        """The batch without what is removed now; outside training nothing is drawn in addition."""
        u = torch.zeros(batch.B, dtype=torch.float64)
        if self.training:
            u = torch.as_tensor(uniform(self.seed, batch.epoch, batch.row_index.cpu().numpy()))
        count = batch.chain_mask.sum(1)
        r = tokens_to_remove(
            self.scheduled_removal(batch.step), u.to(count.device), count, self.config.removal_smoothing
        )
        return drop_chain_prefix(batch, batch.chain_mask.cumsum(1) > r[:, None])

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {"student": count_scored(build_teacher_targets(self.drop_removed(batch)), self.config.ce_reduction)}

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        left = self.drop_removed(batch)
        hidden, targets = encode_batch(self.decoder, left, state, with_chain=True), build_teacher_targets(left)
        total = (
            count_scored(targets, self.config.ce_reduction)
            if batch.loss_denominators is None
            else batch.loss_denominators["student"]
        )
        return make_single_loss_output(
            "student", masked_cross_entropy(self.decoder.logits, hidden, targets, self.config.ce_reduction, total)
        )

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Where more is removed than one step before, while any chain of the set had something left."""
        before = self.scheduled_removal(max(0, batch.step - 1))
        return before < self.max_chain_length and self.scheduled_removal(batch.step) > before

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        """What is left of the chain, the prompt (an eos in iCoT's format), the answer. Raises `Usage` for a teacher."""
        check_no_teacher(with_cot, "iCoT")
        return generate_with_chain(self.decoder, questions, decoding)
