"""Latent rollout: M continuous thoughts in place of a written chain, computed in parallel or one after the other.

PCCoT arXiv:2506.18582 (Jacobi iteration), CODI arXiv:2502.21074 and Coconut arXiv:2412.06769 (sequential), pause tokens
arXiv:2310.02226 (no iterations).

Symbols: z_1 … z_M the latents, read in place of embeddings; h_L the hidden state after the final norm; prj the
projection; bot the last vector of the prefix; T the number of Jacobi iterations. Nothing is detached.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import PassCounts, ReasoningBatch
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput

ForwardFn = Callable[..., DecoderOutput]  # called like Decoder.forward
ProjectFn = Callable[[Tensor], Tensor]
Intervention = Callable[[Tensor, int], Tensor]
Capture = tuple[str, ...]


class LatentPrefix(NamedTuple):
    """Input that the model reads before the latents: vectors that end with bot, and the KV cache before them."""

    embeds: Float[Tensor, "B Np D"]
    cache: KVCache | None = None
    attention_mask: Bool[Tensor, "B Np"] | None = None


class PassRecord(NamedTuple):
    """One pass over the latents: the vectors read, the hidden states, and the cache after it."""

    latents: Float[Tensor, "B M D"]
    hidden_states: Float[Tensor, "B M D"]
    cache: KVCache


class LatentRollout(NamedTuple):
    """Result of a rollout. `records`, if requested, are the passes 0 (which reads the placeholders) to T.

    A sequential rollout has a single record.
    """

    latents: Float[Tensor, "B M D"]  # read in the last pass
    hidden_states: Float[Tensor, "B M D"]  # of the last pass, after the final norm
    begin_hidden: Float[Tensor, "B D"]  # of bot
    cache: KVCache  # of prefix and latents
    passes: tuple[PassCounts, ...]  # decoder calls that each row took part in
    records: tuple[PassRecord, ...] = ()


def read_question(decoder: Decoder, batch: ReasoningBatch, cache: KVCache | None = None) -> DecoderOutput:
    """Read the question, which teacher and student both continue."""
    return decoder(decoder.embed(batch.question_ids), cache, attention_mask=batch.question_mask)


def read_chain(decoder: Decoder, batch: ReasoningBatch, cache: KVCache, capture: Capture = ()) -> DecoderOutput:
    """Read chain and answer after the question: the teacher's pass."""
    input_ids = torch.cat([batch.chain_ids, batch.answer_ids], 1)
    mask = torch.cat([batch.chain_mask, batch.answer_mask], 1)
    return decoder(decoder.embed(input_ids), cache, attention_mask=mask, capture=capture)


def read_after_latents(
    decoder: Decoder,
    end_vector: Float[Tensor, " D"],
    ids: Int[Tensor, "B N"],
    mask: Bool[Tensor, "B N"],
    cache: KVCache,
    capture: Capture = (),
) -> DecoderOutput:
    """Read eot, which is `end_vector`, and the answer's ids after the latents: the student's pass."""
    answer = decoder.embed(ids)
    inputs = torch.cat([end_vector.to(answer.dtype).expand(len(ids), 1, -1), answer], 1)
    return decoder(inputs, cache, attention_mask=F.pad(mask, (1, 0), value=True), capture=capture)


def run_latent_rollout(
    decoder: ForwardFn,
    prefix: LatentPrefix,
    placeholder: Float[Tensor, " D"],
    M: int,
    num_iterations: int | None,
    *,
    project: ProjectFn,
    intervention: Intervention | None = None,
    record_passes: bool = False,
) -> LatentRollout:
    """Compute M latents after a prefix.

    Args:
        decoder: Called like `Decoder.forward`.
        prefix: What is read first.
        placeholder: Vector read in every latent's position in the first pass of the Jacobi iteration.
        M: Number of latents.
        num_iterations: Jacobi iterations T after the placeholder pass, each of which computes all latents at once; None
            for a sequential rollout, which computes one after the other.
        project: Map from a hidden state to the next vector.
        intervention: Changes latents just before they are read. It is called with all of them and the iteration t (0
            for the placeholders if there are no iterations), or with z_m of shape [B, 1, D] and m. The next iteration
            starts from the unchanged latents.
        record_passes: Return a `PassRecord` of every pass.
    """
    if num_iterations is None:
        return run_sequential_rollout(decoder, prefix, M, project, intervention, record_passes)
    B, Np, D = prefix.embeds.shape
    z = placeholder.to(prefix.embeds.dtype).expand(B, M, D)
    latents = intervention(z, 0) if intervention is not None and num_iterations == 0 else z
    mask = None if prefix.attention_mask is None else F.pad(prefix.attention_mask, (0, M), value=True)
    output = decoder(torch.cat([prefix.embeds, latents], 1), prefix.cache, attention_mask=mask)
    prefix_cache = output.cache.crop(output.cache.S - M)
    begin_hidden, hidden_states = output.hidden_states[:, Np - 1], output.hidden_states[:, Np:]
    records = [PassRecord(latents, hidden_states, output.cache)]
    for t in range(1, num_iterations + 1):
        if t == 1:
            z = initial_latents(output.hidden_states[:, Np - 1 :], project)
        else:
            z = jacobi_update(z, hidden_states, project)
        latents = z if intervention is None else intervention(z, t)
        output = decoder(latents, prefix_cache)
        hidden_states = output.hidden_states
        records.append(PassRecord(latents, hidden_states, output.cache))
    passes = (PassCounts(0, 1, num_iterations, 0),) * B
    recorded = tuple(records) if record_passes else ()
    return LatentRollout(latents, hidden_states, begin_hidden, output.cache, passes, recorded)


def initial_latents(hidden_states: Float[Tensor, "B N D"], project: ProjectFn) -> Float[Tensor, "B M D"]:
    """Eq. 1: z_m = prj(h_L of its left neighbor); `hidden_states` are those of bot and all M placeholders."""
    return project(hidden_states[:, :-1])


def jacobi_update(
    z: Float[Tensor, "B M D"], hidden_states: Float[Tensor, "B M D"], project: ProjectFn
) -> Float[Tensor, "B M D"]:
    """Eq. 2: z_m = prj(h_L of z_(m-1) in the last pass) for m = 2 … M; z_1 depends on bot only and stays."""
    return torch.cat([z[:, :1], project(hidden_states[:, :-1])], 1) if z.shape[1] > 1 else z


def run_sequential_rollout(
    decoder: ForwardFn,
    prefix: LatentPrefix,
    M: int,
    project: ProjectFn,
    intervention: Intervention | None = None,
    record_passes: bool = False,
) -> LatentRollout:
    """Eq. 1: z_1 = prj(h_L(bot)), z_(m+1) = prj(h_L(z_m)), each read after all before it; M may be 0."""
    output = decoder(prefix.embeds, prefix.cache, attention_mask=prefix.attention_mask)
    latents: list[Tensor] = []
    hidden_states = [output.hidden_states[:, -1:]]  # of bot, then of each latent
    for m in range(1, M + 1):
        z = project(hidden_states[-1])
        latents.append(z if intervention is None else intervention(z, m))
        output = decoder(latents[-1], output.cache)
        hidden_states.append(output.hidden_states)
    empty = output.hidden_states[:, :0]  # Coconut's first stage has no latents
    record = PassRecord(torch.cat([empty, *latents], 1), torch.cat([empty, *hidden_states[1:]], 1), output.cache)
    records = (record,) if record_passes else ()
    passes = (PassCounts(1, 0, M, 0),) * len(prefix.embeds)
    return LatentRollout(record.latents, record.hidden_states, hidden_states[0][:, 0], output.cache, passes, records)
