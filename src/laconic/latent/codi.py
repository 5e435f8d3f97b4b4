"""CODI: self-distillation of a chain of thought into latents through hidden states at the token before the answer.

CODI arXiv:2502.21074. PCCoT and KaVa extend the same training step.

Symbols: h_t, h_s hidden states of teacher and student at the distillation token, l over layers (0 the input of the
first block, L after the final norm); sigma their standard deviation; CE_s, CE_t cross-entropies of student and teacher;
gamma the weight `hidden_weight`. One model is both: after the question, the teacher reads chain and answer, the student
bot, latents, eot and answer.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.config.methods import Distance, DistillationConfig, ScaleKind
from laconic.errors import UsageError
from laconic.interfaces import StepOutput
from laconic.latent.answering import LatentReasoning
from laconic.latent.rollout import Capture, read_after_latents, read_chain, read_question
from laconic.latent.stop_head import draw_lengths, keep_first_latents
from laconic.latent.stop_training import StopTraining
from laconic.latent.thoughts import LatentThoughts, check_parts
from laconic.losses import build_student_targets, build_teacher_targets, count_scored, masked_cross_entropy
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput

MIN_STD = 1e-6  # keeps the loss finite where all hidden states are equal
DISTANCES = {
    "smooth_l1": partial(F.smooth_l1_loss, reduction="none"),
    "l1": partial(F.l1_loss, reduction="none"),
    "mse": partial(F.mse_loss, reduction="none"),
}
LossTerms = dict[str, Tensor]


def masked_std(x: Float[Tensor, "*shape"], valid: Bool[Tensor, "*#shape"]) -> Float[Tensor, ""]:
    """Return the standard deviation, with n - 1, of all valid elements; 1 if there are fewer than two."""
    valid = valid.expand_as(x)
    n = valid.sum()
    mean = (x * valid).sum() / n.clamp(min=1)
    var = ((x - mean).square() * valid).sum() / (n - 1).clamp(min=1)
    return var.clamp(min=MIN_STD**2).sqrt().where(n > 1, 1.0)


def compute_layer_scales(x: Sequence[Tensor], valid: Tensor, scale: ScaleKind) -> Float[Tensor, " n"]:
    """Return the divisor of the distance in each of n layers: sigma of the layer, sigma of all layers, or 1."""
    if scale == "layer":
        return torch.stack([masked_std(layer, valid) for layer in x])
    return (masked_std(torch.stack(tuple(x)), valid) if scale == "global" else x[0].new_ones(())).expand(len(x))


def hidden_loss(
    h_t: Float[Tensor, "n B D"],
    h_s: Float[Tensor, "n B D"],
    has_target: Bool[Tensor, " B"],
    *,
    distance: Distance = "smooth_l1",
    scale: ScaleKind = "layer",
    denominator: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. 2, PCCoT Eq. 3: L = 1/n sum over l of 1/sigma_l mean_{b,d} d(h_s,l - sg h_t,l).

    `has_target` marks the rows with a distillation token, `denominator` is their number in the whole optimizer step.
    """
    h_t = h_t.detach().to(accumulation_dtype(h_t.dtype))
    h_s = h_s.to(accumulation_dtype(h_s.dtype))
    denominator = float(has_target.sum()) if denominator is None else denominator
    layers = (DISTANCES[distance](h_s, h_t) * has_target[:, None]).sum((1, 2)) / (h_t.shape[2] * (denominator or 1.0))
    return (layers / compute_layer_scales(h_t.unbind(), has_target[:, None], scale)).mean()


def combine_losses(student: Tensor, teacher: Tensor, hidden: Tensor, config: DistillationConfig) -> Float[Tensor, ""]:
    """Eq. 3, PCCoT Eq. 4: L = CE_s + gamma L_CODI + CE_t; the cross-entropies have weights, 1 in the paper."""
    weighted = config.student_ce_weight * student + config.teacher_ce_weight * teacher
    return weighted + config.hidden_weight * hidden


class TeacherStudentPasses(NamedTuple):
    """Outputs of every pass of a training step; `distill_target` is the teacher pass that L_CODI compares with."""

    question: DecoderOutput
    teacher: DecoderOutput | None
    distill_target: DecoderOutput | None
    latents: list[DecoderOutput]
    student: DecoderOutput


def distilled_layer_names(decoder: Decoder, config: DistillationConfig) -> tuple[str, ...]:
    """Return the names of the hidden states that L_CODI compares; none if its weight is 0."""
    L = decoder.config.num_hidden_layers
    first = {"all": 0, "blocks": 1, "last": L}[config.hidden_layers]
    return tuple(f"hidden.{l}" for l in range(first, L + 1)) if config.hidden_weight else ()


def gather_column(output: DecoderOutput, names: tuple[str, ...], column: Int[Tensor, " B"]) -> Float[Tensor, "n B D"]:
    """Return the named hidden states at one column of each row."""
    rows = torch.arange(len(column), device=column.device)
    return torch.stack([output.activations[name][rows, column] for name in names])


class Codi(LatentReasoning):
    """CODI: sequential latents, trained to match the chain's hidden states at the token before the answer.

    Args:
        decoder: The model, teacher and student in one.
        latent_thoughts: Control vectors and projection with the sequential schedule.
        config: Loss weights and distances.
        stop_training: When and how the stop head of the latents is trained; None leaves it as it is.

    Raises:
        UsageError: If the latents have another schedule, or no stop head to train.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.config.methods import DistillationConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> latents = laconic.LatentThoughts(decoder, num_latents=4, schedule="sequential", projection="codi")
        >>> method = laconic.Codi(decoder, latents, DistillationConfig())
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['codi', 'student', 'student_token_accuracy', 'teacher', 'teacher_token_accuracy']
    """

    is_trained_on_chains: ClassVar[bool] = True
    schedules: ClassVar[tuple[str, ...]] = ("sequential",)

    def __init__(
        self,
        decoder: Decoder,
        latent_thoughts: LatentThoughts,
        config: DistillationConfig,
        stop_training: StopTraining | None = None,
    ) -> None:
        super().__init__()
        check_parts(decoder, latent_thoughts, config, DistillationConfig)
        if stop_training is not None and latent_thoughts.stop_head is None:
            raise UsageError('stop_training: these latents have no stop head; set length_policy = "stop_head"')
        if latent_thoughts.schedule not in self.schedules:
            raise UsageError(f"schedule {latent_thoughts.schedule}: {type(self).__name__} needs {self.schedules[0]}")
        self.decoder, self.latent_thoughts, self.config = decoder, latent_thoughts, config
        self.stop_training = stop_training

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Return whether this update is the first that trains the stop head."""
        return self.stop_training is not None and batch.step == self.stop_training.first_step

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """Return the number of rows, of scored tokens in each cross-entropy, and of rows with a distillation token."""
        return {
            "rows": float(batch.B),
            "student": count_scored(build_student_targets(batch)),
            "teacher": count_scored(build_teacher_targets(batch)),
            "codi": float((batch.distill_column >= 0).sum()),
        }

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Return loss and terms of a `batch`; `state` is the KV cache of what precedes the questions, or None.

        From the first step of its training on, the stop head alone is trained.

        Raises:
            UsageError: If every weight of the loss is 0.
        """
        if self.stop_training is not None and batch.step >= self.stop_training.first_step:
            return self.stop_training.compute_loss(self.decoder, self.latent_thoughts, batch, state)
        terms = self.compute_loss_terms(batch, state)
        if not terms:
            raise UsageError("every loss weight is 0, so nothing would be trained; set student_ce_weight")
        zero = next(iter(terms.values())).new_zeros(())
        loss = self.combine_terms(dict.fromkeys(("student", "teacher", "codi", "kv"), zero) | terms)
        return StepOutput(loss, {name: term.detach() for name, term in terms.items()})

    def combine_terms(self, terms: LossTerms) -> Tensor:
        return combine_losses(terms["student"], terms["teacher"], terms["codi"], self.config)

    def compute_loss_terms(self, batch: ReasoningBatch, state: KVCache | None) -> LossTerms:
        """Return the terms whose weight is not 0, and accuracies; see `forward`."""
        return self.compute_distillation_terms(batch, self.run_teacher_and_student(batch, state))

    def run_teacher_and_student(
        self,
        batch: ReasoningBatch,
        cache: KVCache | None = None,
        *,
        capture_teacher: Capture = (),
        capture_latents: Capture = (),
        needs_teacher_cache: bool = False,
    ) -> TeacherStudentPasses:
        """Run the passes over a `batch`, after `cache`, that the terms of the loss need.

        Passes that only terms of weight 0 need are skipped, except the teacher's with `needs_teacher_cache`.
        `capture_teacher` and `capture_latents` name activations of the teacher's pass and of those over the latents.
        """
        decoder, latents, config = self.decoder, self.latent_thoughts, self.config
        hidden_names = distilled_layer_names(decoder, config)
        question = read_question(decoder, batch, cache)
        is_second_pass = config.teacher_pass == "second_pass" and bool(hidden_names)
        captured = capture_teacher if is_second_pass else (*hidden_names, *capture_teacher)
        teacher = target = None
        if config.teacher_ce_weight or captured or needs_teacher_cache:
            teacher = target = read_chain(decoder, batch, question.cache, captured)
        if is_second_pass:
            with torch.no_grad():
                target = read_chain(decoder, batch, question.cache, hidden_names)
        latent_passes: list[DecoderOutput] = []

        def forward(*args: Any, **kwargs: Any) -> DecoderOutput:  # KaVa needs what every pass captured
            latent_passes.append(decoder(*args, **kwargs, capture=capture_latents))
            return latent_passes[-1]

        M = latents.num_latents
        prefix = latents.build_prefix(decoder, question.cache)
        latent_cache = latents.compute_latents(forward, prefix, M).cache
        if latents.length_policy != "fixed":
            latent_cache = keep_first_latents(latent_cache, draw_lengths(batch, M, latents.seed), M)
        student = read_after_latents(
            decoder, latents.end, batch.answer_ids, batch.answer_mask, latent_cache, hidden_names
        )
        return TeacherStudentPasses(question, teacher, target, latent_passes, student)

    def compute_distillation_terms(self, batch: ReasoningBatch, outputs: TeacherStudentPasses) -> LossTerms:
        """Return the terms of a `batch` whose weight is not 0, and accuracies; `outputs` are those of the passes."""
        config, logits = self.config, self.decoder.logits
        denominators = batch.loss_denominators or self.loss_denominators(batch)
        terms: LossTerms = {}
        if config.student_ce_weight:
            targets = build_student_targets(batch)
            result = masked_cross_entropy(logits, outputs.student.hidden_states, targets, denominators["student"])
            terms |= {"student": result.loss, "student_token_accuracy": result.accuracy}
        if config.teacher_ce_weight and outputs.teacher:
            targets = build_teacher_targets(batch)  # the last question token predicts the first of the chain
            hidden = torch.cat([outputs.question.hidden_states[:, -1:], outputs.teacher.hidden_states], 1)
            result = masked_cross_entropy(logits, hidden, targets, denominators["teacher"])
            terms |= {"teacher": result.loss, "teacher_token_accuracy": result.accuracy}
        if config.hidden_weight and outputs.distill_target:
            names = distilled_layer_names(self.decoder, config)
            column = batch.distill_column.clamp(min=0)
            terms["codi"] = hidden_loss(
                gather_column(outputs.distill_target, names, batch.chain_ids.shape[1] + column),
                gather_column(outputs.student, names, 1 + column),  # eot comes before the answer
                batch.distill_column >= 0,
                distance=config.hidden_loss,
                scale=config.hidden_scale,
                denominator=denominators["codi"],
            )
        return terms
