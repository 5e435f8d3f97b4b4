"""Fact recall documents against the rules of the task, as text."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from laconic.batches import DocumentBatch
from laconic.config.data import FactRecallConfig
from laconic.data.synthetic.fact_recall import VOCABULARY, FactRecallDataset
from laconic.data.tokenizer import load_tokenizer
from laconic.interfaces import TrainingData

TASKS: list[dict[str, Any]] = [
    {},
    {"two_token_facts": True},
    {"num_segments": 3},
    {"num_segments": 3, "two_token_facts": True, "num_queries": 1},
    {"num_keys": 8, "num_values": 3, "num_fillers": 2, "num_facts": (8,)},
    {"num_segments": 4, "segments_per_window": 2, "segment_overlap": 1, "num_queries": 1, "segment_tokens": 2},
]


def words(batch: DocumentBatch, row: int) -> list[list[str]]:
    """Return the words of each segment."""
    return [[VOCABULARY[i] for i in batch.input_ids[row, s].tolist()] for s in batch.segment_slices]


def find_facts(segment: list[str], two: bool) -> list[tuple[str, str]]:
    """Return the facts of a segment."""
    if two:
        at = [i for i, word in enumerate(segment) if word[0] == "k"]
        assert all(segment[i + 1][0] == "v" for i in at)
        assert sum(word[0] == "v" for word in segment) == len(at)
        return [(segment[i], segment[i + 1]) for i in at]
    return [(key, f"v{value}") for word in segment if word[0] == "k" for key, value in [word.split("v")]]


@pytest.mark.parametrize("values", TASKS)
def test_fact_recall_documents_obey_the_rules(values: dict[str, Any]) -> None:
    task = FactRecallConfig.model_validate(values)
    batch = FactRecallDataset(3, task).batch(range(200), 0, 0)
    assert batch.attention_mask.all()
    assert batch.windows == task.window_and_overlap
    for row in range(batch.B):
        *facts, queries = words(batch, row)
        assert [len(segment) for segment in facts] == [task.segment_tokens] * task.num_segments
        facts = [fact for segment in facts for fact in find_facts(segment, task.two_token_facts)]
        assert batch.num_facts is not None
        assert len(facts) == int(batch.num_facts[row]) in task.num_facts
        assert len(dict(facts)) == len(facts)  # no key twice
        assert all(int(key[1:]) < task.num_keys and int(value[1:]) < task.num_values for key, value in facts)
        rest = [word for segment in facts for word in segment if word[0] not in "kv"]
        assert all(word[0] == "x" and int(word[1:]) < task.num_fillers for word in rest)
        assert [dict(facts)[key] for key in queries[::2]] == queries[1::2]
        assert batch.loss_mask[row].nonzero()[:, 0].tolist() == [
            task.num_segments * task.segment_tokens + 2 * q + 1 for q in range(task.num_queries)
        ]


def test_fact_recall_loss_mask_does_not_depend_on_num_facts() -> None:
    batch = FactRecallDataset(0, FactRecallConfig()).batch(range(64), 0, 0)
    assert set(batch.loss_mask.sum(1).tolist()) == {8}
    assert sum(int(piece.loss_mask.sum()) for piece in batch.sequential_parts) == 8 * 64


def test_fact_recall_draws_are_uniform() -> None:
    n, task = 4000, FactRecallConfig()
    batch = FactRecallDataset(1, task).batch(range(n), 0, 0)
    assert batch.num_facts is not None
    counts = Counter(batch.num_facts.tolist())
    bound = 5 * math.sqrt(n / 4)  # five standard errors
    assert all(abs(counts[f] - n / 4) < bound for f in task.num_facts)
    fact = (batch.input_ids[:, :16] >= VOCABULARY.index("k0v0")).float()
    share = fact.mean(0)
    assert float((share - 3.75 / 16).abs().max()) < 5 * math.sqrt(0.25 * 0.75 / n)  # every place alike
    used = np.bincount(batch.input_ids[:, 17::2].flatten().numpy(), minlength=len(VOCABULARY))
    values = used[VOCABULARY.index("v0") : VOCABULARY.index("v15") + 1]
    assert abs(values - values.mean()).max() < 5 * math.sqrt(8 * n * 8 / 16)  # queries of a document are not apart
    one = batch.select_rows([i for i in range(n) if int(batch.num_facts[i]) == 8])
    repeats = [len(set(row[::2].tolist())) for row in one.input_ids[:, 16:]]
    assert abs(np.mean(repeats) - 8 * (1 - (7 / 8) ** 8)) < 0.2  # with replacement


def test_fact_recall_rows_are_a_function_of_the_index() -> None:
    source = FactRecallDataset(5, FactRecallConfig())
    assert isinstance(source, TrainingData)
    whole, some = source.batch(range(20), 0, 0), source.batch([7, 3], 4, 9)
    assert some.input_ids.equal(whole.input_ids[torch.tensor([7, 3])])
    assert some.document_ids == ("recall-train-000007", "recall-train-000003")
    assert (some.row_index.tolist(), some.epoch, some.step) == ([7, 3], 4, 9)


def test_fact_recall_splits_and_seeds_differ() -> None:
    sources = [
        FactRecallDataset(seed, FactRecallConfig(), part) for seed in (0, 1) for part in ("train", "valid", "test")
    ]
    assert [len(source) for source in sources[:3]] == [100_000, 1000, 2000]
    texts = {tuple(row) for source in sources for row in source.batch(range(300), 0, 0).input_ids.tolist()}
    assert len(texts) == 300 * len(sources)
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert FactRecallDataset(0, FactRecallConfig()).fingerprint == sources[0].fingerprint
    assert FactRecallDataset(0, FactRecallConfig(num_queries=4)).fingerprint != sources[0].fingerprint
    assert sources[0].max_length == sources[0].batch([0], 0, 0).input_ids.shape[1]


def test_build_recall_tokenizer(tmp_path: Any) -> None:
    tokenizer = FactRecallDataset.build_tokenizer()
    assert tokenizer.vocab_size == len(VOCABULARY) == 299
    text = FactRecallDataset(0, FactRecallConfig()).batch([0], 0, 0).input_ids[0].tolist()
    assert tokenizer.encode(" ".join(VOCABULARY[i] for i in text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
