"""Methods without some of the optional parts, as classes outside laconic may be."""

from typing import Any

from torch import nn

from laconic.batches import AnswerBatch, ReasoningBatch
from laconic.latent.answering import AnswerDecoding, AnswerPrompt


class AnswersOnly(nn.Module):
    """A method that only answers, as another one does.

    Args:
        method: The other method.
    """

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def answer(self, questions: ReasoningBatch, decoding: AnswerDecoding, *, with_cot: bool = False) -> AnswerBatch:
        return self.method.answer(questions, decoding)


class PromptsOnly(AnswersOnly):
    """A method that also returns the prompts of its answers, but not step by step."""

    def prompt_answers(self, questions: ReasoningBatch, decoding: AnswerDecoding) -> AnswerPrompt:
        return self.method.prompt_answers(questions, decoding)
