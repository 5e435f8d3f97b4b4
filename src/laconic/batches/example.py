"""A question with its chain of thought and answer, as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laconic.errors import UsageError


@dataclass(frozen=True)
class ReasoningExample:
    """A question with its chain of thought (a tuple of steps) and its answer, as text.

    `metadata` holds source-specific fields (difficulty, subset, …) that reports group by. `document` is the text that
    the question is about; None if the question stands alone. `place` is where the row was read, as `file:line`.
    """

    id: str
    question: str
    steps: tuple[str, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())
    document: str | None = None
    place: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.steps, str):  # its characters would be taken for steps
            raise UsageError(f"steps: give a tuple of texts, such as ({self.steps[:80]!r},), not one text")
        for name in ("id", "question", "answer"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise UsageError(f"{name}: give text, not {type(value).__name__}")

    @property
    def label(self) -> str:
        """Name of the row in messages: where it was read, with its id if that is another name; else its id."""
        return f"{self.place} (id {self.id[:60]})" if self.place not in ("", self.id) else self.id
