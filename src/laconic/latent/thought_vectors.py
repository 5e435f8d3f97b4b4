"""Trained parts of latent thoughts, and their use: the vectors bot, placeholder and eot, and the feedback projection.

CODI arXiv:2502.21074, PCCoT arXiv:2506.18582, Coconut arXiv:2412.06769.

Shapes: B rows, M latents, D width, P inner width of CODI's projection.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.latent.rollout import ForwardFn, Intervention, LatentPrefix, LatentRollout, run_latent_rollout
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.init import build_seeded_linear
from laconic.storage.saved_module import SavedModule


class Projection(nn.Module):
    """LayerNorm(W_2 GELU(W_1 x)) with GELU (erf): PCCoT's for P = D; CODI's has dropout before it."""

    def __init__(self, D: int, P: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner, self.outer = build_seeded_linear(D, P, generator), build_seeded_linear(P, D, generator)
        self.norm = nn.LayerNorm(D, eps=1e-5)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return self.norm(self.outer(F.gelu(self.inner(F.dropout(x, self.dropout, self.training)))))


class ThoughtVectors(SavedModule):
    """The parts of `LatentThoughts` that a rollout needs; `num_iterations` is None for sequential latents."""

    def __init__(
        self, vectors: Float[Tensor, "3 D"], projection: Projection | None, num_latents: int, num_iterations: int | None
    ) -> None:
        super().__init__()
        self.vectors, self.projection = nn.Parameter(vectors), projection
        self.num_latents, self.num_iterations = num_latents, num_iterations

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

    def build_prefix(
        self,
        decoder: Decoder,
        cache: KVCache | None,
        question: Float[Tensor, "B Nq D"] | None = None,
        attention_mask: Bool[Tensor, "B Nq"] | None = None,
    ) -> LatentPrefix:
        """Return the prefix of the latents; the arguments are those of `LatentThoughts.think`."""
        begin = self.begin.to(decoder.dtype)
        if question is None:
            if cache is None:
                raise UsageError("think requires the cache of a question or its embeddings")
            return LatentPrefix(begin.expand(cache.B, 1, -1), cache, attention_mask)
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (0, 1), value=True)
        embeds = torch.cat([question, begin.to(question.dtype).expand(len(question), 1, -1)], 1)
        return LatentPrefix(embeds, cache, attention_mask)

    def compute_latents(
        self,
        decoder: ForwardFn,
        prefix: LatentPrefix,
        M: int,
        intervention: Intervention | None = None,
        record_passes: bool = False,
    ) -> LatentRollout:
        """Compute M latents after a prefix, whatever a stop head says; see `run_latent_rollout`."""
        return run_latent_rollout(
            decoder, prefix, self.placeholder, M, self.num_iterations,
            project=self.project, intervention=intervention, record_passes=record_passes,
        )  # fmt: skip
