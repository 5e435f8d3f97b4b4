"""Latent rollout over packed rows: the requests of an inference engine one after the other in one flat batch.

Engines such as vLLM keep the KV cache themselves: a call writes the keys and values of its rows into fixed slots.
Calling the model again on the same rows overwrites them, so T calls with updated latents are T Jacobi iterations (PCCoT
arXiv:2506.18582, Eqs. 1 and 2), and M of them give the sequential rollout of M latents (CODI arXiv:2502.21074).

Symbols: N rows of all requests, D width.
"""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from laconic.latent.rollout import ProjectFn

ModelFn = Callable[[Tensor], Tensor]  # embeddings [N, D] -> hidden states after the final norm


def find_latent_rows(
    input_ids: Int[Tensor, " N"], position_ids: Int[Tensor, " N"], begin_token_id: int, latent_token_id: int
) -> Int[Tensor, " rows"]:
    """Return the rows of latents, each of which follows bot or another latent of its request.

    Another row with the latent's id, which a client may have put anywhere, is an ordinary token: it must not read the
    hidden state of a neighbour in the batch that belongs to another request.
    """
    is_control = (input_ids == begin_token_id) | (input_ids == latent_token_id)
    continues = position_ids[1:] == position_ids[:-1] + 1
    is_latent = (input_ids[1:] == latent_token_id) & is_control[:-1] & continues
    return is_latent.nonzero()[:, 0] + 1


def run_packed_rollout(
    run_model: ModelFn,
    inputs_embeds: Float[Tensor, "N D"],
    latent_rows: Int[Tensor, " rows"],
    project: ProjectFn,
    num_updates: int,
) -> Float[Tensor, "N D"]:
    """Read the placeholders, update all latents from the hidden states to their left, and repeat.

    The result of rows without latents does not depend on the number of updates, since every call reads them alike.

    Args:
        run_model: Runs the model on all rows, and overwrites their keys and values.
        inputs_embeds: Embeddings, with placeholders in the rows of latents.
        num_updates: Jacobi iterations T; M for the sequential rollout.

    Returns:
        The hidden states of the last call.
    """
    hidden_states = run_model(inputs_embeds)
    for _ in range(num_updates):
        latents = project(hidden_states[latent_rows - 1])
        inputs_embeds = inputs_embeds.index_copy(0, latent_rows, latents)
        hidden_states = run_model(inputs_embeds)
    return hidden_states
