"""Answers to questions: matched with the gold ones, with the forward passes and cache positions that they took."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from laconic.batches import AnswerBatch, ReasoningExample
from laconic.data.reasoning.answer_matching import AnswerProtocol

AnswerFunction = Callable[[Any], AnswerBatch]


class AnswerRecord(NamedTuple):
    """The answer to one question, as it is stored: the generated text, and the prediction found in it, if any.

    Passes are forward passes of the decoder by part; cache positions those when the answer began and at its end.
    """

    question: str
    gold: str
    output: str
    prediction: str | None
    is_correct: bool
    passes: Mapping[str, int]
    cache_positions: tuple[int, int]


def match_answers(
    answers: AnswerBatch, examples: Sequence[ReasoningExample], protocol: AnswerProtocol
) -> list[AnswerRecord]:
    records: list[AnswerRecord] = []
    rows = zip(examples, answers.texts, answers.passes, answers.cache_positions, strict=True)
    for example, text, passes, positions in rows:
        prediction = protocol.extract(text)
        is_correct = prediction is not None and protocol.is_correct(prediction, example.answer)
        question = example.question, example.answer, text
        records.append(AnswerRecord(*question, prediction, is_correct, passes._asdict(), positions))
    return records
