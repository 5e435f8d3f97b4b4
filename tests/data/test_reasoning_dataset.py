"""Reasoning batches: targets in order of real tokens, padding known by masks alone, length limits and counts."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.batches import IGNORE_INDEX, ReasoningBatch, ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.dataset import ReasoningDataset, collate, pack_row, unpack_row
from laconic.data.reasoning.encode import EncodedExample, find_eos_token_id
from laconic.data.reasoning.read_examples import read_examples
from laconic.data.synthetic.digits import build_digits_tokenizer
from laconic.errors import InputError, UsageError
from laconic.interfaces import TrainingData
from tests.conftest import shared_dir
from tests.data.test_encode_reasoning import EXAMPLE, real, settings

ROWS = [
    EncodedExample("none", (5, 6, 7), (), (), (), (9, 3, 2), (1, 2), 0, 1),
    EncodedExample("one", (5, 8), (4,), (0,), (True,), (9, 3, 1, 2), (1, 3), 0, 1),
    EncodedExample("many", (5, 8, 8, 8), (4, 2, 6), (0, 0, 1), (False, True, True), (9, 2), (0, 1), -1, 1),
]


def sequence(batch: ReasoningBatch, b: int) -> list[int]:
    """Return the real tokens of a row in order."""
    return [
        *batch.question_ids[b][batch.question_mask[b]].tolist(),
        *batch.chain_ids[b][batch.chain_mask[b]].tolist(),
        *batch.answer_ids[b][batch.answer_mask[b]].tolist(),
    ]


def predicted(batch: ReasoningBatch, b: int) -> list[int]:
    """Return the targets of a row from its last question token on, in order of real tokens."""
    return [
        int(batch.question_target[b]),
        *batch.chain_targets[b][batch.chain_mask[b]].tolist(),
        *batch.answer_targets[b][batch.answer_mask[b]].tolist(),
    ]


@pytest.mark.usefixtures("unchecked")
def test_reasoning_example_refuses_one_text_as_steps() -> None:
    with pytest.raises(UsageError, match=r"steps: give a tuple of texts, such as \('3\+4=7',\), not one text"):
        ReasoningExample("1", "3+4=", "3+4=7", "7")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="answer: give text, not int"):
        ReasoningExample("1", "3+4=", ("3+4=7",), 7)  # type: ignore[arg-type]


def test_reasoning_dataset_warns_if_no_row_has_a_chain() -> None:
    rows = [ReasoningExample("1", "3 + 4", ("<<3+4=7>>",), "7")]
    with pytest.warns(UserWarning, match='chain_steps="drop_last" leaves no row with a chain'):
        ReasoningDataset(rows, build_digits_tokenizer(), DataConfig(source="digits", format="digits"))


def test_reasoning_dataset_goes_to_workers_of_a_data_loader() -> None:
    rows = [ReasoningExample("1", "3 + 4 * 2", ("<<3+4=7>>", "<<7*2=4>>"), "4")]
    data = ReasoningDataset(rows, build_digits_tokenizer(), DataConfig(source="digits", format="digits"))
    copied = pickle.loads(pickle.dumps(data))
    assert torch.equal(copied.batch([0]).chain_ids, data.batch([0]).chain_ids)


def check(batch: ReasoningBatch, rows: list[EncodedExample]) -> None:
    for b, row in enumerate(rows):
        assert sequence(batch, b) == [*row.question_ids, *row.chain_ids, *row.answer_ids]
        assert predicted(batch, b) == [*row.chain_ids, *row.answer_ids, IGNORE_INDEX]
        assert (batch.chain_targets[b][~batch.chain_mask[b]] == IGNORE_INDEX).all()
        assert (batch.answer_targets[b][~batch.answer_mask[b]] == IGNORE_INDEX).all()
        assert batch.chain_step_index[b][batch.chain_mask[b]].tolist() == list(row.chain_step_index)
        assert batch.chain_result_mask is not None
        assert batch.chain_result_mask[b][batch.chain_mask[b]].tolist() == list(row.chain_result_mask)
        assert not batch.chain_result_mask[b][~batch.chain_mask[b]].any()
        assert batch.answer_number_mask[b].nonzero().flatten().tolist() == list(range(*row.number_span))
        assert batch.distill_column[b] == row.distill_column
        assert bool(batch.question_mask[b, -1]), "questions are padded left"
        assert not row.chain_ids or bool(batch.chain_mask[b, 0]), "chains are padded right"
        assert bool(batch.answer_mask[b, 0]), "answers are padded right"


def test_collate() -> None:
    batch = collate(ROWS, [7, 8, 9], 2, 30)
    check(batch, ROWS)
    assert batch.question_ids.shape == (3, 4)
    assert batch.chain_ids.shape == (3, 3)
    assert batch.answer_ids.shape == (3, 4)
    assert batch.question_target.tolist() == [9, 4, 4]  # the answer where there is no chain
    assert batch.chain_targets[1].tolist() == [9, IGNORE_INDEX, IGNORE_INDEX]  # a shift by column would give 0
    assert (batch.row_index.tolist(), batch.ids, batch.epoch, batch.step) == ([7, 8, 9], ("none", "one", "many"), 2, 30)
    assert batch.loss_denominators is None


def test_collate_without_any_chain() -> None:
    batch = collate(ROWS[:1], [0])
    check(batch, ROWS[:1])
    assert batch.chain_ids.shape == (1, 0)


ids = st.lists(st.integers(0, 3), max_size=5).map(tuple)


@given(st.lists(st.tuples(ids.filter(len), ids, ids.filter(len)), min_size=1, max_size=4))
def test_collate_of_any_rows(parts: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]) -> None:
    """Ids equal to padding or eos change nothing; only the masks mark padding."""
    rows = [
        EncodedExample(str(i), q, c, (0,) * len(c), tuple(map(bool, c)), a, (0, len(a)), -1)
        for i, (q, c, a) in enumerate(parts)
    ]
    check(collate(rows, range(len(rows))), rows)
    assert [unpack_row(row.id, pack_row(row)) for row in rows] == rows


def test_collate_batch_equals_single_rows() -> None:
    together = collate(ROWS, range(3))
    for b, row in enumerate(ROWS):
        alone = collate([row], [b])
        assert sequence(alone, 0) == sequence(together, b)
        assert predicted(alone, 0) == predicted(together, b)


def gsm(count: int = 60) -> list[ReasoningExample]:
    lines = (shared_dir() / "data/gsm8k-aug/train-subset.jsonl").read_text().splitlines()[:count]
    return [ReasoningExample(r["id"], r["question"], tuple(r["steps"]), r["answer"]) for r in map(json.loads, lines)]


@pytest.mark.parametrize("name", ["gpt2", "gsm-bpe-2048", "stories260k"])
@pytest.mark.parametrize("form", ["pccot", "codi", "coconut", "icot"])
def test_reasoning_dataset_is_training_data(name: str, form: str) -> None:
    source = ReasoningDataset(gsm(), real(name), settings(name, format=form), max_positions=4096, num_latents=24)
    assert isinstance(source, TrainingData)
    assert len(source) == source.counts.num_used == source.counts.num_read == 60
    batch = source.batch([5, 59, 0], 1, 2)
    check(batch, [source.get_row(5), source.get_row(59), source.get_row(0)])
    assert batch.ids == tuple(source.examples[i].id for i in (5, 59, 0))
    assert torch.equal(source.batch([5, 59, 0], 1, 2).chain_ids, batch.chain_ids)
    eos = batch.answer_ids[batch.answer_mask & (batch.answer_targets == IGNORE_INDEX)]
    eos_token_id = find_eos_token_id(real(name), settings(name))
    assert eos.tolist() == [eos_token_id] * 3  # pads may be eos: the real one is live and predicted
    assert (batch.answer_targets == eos_token_id).sum() == 3


def test_reasoning_dataset_counts_of_shipped_subset() -> None:
    source = ReasoningDataset(gsm(), real("gpt2"), settings("gpt2"), num_latents=24)
    chains = [len(source.get_row(i).chain_ids) for i in range(60)]
    assert source.counts.num_without_chain == chains.count(0) > 0
    assert source.counts.num_short_chain == sum(0 < n < 24 for n in chains) > 0
    assert source.counts.describe(24)[-1] == (
        f"rows whose chain has fewer than 24 tokens, one per latent: {source.counts.num_short_chain}"
    )


@pytest.mark.medium
@pytest.mark.parametrize(("name", "below", "untaught"), [("gpt2", 77, 37), ("gsm-bpe-2048", 57, 27)])
def test_reasoning_dataset_lengths_of_the_specification(name: str, below: int, untaught: int) -> None:
    """GSM8K test without last steps: rows without a chain, rows below 24 tokens, empty slots of 24."""
    examples = read_examples(shared_dir() / "data/gsm8k/test.jsonl", settings(name)).examples
    source = ReasoningDataset(examples, real(name), settings(name), num_latents=24)
    chains = [len(source.get_row(i).chain_ids) for i in range(len(source))]
    assert round(100 * source.counts.num_without_chain / 1319, 1) == 6.3
    assert round(100 * (source.counts.num_without_chain + source.counts.num_short_chain) / 1319) == below
    assert round(100 * sum(max(0, 24 - n) for n in chains) / 24 / 1319) == untaught


def test_reasoning_dataset_fingerprint() -> None:
    prints = {
        ReasoningDataset(rows, real("gpt2"), config).fingerprint
        for rows in (gsm(4), gsm(5), [replace(e, id=e.id + "x") for e in gsm(4)])
        for config in (settings("gpt2"), settings("gpt2", format="codi"))
    }
    assert len(prints) == 6
    assert ReasoningDataset(gsm(4), real("gpt2"), settings("gpt2")).fingerprint in prints


def test_reasoning_dataset_fingerprint_without_file_names(tmp_path: Path) -> None:
    """The rows may be in a file of another name; ids that rows give count, and so do the rows."""

    def fingerprint(name: str, *ids: str | None) -> str:
        lines = [{"question": f"{n}+1=", "answer": str(n + 1)} | ({"id": id} if id else {}) for n, id in enumerate(ids)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = settings("gpt2", path=str(tmp_path / name))
        examples = read_examples(tmp_path / name, config).examples
        return ReasoningDataset(examples, real("gpt2"), config).fingerprint

    assert fingerprint("train.jsonl", None, None) == fingerprint("moved.jsonl", None, None)
    assert fingerprint("train.jsonl", "a:1", None) == fingerprint("moved.jsonl", "a:1", None)
    prints = {fingerprint("train.jsonl", *ids) for ids in ((None, None), ("a:1", None), ("b:1", None), (None,))}
    assert len(prints) == 4


def rows(*answers: str) -> list[ReasoningExample]:
    return [replace(EXAMPLE, id=f"row-{i}", answer=answer) for i, answer in enumerate(answers)]


def test_reasoning_dataset_require_leading_digit() -> None:
    unfiltered = ReasoningDataset(rows("18", "-18", "$5"), real("gpt2"), settings("gpt2"))
    assert (unfiltered.counts.num_used, unfiltered.counts.num_without_leading_digit) == (3, 0)
    dropped = ReasoningDataset(rows("18", "-18", "$5"), real("gpt2"), settings("gpt2", require_leading_digit=True))
    assert (dropped.counts.num_used, dropped.counts.num_without_leading_digit) == (1, 2)
    left_out = "2 of 3 rows left out: 2 without a leading digit (require_leading_digit)"
    assert dropped.counts.describe(0) == ["1 of 3 rows are used", left_out]


def test_reasoning_dataset_too_long_is_an_error_by_default() -> None:
    long = len(ReasoningDataset(rows("18"), real("gpt2"), settings("gpt2")).get_row(0))
    assert len(ReasoningDataset(rows("18"), real("gpt2"), settings("gpt2", max_tokens=long))) == 1
    with pytest.raises(InputError) as caught:
        ReasoningDataset(rows("18"), real("gpt2"), settings("gpt2", max_tokens=long - 1))
    message = str(caught.value)
    assert message.startswith("row row-0: 9 + 7 + 6 tokens")
    assert f"1 more than data.max_tokens = {long - 1}; raise it, or set data.on_too_long" in message


def test_reasoning_dataset_positions_hold_latents_or_chain() -> None:
    row = ReasoningDataset(rows("18"), real("gpt2"), settings("gpt2")).get_row(0)
    assert len(row.chain_ids) == 7
    for thoughts, longest in [(0, 7), (5, 7), (6, 8), (24, 26)]:
        need = len(row.question_ids) + longest + len(row.answer_ids)
        assert (
            len(ReasoningDataset(rows("18"), real("gpt2"), settings("gpt2"), max_positions=need, num_latents=thoughts))
            == 1
        )
        message = rf"1 more than the model's {need - 1} positions, with {thoughts} latents"
        with pytest.raises(InputError, match=message):
            ReasoningDataset(rows("18"), real("gpt2"), settings("gpt2"), max_positions=need - 1, num_latents=thoughts)


def test_reasoning_dataset_drop_and_truncate() -> None:
    examples = [*rows("18"), replace(EXAMPLE, id="long", question="Well " * 30 + EXAMPLE.question, answer="18")]
    whole = ReasoningDataset(examples, real("stories260k"), settings("stories260k"))
    fits = len(whole.get_row(0))
    dropped = ReasoningDataset(
        examples, real("stories260k"), settings("stories260k", max_tokens=fits, on_too_long="drop")
    )
    assert (dropped.counts.num_too_long, len(dropped)) == (1, 1)
    cut = ReasoningDataset(
        examples, real("stories260k"), settings("stories260k", max_tokens=fits, on_too_long="truncate_question")
    )
    assert (cut.counts.num_truncated, len(cut)) == (1, 2)
    short, long = cut.get_row(1), whole.get_row(1)
    assert len(short) == fits
    assert (short.chain_ids, short.answer_ids, short.number_span) == (long.chain_ids, long.answer_ids, long.number_span)
    assert short.question_ids[0] == long.question_ids[0] == real("stories260k").bos_token_id
    assert short.question_ids[1:] == long.question_ids[-len(short.question_ids) + 1 :]


@pytest.mark.parametrize("policy", ["error", "truncate_question"])
def test_reasoning_dataset_never_truncates_answers(policy: str) -> None:
    with pytest.raises(InputError, match=r"\d+ more than data.max_tokens = 8; "):
        ReasoningDataset(rows("18"), real("gpt2"), settings("gpt2", max_tokens=8, on_too_long=policy))


def test_reasoning_dataset_refuses_too_few_rows() -> None:
    with pytest.raises(InputError, match="0 of 2 rows are usable, fewer than a batch of 1; 2 of 2 rows left out"):
        ReasoningDataset(rows("1", "2"), real("gpt2"), settings("gpt2", max_tokens=8, on_too_long="drop"))
    with pytest.raises(InputError, match="0 of 0 rows are usable"):
        ReasoningDataset([], real("gpt2"), settings("gpt2"))
    with pytest.raises(InputError, match="2 of 2 rows are usable, fewer than a batch of 3"):
        ReasoningDataset(rows("1", "2"), real("gpt2"), settings("gpt2"), min_rows=3)
    assert len(ReasoningDataset(rows("1"), real("gpt2"), settings("gpt2"))) == 1


def test_reasoning_dataset_reports_invalid_rows() -> None:
    """The first twenty problems are listed, the others counted; one row in a thousand may be skipped."""
    bad = [replace(EXAMPLE, id=f"bad-{i}", answer="none") for i in range(23)]
    with pytest.raises(InputError) as caught:
        ReasoningDataset([*rows("1"), *bad], real("gpt2"), settings("gpt2"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("row bad-0: answer 'none' has no number")
    assert lines[20] == "and 3 more: 3 that cannot be encoded or do not fit"
    with pytest.raises(InputError, match="has no number"):
        ReasoningDataset([*rows(*"1" * 900), bad[0]], real("gpt2"), settings("gpt2", on_invalid_row="skip"))
    source = ReasoningDataset([*rows(*"1" * 999), bad[0]], real("gpt2"), settings("gpt2", on_invalid_row="skip"))
    assert (source.counts.num_invalid, len(source)) == (1, 999)


def test_filter_counts_unknown_tokens() -> None:
    config: dict[str, Any] = {"source": "digits", "format": "digits", "chain_steps": "all"}
    source = ReasoningDataset(
        [ReasoningExample("a", "what 3 =", ("3",), "3")], build_digits_tokenizer(), DataConfig.model_validate(config)
    )
    assert source.counts.describe(0) == ["1 of 1 rows are used", "unknown tokens in questions and chains: 1"]


def test_reasoning_dataset_accepts_numpy_rows() -> None:
    source = ReasoningDataset(gsm(4), real("gpt2"), settings("gpt2"))
    order = np.array([2, 0])
    assert torch.equal(source.batch(order.tolist(), 0, 0).question_ids, source.batch([2, 0], 0, 0).question_ids)


def test_reasoning_dataset_progress_every_thousand_rows() -> None:
    examples = [ReasoningExample(str(i), "3 + 4 =", ("7",), "7") for i in range(2500)]
    calls: list[tuple[str, int, int]] = []
    config = DataConfig(source="digits", format="digits")
    ReasoningDataset(examples, build_digits_tokenizer(), config, progress=lambda *call: calls.append(call))
    assert calls == [("rows encoded", done, 2500) for done in (0, 1000, 2000)]
