"""One training step of an AutoCompressor that learns how many vectors a segment needs, the slow and obvious way.

This is our extension; in the paper (arXiv:2305.14788) every segment has K vectors. It covers the default of recipes
with a learned number: parallel summary tokens, accumulated memory, and the "ponder" estimator, which trains the decoder
with random lengths first and then only the stop head. Rows are processed one by one, without padding or KV cache; a
test checks that `AutoCompressor` has the same loss and gradients.

Symbols: S_i segment i; M_i the memory after it; sigma^i its vectors, N_i of them; e_1..e_K summary tokens; z_1..z_K
their outputs; a_t, lam_t, s_t, P(N) as in `halting.stop_distribution`. Equations AC (of the paper)
and VL (ours) are in docs/ledger.md.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import StopHeadConfig
from laconic.halting.stop_distribution import draw_uniforms
from laconic.models.decoder import Decoder


def training_step(
    decoder: Decoder, summaries: SummaryParameters, config: StopHeadConfig, batch: DocumentBatch,
    *, total_steps: int, seed: int = 0,
) -> Float[Tensor, ""]:  # fmt: skip
    """Compute the loss of one optimizer step in nats per target token.

    Args:
        decoder: Model that reads and compresses segments.
        summaries: Summary tokens e and the stop head u, b.
        config: Length cost and training phases.
        batch: Documents of several windows.
        total_steps: Number of updates of the run.
        seed: Seed of the random lengths.
    """
    head_only = batch.step >= math.ceil(config.head_only_after * total_steps)
    loss = torch.zeros((), dtype=torch.float64)  # float64: the sum adds no rounding
    for row in range(batch.B):
        memory = decoder.token_embedding.weight.new_zeros(0, summaries.width)
        for window in batch.select_rows([row]).sequential_parts:
            window_loss, carried = read_window(decoder, summaries, config, window, memory, head_only, seed)
            loss, memory = loss + window_loss, carried.detach()  # AC6: gradients stop at the end of a window
    num_scored = sum(int((window.targets != IGNORE_INDEX).sum()) for window in batch.sequential_parts)
    return loss / num_scored


def read_window(
    decoder: Decoder,
    summaries: SummaryParameters,
    config: StopHeadConfig,
    window: DocumentBatch,
    memory: Float[Tensor, "M D"],
    head_only: bool,
    seed: int,
) -> tuple[Float[Tensor, ""], Float[Tensor, "m D"]]:
    """Return the loss of one row's window, and the memory that the next window starts with."""
    K = summaries.K
    loss, carried = torch.zeros((), dtype=torch.float64), memory
    previous = None  # M before the previous segment, and that segment's z and P(N)
    for i, columns in enumerate(window.segment_slices):
        is_token = window.attention_mask[0, columns]
        ids, targets = window.input_ids[0, columns][is_token], window.targets[0, columns][is_token]
        if not len(ids):
            continue  # the document has ended
        with torch.set_grad_enabled(not head_only):
            nats, z = read_segment(decoder, summaries, memory, ids, targets)
        if previous is None:
            loss = loss + nats
        else:  # VL22: the loss of this segment, in expectation over the previous one's length
            older, z_before, p = previous
            with torch.no_grad():
                prompts = [torch.cat([older, z_before[:n]]) for n in range(1, K + 1)]
                losses = [read_segment(decoder, summaries, prompt, ids, targets)[0] for prompt in prompts]
            loss = loss + (p * torch.stack(losses)).sum()
        previous = None
        stream = "length" if head_only else "nested"
        u = draw_uniforms(stream, seed, window.epoch, window.row_index, window.first_segment + i, 1)[0, 0]
        length = 1 + int(u * K)  # VL23: uniform
        if head_only:
            p = length_distribution(summaries.stop_logits(decoder, z[None], head_only=True)[0])  # VL3
            length = 1 + min(int((p.detach().cumsum(0) <= u).sum()), K - 1)
            # VL8: vectors that no later target reads cost nothing
            if (window.targets[0, columns.stop :] != IGNORE_INDEX).any():
                loss = loss + config.length_cost * (p * torch.arange(1, K + 1)).sum()
                previous = memory, z, p
        memory = torch.cat([memory, z[:length]])  # AC3
        if window.carried_segments == i + 1:  # the next window reads later segments again
            carried = memory
    return loss, carried


def read_segment(
    decoder: Decoder,
    summaries: SummaryParameters,
    memory: Float[Tensor, "M D"],
    ids: Int[Tensor, " T"],
    targets: Int[Tensor, " T"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "K D"]]:
    """Eqs. AC2 and AC5: run the decoder over [M; S; e_1..e_K]; return the summed loss in nats, and z_1..z_K."""
    assert summaries.tokens is not None
    embeds = torch.cat([memory, decoder.embed(ids[None])[0], summaries.tokens])
    states = decoder(embeds[None]).hidden_states[0]
    m, T = len(memory), len(ids)
    logits = decoder.logits(states[m : m + T])
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"), states[m + T :]


def length_distribution(a: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """Eqs. VL4 and VL5: P(N = t) = s_t lam_t with s_1 = 1, s_{t+1} = s_t (1 - lam_t), and P(N = K) = s_K."""
    lam, s, p = a.sigmoid(), torch.ones((), dtype=a.dtype), list[Tensor]()
    for t in range(len(a)):
        p.append(s * lam[t] if t < len(a) - 1 else s)
        s = s * (1 - lam[t])
    return torch.stack(p)
