"""Latent thoughts of a decoder: build their trained parts, and compute the thoughts about a question.

Shapes: B rows, Nq columns of the question, M latents, D width, V vocabulary.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.generation.config import check_choices, check_type, list_integers
from laconic.latent.rollout import Intervention, LatentRollout
from laconic.latent.stop_head import StopHead, keep_first_latents
from laconic.latent.thought_vectors import Projection, ThoughtVectors
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from laconic.models.init import NORMAL_STD
from laconic.rng import default_seed

LatentSchedule = Literal["jacobi", "sequential"]
LengthPolicy = Literal["fixed", "nested_dropout", "stop_head"]
ProjectionKind = Literal["pccot", "codi", "none"]
InitScale = Literal["unit", "embedding"]


def check_parts(decoder: object, latent_thoughts: object, config: object, config_type: type) -> None:
    """Raise UsageError if a part of a method with latents has another type."""
    check_type("decoder", decoder, Decoder, "a Decoder, such as model.decoder")
    check_type("latent_thoughts", latent_thoughts, LatentThoughts, "laconic.LatentThoughts(decoder, …)")
    check_type("config", config, config_type, f"laconic.config.methods.{config_type.__name__}(…)")


class LatentThoughts(ThoughtVectors):
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
        embedding = decoder.token_embedding.weight.detach()
        D = embedding.shape[1]
        dtype = accumulation_dtype(embedding.dtype)
        device = embedding.device
        seed = default_seed.get() if seed is None else seed
        generator = torch.Generator().manual_seed(seed)
        vectors = init_control_vectors(embedding, control_init, generator).to(dtype)
        width, dropout = (projection_width or D, projection_dropout) if projection == "codi" else (D, 0.0)
        project = None if projection == "none" else Projection(D, width, dropout, generator).to(device, dtype)
        if project is not None and projection_init_scale == "embedding":
            nn.init.constant_(project.norm.weight, float(embedding.to(dtype).square().mean().sqrt()))
        super().__init__(vectors, project, num_latents, num_iterations)
        self.schedule = schedule
        self.settings = {
            "num_latents": num_latents, "schedule": schedule, "num_iterations": num_iterations,
            "projection": projection, "projection_width": width, "projection_dropout": dropout,
        }  # fmt: skip
        self.length_policy, self.seed = length_policy, seed
        self.stop_head: StopHead | None = None
        if length_policy == "stop_head":
            self.stop_head = StopHead(D, num_latents, head_lr_multiplier, dtype, device)
            self.settings["head_lr_multiplier"] = head_lr_multiplier

    def think(
        self,
        decoder: Decoder,
        cache: KVCache | None = None,
        *,
        question: Float[Tensor, "B Nq D"] | None = None,
        attention_mask: Bool[Tensor, "B Nq"] | None = None,
        num_latents: int | None = None,
        intervention: Intervention | None = None,
        record_passes: bool = False,
    ) -> LatentRollout:
        """Compute the latents after a question; with a stop head, keep as many as it says.

        Args:
            decoder: Reads the latents.
            cache: KV cache of the question.
            question: Embeddings of the question, to read it in the same pass as bot; give these or `cache`.
            attention_mask: True at real tokens of `question`.
            num_latents: In place of M, for sequential latents.
            intervention: See `run_latent_rollout`.
            record_passes: Return a record of every pass.

        Raises:
            UsageError: If neither `cache` nor `question` is given.
        """
        prefix = self.build_prefix(decoder, cache, question, attention_mask)
        M = self.num_latents if num_latents is None else num_latents
        rollout = self.compute_latents(decoder, prefix, M, intervention, record_passes)
        if self.stop_head is None:
            return rollout
        N = self.stop_head.count_latents(rollout.hidden_states)
        return rollout._replace(cache=keep_first_latents(rollout.cache, N, self.num_latents))


def init_control_vectors(
    embedding: Float[Tensor, "V D"], init: Literal["mean", "normal"] | tuple[int, ...], generator: torch.Generator
) -> Float[Tensor, "3 D"]:
    """Return the initial bot, placeholder and eot in the accumulation dtype, without converting the whole table."""
    if isinstance(init, str):
        check_choices(control_init=(init, Literal["mean", "normal"]))
    D = embedding.shape[1]
    dtype = accumulation_dtype(embedding.dtype)
    if init == "normal":
        return (torch.randn(3, D, generator=generator) * NORMAL_STD).to(embedding.device, dtype)
    rows = embedding if init == "mean" else embedding[list(init)]
    if not len(rows):
        raise UsageError("control_init copy: the text has no tokens; give one that the tokenizer can encode")
    return torch.cat([rows[:, i : i + 256].mean(0, dtype=dtype) for i in range(0, D, 256)]).expand(3, -1).clone()
