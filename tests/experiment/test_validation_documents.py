"""Validation on documents: scores of a batch against one row at a time, and warnings about collapsed lengths."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.compression.autocompressor import AutoCompressor
from laconic.config.data import FactRecallConfig
from laconic.config.load import load_recipe
from laconic.data.synthetic.fact_recall import FactRecallDataset
from laconic.evaluation.validation import build_validation, warn_collapsed_lengths
from laconic.experiment.from_recipe.build import Experiment, build_experiment

CPU = torch.device("cpu")
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
COMPRESSION = '[compression]\nmax_vectors = 4\nsummary_init = "normal"\nlength_policy = "stop_head"\n'


def build(folder: Path, method: str, tables: str = "") -> tuple[Experiment, Callable[[int], Mapping[str, float]]]:
    """Return an experiment and its validation."""
    (folder / "own.toml").write_text(RECALL.format(method=method, tables=tables))
    experiment = build_experiment(load_recipe(folder / "own.toml")[0], CPU)
    validate = build_validation(experiment.recipe, experiment.parts, experiment.method, CPU)
    assert validate is not None
    return experiment, validate


def test_document_validation_equals_one_document_at_a_time(tmp_path: Path) -> None:
    experiment, validate = build(tmp_path, "autocompressor", COMPRESSION)
    method, config = experiment.method.eval(), experiment.recipe.data.recall
    assert isinstance(method, AutoCompressor)
    assert isinstance(config, FactRecallConfig)
    metrics, nll, num_scored = validate(0), 0.0, 0
    data = FactRecallDataset(0, config, "valid", 7)
    for i in range(7):
        batch = data.batch([i], 0, 0)
        first, second = batch.segment_slices
        memory = method.compress(batch.input_ids[:, first], batch.attention_mask[:, first])
        mask, scored = batch.attention_mask[:, second], batch.loss_mask[:, second]
        nll += float(method.nll(batch.input_ids[:, second], mask, scored, memory))
        num_scored += int(scored[:, 1:].sum())
    assert metrics["nats"] == pytest.approx(nll / num_scored, rel=1e-5)
    assert metrics["vectors"] == 4
    assert metrics["spread"] == 0
    assert tuple(metrics) == experiment.recipe.validation_metrics


def test_document_validation_of_a_language_model_has_no_vectors(tmp_path: Path) -> None:
    experiment, validate = build(tmp_path, "lm")
    metrics = validate(0)
    assert tuple(metrics) == experiment.recipe.validation_metrics == ("nats", "accuracy")
    assert 0 < metrics["nats"] < 2 * math.log(299)


def test_collapse_warning_waits_until_the_head_has_learned(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    experiment, validate = build(tmp_path, "autocompressor", COMPRESSION)
    validate(0)
    assert not [w for w in recwarn if "stops" in str(w.message)]
    method = experiment.method
    assert isinstance(method, AutoCompressor)
    u, b = method.summaries.u, method.summaries.b
    assert isinstance(u, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    with torch.no_grad():
        u.fill_(1e-6)
        b.fill_(-3.0)
    with pytest.warns(UserWarning, match=r"never stops: 4\.00 of 4 vectors per segment"):
        validate(2)


def test_collapse_warning_waits_for_the_length_cost(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    soft = '[stop_head]\nestimator = "soft"\nhead = "vocabulary"\ncontrol_tokens = "vocabulary"\n'
    _, validate = build(tmp_path, "autocompressor", COMPRESSION + soft)
    validate(0)
    assert not [w for w in recwarn if "stops" in str(w.message)]
    with pytest.warns(UserWarning, match=r"never stops"):
        validate(1)


def test_document_validation_repeats_sampled_lengths(tmp_path: Path) -> None:
    tables = '[stop_head]\nstop_rule = "sample"\ninitial_mean_fraction = 0.5\n'
    _, validate = build(tmp_path, "autocompressor", COMPRESSION + tables)
    metrics = validate(0)
    assert metrics == validate(1)
    assert 1 < metrics["vectors"] < 4
    assert metrics["spread"] > 0


def test_warn_collapsed_lengths(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match=r"lengths collapsed.*2\.00"):
        warn_collapsed_lengths([2] * 200, 8)
    recwarn.clear()
    warn_collapsed_lengths([2, 3] * 100, 8)
    warn_collapsed_lengths([], 8)
    assert not len(recwarn)


STATEFUL = """
paper_table = "ours"
method = "hope"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[mixer]
kind = "self_modifying"
num_heads = 2
head_dim = 8
[cms]
chunk_sizes = [4, 8]
[data]
source = "text"
path = "books.jsonl"
[data.text]
row_tokens = 12
segment_tokens = 12
[validation]
max_rows = 9
batch_size = 3
[train]
steps = 2
batch_size = 2
stateful = true
"""


@pytest.mark.medium
@pytest.mark.usefixtures("unchecked")
def test_stateful_validation_on_two_ranks_equals_one_process(tmp_path: Path) -> None:
    books = [json.dumps({"text": f"Book {i}. " + "It was a dark and stormy night. " * 8}) for i in range(9)]
    (tmp_path / "books.jsonl").write_text("\n".join(books) + "\n")
    (tmp_path / "own.toml").write_text(STATEFUL)
    experiment = build_experiment(load_recipe(tmp_path / "own.toml")[0], CPU)

    def validate(ranks: Any) -> Mapping[str, float]:
        function = build_validation(experiment.recipe, experiment.parts, experiment.method, CPU, ranks)
        assert function is not None
        return function(0)

    sent: list[Any] = []
    first: Any = SimpleNamespace(rank=0, world_size=2, run_on_rank_zero=lambda score: sent.append(score()) or sent[0])
    second: Any = SimpleNamespace(rank=1, world_size=2, run_on_rank_zero=lambda score: sent[0])
    assert validate(None) == validate(first) == validate(second)
