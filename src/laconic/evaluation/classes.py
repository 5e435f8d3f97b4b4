"""Class-incremental learning: which class an utterance belongs to, among all that were met, after every task.

A label's score is the mean log-probability of its words, given the utterance and what was learned; no one says which
task an utterance is of. Every item is read on a fork of the state, which itself is never changed.

Symbols: N items, K classes, n tasks; A[i, j] accuracy on task j after task i.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.core import keyed
from laconic.core.contract import Learner
from laconic.core.state import State
from laconic.core.tasks import Ids, Item, Tasks
from laconic.evaluation.labels import Scores, device_of, label_scores, read


class Scored(NamedTuple):
    """Scores of N items for all K classes, and of the labels after the arrow alone; None where there is no such."""

    scores: Scores
    prior: Scores | None = None


class Approach(Protocol):
    """A way to learn a stream and to say which class an item belongs to."""

    def learn(self, items: Sequence[Item]) -> None:
        """A task's examples, each once, in order."""
        ...

    def scored(self, items: Sequence[Item], seen: Sequence[int] | None = None) -> Scored:
        """The scores of all classes; with `seen` only the best of those, and of all, count. Changes nothing."""
        ...


def said_after(
    model: Learner,
    tasks: Tasks,
    state: State,
    items: Sequence[Item],
    seen: Sequence[int] | None = None,
    text: Ids = (),
) -> Scored:
    """The scores of items after a document's beginning and `text`, read on a fork of a state of one row.

    With `seen` only the best of those classes, and the best of all, are told from the others, and there is no prior.
    """
    with torch.no_grad():
        begun = torch.tensor([tasks.first + text], device=device_of(model))
        ready = read(model, begun, state).state
    prompts = [item.ids for item in items]
    if seen is not None:
        return Scored(label_scores(model, ready, prompts, tasks.words, seen))
    found = label_scores(model, ready, [tasks.arrow, *prompts], tasks.words)
    return Scored(found[1:], found[0])


def best(scores: Scores, among: Sequence[int]) -> NDArray[np.int64]:
    """The class of the highest score among some, ascending; ties go to the first."""
    classes = np.asarray(sorted(among))
    return classes[scores[:, classes].argmax(1)]


def right(found: Scored, items: Sequence[Item], seen: Sequence[int]) -> dict[str, NDArray[np.bool_]]:
    """Which items are told right, by way: among the classes seen or all of the set, the prior taken off or not."""
    labels = np.array([item.label for item in items])
    every = range(found.scores.shape[1])
    ways = {"seen": best(found.scores, seen) == labels, "all": best(found.scores, every) == labels}
    if found.prior is not None:
        rest = found.scores - found.prior
        ways |= {"seen-prior": best(rest, seen) == labels, "all-prior": best(rest, every) == labels}
    return ways


Matrix = list[list[float | None]]


class Course(NamedTuple):
    """What an approach made of a stream: A by way, rows after each task, None where nothing was asked."""

    seed: int
    matrices: dict[str, Matrix]
    notes: dict[str, Any]


def course(approach: Approach, tasks: Tasks, note: Callable[[str], None] | None = None) -> Course:
    """Every task learned in turn, and after each all items of the tasks so far told apart; the prior off at the end."""
    made: dict[str, Matrix] = {}
    for i in range(tasks.n):
        approach.learn(tasks.train[i])
        rows = accuracies(approach, tasks, i)
        for way, row in rows.items():
            made.setdefault(way, unasked(i, tasks.n)).append(row)
        say(note, tasks, i, rows)
    return Course(tasks.seed, made, noted(approach))


def at_end(approach: Approach, tasks: Tasks, note: Callable[[str], None] | None = None) -> Course:
    """All tasks learned at once, mixed, and asked once: only the last row of A."""
    items = [item for task in tasks.train for item in task]
    approach.learn([items[i] for i in keyed.index(tasks.seed, 0, np.arange(len(items)), len(items)).tolist()])
    rows = accuracies(approach, tasks, tasks.n - 1)
    say(note, tasks, tasks.n - 1, rows)
    return Course(
        tasks.seed, {way: [*unasked(tasks.n - 1, tasks.n), row] for way, row in rows.items()}, noted(approach)
    )


def unasked(i: int, n: int) -> Matrix:
    """Rows of A after `i` tasks of which nothing was asked."""
    return [[None] * n for _ in range(i)]


def say(note: Callable[[str], None] | None, tasks: Tasks, i: int, rows: Mapping[str, Sequence[float | None]]) -> None:
    """How far it is."""
    if note is not None:
        held = [x for x in rows["seen"] if x is not None]
        note(f"order {tasks.seed}: task {i + 1} of {tasks.n}, {100 * sum(held) / len(held):.1f} % right so far")


def accuracies(approach: Approach, tasks: Tasks, i: int) -> dict[str, list[float | None]]:
    """Row i of A, by way; the prior is taken off in the last row only, since all labels have to be read for it."""
    items = [item for task in tasks.test[: i + 1] for item in task]
    found = right(approach.scored(items, None if i == tasks.n - 1 else tasks.seen(i)), items, tasks.seen(i))
    ends = np.cumsum([len(task) for task in tasks.test[: i + 1]])[:-1]
    rest = [None] * (tasks.n - i - 1)
    return {way: [float(x.mean()) for x in np.split(told, ends)] + rest for way, told in found.items()}


def noted(approach: Any) -> dict[str, Any]:
    """What an approach says of itself at the end: updates of its levels, bytes of its state."""
    said: Mapping[str, Any] = getattr(approach, "notes", {})
    return dict(said)
