"""Class-incremental stream: classes arrive task by task, as token ids."""

from dataclasses import dataclass
from typing import NamedTuple

from laconic.storage.manifest import hash_json

TokenIds = tuple[int, ...]


class LabelledUtterance(NamedTuple):
    """Ids of an utterance and the separator `ARROW` of `intent_data`, and the index of its class."""

    input_ids: TokenIds
    label: int


@dataclass(frozen=True)
class ClassIncrementalStream:
    """A stream in the class order of one seed.

    Labels are encoded as they follow the arrow. Training and test examples are given by task, the former in the order
    of reading.
    """

    name: str
    seed: int
    label_ids: tuple[TokenIds, ...]
    task_classes: tuple[tuple[int, ...], ...]
    train: tuple[tuple[LabelledUtterance, ...], ...]
    test: tuple[tuple[LabelledUtterance, ...], ...]
    start_ids: TokenIds
    line_end_ids: TokenIds

    @property
    def fingerprint(self) -> str:
        return hash_json([self.label_ids, self.task_classes, self.train, self.test])

    @property
    def num_tasks(self) -> int:
        return len(self.task_classes)

    def seen_classes(self, i: int) -> list[int]:
        return sorted(label for task in self.task_classes[: i + 1] for label in task)

    def training_ids(self, item: LabelledUtterance) -> TokenIds:
        """Return the training line of an example: utterance, arrow, label, line end."""
        return item.input_ids + self.label_ids[item.label] + self.line_end_ids
