"""Pairs and queries against their rules, document by document, as text."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.core.contract import UNSCORED, Source
from laconic.data.mqar import WORDS, Mqar, mqar_tokenizer
from laconic.data.task_settings import Pairs
from laconic.data.tokens import load_tokenizer

TASKS: list[dict[str, Any]] = [
    {},
    {"pairs": (2, 4), "length": 16},
    {"pairs": (1,), "length": 4},
    {"pairs": (32,), "length": 256},
]


@pytest.mark.parametrize("said", TASKS)
def test_every_document_obeys_the_rules(said: dict[str, Any]) -> None:
    task = Pairs.model_validate(said)
    batch = Mqar(3, task).batch(range(60), 0, 0)
    assert batch.facts is not None
    assert batch.text.shape == (60, task.length)
    assert batch.live.all()
    for row in range(60):
        words = [WORDS[i] for i in batch.text[row].tolist()]
        N = int(batch.facts[row])
        assert N in task.pairs
        told = dict(zip(words[0 : 2 * N : 2], words[1 : 2 * N : 2], strict=True))
        assert len(told) == N
        assert all(key[0] == "k" and int(key[1:]) < task.keys for key in told)
        assert all(value[0] == "v" and int(value[1:]) < task.values for value in told.values())
        asked = [(t, words[t]) for t in range(2 * N, task.length) if words[t][0] == "k"]
        assert sorted(key for _, key in asked) == sorted(told)  # each once
        assert all(words[t + 1] == told[key] for t, key in asked)
        assert words.count(".") == task.length - 4 * N
        assert batch.scored[row].nonzero()[:, 0].tolist() == [t + 1 for t, _ in asked]
        targets = batch.targets[row]
        assert (targets != UNSCORED).nonzero()[:, 0].tolist() == [t for t, _ in asked]
        assert [WORDS[int(targets[t])] for t, _ in asked] == [told[key] for _, key in asked]


def test_draws_are_even() -> None:
    n, task = 1000, Pairs(pairs=(2, 4), length=32)
    batch = Mqar(1, task).batch(range(n), 0, 0)
    assert batch.facts is not None
    assert abs(int((batch.facts == 2).sum()) - n / 2) < 5 * math.sqrt(n / 4)
    some = batch.take([i for i in range(n) if int(batch.facts[i]) == 4])
    share = (some.targets != UNSCORED)[:, 8::2].float().mean(0)  # every place alike
    assert float((share - 4 / 12).abs().max()) < 5 * math.sqrt(1 / 3 * 2 / 3 / some.B)
    values = torch.bincount(some.text[:, 1:8:2].flatten(), minlength=len(WORDS))
    used = values[WORDS.index("v0") : WORDS.index("v31") + 1]
    assert int(used.sum()) == 4 * some.B
    assert float((used - used.float().mean()).abs().max()) < 5 * math.sqrt(4 * some.B / 32)


def test_a_document_is_its_place() -> None:
    source = Mqar(5, Pairs(), "valid")
    assert isinstance(source, Source)
    whole, some = source.batch(range(20), 0, 0), source.batch([7, 3], 4, 9)
    assert some.text.equal(whole.text[torch.tensor([7, 3])])
    assert some.names == ("mqar-valid-000007", "mqar-valid-000003")
    assert (some.index.tolist(), some.epoch, some.step) == ([7, 3], 4, 9)
    assert source.longest == some.text.shape[1]


def test_parts_and_seeds_differ() -> None:
    sources = [Mqar(seed, Pairs(), part) for seed in (0, 1) for part in ("train", "valid", "test")]
    assert [len(source) for source in sources[:3]] == [100_000, 500, 1000]
    texts = {tuple(row) for source in sources for row in source.batch(range(60), 0, 0).text.tolist()}
    assert len(texts) == 60 * len(sources)
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert Mqar(0, Pairs(length=96)).fingerprint != sources[0].fingerprint
    assert len(Mqar(0, Pairs(), "test", 5)) == 5


def test_the_tokenizer_has_its_words(tmp_path: Path) -> None:
    made = mqar_tokenizer()
    assert made.vocab_size == len(WORDS) == 516
    text = Mqar(0, Pairs()).batch([0], 0, 0).text[0].tolist()
    assert made.encode(" ".join(WORDS[i] for i in text)) == text
    made.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == made.fingerprint


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"pairs": ()}, r"pairs \[\]: ascending numbers of pairs"),
        ({"pairs": (4, 2)}, r"pairs \[4, 2\]: ascending numbers of pairs"),
        ({"pairs": (33,), "length": 256}, "pairs 33: only 32 keys, and those of a document differ; give fewer pairs"),
        ({"pairs": (8,), "length": 30}, "length 30: 8 pairs and as many queries take an even 32 at least"),
        ({"pairs": (2,), "length": 9}, "length 9: 2 pairs and as many queries take an even 8 at least"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pairs.model_validate(said)
