"""Class-incremental learning: which class an utterance belongs to, among all that were met, after every task.

A label's score is the mean log-probability of its words, given the utterance and what was learned; no one says which
task an utterance is of. Every item is read on a fork of the state, which itself is never changed.

Symbols: N items, K classes, n tasks; A[i, j] accuracy on task j after task i.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from laconic.core import finite, keyed
from laconic.core import state as values
from laconic.core.contract import Learner
from laconic.core.state import State
from laconic.core.tasks import Ids, Item, Tasks

Scores = NDArray[np.float64]
WAYS = ("seen", "all", "seen-prior", "all-prior")
PROMPTS, ROWS = 16, 192  # utterances read at once; labels said at once


class Scored(NamedTuple):
    """Scores of N items for all K classes, and of the labels after the arrow alone; None where there is no such."""

    scores: Scores
    prior: Scores | None = None


class Approach(Protocol):
    """A way to learn a stream and to say which class an item belongs to."""

    def learn(self, items: Sequence[Item]) -> None:
        """A task's examples, each once, in order."""
        ...

    def scored(self, items: Sequence[Item], seen: Sequence[int]) -> Scored:
        """The scores of all classes; `seen` are those met so far. Changes nothing."""
        ...


def grid(rows: Sequence[Ids], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids padded right, and where they are live."""
    T = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)
    live = torch.tensor([[t < len(row) for t in range(T)] for row in rows], device=device)
    return ids, live


def forked(state: State, n: int) -> State:
    """Every row `n` times, side by side; what all rows share is not copied."""
    return values.mapped(state, lambda x: spread(x, n))


def spread(x: Tensor, n: int) -> Tensor:
    """Rows repeated; a row that stands for the whole batch goes on doing so."""
    if len(x) == 1 or x.stride(0) == 0:
        return x[:1].expand(len(x) * n, *x.shape[1:])
    return x.repeat_interleave(n, 0)


def said_after(model: Learner, tasks: Tasks, state: State, items: Sequence[Item], text: Ids = ()) -> Scored:
    """The scores of items after a document's beginning and `text`, read on a fork of a state of one row."""
    with torch.no_grad():
        begun = torch.tensor([tasks.first + text], device=device_of(model))
        ready = read(model, begun, state).state
    prompts = [item.ids for item in items]
    found = label_scores(model, ready, [tasks.arrow, *prompts], tasks.words)
    return Scored(found[1:], found[0])


def label_scores(model: Learner, state: State, prompts: Sequence[Ids], words: Sequence[Ids]) -> Scores:
    """[N, K]: the mean log-probability of the words of every label after every prompt, each read on its own fork.

    `state` has one row, of which the forks are made; nothing is learned from prompts and labels.
    """
    found = np.empty((len(prompts), len(words)))
    order = sorted(range(len(words)), key=lambda k: len(words[k]))
    groups = runs(order, ROWS // 4)
    with torch.no_grad():
        for at in runs(sorted(range(len(prompts)), key=lambda i: len(prompts[i])), PROMPTS):
            ids, live = grid([prompts[i] for i in at], device_of(model))
            seen = read(model, ids, forked(state, len(at)), live)
            ends = seen.hidden[torch.arange(len(at)), live.sum(1) - 1]
            first = F.log_softmax(model.logits(ends).float(), -1).double()
            for group in groups:
                told = [words[k] for k in group]
                found[np.ix_(at, group)] = said(model, seen.state, first, told).cpu().numpy()
    return found


class Read(NamedTuple):
    """What a reading gave: vectors after the last norm, and the new state."""

    hidden: Tensor
    state: State


def read(model: Learner, ids: Tensor, state: State, live: Tensor | None = None) -> Read:
    """Ids on a state, from which nothing is learned but by models that could not see them otherwise."""
    seen = finite.read(model, ids, state, live=live, learn=blind(state))
    return Read(seen.hidden, cast(State, cast(Any, seen.state)))


def runs(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Numbers in runs of at most `size`."""
    return [order[i : i + size] for i in range(0, len(order), size)]


def module_of(model: Any) -> nn.Module:
    """The weights: a learner's own, or those of the decoder that stands for one."""
    return model if isinstance(model, nn.Module) else model.decoder


def device_of(model: Learner) -> torch.device:
    """Where a model's weights lie."""
    return next(module_of(model).parameters()).device


def blind(state: State) -> bool:
    """Whether a model sees what it reads in its fast weights alone, so that they have to move on each fork too."""
    return state.layers[0].cache is None


def said(model: Learner, state: State, first: Tensor, words: Sequence[Ids]) -> Tensor:
    """[b, k]: of labels after b prompts, whose next-token log-probabilities are `first`."""
    b, k = len(first), len(words)
    ids, live = grid(words, first.device)
    total = first[:, ids[:, 0]]
    if ids.shape[1] > 1:
        rows = ids[:, :-1].repeat(b, 1), live[:, 1:].repeat(b, 1)
        parts = [model.logits(read(model, part, own, alive).hidden) for part, alive, own in pieces(*rows, state, k)]
        logits = torch.cat(parts).float().view(b, k, ids.shape[1] - 1, -1)
        next = logits.gather(3, ids[:, 1:].expand(b, -1, -1)[..., None])[..., 0] - logits.logsumexp(-1)
        total = total + next.double().masked_fill(~live[:, 1:], 0).sum(2)
    return total / live.sum(1)


def pieces(ids: Tensor, live: Tensor, state: State, k: int) -> Iterator[tuple[Tensor, Tensor, State]]:
    """The rows in runs of whole prompts that are read at once, with their forks."""
    each = max(1, ROWS // k)
    for begin in range(0, len(ids) // k, each):
        end = min(begin + each, len(ids) // k)
        own = forked(values.mapped(state, lambda x, a=begin, b=end: x[a:b]), k)
        yield ids[begin * k : end * k], live[begin * k : end * k], own


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
    """Every task learned in turn, and after each all items of the tasks so far told apart."""
    made: dict[str, Matrix] = {}
    for i in range(tasks.n):
        approach.learn(tasks.train[i])
        rows = accuracies(approach, tasks, i)
        for way, row in rows.items():
            made.setdefault(way, []).append(row)
        say(note, tasks, i, rows)
    return Course(tasks.seed, made, noted(approach))


def at_end(approach: Approach, tasks: Tasks, note: Callable[[str], None] | None = None) -> Course:
    """All tasks learned at once, mixed, and asked once: only the last row of A."""
    items = [item for task in tasks.train for item in task]
    approach.learn([items[i] for i in keyed.index(tasks.seed, 0, np.arange(len(items)), len(items)).tolist()])
    empty: Matrix = [[None] * tasks.n for _ in range(tasks.n - 1)]
    rows = accuracies(approach, tasks, tasks.n - 1)
    say(note, tasks, tasks.n - 1, rows)
    return Course(tasks.seed, {way: [*empty, row] for way, row in rows.items()}, noted(approach))


def say(note: Callable[[str], None] | None, tasks: Tasks, i: int, rows: Mapping[str, Sequence[float | None]]) -> None:
    """How far it is."""
    if note is not None:
        held = [x for x in rows["seen"] if x is not None]
        note(f"order {tasks.seed}: task {i + 1} of {tasks.n}, {100 * sum(held) / len(held):.1f} % right so far")


def accuracies(approach: Approach, tasks: Tasks, i: int) -> dict[str, list[float | None]]:
    """Row i of A, by way."""
    items = [item for task in tasks.test[: i + 1] for item in task]
    found = right(approach.scored(items, tasks.seen(i)), items, tasks.seen(i))
    ends = np.cumsum([len(task) for task in tasks.test[: i + 1]])[:-1]
    rest = [None] * (tasks.n - i - 1)
    return {way: [float(x.mean()) for x in np.split(told, ends)] + rest for way, told in found.items()}


def noted(approach: Any) -> dict[str, Any]:
    """What an approach says of itself at the end: updates of its levels, bytes of its state."""
    said: Mapping[str, Any] = getattr(approach, "notes", {})
    return dict(said)
