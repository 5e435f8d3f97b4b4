"""A run over a set: what is counted for each question, whatever the batches, and what a set must hold."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from laconic.core.answering import Writing, after
from laconic.core.contract import Example, Reasoning
from laconic.core.errors import BadInput
from laconic.evaluation import edits, survey
from laconic.evaluation.edits import Intervention
from laconic.evaluation.inspect import common, spoken
from laconic.evaluation.protocols import DIGIT
from laconic.evaluation.subject import Choice, Left, Subject
from laconic.methods import codi
from tests.methods.batches import kava, reasoning

SIZES = ((5, 6, 4), (3, 3, 3), (4, 0, 5), (2, 5, 3), (6, 4, 3))
SWAP, ZERO = Intervention("swap"), Intervention("zero", "cache")


class Rows:
    """Five rows, each the same in whatever batch it is asked for."""

    fingerprint = "five"
    rows = reasoning(SIZES)

    def __len__(self) -> int:
        return len(SIZES)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Reasoning:
        return replace(self.rows.take(rows), index=torch.as_tensor(rows))


@pytest.fixture(scope="module")
def subject() -> Subject:
    """KaVa with random weights, whose answers are the last digit of the first id it says."""
    method = kava(M=4)
    writing = Writing(1, (2,), lambda ids: str(ids[0] % 10))

    def left(batch: Reasoning) -> Left:
        taught = method.teach(batch)
        chosen = {name: Choice(taught.kept, taught.S) for name in ("rkv", "random")}
        return Left(taught.k_t, taught.k_t, taught.v_t, taught.I, taught.R, chosen, "rkv", (0, 1), True)

    def think(questions: Any, edit: Any = None, trace: bool = False, rounds: int | None = None) -> Any:
        method.thoughts.rounds = 2 if rounds is None else rounds
        return codi.think(method.decoder, method.thoughts, questions, edit, trace)

    return Subject(
        "run", "kava", method.decoder, method.decoder.logits, str, think,
        lambda questions, state, passes: after(method.decoder, questions, state, method.thoughts.eot, passes, writing),
        left, 2, torch.device("cpu"),
    )  # fmt: skip


EXAMPLES = [Example(str(i), f"question {i}", (), str(i)) for i in range(len(SIZES))]


def asked(subject: Subject, batch: int, monkeypatch: pytest.MonkeyPatch) -> survey.Survey:
    monkeypatch.setattr(survey, "REFERENCE", 4)
    return survey.survey(
        subject, Rows(), EXAMPLES, DIGIT, [SWAP, ZERO, Intervention("mean")], rounds=(0, 2), batch=batch
    )


def test_every_question_is_counted_once_whatever_the_batches(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = asked(subject, 5, monkeypatch), asked(subject, 2, monkeypatch)
    assert whole.plain == parts.plain
    assert whole.edited == parts.edited
    assert whole.swept == parts.swept
    assert whole.swept[2] == whole.plain
    assert np.array_equal(whole.reads, parts.reads, equal_nan=True)
    for key, found in whole.figures.items():
        assert np.allclose(found, parts.figures[key])
    assert set(whole.near) == {(what, "kept") for what, against in whole.figures if against == "kept"}
    assert whole.filled == 3  # chains of six, five and four tokens; the others leave slots without one


def test_a_question_alone_says_what_it_says_in_the_set(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(subject, 5, monkeypatch)
    assert found.donors is not None
    for i in range(len(SIZES)):
        batch = Rows().batch([i], 0, 0)
        own = subject.think(batch, trace=True)
        theirs = subject.think(Rows().batch([int(found.donors[i])], 0, 0), trace=True)
        given = edits.Given(own, np.array([i]), donors=theirs)
        plain = subject.follow(batch, own.state, own.passes).texts[0]
        swapped = edits.edited(subject, batch, SWAP, given)
        assert found.plain.predictions[i] == plain
        assert found.edited[SWAP].predictions[i] == subject.follow(batch, swapped.state, swapped.passes).texts[0]
        top = subject.logits(own.hidden[0]).argmax(-1).tolist()
        chain = batch.chain[0, batch.chain_live[0]].tolist()
        if chain:
            assert found.reads[i, 0] == spoken(top, chain)
            assert found.reads[i, 2] == common(top, chain)
        else:
            assert np.isnan(found.reads[i]).all()


def test_answers_that_become_the_donors() -> None:
    """Of four questions one has its donor's answer anyway, and one donor has none."""
    made = survey.Answered(["1", "2", "2", None], [True] * 4)
    swapped = survey.Answered(["2", "2", "1", "1"], [False] * 4)
    found = survey.Survey(
        "run", "kava", made, {SWAP: swapped}, {}, np.array([1, 2, 3, 0]), 2, np.zeros((4, 3)), {}, {}, ()
    )
    assert found.became(SWAP, DIGIT).tolist() == [1.0, 1.0]  # row 0 took "2"; row 3, without an answer, took "1"
    assert len(replace(found, donors=None).became(SWAP, DIGIT)) == 0


def test_a_mean_needs_its_questions(subject: Subject) -> None:
    with pytest.raises(BadInput, match="mean: 5 questions, a mean is taken over 256; give a set that has as many"):
        survey.survey(subject, Rows(), EXAMPLES, DIGIT, [Intervention("mean")])


def test_chains_kept_whole_are_counted_apart(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(subject, 5, monkeypatch)
    assert (found.whole, found.habits[0].chains) == (2, 2)  # of 3 and 4 tokens; of 6 and 5, and one row has no chain
    without = survey.survey(replace(subject, left=None), Rows(), EXAMPLES, DIGIT, [])
    assert (without.figures, without.habits, without.donors) == ({}, (), None)
    assert without.plain == found.plain


def test_chance_is_taken_of_questions_that_have_a_chain() -> None:
    """Of four questions two have a chain: each is held against the other's, whatever the seed."""
    found = survey.Collected(tops=[(1, 2), (3, 4), (5, 6), (7, 8)], chains=[(1, 2), (), (5, 1, 2), ()])
    for seed in range(8):
        made = survey.words_in(found, seed)
        assert made[0].tolist() == [1.0, 1.0, 1.0]
        assert made[2].tolist() == [0.5, 0.0, 1 / 3]
        assert np.isnan(made[[1, 3]]).all()
    one = survey.Collected(tops=[(1, 2), (3, 4)], chains=[(1, 2), ()])
    assert np.isnan(survey.words_in(one, 0)).all()  # nothing to hold it against
