"""Classes that come one task after another, as ids: what data hands to evaluation."""

from dataclasses import dataclass
from typing import NamedTuple

Ids = tuple[int, ...]


class Item(NamedTuple):
    """An utterance with the arrow behind it, and the number of its class."""

    ids: Ids
    label: int


@dataclass(frozen=True)
class Tasks:
    """A class-incremental stream in the order of one seed.

    `labels` are the words of every class and `words` their ids, as they follow the arrow; `tasks` the classes of each
    task; `train` and `test` the items of each, train in the order of reading. `first` begins a document, `last` ends a
    line, `arrow` is all that is read of a line without an utterance.
    """

    name: str
    seed: int
    labels: tuple[str, ...]
    words: tuple[Ids, ...]
    tasks: tuple[tuple[int, ...], ...]
    train: tuple[tuple[Item, ...], ...]
    test: tuple[tuple[Item, ...], ...]
    first: Ids
    arrow: Ids
    last: Ids

    @property
    def n(self) -> int:
        """Tasks."""
        return len(self.tasks)

    def seen(self, i: int) -> list[int]:
        """The classes of the tasks up to the `i`-th, from 0, in the order of their numbers."""
        return sorted(label for task in self.tasks[: i + 1] for label in task)

    def line(self, item: Item) -> Ids:
        """The line of an example: utterance, arrow, the label's words, the end."""
        return item.ids + self.words[item.label] + self.last
