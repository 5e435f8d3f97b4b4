"""Labels of which only the best counts: few are read, and the best is the best of all that are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from laconic.core.contract import Learner
from laconic.core.decoder import Seen
from laconic.evaluation.classes import best, said_after
from laconic.evaluation.labels import Scores, label_scores, shared
from laconic.evaluation.listening import Cached
from tests.evaluation import streamed

TASKS = streamed.tasks()
PROMPTS = [item.ids for task in TASKS.test for item in task]
# Beginnings in common, a label that begins another, one word, and one long.
WORDS = [(9, 4, 7), (9, 4, 7, 2), (9, 4, 1), (9,), (3, 3), (5, 9, 9, 4, 7, 2, 8, 1, 6), (3, 3, 3, 1)]


class Counted:
    """A learner that counts the rows it reads behind others."""

    def __init__(self, model: Learner) -> None:
        self.model, self.rows = model, 0
        self.config, self.start, self.logits = model.config, model.start, model.logits
        self.decoder: Any = getattr(model, "decoder", model)

    def advance(self, ids: torch.Tensor, state: Any = None, **rest: Any) -> Seen:
        self.rows += len(ids)
        return self.model.advance(ids, state, **rest)


def sure(model: Learner) -> Learner:
    """The model with logits of which a few are far above the others, as a trained one's."""
    plain = model.logits
    model.logits = lambda hidden: 12 * plain(hidden)  # type: ignore[method-assign]
    return model


def models() -> list[Learner]:
    return [Cached(streamed.decoder()), sure(Cached(streamed.decoder())), streamed.remembering()]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("among", [[0], [1, 2, 5], [3, 4], [*range(7)]])
def test_the_best_is_the_best_of_all_that_are_read(which: int, among: Sequence[int]) -> None:
    model = models()[which]
    whole = label_scores(model, model.start(1), PROMPTS, WORDS)
    some = label_scores(model, model.start(1), PROMPTS, WORDS, among)
    for classes in (among, range(len(WORDS))):
        chosen = best(whole, classes)
        assert best(some, classes).tolist() == chosen.tolist()
        rows = np.arange(len(PROMPTS))
        np.testing.assert_allclose(some[rows, chosen], whole[rows, chosen], atol=1e-5)
    assert (some >= whole - 1e-5).all()


def test_labels_that_cannot_be_the_best_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.evaluation.labels.TRIED", 2)
    many = [(i, (7 * i) % 24) for i in range(20)]
    model = Counted(sure(Cached(streamed.decoder())))
    whole = label_scores(model, model.start(1), PROMPTS, many)
    all_rows, model.rows = model.rows, 0
    some = label_scores(model, model.start(1), PROMPTS, many, range(20))
    assert best(some, range(20)).tolist() == best(whole, range(20)).tolist()
    assert model.rows < all_rows / 2


def test_how_much_two_labels_share() -> None:
    size = torch.tensor([3, 4, 2])
    ids = torch.tensor([[9, 4, 7, 0], [9, 4, 7, 0], [9, 5, 0, 0]])
    assert shared(ids, size).tolist() == [[3, 3, 1], [3, 4, 1], [1, 1, 2]]


def test_with_classes_seen_there_is_no_prior() -> None:
    model = Cached(streamed.decoder())
    items = [item for task in TASKS.test for item in task]
    whole, some = (said_after(model, TASKS, model.start(1), items, seen) for seen in (None, [1, 3]))
    assert whole.prior is not None
    assert some.prior is None
    assert best(some.scores, [1, 3]).tolist() == best(whole.scores, [1, 3]).tolist()
    assert isinstance(some.scores, np.ndarray)
    assert some.scores.shape == whole.scores.shape == (len(items), len(TASKS.words))


def test_a_mean_is_not_what_its_first_words_say() -> None:
    # MISREAD: a bound taken for a score, which prefers labels of which little was read.
    model = sure(Cached(streamed.decoder()))
    whole: Scores = label_scores(model, model.start(1), PROMPTS, WORDS)
    first = label_scores(model, model.start(1), PROMPTS, [words[:1] for words in WORDS]) / [len(w) for w in WORDS]
    assert (first >= whole - 1e-6).all()
    assert best(first, range(7)).tolist() != best(whole, range(7)).tolist()
