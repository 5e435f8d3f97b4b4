"""Documents read during training: what is told of them, and lengths that mean nothing any more."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.config.load import load_recipe
from laconic.evaluation.validation_documents import warn_collapsed_lengths
from laconic.experiment.build import build_experiment

RECALL = """
paper_table = "ours"
method = "{method}"
[model]
family = "llama"
tokenizer = "recall"
hidden_size = 16
num_attention_heads = 2
max_position_embeddings = 64
{tables}
[data]
source = "recall"
[data.recall]
segment_tokens = 8
num_facts = [1, 2]
num_queries = 2
train_rows = 40
valid_rows = 7
[validation]
max_rows = 7
batch_size = 3
[train]
steps = 1
batch_size = 4
"""
READING = '[reading]\ncap = 4\nsummary_init = "normal"\nlength = "stop"\n'


def built(folder: Path, method: str, tables: str = "") -> Any:
    (folder / "own.toml").write_text(RECALL.format(method=method, tables=tables))
    return build_experiment(load_recipe(folder / "own.toml")[0], torch.device("cpu"))


def test_a_document_is_read_as_it_is_one_by_one(tmp_path: Path) -> None:
    made = built(tmp_path, "autocompressor", READING)
    method = made.method.eval()
    assert isinstance(method, AutoCompressor)
    told, nats, scored = made.validate(0), 0.0, 0
    source = made.source.__class__(0, load_recipe(tmp_path / "own.toml")[0].data.recall, "valid", 7)
    for i in range(7):
        batch = source.batch([i], 0, 0)
        first, second = batch.segments
        memory = method.compress(batch.text[:, first], batch.live[:, first])
        live, marks = batch.live[:, second], batch.scored[:, second]
        nats += float(method.nll(batch.text[:, second], live, marks, memory))
        scored += int(marks[:, 1:].sum())
    assert told["nats"] == pytest.approx(nats / scored, rel=1e-5)
    assert told["vectors"] == 4
    assert told["spread"] == 0


def test_plain_text_has_no_vectors(tmp_path: Path) -> None:
    told = built(tmp_path, "plain").validate(0)
    assert set(told) == {"nats", "right"}
    assert 0 < told["nats"] < 2 * math.log(299)


def test_nothing_is_said_before_the_head_has_learned(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    made = built(tmp_path, "autocompressor", READING)
    made.validate(0)
    assert not [w for w in recwarn if "stops" in str(w.message)]
    with torch.no_grad():
        made.method.summaries.u.fill_(1e-6)
        made.method.summaries.b.fill_(-3.0)
    with pytest.warns(UserWarning, match=r"never stops: 4\.00 of 4 vectors a segment; raise halting\.price"):
        made.validate(2)


def test_a_price_that_does_not_count_yet_is_not_to_blame(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    soft = '[halting]\nestimator = "soft"\nstop_head = "vocabulary"\ncontrol = "rows"\n'
    made = built(tmp_path, "autocompressor", READING + soft)
    made.validate(0)
    assert not [w for w in recwarn if "stops" in str(w.message)]
    with pytest.warns(UserWarning, match=r"never stops"):
        made.validate(1)


def test_a_run_that_draws_its_lengths_is_validated_by_the_same_draws(tmp_path: Path) -> None:
    made = built(tmp_path, "autocompressor", READING + '[halting]\nstop = "sample"\nstart = 0.5\n')
    told = made.validate(0)
    assert told == made.validate(1)
    assert 1 < told["vectors"] < 4
    assert told["spread"] > 0


def test_lengths_that_are_all_the_same_are_told_of(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match=r"lengths collapsed: every segment has about 2\.00 vectors; change"):
        warn_collapsed_lengths([2] * 200, 8)
    recwarn.clear()
    warn_collapsed_lengths([2, 3] * 100, 8)
    warn_collapsed_lengths([], 8)
    assert not len(recwarn)
