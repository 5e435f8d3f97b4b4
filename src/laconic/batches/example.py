"""A question with its chain of thought and answer, as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReasoningExample:
    """A question with its chain of thought (a tuple of steps) and its answer, as text.

    `metadata` holds source-specific fields (difficulty, subset, …) that reports group by. `document` is the text that
    the question is about; None if the question stands alone.
    """

    id: str
    question: str
    steps: tuple[str, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    document: str | None = None
