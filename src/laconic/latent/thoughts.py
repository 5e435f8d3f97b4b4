"""What is learned beside the decoder so that it can think: the vectors bot, slot and eot, and the map fed back.

CODI arXiv:2502.21074, PCCoT arXiv:2506.18582, Coconut arXiv:2412.06769.

Shapes: B rows, M thoughts, D width, P inner width of CODI's map, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.latent.rollout import ForwardFn, Intervention, LatentRollout, LatentSchedule, run_latent_rollout
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.storage import atomic

ProjectionKind = Literal["pccot", "codi", "none"]
LAYER_NORM_EPS = 1e-5  # of the map's LayerNorm
NORMAL_STD = 0.02  # of vectors drawn at the start


class LatentThoughts(nn.Module):
    """bot, slot and eot, and the projection from a hidden state to the next vector; how many thoughts, how made.

    `control` "vectors" keeps the three out of the vocabulary; "rows" scores them too where head and words are tied,
    as words appended to the vocabulary would be, so that `logits` has three more columns, which nothing ever targets.
    They start as the mean of the embedding table, as normal noise of `seed`, or as the mean of the rows of some ids.
    Parameters are float32 at least, whatever the decoder's type.
    """

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
        projection_init_scale: Literal["unit", "embedding"] = "unit",
        control_tokens: Literal["vectors", "rows"] = "vectors",
        control_init: Literal["mean", "normal"] | tuple[int, ...] = "mean",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if (num_iterations is None) != (schedule == "sequential"):
            raise UsageError(f"rounds {num_iterations}: mode jacobi needs a number, sequential has none")
        self.schedule: LatentSchedule = schedule
        self.num_latents, self.num_iterations, self.control_tokens = num_latents, num_iterations, control_tokens
        table = decoder.token_embedding.weight.detach()
        D, dtype, device = table.shape[1], accumulation_dtype(table.dtype), table.device
        generator = torch.Generator().manual_seed(seed)
        self.vectors = nn.Parameter(init_control_vectors(table, control_init, generator).to(dtype))
        width, dropout = (projection_width or D, projection_dropout) if projection == "codi" else (D, 0.0)
        self.projection = None if projection == "none" else Projection(D, width, dropout, generator).to(device, dtype)
        if self.projection is not None and projection_init_scale == "embedding":
            nn.init.constant_(self.projection.norm.weight, float(table.to(dtype).square().mean().sqrt()))
        self.settings = {
            "count": num_latents, "mode": schedule, "rounds": num_iterations, "project": projection,
            "project_width": width, "project_dropout": dropout, "control": control_tokens,
        }  # fmt: skip

    @property
    def begin(self) -> Float[Tensor, " D"]:
        """What begins the thoughts."""
        return self.vectors[0]

    @property
    def placeholder(self) -> Float[Tensor, " D"]:
        """The placeholder that a thought takes the place of."""
        return self.vectors[1]

    @property
    def end(self) -> Float[Tensor, " D"]:
        """What ends the thoughts."""
        return self.vectors[2]

    def project(self, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """The vector that a hidden state becomes when it is read, in the hidden state's type."""
        return (
            hidden_states
            if self.projection is None
            else self.projection(hidden_states.to(self.vectors.dtype)).to(hidden_states.dtype)
        )

    def logits(self, decoder: Decoder, hidden_states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """The decoder's, and those of the three rows behind them where they are words of a tied head."""
        words = decoder.logits(hidden_states)
        if self.control_tokens == "vectors" or not decoder.config.tie_word_embeddings:
            return words
        return torch.cat([words, F.linear(hidden_states, self.vectors.to(hidden_states.dtype)).to(words.dtype)], -1)

    def think(
        self,
        decoder: Decoder,
        cache: KVCache | None = None,
        *,
        question: Float[Tensor, "B Nq D"] | None = None,
        attention_mask: Bool[Tensor, "B Nq"] | None = None,
        forward_fn: ForwardFn | None = None,
        intervention: Intervention | None = None,
        record_passes: bool = False,
    ) -> LatentRollout:
        """The thoughts that follow `state`, or follow the vectors of a question that is read in the same pass as bot.

        `live` is the question's; `reader` reads in the decoder's place. Raises `Usage` (2) where there is neither.
        """
        if cache is None and question is None:
            raise UsageError("thoughts follow nothing; give the state of a question, or its vectors")
        B = cache.B if cache is not None else len(question) if question is not None else 0
        prefix = self.begin.to(decoder.token_embedding.weight.dtype).expand(B, 1, -1)
        if question is not None:
            attention_mask = (
                None if attention_mask is None else torch.cat([attention_mask, attention_mask.new_ones(B, 1)], 1)
            )
            prefix = torch.cat([question, prefix.to(question.dtype)], 1)
        return run_latent_rollout(
            forward_fn or decoder,
            prefix,
            self.placeholder,
            self.num_latents,
            self.num_iterations,
            project=self.project,
            cache=cache,
            attention_mask=attention_mask,
            schedule=self.schedule,
            intervention=intervention,
            record_passes=record_passes,
        )

    def save(self, path: str | Path, metadata: Mapping[str, object]) -> None:
        """One safetensors file; `about` names the base and the tokenizer it belongs to."""
        atomic.save_artifact(Path(path), self.state_dict(), "thoughts", {**metadata, "settings": self.settings})

    def load(self, path: str | Path, metadata: Mapping[str, object]) -> "LatentThoughts":
        """What `save` wrote, put here. Raises `Damaged` (76) for another base, tokenizer, setting or name."""
        atomic.load_into_module(self, Path(path), "thoughts", {**metadata, "settings": self.settings})
        return self


def init_control_vectors(
    embedding: Float[Tensor, "V D"], init: Literal["mean", "normal"] | tuple[int, ...], generator: torch.Generator
) -> Float[Tensor, "3 D"]:
    """bot, slot and eot before training, in the table's place and wide type."""
    D, dtype = embedding.shape[1], accumulation_dtype(embedding.dtype)
    if init == "normal":
        return (torch.randn(3, D, generator=generator) * NORMAL_STD).to(embedding.device, dtype)
    rows = embedding if init == "mean" else embedding[list(init)]
    if not len(rows):
        raise UsageError("control_init copies the rows of no token; name a text that the tokenizer has tokens for")
    return rows.mean(0, dtype=dtype).expand(3, -1).clone()


class Projection(nn.Module):
    """LayerNorm of two linear maps with GELU (erf) between: PCCoT's with P = D, CODI's with dropout before it."""

    def __init__(self, D: int, P: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner, self.outer = build_seeded_linear(D, P, generator), build_seeded_linear(P, D, generator)
        self.norm = nn.LayerNorm(D, LAYER_NORM_EPS)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return self.norm(self.outer(F.gelu(self.inner(F.dropout(x, self.dropout, self.training)))))


def build_seeded_linear(in_features: int, out_features: int, generator: torch.Generator) -> nn.Linear:
    """A map as torch starts it, uniform in ±1/√inner, drawn by a generator of its own."""
    made, bound = nn.Linear(in_features, out_features, device="meta").to_empty(device="cpu"), in_features**-0.5
    with torch.no_grad():
        for p in made.parameters():
            p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * bound)
    return made
