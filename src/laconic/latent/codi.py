"""CODI: one model teaches itself to think without words, by one hidden state where the answer begins.

CODI arXiv:2502.21074; what PCCoT and KaVa share with it stands here too.

Symbols: h_t, h_s hidden states of teacher and student at the distillation token, l over layers (0 what the first block
reads, L after the final norm); sigma their spread; CE_s, CE_t cross-entropies of student and teacher; gamma `alpha1`.
The question is read once; the teacher goes on with chain and answer, the student with bot, thoughts, eot and answer.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.batches import AnswerBatch, ReasoningBatch, StepOutput
from laconic.config.methods import Distance, DistillationConfig, ScaleKind
from laconic.errors import UsageError
from laconic.latent.answering import AnswerDecoding, answer_from_latents, eval_no_grad
from laconic.latent.cot import (
    build_student_targets,
    build_teacher_targets,
    count_scored,
    generate_with_chain,
    masked_cross_entropy,
)
from laconic.latent.rollout import ForwardFn, Intervention, LatentRollout
from laconic.latent.thoughts import LatentThoughts
from laconic.models.attention import accumulation_dtype
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder, DecoderOutput

MIN_STD = 1e-6  # no spread is taken smaller
DISTANCES = {
    "smooth_l1": partial(F.smooth_l1_loss, reduction="none"),
    "l1": partial(F.l1_loss, reduction="none"),
    "mse": partial(F.mse_loss, reduction="none"),
}
LossTerms = dict[str, Tensor]


def masked_std(x: Float[Tensor, "*shape"], valid: Bool[Tensor, "*#shape"]) -> Float[Tensor, ""]:
    """The standard deviation, with n - 1, of all live elements together; 1 if there are fewer than two."""
    valid = valid.expand_as(x)
    n = valid.sum()
    mean = (x * valid).sum() / n.clamp(min=1)
    var = ((x - mean).square() * valid).sum() / (n - 1).clamp(min=1)
    return var.clamp(min=MIN_STD**2).sqrt().where(n > 1, 1.0)


def compute_layer_scales(x: Sequence[Tensor], valid: Tensor, norm: ScaleKind) -> Float[Tensor, " n"]:
    """What the distance in each of n layers is divided by, before the power."""
    if norm == "layer":
        return torch.stack([masked_std(layer, valid) for layer in x])
    return (masked_std(torch.stack(tuple(x)), valid) if norm == "global" else x[0].new_ones(())).expand(len(x))


def hidden_loss(
    h_t: Float[Tensor, "n B D"],
    h_s: Float[Tensor, "n B D"],
    has_target: Bool[Tensor, " B"],
    *,
    loss: Distance = "smooth_l1",
    norm: ScaleKind = "layer",
    power: int = 1,
    denominator: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. 2: L = 1/n sum over l of 1/sigma_l mean_{b,d} d(h_s,l - sg h_t,l), over the `total` rows that have one."""
    h_t, h_s = h_t.detach().to(accumulation_dtype(h_t.dtype)), h_s.to(accumulation_dtype(h_s.dtype))
    denominator = float(has_target.sum()) if denominator is None else denominator
    each = (DISTANCES[loss](h_s, h_t) * has_target[:, None]).sum((1, 2)) / (h_t.shape[2] * (denominator or 1.0))
    return (each / compute_layer_scales(h_t.unbind(), has_target[:, None], norm) ** power).mean()


def combine_losses(student: Tensor, teacher: Tensor, codi: Tensor, config: DistillationConfig) -> Float[Tensor, ""]:
    """Eq. 3: L = CE_s + gamma L_CODI + CE_t, the cross-entropies by their weights, 1 in the paper."""
    return config.student_ce_weight * student + config.teacher_ce_weight * teacher + config.hidden_weight * codi


class TeacherStudentPasses(NamedTuple):
    """The two parts of one model on a batch: what each pass saw; `target` is the teacher's that L_CODI goes by."""

    question: DecoderOutput
    teacher: DecoderOutput | None
    distill_target: DecoderOutput | None
    student: DecoderOutput


def encode_question(decoder: Decoder, batch: ReasoningBatch, cache: KVCache | None = None) -> DecoderOutput:
    """The pass that teacher and student continue."""
    return decoder(decoder.embed(batch.question_ids), cache, live=batch.question_mask)


def encode_chain(
    decoder: Decoder, batch: ReasoningBatch, cache: KVCache, capture: tuple[str, ...] = ()
) -> DecoderOutput:
    """The teacher's pass: chain and answer."""
    ids, live = torch.cat([batch.chain_ids, batch.answer_ids], 1), torch.cat([batch.chain_mask, batch.answer_mask], 1)
    return decoder(decoder.embed(ids), cache, live=live, want=capture)


def encode_answer(
    decoder: Decoder,
    latent_thoughts: LatentThoughts,
    batch: ReasoningBatch,
    cache: KVCache,
    capture: tuple[str, ...] = (),
) -> DecoderOutput:
    """The student's pass: eot and answer."""
    words = decoder.embed(batch.answer_ids)
    eot = latent_thoughts.end.to(words.dtype).expand(batch.B, 1, -1)
    live = F.pad(batch.answer_mask, (1, 0), value=True)
    return decoder(torch.cat([eot, words], 1), cache, live=live, want=capture)


def run_teacher_and_student(
    decoder: Decoder,
    latent_thoughts: LatentThoughts,
    batch: ReasoningBatch,
    config: DistillationConfig,
    cache: KVCache | None = None,
    *,
    capture: tuple[str, ...] = (),
    needs_teacher_cache: bool = False,
    forward_fn: ForwardFn | None = None,
) -> TeacherStudentPasses:
    """Every pass of a training step that a term of the loss looks at; `reader` reads the thoughts.

    `want` names further stages of the teacher; `chosen`: its cache is looked at, whatever the weights are.
    """
    states = distilled_layer_names(decoder, config)
    question = encode_question(decoder, batch, cache)
    second = config.teacher_pass == "second_pass" and bool(states)
    wanted = capture if second else (*states, *capture)
    teacher = target = (
        encode_chain(decoder, batch, question.cache, wanted)
        if config.teacher_ce_weight or wanted or needs_teacher_cache
        else None
    )
    if second:
        with torch.no_grad():
            again = question if config.share_question_cache else encode_question(decoder, batch, cache)
            target = encode_chain(decoder, batch, again.cache, states)
    own = question if config.share_question_cache else encode_question(decoder, batch, cache)
    rolled = latent_thoughts.think(decoder, own.cache, forward_fn=forward_fn)
    return TeacherStudentPasses(
        question, teacher, target, encode_answer(decoder, latent_thoughts, batch, rolled.cache, states)
    )


def distilled_layer_names(decoder: Decoder, config: DistillationConfig) -> tuple[str, ...]:
    """The stages that L_CODI compares; none if it has no weight."""
    L = decoder.config.num_hidden_layers
    first = {"all": 0, "blocks": 1, "last": L}[config.hidden_layers]
    return tuple(f"hidden.{l}" for l in range(first, L + 1)) if config.hidden_weight else ()


def gather_column(output: DecoderOutput, names: tuple[str, ...], column: Int[Tensor, " B"]) -> Float[Tensor, "n B D"]:
    """Hidden states of one column of each row."""
    rows = torch.arange(len(column), device=column.device)
    return torch.stack([output.activations[name][rows, column] for name in names])


def count_denominators(batch: ReasoningBatch, config: DistillationConfig) -> dict[str, float]:
    """Rows, tokens (or rows) scored in each cross-entropy, and rows that have a distillation token."""
    return {
        "rows": float(batch.B),
        "student": count_scored(build_student_targets(batch), config.ce_reduction),
        "teacher": count_scored(build_teacher_targets(batch), config.ce_reduction),
        "codi": float((batch.distill_column >= 0).sum()),
    }


def compute_loss_terms(
    decoder: Decoder,
    latent_thoughts: LatentThoughts,
    batch: ReasoningBatch,
    outputs: TeacherStudentPasses,
    config: DistillationConfig,
) -> LossTerms:
    """The terms of the loss that have a weight, and how often either part's likeliest token was right."""
    sums: Mapping[str, float] = batch.loss_denominators or count_denominators(batch, config)
    logits = partial(latent_thoughts.logits, decoder)
    found: LossTerms = {}
    if config.student_ce_weight:
        said = masked_cross_entropy(
            logits, outputs.student.hidden_states, build_student_targets(batch), config.ce_reduction, sums["student"]
        )
        found |= {"student": said.loss, "student_right": said.accuracy}
    if config.teacher_ce_weight and outputs.teacher:
        hidden = torch.cat([outputs.question.hidden_states[:, -1:], outputs.teacher.hidden_states], 1)
        said = masked_cross_entropy(logits, hidden, build_teacher_targets(batch), config.ce_reduction, sums["teacher"])
        found |= {"teacher": said.loss, "teacher_right": said.accuracy}
    if config.hidden_weight and outputs.distill_target:
        names, column = distilled_layer_names(decoder, config), batch.distill_column.clamp(min=0)
        h_t = gather_column(outputs.distill_target, names, batch.chain_ids.shape[1] + column)
        h_s = gather_column(outputs.student, names, 1 + column)
        found["codi"] = hidden_loss(
            h_t,
            h_s,
            batch.distill_column >= 0,
            loss=config.hidden_loss,
            norm=config.hidden_scale,
            power=config.hidden_scale_power,
            denominator=sums["codi"],
        )
    return found


def ordered_terms(terms: LossTerms, *names: str) -> tuple[Tensor, ...]:
    """Terms of the loss in the order asked for; one that was not computed is 0. Raises `Usage` (2) if none was."""
    if not terms:
        raise UsageError("every weight of the loss is 0, so nothing would be learned; give student one")
    zero = next(iter(terms.values())).new_zeros(())
    return tuple(terms.get(name, zero) for name in names)


def make_output(loss: Tensor, terms: LossTerms) -> StepOutput:
    """The loss with its parts cut from the graph."""
    return StepOutput(loss, {name: part.detach() for name, part in terms.items()})


def think_no_grad(
    decoder: Decoder,
    latent_thoughts: LatentThoughts,
    questions: ReasoningBatch,
    intervention: Intervention | None = None,
    record_passes: bool = False,
) -> LatentRollout:
    """The thoughts on questions, without gradients and dropout."""
    with eval_no_grad(decoder, latent_thoughts):
        return latent_thoughts.think(
            decoder, encode_question(decoder, questions).cache, intervention=intervention, record_passes=record_passes
        )


def answer_with_method(
    decoder: Decoder,
    latent_thoughts: LatentThoughts,
    questions: ReasoningBatch,
    decoding: AnswerDecoding,
    with_cot: bool,
) -> AnswerBatch:
    """The answer after the thoughts, or by the same weights after a chain written out."""
    return (
        generate_with_chain(decoder, questions, decoding)
        if with_cot
        else answer_from_latents(decoder, latent_thoughts, questions, decoding)
    )


class Codi(nn.Module):
    """CODI whole: thoughts made one after the other, distilled at one token."""

    def __init__(self, decoder: Decoder, latent_thoughts: LatentThoughts, config: DistillationConfig) -> None:
        super().__init__()
        if latent_thoughts.schedule != "sequential":
            raise UsageError(
                f"codi: thoughts of mode {latent_thoughts.schedule}; choose sequential, or the method pccot"
            )
        self.decoder, self.latent_thoughts, self.config = decoder, latent_thoughts, config

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """What the sums of the loss are divided by."""
        return count_denominators(batch, self.config)

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Loss and parts of a batch; `state` is what stands before the questions."""
        both = run_teacher_and_student(self.decoder, self.latent_thoughts, batch, self.config, state)
        found = compute_loss_terms(self.decoder, self.latent_thoughts, batch, both, self.config)
        student, teacher, kd = ordered_terms(found, "student", "teacher", "codi")
        return make_output(combine_losses(student, teacher, kd, self.config), found)

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        """Never: one phase."""
        return False

    def think(
        self, questions: ReasoningBatch, intervention: Intervention | None = None, record_passes: bool = False
    ) -> LatentRollout:
        """The thoughts on questions."""
        return think_no_grad(self.decoder, self.latent_thoughts, questions, intervention, record_passes)

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        """The answer after the thoughts; of the teacher, after a chain."""
        return answer_with_method(self.decoder, self.latent_thoughts, questions, decoding, with_cot)
