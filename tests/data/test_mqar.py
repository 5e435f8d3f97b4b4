"""MQAR documents against the rules of the task, as text."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.batches import IGNORE_INDEX
from laconic.config.synthetic import MQARConfig
from laconic.data.synthetic.mqar import VOCABULARY, MQARDataset
from laconic.data.tokenizer import load_tokenizer
from laconic.interfaces import TrainingData

TASKS: list[dict[str, Any]] = [
    {},
    {"num_pairs": (2, 4), "row_tokens": 16},
    {"num_pairs": (1,), "row_tokens": 4},
    {"num_pairs": (32,), "row_tokens": 256},
    {"num_pairs": (2, 6), "row_tokens": 56, "tokens_per_key": 2, "num_keys": 3, "num_values": 4},
]


@pytest.mark.parametrize("values", TASKS)
def test_mqar_documents_obey_the_rules(values: dict[str, Any]) -> None:
    task = MQARConfig.model_validate(values)
    batch = MQARDataset(3, task).batch(range(60), 0, 0)
    assert batch.num_facts is not None
    assert batch.input_ids.shape == (60, task.row_tokens)
    assert batch.attention_mask.all()
    for row in range(60):
        words = [VOCABULARY[i] for i in batch.input_ids[row].tolist()]
        N, w = int(batch.num_facts[row]), task.tokens_per_key
        blocks = [(tuple(words[t : t + w]), tuple(words[t + w : t + 2 * w])) for t in range(0, task.row_tokens, 2 * w)]
        pairs = dict(blocks[:N])
        assert N in task.num_pairs
        assert len(pairs) == N  # no key twice
        assert all(word[0] == "k" and int(word[1:]) < task.num_keys for key in pairs for word in key)
        assert all(word[0] == "v" and int(word[1:]) < task.num_values for value in pairs.values() for word in value)
        queries = {2 * w * i: block for i, block in enumerate(blocks) if i >= N and block[0][0] != "."}
        assert dict(queries.values()) == pairs  # each once, with its value
        assert len(queries) == N
        assert words.count(".") == task.row_tokens - 4 * w * N
        columns = [t + w + i for t in queries for i in range(w)]
        assert batch.loss_mask[row].nonzero()[:, 0].tolist() == columns
        targets = batch.targets[row]
        assert (targets != IGNORE_INDEX).nonzero()[:, 0].tolist() == [t - 1 for t in columns]
        assert [VOCABULARY[int(targets[t - 1])] for t in columns] == [words[t] for t in columns]


def test_mqar_draws_are_uniform() -> None:
    n, task = 1000, MQARConfig(num_pairs=(2, 4), row_tokens=32)
    batch = MQARDataset(1, task).batch(range(n), 0, 0)
    assert batch.num_facts is not None
    assert abs(int((batch.num_facts == 2).sum()) - n / 2) < 5 * math.sqrt(n / 4)
    some = batch.select_rows([i for i in range(n) if int(batch.num_facts[i]) == 4])
    share = (some.targets != IGNORE_INDEX)[:, 8::2].float().mean(0)  # every place alike
    assert float((share - 4 / 12).abs().max()) < 5 * math.sqrt(1 / 3 * 2 / 3 / some.B)
    values = torch.bincount(some.input_ids[:, 1:8:2].flatten(), minlength=len(VOCABULARY))
    used = values[VOCABULARY.index("v0") : VOCABULARY.index("v31") + 1]
    assert int(used.sum()) == 4 * some.B
    assert float((used - used.float().mean()).abs().max()) < 5 * math.sqrt(4 * some.B / 32)


def test_mqar_rows_are_a_function_of_the_index() -> None:
    source = MQARDataset(5, MQARConfig(), "valid")
    assert isinstance(source, TrainingData)
    whole, some = source.batch(range(20), 0, 0), source.batch([7, 3], 4, 9)
    assert some.input_ids.equal(whole.input_ids[torch.tensor([7, 3])])
    assert some.document_ids == ("mqar-valid-000007", "mqar-valid-000003")
    assert (some.row_index.tolist(), some.epoch, some.step) == ([7, 3], 4, 9)
    assert source.max_length == some.input_ids.shape[1]


def test_mqar_splits_and_seeds_differ() -> None:
    sources = [MQARDataset(seed, MQARConfig(), part) for seed in (0, 1) for part in ("train", "valid", "test")]
    assert [len(source) for source in sources[:3]] == [100_000, 500, 1000]
    texts = {tuple(row) for source in sources for row in source.batch(range(60), 0, 0).input_ids.tolist()}
    assert len(texts) == 60 * len(sources)
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert MQARDataset(0, MQARConfig(row_tokens=96)).fingerprint != sources[0].fingerprint
    assert len(MQARDataset(0, MQARConfig(), "test", 5)) == 5


def test_build_mqar_tokenizer(tmp_path: Path) -> None:
    tokenizer = MQARDataset.build_tokenizer()
    assert tokenizer.vocab_size == len(VOCABULARY) == 132
    text = MQARDataset(0, MQARConfig()).batch([0], 0, 0).input_ids[0].tolist()
    assert tokenizer.encode(" ".join(VOCABULARY[i] for i in text)) == text
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_pairs": ()}, r"\[\]: give distinct"),
        ({"num_pairs": (4, 2)}, r"\[4, 2\]: give distinct"),
        ({"num_pairs": (33,), "row_tokens": 256}, "num_pairs 33"),
        ({"num_pairs": (8,), "row_tokens": 30}, "row_tokens 30: give a multiple of 2, at least 32"),
    ],
)
def test_mqar_config_refuses_impossible_tasks(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MQARConfig.model_validate(values)
