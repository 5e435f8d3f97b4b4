"""PCCoT: CODI's distillation with all thoughts made at once, in rounds; with 0 rounds, pause tokens.

PCCoT arXiv:2506.18582, pause tokens arXiv:2310.02226. Equations 1 and 2 are `core.rollout.first` and `.shift`.

Symbols: CE_s, CE_t cross-entropies of student and teacher, alpha and beta their weights; gamma `alpha1`.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.core.answering import Writing
from laconic.core.cache import Cache
from laconic.core.contract import Answers, Reasoning, Step
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.rollout import Edit, Rollout
from laconic.core.thoughts import Thoughts
from laconic.methods import codi
from laconic.methods.settings import Distilling


def kd_loss(
    h_t: Float[Tensor, "L B D"], h_s: Float[Tensor, "L B D"], has: Bool[Tensor, " B"], sigma: bool
) -> Float[Tensor, ""]:
    """Eq. 3: L_KD = 1/L sum over blocks l of mean smooth_l1(h_s,l - sg h_t,l) / sigma_l, or / one sigma of all."""
    return codi.hidden_loss(h_t, h_s, has, norm="layer" if sigma else "global")


def total(student: Tensor, teacher: Tensor, kd: Tensor, how: Distilling) -> Float[Tensor, ""]:
    """Eq. 4: L = alpha CE_t + beta CE_s + gamma L_KD."""
    return codi.total(student, teacher, kd, how)


class Pccot(nn.Module):
    """PCCoT whole: thoughts made in rounds, distilled at one token."""

    def __init__(self, decoder: Decoder, thoughts: Thoughts, how: Distilling) -> None:
        super().__init__()
        if thoughts.mode != "jacobi":
            raise Usage(f"pccot: thoughts of mode {thoughts.mode}; choose jacobi, or the method codi")
        self.decoder, self.thoughts, self.how = decoder, thoughts, how

    def totals(self, batch: Reasoning) -> dict[str, float]:
        """What the sums of the loss are divided by."""
        return codi.totals(batch, self.how)

    def forward(self, batch: Reasoning, state: Cache | None = None) -> Step:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        both = codi.read_both(self.decoder, self.thoughts, batch, self.how, state)
        found = codi.parts(self.decoder, self.thoughts, batch, both, self.how)
        student, teacher, kd = codi.terms(found, "student", "teacher", "codi")
        return codi.step(total(student, teacher, kd, self.how), found)

    def restarts(self, batch: Reasoning) -> bool:
        """Never: one phase."""
        return False

    def think(self, questions: Reasoning, edit: Edit | None = None, trace: bool = False) -> Rollout:
        """The thoughts on questions."""
        return codi.think(self.decoder, self.thoughts, questions, edit, trace)

    def answer(self, questions: Reasoning, writing: Writing, *, teacher: bool = False) -> Answers:
        """The answer after the thoughts; of the teacher, after a chain."""
        return codi.answer(self.decoder, self.thoughts, questions, writing, teacher)
