"""KaVa: PCCoT, and the student's keys and values at its slots drawn to those that the teacher's chain leaves behind.

KaVa arXiv:2510.02312. Equations 1 to 3 are `methods.rkv`, 5a and 5b `methods.cot.nll`.

Symbols: K_t, V_t the teacher's keys and values on the chain, K~, V~ those kept; K_s, V_s the student's at the slots of
its last round; d a distance; alpha2 the weight of L_KV. G heads of keys, M slots, E width of a head, L layers.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.batches import AnswerBatch, ReasoningBatch, StepOutput
from laconic.config.methods import Distance, DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.errors import UsageError
from laconic.latent import codi, pccot, rkv
from laconic.latent.answering import AnswerDecoding, eval_no_grad
from laconic.latent.rkv import LayerSelection, SelectedColumns
from laconic.latent.rollout import ForwardFn, Intervention, LatentRollout, LatentSchedule
from laconic.latent.thoughts import LatentThoughts
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput

LayerTensors = Sequence[Float[Tensor, "B G M E"]]
KVReduction = Literal["mean", "row_mean", "paper_sum"]
KVNorm = Literal["layer", "global", "own", "none"]


def pad_short_chain(
    columns: SelectedColumns, mode: Literal["mask", "zero", "repeat"]
) -> tuple[SelectedColumns, Bool[Tensor, "B G M"]]:
    """What slots beyond a short chain are taught: nothing, zeros, or the kept tokens spread; and which are taught."""
    if mode == "mask":
        return columns, columns.valid
    if mode == "zero":
        return columns, torch.ones_like(columns.valid)
    M, n = columns.valid.shape[2], columns.valid.sum(2, keepdim=True)
    index = columns.index.gather(2, torch.arange(M, device=n.device) * n // M)
    live = (n > 0).expand_as(columns.valid)
    return SelectedColumns(index, live), live


def compute_row_weights(
    target_mask: Bool[Tensor, "B G M"], L: int, E: int, reduction: KVReduction, denominator: float | None
) -> Float[Tensor, " B"]:
    """What the sum of a row over l, g, m and e is multiplied by; `total` is of tokens taught, or else of rows."""
    (B, G, M), own = target_mask.shape, target_mask.sum((1, 2), dtype=torch.float64)
    if reduction == "mean":
        tokens = float(own.sum()) / G if denominator is None else denominator
        return torch.ones_like(own) / ((tokens or 1.0) * L * G * E)
    rows = float(B) if denominator is None else denominator
    return 1 / ((rows or 1.0) * (own.clamp(min=1) * L * E if reduction == "row_mean" else torch.full_like(own, M)))


def key_or_value_loss(
    target: LayerTensors,
    student: LayerTensors,
    target_mask: Bool[Tensor, "B G M"],
    weights: Float[Tensor, " B"],
    loss: Distance,
    norm: KVNorm,
    power: int,
) -> Float[Tensor, ""]:
    """Keys or values alone: the weighted sum over rows of d between a detached target and the student."""
    live = target_mask[..., None]
    target = [x.detach().to(accumulation_dtype(x.dtype)) for x in target]
    student = [x.to(accumulation_dtype(x.dtype)) for x in student]
    if norm == "own":
        target, student = ([x / codi.masked_std(x, live) ** power for x in layers] for layers in (target, student))
    sigma = codi.compute_layer_scales(target, live, "none" if norm == "own" else norm) ** power
    each = [(codi.DISTANCES[loss](s, t) * live).sum((1, 2, 3)) for s, t in zip(student, target, strict=True)]
    return (torch.stack(each) * weights.to(sigma.dtype) / sigma[:, None]).sum()


def kv_loss(
    k_target: LayerTensors,
    v_target: LayerTensors,
    k_s: LayerTensors,
    v_s: LayerTensors,
    target_mask: Bool[Tensor, "B G M"],
    *,
    loss: Distance = "smooth_l1",
    reduction: KVReduction = "mean",
    norm: KVNorm = "none",
    power: int = 1,
    terms: Literal["both", "k", "v"] = "both",
    denominator: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. 4: L_KV = 1/2 [mean d(sg K~ - K_s) + mean d(sg V~ - V_s)], means over taught (b, l, g, m) and E."""
    weights = compute_row_weights(target_mask, len(k_s), k_s[0].shape[3], reduction, denominator)
    sides = {"k": (k_target, k_s), "v": (v_target, v_s)}
    chosen = [sides[name] for name in ("k", "v") if terms in (name, "both")]
    each = [key_or_value_loss(target, student, target_mask, weights, loss, norm, power) for target, student in chosen]
    return torch.stack(each).sum() / 2


def combine_losses(
    student: Tensor, teacher: Tensor, kd: Tensor, kv: Tensor, config: DistillationConfig, alpha2: float
) -> Float[Tensor, ""]:
    """Eq. 5: L = CE_s + CE_t + alpha1 L_CODI + alpha2 L_KV."""
    return pccot.combine_losses(student, teacher, kd, config) + alpha2 * kv


class TeacherTargets(NamedTuple):
    """What the teacher leaves in every layer: keys and values on the chain, those kept, and the scores behind it.

    `matched` are the layers whose slots are drawn to what is kept there.
    """

    k_t: tuple[Float[Tensor, "B G Nc E"], ...]
    v_t: tuple[Float[Tensor, "B G Nc E"], ...]
    columns: tuple[SelectedColumns, ...]
    I: tuple[Float[Tensor, "B G Nc"], ...]
    R: tuple[Float[Tensor, "B G Nc"], ...]
    S: tuple[Float[Tensor, "B G Nc"], ...]
    distilled_layers: tuple[int, ...]


def record_forward(decoder: Decoder, capture: tuple[str, ...]) -> tuple[ForwardFn, list[DecoderOutput]]:
    """The decoder as a reader that leaves behind what each of its passes saw."""
    passes: list[DecoderOutput] = []

    def read(vectors: Tensor, state: KVCache | None = None, *, live: Tensor | None = None) -> DecoderOutput:
        passes.append(decoder(vectors, state, live=live, want=capture))
        return passes[-1]

    return read, passes


def group_passes_by_iteration(
    passes: list[DecoderOutput], schedule: LatentSchedule, which: Literal["last", "all"]
) -> list[list[DecoderOutput]]:
    """The passes that wrote the slots, round by round; thoughts made one after the other are one round of many."""
    rounds = [passes] if schedule == "sequential" else [[seen] for seen in passes[1:] or passes]
    return rounds if which == "all" else rounds[-1:]


class Kava(nn.Module):
    """KaVa whole: `keeping` says which tokens of the chain are kept, `matching` how the slots are drawn to them."""

    def __init__(
        self,
        decoder: Decoder,
        latent_thoughts: LatentThoughts,
        config: DistillationConfig,
        selection_config: KVSelectionConfig,
        kv_config: KVDistillationConfig,
        seed: int = 0,
    ) -> None:
        super().__init__()
        L = decoder.config.num_hidden_layers
        self.layers = tuple(range(L)) if kv_config.layers is None else kv_config.layers
        if not self.layers or max(self.layers) >= L:
            raise UsageError(f"kv_layers {list(self.layers)}: the decoder has layers 0 to {L - 1}; name some of them")
        self.decoder, self.latent_thoughts = decoder, latent_thoughts
        self.config, self.selection_config, self.kv_config, self.seed = config, selection_config, kv_config, seed

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """What the sums of the loss are divided by."""
        length, M = batch.chain_mask.sum(1), self.latent_thoughts.num_latents
        short = {"mask": length.clamp(max=M), "zero": torch.full_like(length, M), "repeat": (length > 0) * M}
        return codi.count_denominators(batch, self.config) | {
            "kv": float(short[self.kv_config.short_chain_targets].sum())
        }

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        pre = tuple(f"k.{l}" for l in self.layers if self.kv_config.key_space == "pre_rope")
        asked = self.kv_config.weight and rkv.get_needed_scores(self.selection_config)[0]
        queries = tuple(f"q_rot.{l}" for l in self.layers if asked)
        reader, passes = record_forward(self.decoder, pre if self.kv_config.weight else ())
        want = (*queries, *pre) if self.kv_config.weight else ()
        both = codi.run_teacher_and_student(
            self.decoder,
            self.latent_thoughts,
            batch,
            self.config,
            state,
            capture=want,
            needs_teacher_cache=bool(self.kv_config.weight),
            forward_fn=reader,
        )
        found = codi.compute_loss_terms(self.decoder, self.latent_thoughts, batch, both, self.config)
        if self.kv_config.weight and both.teacher:
            found |= self.compute_kv_terms(batch, both.teacher, passes)
        student, teacher, kd, kv = codi.ordered_terms(found, "student", "teacher", "codi", "kv")
        return codi.make_output(combine_losses(student, teacher, kd, kv, self.config, self.kv_config.weight), found)

    def compute_kv_terms(
        self, batch: ReasoningBatch, teacher: DecoderOutput, passes: list[DecoderOutput]
    ) -> codi.LossTerms:
        """L_KV, and the mean share of slots that hold a kept token."""
        how, M = self.kv_config, self.latent_thoughts.num_latents
        sums = batch.loss_denominators or self.loss_denominators(batch)
        chosen = [self.select_tokens(batch, teacher, l) for l in self.layers]
        targets = [pad_short_chain(c.columns, how.short_chain_targets) for c in chosen]
        k_kept = [rkv.gather_selected(c.k_t, kept) for c, (kept, _) in zip(chosen, targets, strict=True)]
        v_kept = [rkv.gather_selected(c.v_t, kept) for c, (kept, _) in zip(chosen, targets, strict=True)]
        losses = [
            kv_loss(
                k_kept,
                v_kept,
                *self.gather_latent_kv(round),
                targets[0][1],
                loss=how.distance,
                reduction=how.reduction,
                norm=how.scale,
                power=how.scale_power,
                terms=how.terms,
                denominator=sums["kv" if how.reduction == "mean" else "rows"],
            )
            for round in group_passes_by_iteration(passes, self.latent_thoughts.schedule, how.iterations)
        ]
        share = chosen[0].columns.valid[:, 0].sum() / (M * (sums["rows"] or 1.0))
        return {"kv": torch.stack(losses).mean(), "kept": share}

    def select_tokens(
        self, batch: ReasoningBatch, teacher: DecoderOutput, layer: int, all_scores: bool = False
    ) -> LayerSelection:
        """What a layer keeps of the chain."""
        M, space = self.latent_thoughts.num_latents, self.kv_config.key_space
        return rkv.select_tokens(
            self.decoder, batch, teacher, layer, self.selection_config, M, self.seed, space, all_scores
        )

    def gather_latent_kv(self, passes: list[DecoderOutput]) -> tuple[list[Tensor], list[Tensor]]:
        """The student's keys and values at its slots, the last columns that a round wrote."""
        M, state = self.latent_thoughts.num_latents, passes[-1].cache
        keys = [state.keys[l] for l in self.layers]
        if self.kv_config.key_space == "pre_rope":
            keys = [torch.cat([seen.activations[f"k.{l}"] for seen in passes], 2) for l in self.layers]
        return [k[:, :, -M:] for k in keys], [state.values[l][:, :, -M:] for l in self.layers]

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Never: one phase."""
        return False

    def think(
        self, questions: ReasoningBatch, intervention: Intervention | None = None, record_passes: bool = False
    ) -> LatentRollout:
        """The thoughts on questions."""
        return codi.think_no_grad(self.decoder, self.latent_thoughts, questions, intervention, record_passes)

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        """The answer after the thoughts; of the teacher, after a chain."""
        return codi.answer_with_method(self.decoder, self.latent_thoughts, questions, decoding, with_cot)

    def compute_teacher_targets(self, batch: ReasoningBatch) -> TeacherTargets:
        """What the teacher's pass on a batch leaves to be matched, in every layer, with all scores."""
        with eval_no_grad(self.decoder):
            question = codi.encode_question(self.decoder, batch).cache
            teacher = codi.encode_chain(self.decoder, batch, question, ("q_rot", "k"))
            layers = range(self.decoder.config.num_hidden_layers)
            every = zip(*(self.select_tokens(batch, teacher, l, all_scores=True) for l in layers), strict=True)
            return TeacherTargets(*every, distilled_layers=self.layers)
