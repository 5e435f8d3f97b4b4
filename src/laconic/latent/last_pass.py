"""All passes of a latent rollout but the last one, which can then read what follows the latents too.

Symbols: z_m the latents, M their number.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.batches import PassCounts
from laconic.latent.rollout import LatentPrefix, ProjectFn, read_placeholders, run_sequential_rollout
from laconic.latent.thoughts import LatentThoughts
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


class LastPass(NamedTuple):
    """The last pass of a rollout, before it is run: what follows the latents can be read in the same pass.

    Attributes:
        embeds: Vectors that the pass reads.
        attention_mask: True at real vectors of `embeds`.
        cache: KV cache of what precedes them.
        passes: Decoder calls that each row takes part in, this one included.
    """

    embeds: Float[Tensor, "B T D"]
    attention_mask: Bool[Tensor, "B T"]
    cache: KVCache | None
    passes: tuple[PassCounts, ...]


def run_until_last_pass(decoder: Decoder, latent_thoughts: LatentThoughts, prefix: LatentPrefix, M: int) -> LastPass:
    """Run all passes of `LatentThoughts.think` but the last one, without a tolerance or a stop head.

    More iterations than latents change nothing, so they are left out.
    """
    B, _, D = prefix.embeds.shape
    placeholder, project = latent_thoughts.placeholder, latent_thoughts.project
    num_iterations = latent_thoughts.num_iterations
    if num_iterations == 0 or M == 0:
        z = torch.cat([prefix.embeds, placeholder.to(prefix.embeds.dtype).expand(B, M, D)], 1)
        cache = prefix.cache
    elif num_iterations is None:
        rollout = run_sequential_rollout(decoder, prefix, M - 1, project)
        read = torch.cat([rollout.begin_hidden[:, None], rollout.hidden_states], 1)
        z, cache = project(read[:, -1:]), rollout.cache  # with M = 1, the latent follows bot
    else:
        num_iterations = min(num_iterations, M)
        z, cache = iterate_latents(decoder, prefix, placeholder.to(prefix.embeds.dtype), M, num_iterations, project)
    mask = torch.ones(z.shape[:2], dtype=torch.bool, device=z.device)
    if cache is prefix.cache and prefix.attention_mask is not None:
        mask[:, : prefix.attention_mask.shape[1]] = prefix.attention_mask
    passes = PassCounts(1, 0, M, 0) if num_iterations is None else PassCounts(0, 1, num_iterations, 0)
    return LastPass(z, mask, cache, (passes,) * B)


def iterate_latents(
    decoder: Decoder,
    prefix: LatentPrefix,
    placeholder: Float[Tensor, " D"],
    M: int,
    num_iterations: int,
    project: ProjectFn,
) -> tuple[Float[Tensor, "B N D"], KVCache]:
    """Run the placeholder pass and all Jacobi iterations but the last one, on as few positions as they need.

    A pass leaves out z_M, on which no other latent depends, and the latents that are already final: in iteration t the
    first t - 1, whose keys and values the pass before has computed.

    Returns:
        The N latents that the last pass reads, and the KV cache of the prefix and the M - N final latents.
    """
    placeholders = placeholder.expand(len(prefix.embeds), M - 1, -1)
    output, cache = read_placeholders(decoder, prefix, placeholders, num_outputs=M)
    z = project(output.hidden_states)
    for _ in range(num_iterations - 1):
        output = decoder(z[:, :-1], cache)
        cache = output.cache.crop(cache.S + 1)  # the first latent that was read is final; the others are read again
        z = project(output.hidden_states)
    return z, cache
