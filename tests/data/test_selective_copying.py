"""Selective copying documents against the rules of the task, as text."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from laconic.batches import IGNORE_INDEX
from laconic.config.synthetic import SelectiveCopyingConfig
from laconic.data.synthetic.mqar import VOCABULARY
from laconic.data.synthetic.selective_copying import SelectiveCopyingDataset
from laconic.interfaces import TrainingData

TASKS: list[dict[str, Any]] = [
    {},
    {"num_copied": (2, 5), "row_tokens": 12, "num_values": 3},
    {"num_copied": (1,), "row_tokens": 2},
]


@pytest.mark.parametrize("options", TASKS)
def test_selective_copying_documents_obey_the_rules(options: dict[str, Any]) -> None:
    task = SelectiveCopyingConfig.model_validate(options)
    source = SelectiveCopyingDataset(3, task)
    assert isinstance(source, TrainingData)
    batch = source.batch(range(60), 0, 0)
    assert batch.input_ids.shape == (60, source.max_length)
    assert batch.num_facts is not None
    assert set(batch.num_facts.tolist()) == set(task.num_copied)
    for row in range(60):
        words, N = [VOCABULARY[i] for i in batch.input_ids[row].tolist()], int(batch.num_facts[row])
        values = [word for word in words if word[0] == "v"]
        assert len(values) == N
        assert all(int(value[1:]) < task.num_values for value in values)
        assert words[-N:] == ["k0"] * N
        assert words.count(".") == task.row_tokens - 2 * N
        assert (batch.targets[row] != IGNORE_INDEX).nonzero()[:, 0].tolist() == [
            *range(task.row_tokens - N, task.row_tokens)
        ]
        assert [VOCABULARY[i] for i in batch.targets[row, -N:].tolist()] == values


def test_selective_copying_positions_are_uniform() -> None:
    task = SelectiveCopyingConfig(num_copied=(4,), row_tokens=20)
    batch = SelectiveCopyingDataset(1, task).batch(range(1000), 0, 0)
    occupancy = (batch.input_ids[:, :16] != VOCABULARY.index(".")).float().mean(0)
    assert float((occupancy - 4 / 16).abs().max()) < 5 * (0.25 * 0.75 / 1000) ** 0.5
    some = SelectiveCopyingDataset(1, task).batch([7, 3], 2, 5)
    assert some.input_ids.equal(batch.input_ids[torch.tensor([7, 3])])
    assert some.document_ids == ("copying-train-000007", "copying-train-000003")
    sources = [SelectiveCopyingDataset(seed, task, part) for seed in (0, 1) for part in ("train", "valid", "test")]
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert [len(source) for source in sources[:3]] == [100_000, 500, 1000]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_copied": (4, 2)}, r"\[4, 2\]: give distinct"),
        ({"num_copied": ()}, r"\[\]: give distinct"),
        ({"num_copied": (2, 8), "row_tokens": 15}, "row_tokens 15"),
    ],
)
def test_selective_copying_config_refuses_impossible_tasks(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SelectiveCopyingConfig.model_validate(values)
