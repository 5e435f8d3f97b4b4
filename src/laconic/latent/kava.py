"""KaVa: distill the KV cache of a written chain, compressed by R-KV, into the keys and values of the latents.

KaVa arXiv:2510.02312. Equations 1 to 3 are in `latent.rkv`, 5a and 5b in `losses.masked_cross_entropy`.

Symbols: K_t, V_t the teacher's keys and values on the chain, K~, V~ the selected ones; K_s, V_s the student's at the
latents of the last iteration; d a distance; alpha2 the weight of L_KV. G KV heads, M latents, E head size, L layers.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.errors import UsageError
from laconic.latent import codi, rkv
from laconic.latent.rkv import LayerSelection
from laconic.latent.stop_training import StopTraining
from laconic.latent.thoughts import LatentThoughts
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput

LayerTensors = Sequence[Float[Tensor, "B G M E"]]
DEFAULT_CONFIG = KVDistillationConfig()


def key_or_value_loss(
    target: LayerTensors,
    student: LayerTensors,
    target_mask: Bool[Tensor, "B G M"],
    weight: float,
    config: KVDistillationConfig,
) -> Float[Tensor, ""]:
    """Return the weighted sum of d between detached targets and the student, for keys or for values."""
    mask = target_mask[..., None]
    target = [x.detach().to(accumulation_dtype(x.dtype)) for x in target]
    student = [x.to(accumulation_dtype(x.dtype)) for x in student]
    sigma = codi.compute_layer_scales(target, mask, config.scale) ** config.scale_power
    d = codi.DISTANCES[config.distance]
    layers = [(d(s, t) * mask).sum((1, 2, 3)) for s, t in zip(student, target, strict=True)]
    return (torch.stack(layers) * weight / sigma[:, None]).sum()


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
        config: Distance d, and its scale.
        denominator: Number of targets of a head in the whole optimizer step.
    """
    L, G, E = len(k_s), target_mask.shape[1], k_s[0].shape[3]
    count = float(target_mask.sum()) / G if denominator is None else denominator  # every head selects the same number
    weight = 1 / ((count or 1.0) * L * G * E)  # without targets the loss is 0, not NaN
    keys = key_or_value_loss(k_target, k_s, target_mask, weight, config)
    values = key_or_value_loss(v_target, v_s, target_mask, weight, config)
    return (keys + values) / 2


def combine_losses(
    student: Tensor, teacher: Tensor, kd: Tensor, kv: Tensor, config: DistillationConfig, alpha2: float
) -> Float[Tensor, ""]:
    """Eq. 5: L = CE_s + CE_t + alpha1 L_CODI + alpha2 L_KV."""
    return codi.combine_losses(student, teacher, kd, config) + alpha2 * kv


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
        L = decoder.config.num_hidden_layers
        self.layers = tuple(range(L)) if kv_config.layers is None else kv_config.layers
        if max(self.layers) >= L:
            raise UsageError(f"layers {list(self.layers)}: choose one or more of the decoder's layers 0 to {L - 1}")
        self.selection_config, self.kv_config = selection_config, kv_config
        self.seed = latent_thoughts.seed if seed is None else seed

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        selectable = rkv.find_selectable_columns(batch, self.selection_config.policy)
        M = self.latent_thoughts.num_latents
        is_masked = self.kv_config.short_chain_targets == "mask"
        num_targets = float(selectable.sum(1).clamp(max=M).sum()) if is_masked else float(batch.B * M)
        return super().loss_denominators(batch) | {"kv": num_targets}

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
        config, M = self.selection_config, self.latent_thoughts.num_latents
        return rkv.select_tokens(self.decoder, batch, teacher, layer, config, M, self.seed, self.kv_config.key_space)

    def _compute_kv_terms(
        self, batch: ReasoningBatch, teacher: DecoderOutput, latent_passes: list[DecoderOutput]
    ) -> codi.LossTerms:
        """Return L_KV and the mean share of slots that have a selected token."""
        config = self.kv_config
        denominators = batch.loss_denominators or self.loss_denominators(batch)
        M = self.latent_thoughts.num_latents
        selections = [self.select_kv(batch, teacher, l) for l in self.layers]
        k_target = [rkv.gather_selected(s.k_t, s.columns) for s in selections]
        v_target = [rkv.gather_selected(s.v_t, s.columns) for s in selections]
        valid = selections[0].columns.valid  # the same slots in all layers
        mask = valid if config.short_chain_targets == "mask" else torch.ones_like(valid)
        student = self._gather_latent_kv(latent_passes)
        loss = kv_loss(k_target, v_target, *student, mask, config, denominator=denominators["kv"])
        return {"kv": loss, "kv_target_fraction": valid[:, 0].sum() / (M * (denominators["rows"] or 1.0))}

    def _gather_latent_kv(self, passes: list[DecoderOutput]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the student's keys and values at the latents, the last M columns."""
        M = self.latent_thoughts.num_latents
        keys = [passes[-1].cache.keys[l] for l in self.layers]
        values = [passes[-1].cache.values[l] for l in self.layers]
        if self.kv_config.key_space == "pre_rope":  # not in the cache; a sequential rollout has one latent per pass
            last = passes if self.latent_thoughts.schedule == "sequential" else passes[-1:]
            keys = [torch.cat([output.activations[f"k.{l}"] for output in last], 2) for l in self.layers]
        return [k[:, :, -M:] for k in keys], [v[:, :, -M:] for v in values]
