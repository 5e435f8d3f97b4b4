"""Classes that come one task after another, as ids: what data hands to evaluation."""

from dataclasses import dataclass
from typing import NamedTuple

TokenIds = tuple[int, ...]


class LabelledUtterance(NamedTuple):
    """An utterance with the arrow behind it, and the number of its class."""

    input_ids: TokenIds
    label: int


@dataclass(frozen=True)
class ClassIncrementalStream:
    """A class-incremental stream in the order of one seed.

    `labels` are the words of every class and `words` their ids, as they follow the arrow; `tasks` the classes of each
    task; `train` and `test` the items of each, train in the order of reading. `first` begins a document, `last` ends a
    line, `arrow` is all that is read of a line without an utterance.
    """

    name: str
    seed: int
    label_texts: tuple[str, ...]
    label_ids: tuple[TokenIds, ...]
    task_classes: tuple[tuple[int, ...], ...]
    train: tuple[tuple[LabelledUtterance, ...], ...]
    test: tuple[tuple[LabelledUtterance, ...], ...]
    start_ids: TokenIds
    arrow_ids: TokenIds
    line_end_ids: TokenIds

    @property
    def num_tasks(self) -> int:
        """Tasks."""
        return len(self.task_classes)

    def seen_classes(self, i: int) -> list[int]:
        """The classes of the tasks up to the `i`-th, from 0, in the order of their numbers."""
        return sorted(label for task in self.task_classes[: i + 1] for label in task)

    def training_ids(self, item: LabelledUtterance) -> TokenIds:
        """The line of an example: utterance, arrow, the label's words, the end."""
        return item.input_ids + self.label_ids[item.label] + self.line_end_ids
