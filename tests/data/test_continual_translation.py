"""Continual translation documents against the rules of the task, as text."""

from typing import Any

import pytest
import torch

from laconic.batches import IGNORE_INDEX
from laconic.config.synthetic import ContinualTranslationConfig
from laconic.data.synthetic.continual_translation import ContinualTranslationDataset
from laconic.data.synthetic.mqar import VOCABULARY
from laconic.evaluation.streams.metrics import score_translation
from laconic.interfaces import TrainingData

TASKS: list[dict[str, Any]] = [
    {},
    {"num_languages": 6, "num_words": 3, "num_repetitions": 1, "pause_tokens": 5, "num_values": 4},
    {"num_languages": 1, "num_words": 1, "pause_tokens": 1},
]


@pytest.mark.parametrize("options", TASKS)
def test_continual_translation_documents_obey_the_rules(options: dict[str, Any]) -> None:
    task = ContinualTranslationConfig.model_validate(options)
    N, n, R = task.num_languages, task.num_words, task.num_repetitions
    source = ContinualTranslationDataset(3, task)
    assert isinstance(source, TrainingData)
    batch = source.batch(range(40), 0, 0)
    assert batch.input_ids.shape == (40, source.max_length)
    for row in range(40):
        words = [VOCABULARY[i] for i in batch.input_ids[row].tolist()]
        assert words.count(".") == task.pause_tokens
        spoken = [word for word in words if word != "."]
        pairs = list(zip(spoken[::2], spoken[1::2], strict=True))
        lessons, recall = pairs[: N * R * n], pairs[N * R * n :]
        translations = dict(lessons)
        assert len(translations) == N * n
        assert all(int(v[1:]) < task.num_values for v in translations.values())
        assert all(translations[k] == v for k, v in pairs), "a word has one translation"
        for l in range(N):
            vocabulary = {f"k{8 * l + i}" for i in range(n)}
            for r in range(R):
                start = (l * R + r) * n
                assert {k for k, _ in lessons[start : start + n]} == vocabulary
        assert sorted(k for k, _ in recall) == sorted(translations)
        scored = (batch.targets[row] != IGNORE_INDEX).nonzero()[:, 0].tolist()
        assert scored == list(range(len(words) - 2 * N * n, len(words), 2))


def test_continual_translation_pauses_and_order_are_random() -> None:
    task = ContinualTranslationConfig()
    source = ContinualTranslationDataset(1, task)
    batch = source.batch(range(400), 0, 0)
    is_blank = batch.input_ids == VOCABULARY.index(".")
    lengths = is_blank[:, 32:64].sum(1).float()  # of the first pause, as far as it reaches into the second lesson
    assert lengths.std() > 3
    first_queries = batch.input_ids[:, -64]
    assert first_queries.unique().numel() == 32
    assert source.batch([7, 3], 2, 5).input_ids.equal(batch.input_ids[torch.tensor([7, 3])])
    fingerprints = {ContinualTranslationDataset(0, task, part).fingerprint for part in ("train", "valid", "test")}
    assert len(fingerprints) == 3


def test_score_translation_counts_every_language() -> None:
    batch = ContinualTranslationDataset(0, ContinualTranslationConfig(num_languages=2, num_words=3)).batch([0], 0, 0)
    is_first = batch.input_ids[0] < VOCABULARY.index("k8")
    sums = score_translation(batch, 0, is_first)
    assert sums == {"all": (3, 6), "language 1": (3, 3), "language 2": (0, 3)}
