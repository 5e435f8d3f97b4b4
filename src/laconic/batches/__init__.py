"""Batches that data, methods, training and evaluation hand to one another."""

from laconic.batches.answers import AnswerBatch, PassCounts, StopReason
from laconic.batches.documents import IGNORE_INDEX, DocumentBatch, next_token_targets
from laconic.batches.example import ReasoningExample
from laconic.batches.reasoning import ReasoningBatch

__all__ = [
    "IGNORE_INDEX",
    "AnswerBatch",
    "DocumentBatch",
    "PassCounts",
    "ReasoningBatch",
    "ReasoningExample",
    "StopReason",
    "next_token_targets",
]
