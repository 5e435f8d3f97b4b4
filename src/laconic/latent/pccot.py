"""PCCoT: CODI's distillation with all latents computed in parallel by Jacobi iteration; pause tokens with none.

PCCoT arXiv:2506.18582, pause tokens arXiv:2310.02226. Equations 1 and 2 are `rollout.initial_latents` and
`rollout.jacobi_update`.

Symbols: CE_s, CE_t cross-entropies of student and teacher, alpha and beta their weights; gamma that of L_KD.
"""

from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from laconic.config.methods import DistillationConfig
from laconic.latent import codi


def kd_loss(
    h_t: Float[Tensor, "L B D"], h_s: Float[Tensor, "L B D"], has_target: Bool[Tensor, " B"], per_layer: bool
) -> Float[Tensor, ""]:
    """Eq. 3: L_KD = 1/L sum over blocks l of mean smooth_l1(h_s,l - sg h_t,l) / sigma_l, or / one sigma of all."""
    return codi.hidden_loss(h_t, h_s, has_target, scale="layer" if per_layer else "global")


def combine_losses(student: Tensor, teacher: Tensor, kd: Tensor, config: DistillationConfig) -> Float[Tensor, ""]:
    """Eq. 4: L = alpha CE_t + beta CE_s + gamma L_KD."""
    return codi.combine_losses(student, teacher, kd, config)


class Pccot(codi.Codi):
    """PCCoT: latents of the Jacobi schedule, distilled at one token.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.config.methods import DistillationConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> latents = laconic.LatentThoughts(decoder, num_latents=4, num_iterations=2)
        >>> method = laconic.Pccot(decoder, latents, DistillationConfig())
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['codi', 'student', 'student_right', 'teacher', 'teacher_right']
    """

    schedules: ClassVar[tuple[str, ...]] = ("jacobi",)
