"""Explicit chain of thought and none: the two baselines of the latent methods.

`Cot` is trained on a written chain and the answer, `NoCot` on the answer alone.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.interfaces import StepOutput
from laconic.latent.answering import (
    AnswerDecoding,
    AnswerPrompt,
    PromptedAnswers,
    prompt_with_chain,
    prompt_with_question,
)
from laconic.losses import build_student_targets, build_teacher_targets, count_scored, masked_cross_entropy
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


def drop_chain_prefix(batch: ReasoningBatch, remaining: Bool[Tensor, "B Nc"]) -> ReasoningBatch:
    """Return the batch with the remaining chain tokens, which end each chain.

    The last question token then predicts the first remaining token, or the answer's first. Columns without any
    remaining token are removed.
    """
    remaining = remaining & batch.chain_mask
    first = batch.answer_ids[:, 0]
    if remaining.shape[1]:
        first_chain = batch.chain_ids.gather(1, remaining.long().argmax(1, keepdim=True))[:, 0]
        first = torch.where(remaining.any(1), first_chain, first)
    columns = remaining.any(0).nonzero()[:, 0]
    return replace(
        batch,
        chain_ids=batch.chain_ids[:, columns],
        chain_mask=remaining[:, columns],
        chain_step_index=batch.chain_step_index[:, columns],
        chain_result_mask=None if batch.chain_result_mask is None else batch.chain_result_mask[:, columns],
        chain_targets=batch.chain_targets.masked_fill(~remaining, IGNORE_INDEX)[:, columns],
        question_target=first.masked_fill(batch.question_target == IGNORE_INDEX, IGNORE_INDEX),
    )


def encode_batch(
    decoder: Decoder, batch: ReasoningBatch, cache: KVCache | None, *, with_chain: bool
) -> Float[Tensor, "B N D"]:
    """Read question, chain and answer in one pass; return hidden states from the last question token on."""
    ids, masks = [batch.question_ids, batch.answer_ids], [batch.question_mask, batch.answer_mask]
    if with_chain:
        ids.insert(1, batch.chain_ids)
        masks.insert(1, batch.chain_mask)
    output = decoder(decoder.embed(torch.cat(ids, 1)), cache, attention_mask=torch.cat(masks, 1))
    return output.hidden_states[:, batch.question_ids.shape[1] - 1 :]


def compute_single_loss(
    name: str, decoder: Decoder, hidden: Float[Tensor, "B N D"], targets: Int[Tensor, "B N"], batch: ReasoningBatch
) -> StepOutput:
    """Return loss and accuracy of a method with one cross-entropy; `name` is that of its denominator and metrics."""
    totals = batch.loss_denominators
    result = masked_cross_entropy(decoder.logits, hidden, targets, None if totals is None else totals[name])
    return StepOutput(result.loss, {name: result.loss.detach(), f"{name}_right": result.accuracy})


class Cot(PromptedAnswers):
    """Explicit chain of thought: chain and answer are written and scored.

    Args:
        decoder: The model.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> method = laconic.Cot(decoder)
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['teacher', 'teacher_right']
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """Count the targets of each term of the loss."""
        return {"teacher": count_scored(build_teacher_targets(batch))}

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Return loss and accuracy of a batch; `state` is the KV cache of what precedes the questions.

        Args:
            batch: Questions, chains and answers.
            state: Cache of the documents, or None.
        """
        hidden = encode_batch(self.decoder, batch, state, with_chain=True)
        return compute_single_loss("teacher", self.decoder, hidden, build_teacher_targets(batch), batch)

    def prompt_answers(
        self, questions: ReasoningBatch, decoding: AnswerDecoding, state: KVCache | None = None
    ) -> AnswerPrompt:
        """Return what chain and answer follow. Arguments are those of `prompt_answers`."""
        return prompt_with_chain(self.decoder, questions, decoding, state)

    prompt_chains = prompt_answers


class NoCot(PromptedAnswers):
    """No chain of thought: the answer follows the question.

    Args:
        decoder: The model.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> method = laconic.NoCot(decoder)
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['student', 'student_right']
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        """Count the targets of each term of the loss."""
        return {"student": count_scored(build_student_targets(batch))}

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Return loss and accuracy of a batch; `state` is the KV cache of what precedes the questions.

        Args:
            batch: Questions and answers.
            state: Cache of the documents, or None.
        """
        hidden = encode_batch(self.decoder, batch, state, with_chain=False)
        return compute_single_loss("student", self.decoder, hidden, build_student_targets(batch), batch)

    def prompt_answers(
        self, questions: ReasoningBatch, decoding: AnswerDecoding, state: KVCache | None = None
    ) -> AnswerPrompt:
        """Return what the answer follows."""
        return prompt_with_question(self.decoder, questions, decoding.answer_prompt, state)
