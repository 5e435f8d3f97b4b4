"""Rows on a grid: targets in the order of live tokens, pads known by `*_live` alone, budgets with counts."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.contract import UNSCORED, Example, Reasoning, Source
from laconic.core.errors import BadInput
from laconic.data.examples import read_examples
from laconic.data.pieces import Encoded
from laconic.data.reasoning import Questions, collate, pack, unpack
from laconic.data.settings import Data
from laconic.data.synthetic import digits_tokenizer
from tests.conftest import shared_dir
from tests.data.test_pieces import EXAMPLE, real, settings

ROWS = [
    Encoded("none", (5, 6, 7), (), (), (9, 3, 2), (1, 2), 0, 1),
    Encoded("one", (5, 8), (4,), (0,), (9, 3, 1, 2), (1, 3), 0, 1),
    Encoded("many", (5, 8, 8, 8), (4, 2, 6), (0, 0, 1), (9, 2), (0, 1), -1, 1),
]


def sequence(batch: Reasoning, b: int) -> list[int]:
    """The live tokens of a row, in order."""
    return [
        *batch.question[b][batch.question_live[b]].tolist(),
        *batch.chain[b][batch.chain_live[b]].tolist(),
        *batch.answer[b][batch.answer_live[b]].tolist(),
    ]


def predicted(batch: Reasoning, b: int) -> list[int]:
    """The targets of a row from its last question token on, in order of live tokens."""
    return [
        int(batch.next_question[b]),
        *batch.next_chain[b][batch.chain_live[b]].tolist(),
        *batch.next_answer[b][batch.answer_live[b]].tolist(),
    ]


def check(batch: Reasoning, rows: list[Encoded]) -> None:
    for b, row in enumerate(rows):
        assert sequence(batch, b) == [*row.question, *row.chain, *row.answer]
        assert predicted(batch, b) == [*row.chain, *row.answer, UNSCORED]
        assert (batch.next_chain[b][~batch.chain_live[b]] == UNSCORED).all()
        assert (batch.next_answer[b][~batch.answer_live[b]] == UNSCORED).all()
        assert batch.chain_step[b][batch.chain_live[b]].tolist() == list(row.chain_step)
        assert batch.number[b].nonzero().flatten().tolist() == list(range(*row.number))
        assert batch.distil[b] == row.distil
        assert bool(batch.question_live[b, -1]), "questions are padded left"
        assert not row.chain or bool(batch.chain_live[b, 0]), "chains are padded right"
        assert bool(batch.answer_live[b, 0]), "answers are padded right"


def test_the_grid() -> None:
    batch = collate(ROWS, [7, 8, 9], 2, 30)
    check(batch, ROWS)
    assert batch.question.shape == (3, 4)
    assert batch.chain.shape == (3, 3)
    assert batch.answer.shape == (3, 4)
    assert batch.next_question.tolist() == [9, 4, 4]  # the answer where there is no chain
    assert batch.next_chain[1].tolist() == [9, UNSCORED, UNSCORED]  # a shift by column would give 0
    assert (batch.index.tolist(), batch.ids, batch.epoch, batch.step) == ([7, 8, 9], ("none", "one", "many"), 2, 30)
    assert batch.totals is None


def test_a_batch_without_any_chain() -> None:
    batch = collate(ROWS[:1], [0])
    check(batch, ROWS[:1])
    assert batch.chain.shape == (1, 0)


ids = st.lists(st.integers(0, 3), max_size=5).map(tuple)


@given(st.lists(st.tuples(ids.filter(len), ids, ids.filter(len)), min_size=1, max_size=4))
def test_any_rows(parts: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]) -> None:
    """Ids that are also pads' and eos's change nothing: only `*_live` says what a pad is."""
    rows = [Encoded(str(i), q, c, (0,) * len(c), a, (0, len(a)), -1) for i, (q, c, a) in enumerate(parts)]
    check(collate(rows, range(len(rows))), rows)
    assert [unpack(row.id, pack(row)) for row in rows] == rows


def test_a_row_alone_is_the_row_of_a_batch() -> None:
    together = collate(ROWS, range(3))
    for b, row in enumerate(ROWS):
        alone = collate([row], [b])
        assert sequence(alone, 0) == sequence(together, b)
        assert predicted(alone, 0) == predicted(together, b)


def gsm(count: int = 60) -> list[Example]:
    lines = (shared_dir() / "data/gsm8k-aug/train-subset.jsonl").read_text().splitlines()[:count]
    return [Example(r["id"], r["question"], tuple(r["steps"]), r["answer"]) for r in map(json.loads, lines)]


@pytest.mark.parametrize("name", ["gpt2", "gsm-bpe-2048", "stories260k"])
@pytest.mark.parametrize("form", ["pccot", "codi", "coconut", "icot"])
def test_questions_are_a_source(name: str, form: str) -> None:
    source = Questions(gsm(), real(name), settings(name, format=form), context=4096, thoughts=24)
    assert isinstance(source, Source)
    assert len(source) == source.counts.kept == source.counts.read == 60
    batch = source.batch([5, 59, 0], 1, 2)
    check(batch, [source.row(5), source.row(59), source.row(0)])
    assert batch.ids == tuple(source.examples[i].id for i in (5, 59, 0))
    assert torch.equal(source.batch([5, 59, 0], 1, 2).chain, batch.chain)
    eos = batch.answer[batch.answer_live & (batch.next_answer == UNSCORED)]
    assert eos.tolist() == [source.encoder.eos] * 3  # pads may be eos: the real one is live and predicted
    assert (batch.next_answer == source.encoder.eos).sum() == 3


def test_counts_of_the_shipped_subset() -> None:
    source = Questions(gsm(), real("gpt2"), settings("gpt2"), thoughts=24)
    chains = [len(source.row(i).chain) for i in range(60)]
    assert source.counts.empty == chains.count(0) > 0
    assert source.counts.short == sum(0 < n < 24 for n in chains) > 0
    assert source.counts.lines(24)[-1] == (
        f"{source.counts.short} rows whose chain has fewer than 24 tokens, one a thought"
    )


@pytest.mark.parametrize(("name", "below", "untaught"), [("gpt2", 77, 37), ("gsm-bpe-2048", 57, 27)])
def test_figures_of_the_specification(name: str, below: int, untaught: int) -> None:
    """GSM8K test without last steps: rows without a chain, rows below 24 tokens, slots of 24 without a token."""
    examples = read_examples(shared_dir() / "data/gsm8k/test.jsonl", settings(name)).examples
    source = Questions(examples, real(name), settings(name), thoughts=24)
    chains = [len(source.row(i).chain) for i in range(len(source))]
    assert round(100 * source.counts.empty / 1319, 1) == 6.3
    assert round(100 * (source.counts.empty + source.counts.short) / 1319) == below
    assert round(100 * sum(max(0, 24 - n) for n in chains) / 24 / 1319) == untaught


def test_fingerprint_is_of_ids_and_names() -> None:
    prints = {
        Questions(rows, real("gpt2"), how).fingerprint
        for rows in (gsm(4), gsm(5), [replace(e, id=e.id + "x") for e in gsm(4)])
        for how in (settings("gpt2"), settings("gpt2", format="codi"))
    }
    assert len(prints) == 6
    assert Questions(gsm(4), real("gpt2"), settings("gpt2")).fingerprint in prints


def rows(*answers: str) -> list[Example]:
    return [replace(EXAMPLE, id=f"row-{i}", answer=answer) for i, answer in enumerate(answers)]


def test_drop_negative_leaves_out_what_begins_with_no_digit() -> None:
    kept = Questions(rows("18", "-18", "$5"), real("gpt2"), settings("gpt2"))
    assert (kept.counts.kept, kept.counts.negative) == (3, 0)
    dropped = Questions(rows("18", "-18", "$5"), real("gpt2"), settings("gpt2", drop_negative=True))
    assert (dropped.counts.kept, dropped.counts.negative) == (1, 2)
    assert "2 rows left out: the answer does not begin with a digit (drop_negative)" in dropped.counts.lines()


def test_too_long_is_an_error_by_default() -> None:
    long = len(Questions(rows("18"), real("gpt2"), settings("gpt2")).row(0))
    assert len(Questions(rows("18"), real("gpt2"), settings("gpt2", max_tokens=long))) == 1
    with pytest.raises(BadInput) as caught:
        Questions(rows("18"), real("gpt2"), settings("gpt2", max_tokens=long - 1))
    assert str(caught.value) == (
        f"row row-0: question, chain and answer of 9 + 7 + 6 tokens, 1 more than data.max_tokens = {long - 1}; "
        'set data.too_long = "drop", or "cut-question"'
    )


def test_the_context_holds_thoughts_or_chain_whichever_is_longer() -> None:
    row = Questions(rows("18"), real("gpt2"), settings("gpt2")).row(0)
    assert len(row.chain) == 7
    for thoughts, longest in [(0, 7), (5, 7), (6, 8), (24, 26)]:
        need = len(row.question) + longest + len(row.answer)
        assert len(Questions(rows("18"), real("gpt2"), settings("gpt2"), context=need, thoughts=thoughts)) == 1
        message = rf"1 more than the model's {need - 1} positions hold with {thoughts} thoughts"
        with pytest.raises(BadInput, match=message):
            Questions(rows("18"), real("gpt2"), settings("gpt2"), context=need - 1, thoughts=thoughts)


def test_drop_and_cut() -> None:
    examples = [*rows("18"), replace(EXAMPLE, id="long", question="Well " * 30 + EXAMPLE.question, answer="18")]
    whole = Questions(examples, real("stories260k"), settings("stories260k"))
    fits = len(whole.row(0))
    dropped = Questions(examples, real("stories260k"), settings("stories260k", max_tokens=fits, too_long="drop"))
    assert (dropped.counts.long, len(dropped)) == (1, 1)
    cut = Questions(examples, real("stories260k"), settings("stories260k", max_tokens=fits, too_long="cut-question"))
    assert (cut.counts.cut, len(cut)) == (1, 2)
    short, long = cut.row(1), whole.row(1)
    assert len(short) == fits
    assert (short.chain, short.answer, short.number) == (long.chain, long.answer, long.number)
    assert short.question[0] == long.question[0] == real("stories260k").bos
    assert short.question[1:] == long.question[-len(short.question) + 1 :]


@pytest.mark.parametrize("policy", ["error", "cut-question"])
def test_an_answer_is_never_cut(policy: str) -> None:
    with pytest.raises(BadInput, match=r"tokens, \d+ more than data.max_tokens = 8; "):
        Questions(rows("18"), real("gpt2"), settings("gpt2", max_tokens=8, too_long=policy))


def test_all_rows_too_long_and_fewer_rows_than_a_batch() -> None:
    with pytest.raises(BadInput, match=r"0 of 2 rows are left, a batch asks for 1; give more rows than that"):
        Questions(rows("1", "2"), real("gpt2"), settings("gpt2", max_tokens=8, too_long="drop"))
    with pytest.raises(BadInput, match=r"0 of 0 rows are left, a batch asks for 1"):
        Questions([], real("gpt2"), settings("gpt2"))
    with pytest.raises(BadInput, match=r"2 of 2 rows are left, a batch asks for 3"):
        Questions(rows("1", "2"), real("gpt2"), settings("gpt2"), least=3)
    assert len(Questions(rows("1"), real("gpt2"), settings("gpt2"))) == 1


def test_rows_that_cannot_be_encoded() -> None:
    """The first twenty are told, the others counted; one in a thousand may be left out."""
    bad = [replace(EXAMPLE, id=f"bad-{i}", answer="none") for i in range(23)]
    with pytest.raises(BadInput) as caught:
        Questions([*rows("1"), *bad], real("gpt2"), settings("gpt2"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("row bad-0: answer 'none' holds no number")
    assert lines[20] == "and 3 more: 3 that cannot be encoded or do not fit"
    with pytest.raises(BadInput, match="holds no number"):
        Questions([*rows(*"1" * 900), bad[0]], real("gpt2"), settings("gpt2", on_bad="skip"))
    source = Questions([*rows(*"1" * 999), bad[0]], real("gpt2"), settings("gpt2", on_bad="skip"))
    assert (source.counts.bad, len(source)) == (1, 999)


def test_unknown_words_are_counted() -> None:
    how: dict[str, Any] = {"kind": "digits", "format": "digits", "chain": "all"}
    source = Questions([Example("a", "what 3 =", ("3",), "3")], digits_tokenizer(), Data.model_validate(how))
    assert source.counts.lines() == [
        "1 rows read",
        "1 rows kept",
        "1 tokens of questions and chains that the tokenizer has no word for",
    ]


def test_rows_of_numpy_are_rows() -> None:
    source = Questions(gsm(4), real("gpt2"), settings("gpt2"))
    order = np.array([2, 0])
    assert torch.equal(source.batch(order.tolist(), 0, 0).question, source.batch([2, 0], 0, 0).question)
