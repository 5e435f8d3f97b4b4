"""PCCoT: CODI's distillation with all thoughts made at once, in rounds; with 0 rounds, pause tokens.

PCCoT arXiv:2506.18582, pause tokens arXiv:2310.02226. Equations 1 and 2 are `core.rollout.first` and `.shift`.

Symbols: CE_s, CE_t cross-entropies of student and teacher, alpha and beta their weights; gamma `alpha1`.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.batches import AnswerBatch, ReasoningBatch, StepOutput
from laconic.config.methods import DistillationConfig
from laconic.errors import UsageError
from laconic.latent import codi
from laconic.latent.answering import AnswerDecoding
from laconic.latent.rollout import Intervention, LatentRollout
from laconic.latent.thoughts import LatentThoughts
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


def kd_loss(
    h_t: Float[Tensor, "L B D"], h_s: Float[Tensor, "L B D"], has_target: Bool[Tensor, " B"], per_layer: bool
) -> Float[Tensor, ""]:
    """Eq. 3: L_KD = 1/L sum over blocks l of mean smooth_l1(h_s,l - sg h_t,l) / sigma_l, or / one sigma of all."""
    return codi.hidden_loss(h_t, h_s, has_target, norm="layer" if per_layer else "global")


def combine_losses(student: Tensor, teacher: Tensor, kd: Tensor, config: DistillationConfig) -> Float[Tensor, ""]:
    """Eq. 4: L = alpha CE_t + beta CE_s + gamma L_KD."""
    return codi.combine_losses(student, teacher, kd, config)


class Pccot(nn.Module):
    """PCCoT whole: thoughts made in rounds, distilled at one token."""

    def __init__(self, decoder: Decoder, latent_thoughts: LatentThoughts, config: DistillationConfig) -> None:
        super().__init__()
        if latent_thoughts.schedule != "jacobi":
            raise UsageError(f"pccot: thoughts of mode {latent_thoughts.schedule}; choose jacobi, or the method codi")
        self.decoder, self.latent_thoughts, self.config = decoder, latent_thoughts, config

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """What the sums of the loss are divided by."""
        return codi.count_denominators(batch, self.config)

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        both = codi.run_teacher_and_student(self.decoder, self.latent_thoughts, batch, self.config, state)
        found = codi.compute_loss_terms(self.decoder, self.latent_thoughts, batch, both, self.config)
        student, teacher, kd = codi.ordered_terms(found, "student", "teacher", "codi")
        return codi.make_output(combine_losses(student, teacher, kd, self.config), found)

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Never: one phase."""
        return False

    def think(
        self, questions: ReasoningBatch, intervention: Intervention | None = None, record_passes: bool = False
    ) -> LatentRollout:
        """The thoughts on questions."""
        return codi.think_no_grad(self.decoder, self.latent_thoughts, questions, intervention, record_passes)

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        """The answer after the thoughts; of the teacher, after a chain."""
        return codi.answer_with_method(self.decoder, self.latent_thoughts, questions, decoding, with_cot)
