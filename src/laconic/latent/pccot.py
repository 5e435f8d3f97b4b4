"""PCCoT: CODI's distillation with all latents computed in parallel by Jacobi iteration; pause tokens with none.

PCCoT arXiv:2506.18582, pause tokens arXiv:2310.02226. Equations 1 and 2 are `rollout.initial_latents` and
`rollout.jacobi_update`; equations 3 and 4, the losses, are `codi.hidden_loss` and `codi.combine_losses`.
"""

from typing import ClassVar

from laconic.latent import codi


class Pccot(codi.Codi):
    """PCCoT: `Codi` with latents that are computed together, in Jacobi iterations; see `Codi` for the arguments.

    Examples:
        >>> import laconic
        >>> from laconic.config.methods import DistillationConfig
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> latents = laconic.LatentThoughts(decoder, num_latents=4, num_iterations=2)
        >>> method = laconic.Pccot(decoder, latents, DistillationConfig())
    """

    schedules: ClassVar[tuple[str, ...]] = ("jacobi",)
