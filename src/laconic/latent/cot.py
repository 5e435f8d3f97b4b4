"""Explicit chain of thought and none: the two baselines of the latent methods.

`Cot` is trained on a written chain and the answer, `NoCot` on the answer alone.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.generation.config import check_type
from laconic.interfaces import StepOutput
from laconic.latent.answering import AnswerDecoding, AnswerPrompt, PromptedAnswers, prompt_with_question
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


def compute_single_loss(
    name: str, decoder: Decoder, hidden: Float[Tensor, "B N D"], targets: Int[Tensor, "B N"], batch: ReasoningBatch
) -> StepOutput:
    """Return loss and accuracy of a method with one cross-entropy; `name` is that of its denominator and metrics."""
    totals = batch.loss_denominators
    result = masked_cross_entropy(decoder.logits, hidden, targets, None if totals is None else totals[name])
    return StepOutput(result.loss, {name: result.loss.detach(), f"{name}_token_accuracy": result.accuracy})


class WrittenReasoning(PromptedAnswers):
    """Base of methods that read and write text only, with one cross-entropy over what follows the question."""

    loss_name: ClassVar[str] = "student"  # of the denominator and the metrics
    writes_chain: ClassVar[bool] = True  # before the answer

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        check_type("decoder", decoder, Decoder, "a Decoder, such as model.decoder")
        self.decoder = decoder

    def drop_removed(self, batch: ReasoningBatch) -> ReasoningBatch:
        """Return the batch without the chain tokens that the method removes at this step; by default none are."""
        return batch

    def build_targets(self, batch: ReasoningBatch) -> Int[Tensor, "B N"]:
        """Return the targets from the last question token on."""
        return build_teacher_targets(batch) if self.writes_chain else build_student_targets(batch)

    def loss_denominators(self, batch: ReasoningBatch) -> dict[str, float]:
        return {self.loss_name: count_scored(self.build_targets(self.drop_removed(batch)))}

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Return loss and accuracy of a `batch`; `state` is the KV cache of what precedes the questions."""
        remaining = self.drop_removed(batch)
        ids = [batch.question_ids, batch.answer_ids]
        masks = [batch.question_mask, batch.answer_mask]
        if self.writes_chain:
            ids.insert(1, remaining.chain_ids)
            masks.insert(1, remaining.chain_mask)
        output = self.decoder(self.decoder.embed(torch.cat(ids, 1)), state, attention_mask=torch.cat(masks, 1))
        hidden = output.hidden_states[:, batch.question_ids.shape[1] - 1 :]
        return compute_single_loss(self.loss_name, self.decoder, hidden, self.build_targets(remaining), batch)

    def prompt_answers(
        self, questions: ReasoningBatch, decoding: AnswerDecoding, state: KVCache | None = None
    ) -> AnswerPrompt:
        """Return the prompt of chain or answer; see `PromptedAnswers`."""
        prefix_ids = () if self.writes_chain else decoding.answer_prompt
        prompt = prompt_with_question(self.decoder, questions, prefix_ids, state)
        return prompt._replace(writes_chain=self.writes_chain)


class Cot(WrittenReasoning):
    """Explicit chain of thought: chain and answer are written and scored.

    Examples:
        >>> import laconic
        >>> from laconic.config.data import DigitsConfig
        >>> from laconic.data.synthetic.digits import DigitsDataset
        >>> data = DigitsDataset(0, DigitsConfig())
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> method = laconic.Cot(decoder)
        >>> output = method(data.batch([0], epoch=0, step=0))
        >>> sorted(output.metrics)
        ['teacher', 'teacher_token_accuracy']
    """

    loss_name = "teacher"
    is_trained_on_chains = True


class NoCot(WrittenReasoning):
    """No chain of thought: the answer follows the question.

    Examples:
        >>> import laconic
        >>> method = laconic.NoCot(laconic.Decoder(laconic.DecoderConfig.tiny("llama")))
        >>> method.writes_chain
        False
    """

    writes_chain = False
