"""KaVa: distill the KV cache of a written chain, compressed by R-KV, into the keys and values of the latents.

KaVa arXiv:2510.02312. Equations 1 to 3 are in `latent.rkv`, 5a and 5b in `losses.masked_cross_entropy`.

Symbols: K_t, V_t the teacher's keys and values on the chain, K~, V~ the selected ones; K_s, V_s the student's at the
latents of the last iteration; d a distance; alpha2 the weight of L_KV. G KV heads, M latents, E head size, L layers.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.errors import UsageError
from laconic.latent import codi, rkv
from laconic.latent.rkv import LayerSelection, SelectedColumns
from laconic.latent.stop_training import StopTraining
from laconic.latent.thoughts import LatentThoughts
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput

LayerTensors = Sequence[Float[Tensor, "B G M E"]]
KVReduction = Literal["mean", "row_mean", "paper_sum"]
DEFAULT_CONFIG = KVDistillationConfig()


def pad_short_chain(
    columns: SelectedColumns, mode: Literal["mask", "zero", "repeat"]
) -> tuple[SelectedColumns, Bool[Tensor, "B G M"]]:
    """Return the columns to distill into each slot, and which slots have a target.

    Slots beyond a chain shorter than M have no target ("mask"), zeros as targets ("zero"), or the selected tokens
    spread over all slots ("repeat").
    """
    if mode == "mask":
        return columns, columns.valid
    if mode == "zero":
        return columns, torch.ones_like(columns.valid)
    M, n = columns.valid.shape[2], columns.valid.sum(2, keepdim=True)
    index = columns.index.gather(2, torch.arange(M, device=n.device) * n // M)  # slot m: token m n / M, rounded down
    valid = (n > 0).expand_as(columns.valid)
    return SelectedColumns(index, valid), valid


def compute_row_weights(
    target_mask: Bool[Tensor, "B G M"], L: int, E: int, reduction: KVReduction, denominator: float | None
) -> Float[Tensor, " B"]:
    """Return the factor of each row's sum over layers, heads, slots and E.

    "mean" averages over all targets, "row_mean" over each row and then rows, "paper_sum" divides by rows and M only.
    The denominator counts targets for "mean", else rows.
    """
    (B, G, M), counts = target_mask.shape, target_mask.sum((1, 2), dtype=torch.float64)
    if reduction == "mean":
        tokens = float(counts.sum()) / G if denominator is None else denominator  # every head selects the same number
        return torch.ones_like(counts) / ((tokens or 1.0) * L * G * E)  # without targets the loss is 0, not NaN
    rows = float(B) if denominator is None else denominator
    per_row = counts.clamp(min=1) * L * E if reduction == "row_mean" else torch.full_like(counts, M)
    return 1 / ((rows or 1.0) * per_row)


def key_or_value_loss(
    target: LayerTensors,
    student: LayerTensors,
    target_mask: Bool[Tensor, "B G M"],
    weights: Float[Tensor, " B"],
    config: KVDistillationConfig,
) -> Float[Tensor, ""]:
    """Return the weighted sum over rows of d between detached targets and the student, for keys or for values."""
    mask, scale, power = target_mask[..., None], config.scale, config.scale_power
    target = [x.detach().to(accumulation_dtype(x.dtype)) for x in target]
    student = [x.to(accumulation_dtype(x.dtype)) for x in student]
    if scale == "each_side":
        target, student = ([x / codi.masked_std(x, mask) ** power for x in xs] for xs in (target, student))
    sigma = codi.compute_layer_scales(target, mask, "none" if scale == "each_side" else scale) ** power
    d = codi.DISTANCES[config.distance]
    layers = [(d(s, t) * mask).sum((1, 2, 3)) for s, t in zip(student, target, strict=True)]
    return (torch.stack(layers) * weights.to(sigma.dtype) / sigma[:, None]).sum()


def kv_loss(
    k_target: LayerTensors,
    v_target: LayerTensors,
    k_s: LayerTensors,
    v_s: LayerTensors,
    target_mask: Bool[Tensor, "B G M"],
    config: KVDistillationConfig = DEFAULT_CONFIG,
    *,
    denominator: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. 4: L_KV = 1/2 [mean d(sg K~ - K_s) + mean d(sg V~ - V_s)], means over targets (b, l, g, m) and E.

    Args:
        k_target: Selected keys of the teacher, K~, in every layer, and `v_target` values V~; gradients stop here.
        k_s: The student's keys at the latents, and `v_s` its values.
        target_mask: Slots that have a target.
        config: Distance d, its scale, and the reduction (see `compute_row_weights`).
        denominator: Number of targets (or rows) in the whole optimizer step.
    """
    weights = compute_row_weights(target_mask, len(k_s), k_s[0].shape[3], config.reduction, denominator)
    keys = key_or_value_loss(k_target, k_s, target_mask, weights, config)
    values = key_or_value_loss(v_target, v_s, target_mask, weights, config)
    return (keys + values) / 2


def combine_losses(
    student: Tensor, teacher: Tensor, kd: Tensor, kv: Tensor, config: DistillationConfig, alpha2: float
) -> Float[Tensor, ""]:
    """Eq. 5: L = CE_s + CE_t + alpha1 L_CODI + alpha2 L_KV."""
    return codi.combine_losses(student, teacher, kd, config) + alpha2 * kv


def find_distilled_layers(config: KVDistillationConfig, L: int) -> tuple[int, ...]:
    """Return the layers whose keys and values are distilled. Raises `UsageError` for one that does not exist."""
    layers = tuple(range(L)) if config.layers is None else config.layers
    if not layers or max(layers) >= L:
        raise UsageError(f"layers {list(layers)}: choose one or more of the decoder's layers 0 to {L - 1}")
    return layers


class Kava(codi.Codi):
    """KaVa: latents trained to match the chain's hidden states before the answer, and selected keys and values of it.

    Args:
        decoder: The model, teacher and student in one.
        latent_thoughts: Control vectors and projection.
        config: Weights of the cross-entropies and of the hidden-state loss.
        selection_config: Which chain tokens are selected.
        kv_config: Weight, distance and layers of L_KV.
        seed: Seed of the policy "random"; that of the latents by default.
        stop_training: When and how the stop head of the latents is trained; None leaves it as it is.

    Raises:
        UsageError: If `kv_config` names layers that the decoder does not have.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> latents = laconic.LatentThoughts(decoder, num_latents=4, num_iterations=2)
        >>> method = laconic.Kava(decoder, latents, DistillationConfig(), KVSelectionConfig(), KVDistillationConfig())
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['codi', 'kv', 'kv_target_fraction', 'student', 'student_token_accuracy', 'teacher', 'teacher_token_accuracy']
    """

    schedules: ClassVar[tuple[str, ...]] = ("jacobi", "sequential")

    def __init__(
        self,
        decoder: Decoder,
        latent_thoughts: LatentThoughts,
        config: DistillationConfig,
        selection_config: KVSelectionConfig,
        kv_config: KVDistillationConfig,
        seed: int | None = None,
        stop_training: StopTraining | None = None,
    ) -> None:
        super().__init__(decoder, latent_thoughts, config, stop_training)
        self.layers = find_distilled_layers(kv_config, decoder.config.num_hidden_layers)
        self.selection_config, self.kv_config = selection_config, kv_config
        self.seed = latent_thoughts.seed if seed is None else seed

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        selectable = rkv.find_selectable_columns(batch, self.selection_config.policy)
        length, M = selectable.sum(1), self.latent_thoughts.num_latents
        targets = {"mask": length.clamp(max=M), "zero": torch.full_like(length, M), "repeat": (length > 0) * M}
        kv = float(targets[self.kv_config.short_chain_targets].sum())
        return super().loss_denominators(batch) | {"kv": kv}

    def combine_terms(self, terms: codi.LossTerms) -> Tensor:
        student, teacher, kd, kv = (terms[name] for name in ("student", "teacher", "codi", "kv"))
        return combine_losses(student, teacher, kd, kv, self.config, self.kv_config.weight)

    def compute_loss_terms(self, batch: ReasoningBatch, state: KVCache | None) -> codi.LossTerms:
        """Return the terms whose weight is not 0, and accuracies; see `forward`."""
        weight = self.kv_config.weight
        keys = tuple(f"k.{l}" for l in self.layers if weight and self.kv_config.key_space == "pre_rope")
        needs_queries = weight and rkv.get_needed_scores(self.selection_config)[0]
        queries = tuple(f"q_rot.{l}" for l in self.layers if needs_queries)
        outputs = self.run_teacher_and_student(
            batch, state, capture_teacher=(*queries, *keys), capture_latents=keys, needs_teacher_cache=bool(weight)
        )
        terms = self.compute_distillation_terms(batch, outputs)
        if weight and outputs.teacher:
            terms |= self._compute_kv_terms(batch, outputs.teacher, outputs.latents)
        return terms

    def select_kv(self, batch: ReasoningBatch, teacher: DecoderOutput, layer: int) -> LayerSelection:
        """Select the chain tokens of a `layer` of a `batch`, from the pass of the `teacher` over chain and answer.

        A policy of your own selects min(M, N_C) in every layer and KV head.
        """
        config, M, key_space = self.selection_config, self.latent_thoughts.num_latents, self.kv_config.key_space
        return rkv.select_tokens(self.decoder, batch, teacher, layer, config, M, self.seed, key_space)

    def _compute_kv_terms(
        self, batch: ReasoningBatch, teacher: DecoderOutput, latent_passes: list[DecoderOutput]
    ) -> codi.LossTerms:
        """Return L_KV and the mean share of slots that have a selected token."""
        config, denominators = self.kv_config, batch.loss_denominators or self.loss_denominators(batch)
        M = self.latent_thoughts.num_latents
        selections = [self.select_kv(batch, teacher, l) for l in self.layers]
        targets = [pad_short_chain(s.columns, config.short_chain_targets) for s in selections]
        k_target = [rkv.gather_selected(s.k_t, c) for s, (c, _) in zip(selections, targets, strict=True)]
        v_target = [rkv.gather_selected(s.v_t, c) for s, (c, _) in zip(selections, targets, strict=True)]
        loss = kv_loss(
            k_target,
            v_target,
            *self._gather_latent_kv(latent_passes),
            targets[0][1],  # which slots have a target is the same in all layers
            config,
            denominator=denominators["kv" if config.reduction == "mean" else "rows"],
        )
        valid = selections[0].columns.valid
        return {"kv": loss, "kv_target_fraction": valid[:, 0].sum() / (M * (denominators["rows"] or 1.0))}

    def _gather_latent_kv(self, passes: list[DecoderOutput]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the student's keys and values at the latents, the last M columns."""
        M, cache = self.latent_thoughts.num_latents, passes[-1].cache
        keys = [cache.keys[l] for l in self.layers]
        if self.kv_config.key_space == "pre_rope":  # not in the cache; a sequential rollout has one latent per pass
            last = passes if self.latent_thoughts.schedule == "sequential" else passes[-1:]
            keys = [torch.cat([output.activations[f"k.{l}"] for output in last], 2) for l in self.layers]
        return [k[:, :, -M:] for k in keys], [cache.values[l][:, :, -M:] for l in self.layers]
