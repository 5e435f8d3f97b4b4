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
    {"pairs": (2, 6), "length": 56, "words": 2, "keys": 3, "values": 4},
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
        N, w = int(batch.facts[row]), task.words
        blocks = [(tuple(words[t : t + w]), tuple(words[t + w : t + 2 * w])) for t in range(0, task.length, 2 * w)]
        told = dict(blocks[:N])
        assert N in task.pairs
        assert len(told) == N  # no key twice
        assert all(word[0] == "k" and int(word[1:]) < task.keys for key in told for word in key)
        assert all(word[0] == "v" and int(word[1:]) < task.values for value in told.values() for word in value)
        asked = {2 * w * i: block for i, block in enumerate(blocks) if i >= N and block[0][0] != "."}
        assert dict(asked.values()) == told  # each once, with its value
        assert len(asked) == N
        assert words.count(".") == task.length - 4 * w * N
        columns = [t + w + i for t in asked for i in range(w)]
        assert batch.scored[row].nonzero()[:, 0].tolist() == columns
        targets = batch.targets[row]
        assert (targets != UNSCORED).nonzero()[:, 0].tolist() == [t - 1 for t in columns]
        assert [WORDS[int(targets[t - 1])] for t in columns] == [words[t] for t in columns]


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
    assert made.vocab_size == len(WORDS) == 132
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
        ({"pairs": (8,), "length": 30}, "length 30: 8 pairs and as many queries take a multiple of 2, 32 at least"),
        ({"pairs": (2,), "length": 9}, "length 9: 2 pairs and as many queries take a multiple of 2, 8 at least"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pairs.model_validate(said)
