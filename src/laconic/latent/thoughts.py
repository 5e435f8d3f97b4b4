"""Trainable parameters for latent thoughts: the vectors bot, placeholder and eot, and the feedback projection.

CODI arXiv:2502.21074, PCCoT arXiv:2506.18582, Coconut arXiv:2412.06769.

Shapes: B rows, M latents, D width, P inner width of CODI's projection, V vocabulary.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.generation.config import check_choices, check_type, list_integers
from laconic.latent.rollout import (
    ForwardFn,
    Intervention,
    LatentPrefix,
    LatentRollout,
    LatentSchedule,
    run_latent_rollout,
)
from laconic.latent.stop_head import StopHead, keep_first_latents
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.init import NORMAL_STD, build_seeded_linear
from laconic.rng import default_seed
from laconic.storage.saved_module import SavedModule

LengthPolicy = Literal["fixed", "nested_dropout", "stop_head"]
ProjectionKind = Literal["pccot", "codi", "none"]
InitScale = Literal["unit", "embedding"]
LAYER_NORM_EPS = 1e-5


class LatentThoughts(SavedModule):
    """Control vectors and projection of a model with latent thoughts.

    Args:
        decoder: Decoder that reads the latents; its embeddings give width, device and initial values.
        num_latents: Number of latents M.
        schedule: "jacobi" or "sequential"; see `run_latent_rollout`.
        num_iterations: Jacobi iterations T; None for the sequential schedule.
        projection: PCCoT's or CODI's map from a hidden state to the next vector, or none.
        projection_width: Inner width of CODI's map; the decoder's width by default.
        projection_dropout: Dropout before CODI's map.
        projection_init_scale: Initial weight of the map's LayerNorm: 1, or the RMS of the embeddings.
        control_init: Start from the mean embedding, from normal noise, or from the mean embedding of some token ids.
        length_policy: "fixed", "nested_dropout" or "stop_head"; the last adds a `StopHead`.
        head_lr_multiplier: Learning rate of the stop head relative to everything else.
        seed: Seed of the random initial values and of drawn lengths; by default `rng.default_seed`.

    Parameters are at least float32, whatever the decoder's dtype.

    Examples:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> latents = laconic.LatentThoughts(decoder, num_latents=4, num_iterations=2)
        >>> question = decoder.embed(torch.tensor([[5, 6, 7]]))
        >>> latents.think(decoder, question=question, attention_mask=torch.ones(1, 3).bool()).latents.shape
        torch.Size([1, 4, 48])
    """

    artifact_kind = "thoughts"

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_latents: int,
        schedule: LatentSchedule = "jacobi",
        num_iterations: int | None = None,
        projection: ProjectionKind = "pccot",
        projection_width: int | None = None,
        projection_dropout: float = 0.0,
        projection_init_scale: InitScale = "unit",
        control_init: Literal["mean", "normal"] | tuple[int, ...] = "mean",
        length_policy: LengthPolicy = "fixed",
        head_lr_multiplier: float = 3.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_type("decoder", decoder, Decoder, "a Decoder, such as model.decoder")
        check_choices(
            schedule=(schedule, LatentSchedule), length_policy=(length_policy, LengthPolicy),
            projection=(projection, ProjectionKind), projection_init_scale=(projection_init_scale, InitScale),
        )  # fmt: skip
        M, T = list_integers("num_latents, num_iterations", (num_latents, num_iterations or 0))
        if M < 1 or T < 0:
            raise UsageError(f"num_latents={M}, num_iterations={T}: give 1 latent or more, and 0 iterations or more")
        if (num_iterations is None) != (schedule == "sequential"):
            raise UsageError(f"num_iterations={num_iterations}: required for schedule jacobi, none for sequential")
        if length_policy != "fixed" and not num_iterations:
            raise UsageError(f'length_policy "{length_policy}": needs Jacobi iterations; use "fixed"')
        self.schedule, self.num_latents, self.num_iterations = schedule, num_latents, num_iterations
        embedding = decoder.token_embedding.weight.detach()
        D, dtype, device = embedding.shape[1], accumulation_dtype(embedding.dtype), embedding.device
        seed = default_seed.get() if seed is None else seed
        generator = torch.Generator().manual_seed(seed)
        self.vectors = nn.Parameter(init_control_vectors(embedding, control_init, generator).to(dtype))
        width, dropout = (projection_width or D, projection_dropout) if projection == "codi" else (D, 0.0)
        self.projection = None if projection == "none" else Projection(D, width, dropout, generator).to(device, dtype)
        if self.projection is not None and projection_init_scale == "embedding":
            nn.init.constant_(self.projection.norm.weight, float(embedding.to(dtype).square().mean().sqrt()))
        self.settings = {
            "num_latents": num_latents, "schedule": schedule, "num_iterations": num_iterations,
            "projection": projection, "projection_width": width, "projection_dropout": dropout,
        }  # fmt: skip
        self.length_policy, self.seed, self.stop_head = length_policy, seed, None
        if length_policy == "stop_head":
            self.stop_head = StopHead(D, num_latents, head_lr_multiplier, dtype, device)
            self.settings["head_lr_multiplier"] = head_lr_multiplier

    @property
    def begin(self) -> Float[Tensor, " D"]:
        """bot, the vector before the latents."""
        return self.vectors[0]

    @property
    def placeholder(self) -> Float[Tensor, " D"]:
        """The vector read in a latent's position before there is one."""
        return self.vectors[1]

    @property
    def end(self) -> Float[Tensor, " D"]:
        """eot, the vector after the latents."""
        return self.vectors[2]

    def project(self, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Return the vectors to read after these last hidden states, in their dtype."""
        if self.projection is None:
            return hidden_states
        return self.projection(hidden_states.to(self.vectors.dtype)).to(hidden_states.dtype)

    def think(
        self,
        decoder: Decoder,
        cache: KVCache | None = None,
        *,
        question: Float[Tensor, "B Nq D"] | None = None,
        attention_mask: Bool[Tensor, "B Nq"] | None = None,
        num_latents: int | None = None,
        forward_fn: ForwardFn | None = None,
        uses_stop_head: bool = True,
        intervention: Intervention | None = None,
        record_passes: bool = False,
    ) -> LatentRollout:
        """Compute the latents after a question.

        Args:
            decoder: Reads the latents.
            cache: KV cache of the question.
            question: Embeddings of the question, to read it in the same pass as bot; give these or `cache`.
            attention_mask: True at real tokens of `question`.
            num_latents: In place of M, for sequential latents.
            forward_fn: Called in place of the decoder.
            uses_stop_head: If there is a stop head, keep as many latents as it says; else all. All are computed.
            intervention: See `run_latent_rollout`.
            record_passes: Return a record of every pass.

        Raises:
            UsageError: If neither `cache` nor `question` is given.
        """
        prefix = self.build_prefix(decoder, cache, question, attention_mask)
        M = self.num_latents if num_latents is None else num_latents
        rollout = run_latent_rollout(
            forward_fn or decoder, prefix, self.placeholder, M, self.num_iterations,
            project=self.project, intervention=intervention, record_passes=record_passes,
        )  # fmt: skip
        if self.stop_head is None or not uses_stop_head:
            return rollout
        N = self.stop_head.count_latents(rollout.hidden_states)
        return rollout._replace(cache=keep_first_latents(rollout.cache, N, self.num_latents))

    def build_prefix(
        self,
        decoder: Decoder,
        cache: KVCache | None,
        question: Float[Tensor, "B Nq D"] | None,
        attention_mask: Bool[Tensor, "B Nq"] | None,
    ) -> LatentPrefix:
        """Return the prefix of the latents; the arguments are those of `think`."""
        if cache is None and question is None:
            raise UsageError("think requires the cache of a question or its embeddings")
        begin = self.begin.to(decoder.token_embedding.weight.dtype)
        if question is None:
            assert cache is not None
            embeds = begin.expand(cache.B, 1, -1)
        else:
            B = len(question)
            if attention_mask is not None:
                attention_mask = torch.cat([attention_mask, attention_mask.new_ones(B, 1)], 1)
            embeds = torch.cat([question, begin.to(question.dtype).expand(B, 1, -1)], 1)
        return LatentPrefix(embeds, cache, attention_mask)


def init_control_vectors(
    embedding: Float[Tensor, "V D"], init: Literal["mean", "normal"] | tuple[int, ...], generator: torch.Generator
) -> Float[Tensor, "3 D"]:
    """Return the initial bot, placeholder and eot in the accumulation dtype."""
    D, dtype = embedding.shape[1], accumulation_dtype(embedding.dtype)
    if init == "normal":
        return (torch.randn(3, D, generator=generator) * NORMAL_STD).to(embedding.device, dtype)
    rows = embedding if init == "mean" else embedding[list(init)]
    if not len(rows):
        raise UsageError("control_init copy: the text has no tokens; give one that the tokenizer can encode")
    return rows.mean(0, dtype=dtype).expand(3, -1).clone()


class Projection(nn.Module):
    """LayerNorm(W_2 GELU(W_1 x)) with GELU (erf): PCCoT's for P = D; CODI's has dropout before it."""

    def __init__(self, D: int, P: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = build_seeded_linear(D, P, generator)
        self.outer = build_seeded_linear(P, D, generator)
        self.norm = nn.LayerNorm(D, LAYER_NORM_EPS)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return self.norm(self.outer(F.gelu(self.inner(F.dropout(x, self.dropout, self.training)))))
