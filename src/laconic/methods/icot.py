"""iCoT: the chain is taken away from its left end, token by token, until the answer comes without it.

iCoT arXiv:2405.14838. Symbols: s tokens to remove on schedule, o more drawn for each row, r removed, N_C chain tokens.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from laconic.core.answering import Writing
from laconic.core.cache import Cache
from laconic.core.contract import Answers, Reasoning, Step
from laconic.core.decoder import Decoder
from laconic.core.keyed import uniform
from laconic.methods.cot import chain, nll, only, read, refuse, scored, shortened, teacher_targets
from laconic.methods.settings import Removing

MOST = 99  # of the tokens drawn in addition; what is beyond counts as this


def removed(s: float, u: Float[Tensor, " B"], count: Int[Tensor, " B"], smoothing: float = 4.0) -> Int[Tensor, " B"]:
    """Eq. 1: r = min(s + o, N_C), o the quantile u of P(o) ~ e^(-smoothing o) on 0 ... 99, the rest on the last."""
    o = (torch.log1p(-u) / -smoothing).floor().clamp(max=MOST)
    return torch.minimum(s + o, count.to(o.dtype)).long()


class Icot(nn.Module):
    """iCoT whole: question, what is left of the chain, answer; all after the question scored.

    `longest` is the number of tokens of the longest chain of the set: once all are gone nothing restarts any more.
    """

    def __init__(
        self,
        decoder: Decoder,
        how: Removing,
        *,
        steps_per_epoch: int,
        longest: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.decoder, self.how, self.seed = decoder, how, seed
        self.every = max(1, round(steps_per_epoch / how.remove_per_epoch))
        self.longest = math.inf if longest is None else longest

    def removing(self, step: int) -> float:
        """s at an optimizer step: one more each `every` steps, all from `remove_all_from` on."""
        s = float(step // self.every)
        return math.inf if self.how.remove_all_from is not None and s >= self.how.remove_all_from else s

    def left(self, batch: Reasoning) -> Reasoning:
        """The batch without what is removed now; outside training nothing is drawn in addition."""
        u = torch.zeros(batch.B, dtype=torch.float64)
        if self.training:
            u = torch.as_tensor(uniform(self.seed, batch.epoch, batch.index.cpu().numpy()))
        count = batch.chain_live.sum(1)
        r = removed(self.removing(batch.step), u.to(count.device), count, self.how.smoothing)
        return shortened(batch, batch.chain_live.cumsum(1) > r[:, None])

    def totals(self, batch: Reasoning) -> dict[str, float]:
        """Tokens, or rows, that are scored."""
        return {"student": scored(teacher_targets(self.left(batch)), self.how.ce_reduction)}

    def forward(self, batch: Reasoning, state: Cache | None = None) -> Step:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        left = self.left(batch)
        hidden, targets = read(self.decoder, left, state, chain=True), teacher_targets(left)
        total = scored(targets, self.how.ce_reduction) if batch.totals is None else batch.totals["student"]
        return only("student", nll(self.decoder.logits, hidden, targets, self.how.ce_reduction, total))

    def restarts(self, batch: Reasoning) -> bool:
        """Where more is removed than one step before, while any chain of the set had something left."""
        before = self.removing(max(0, batch.step - 1))
        return before < self.longest and self.removing(batch.step) > before

    def answer(self, questions: Reasoning, writing: Writing, *, teacher: bool = False) -> Answers:
        """What is left of the chain, the prompt (an eos in iCoT's format), the answer. Raises `Usage` for a teacher."""
        refuse(teacher, "iCoT")
        return chain(self.decoder, questions, writing)
