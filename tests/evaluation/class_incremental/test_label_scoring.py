"""Label scoring: candidates and bounds give the same best label while reading fewer labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from laconic.evaluation.class_incremental.label_scoring import ScoreArray, count_common_prefix, score_labels
from laconic.evaluation.class_incremental.protocol import predict_class, score_after
from laconic.evaluation.streams.evaluate import CacheAsState
from laconic.interfaces import StatefulLM
from laconic.models.decoder import DecoderOutput
from tests.evaluation import streamed

TASKS = streamed.tasks()
PROMPTS = [item.input_ids for task in TASKS.test for item in task]
# Labels with common prefixes, one that is a prefix of another, a single token, and a long one.
LABELS = [(9, 4, 7), (9, 4, 7, 2), (9, 4, 1), (9,), (3, 3), (5, 9, 9, 4, 7, 2, 8, 1, 6), (3, 3, 3, 1)]


class RowCounter:
    """A model that counts the rows it reads."""

    def __init__(self, model: StatefulLM) -> None:
        self.model, self.rows = model, 0
        self.config, self.initial_state, self.logits = model.config, model.initial_state, model.logits
        self.decoder: Any = getattr(model, "decoder", model)

    def read_tokens(self, input_ids: torch.Tensor, state: Any = None, **options: Any) -> DecoderOutput:
        self.rows += len(input_ids)
        return self.model.read_tokens(input_ids, state, **options)


def sharpen(model: StatefulLM) -> StatefulLM:
    """Scale the logits, so that a few are far above the others as in a trained model."""
    plain = model.logits
    model.logits = lambda hidden: 12 * plain(hidden)  # type: ignore[method-assign]
    return model


def models() -> list[StatefulLM]:
    return [CacheAsState(streamed.decoder()), sharpen(CacheAsState(streamed.decoder())), streamed.remembering()]


@pytest.mark.medium
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("candidates", [[0], [1, 2, 5], [3, 4], [*range(7)]])
def test_score_labels_with_candidates_gives_the_same_best(which: int, candidates: Sequence[int]) -> None:
    model = models()[which]
    whole = score_labels(model, model.initial_state(1), PROMPTS, LABELS)
    some = score_labels(model, model.initial_state(1), PROMPTS, LABELS, candidates)
    chosen = predict_class(whole, candidates)
    assert predict_class(some, candidates).tolist() == chosen.tolist()
    rows = np.arange(len(PROMPTS))
    np.testing.assert_allclose(some[rows, chosen], whole[rows, chosen], atol=1e-5)
    assert (some >= whole - 1e-5).all()


def test_score_labels_with_candidates_reads_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.evaluation.class_incremental.label_scoring.LABEL_BATCH", 2)
    many = [(i, (7 * i) % 24) for i in range(20)]
    model = RowCounter(sharpen(CacheAsState(streamed.decoder())))
    whole = score_labels(model, model.initial_state(1), PROMPTS, many)
    all_rows, model.rows = model.rows, 0
    some = score_labels(model, model.initial_state(1), PROMPTS, many, range(20))
    assert predict_class(some, range(20)).tolist() == predict_class(whole, range(20)).tolist()
    assert model.rows < all_rows / 2


def test_count_common_prefix() -> None:
    size = torch.tensor([3, 4, 2])
    ids = torch.tensor([[9, 4, 7, 0], [9, 4, 7, 0], [9, 5, 0, 0]])
    assert count_common_prefix(ids, size).tolist() == [[3, 3, 1], [3, 4, 1], [1, 1, 2]]


def test_score_after_with_seen_classes_gives_the_same_best() -> None:
    model = CacheAsState(streamed.decoder())
    items = [item for task in TASKS.test for item in task]
    whole, some = (score_after(model, TASKS, model.initial_state(1), items, seen) for seen in (None, [1, 3]))
    assert predict_class(some, [1, 3]).tolist() == predict_class(whole, [1, 3]).tolist()
    assert some.shape == whole.shape == (len(items), len(TASKS.label_ids))


def test_score_labels_is_not_its_first_bound() -> None:
    # MISREAD: a bound used as a score prefers labels of which little was read.
    model = sharpen(CacheAsState(streamed.decoder()))
    whole: ScoreArray = score_labels(model, model.initial_state(1), PROMPTS, LABELS)
    first = score_labels(model, model.initial_state(1), PROMPTS, [words[:1] for words in LABELS]) / [
        len(w) for w in LABELS
    ]
    assert (first >= whole - 1e-6).all()
    assert predict_class(first, range(7)).tolist() != predict_class(whole, range(7)).tolist()
