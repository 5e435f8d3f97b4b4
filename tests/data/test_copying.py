"""Values to copy against their rules, document by document, as text."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from laconic.core.contract import UNSCORED, Source
from laconic.data.copying import Copies
from laconic.data.mqar import WORDS
from laconic.data.task_settings import Copying

TASKS: list[dict[str, Any]] = [{}, {"counts": (2, 5), "length": 12, "values": 3}, {"counts": (1,), "length": 2}]


@pytest.mark.parametrize("said", TASKS)
def test_every_document_obeys_the_rules(said: dict[str, Any]) -> None:
    task = Copying.model_validate(said)
    source = Copies(3, task)
    assert isinstance(source, Source)
    batch = source.batch(range(60), 0, 0)
    assert batch.text.shape == (60, source.longest)
    assert batch.facts is not None
    assert set(batch.facts.tolist()) == set(task.counts)
    for row in range(60):
        words, N = [WORDS[i] for i in batch.text[row].tolist()], int(batch.facts[row])
        values = [word for word in words if word[0] == "v"]
        assert len(values) == N
        assert all(int(value[1:]) < task.values for value in values)
        assert words[-N:] == ["k0"] * N
        assert words.count(".") == task.length - 2 * N
        assert (batch.targets[row] != UNSCORED).nonzero()[:, 0].tolist() == [*range(task.length - N, task.length)]
        assert [WORDS[i] for i in batch.targets[row, -N:].tolist()] == values


def test_places_are_even_and_parts_differ() -> None:
    task = Copying(counts=(4,), length=20)
    batch = Copies(1, task).batch(range(1000), 0, 0)
    there = (batch.text[:, :16] != WORDS.index(".")).float().mean(0)
    assert float((there - 4 / 16).abs().max()) < 5 * (0.25 * 0.75 / 1000) ** 0.5
    some = Copies(1, task).batch([7, 3], 2, 5)
    assert some.text.equal(batch.text[torch.tensor([7, 3])])
    assert some.names == ("copying-train-000007", "copying-train-000003")
    sources = [Copies(seed, task, part) for seed in (0, 1) for part in ("train", "valid", "test")]
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert [len(source) for source in sources[:3]] == [100_000, 500, 1000]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"counts": (4, 2)}, r"counts \[4, 2\]: ascending numbers of values"),
        ({"counts": ()}, r"counts \[\]: ascending numbers of values"),
        ({"counts": (2, 8), "length": 15}, "length 15: 8 values and as many markers take 16 at least"),
    ],
)
def test_tasks_that_cannot_be_meant(said: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Copying.model_validate(said)
