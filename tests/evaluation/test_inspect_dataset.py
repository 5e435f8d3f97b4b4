"""A run over a set: what is counted for each question, whatever the batches, and what a set must hold."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from laconic.batches import ReasoningBatch, ReasoningExample
from laconic.data.reasoning.answer_matching import DIGIT
from laconic.evaluation.inspection import conditions, interventions
from laconic.evaluation.inspection.dataset import DatasetInspection, compute_chain_word_rates, inspect_dataset
from laconic.evaluation.inspection.inspected_run import InspectedRun, KeysValues, TeacherChain
from laconic.evaluation.inspection.interventions import InterventionSpec
from laconic.evaluation.inspection.logit_lens import lcs_ratio, share_in_chain
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.latent.answering import AnswerDecoding
from tests.latent.batches import build_kava, reasoning_batch, select_in_all_layers

SIZES = ((5, 6, 4), (3, 3, 3), (4, 0, 5), (2, 5, 3), (6, 4, 3))


class Rows:
    """Five rows, each the same in whatever batch it is asked for."""

    fingerprint = "five"
    rows = reasoning_batch(SIZES)

    def __len__(self) -> int:
        return len(SIZES)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        return replace(self.rows.select_rows(rows), row_index=torch.as_tensor(rows))


class KavaSubject(InspectedRun):
    """KaVa with random weights, whose answers are the last digit of the first id it says."""

    def decode_token(self, i: int) -> str:
        return str(i)

    def think(
        self, questions: Any, intervention: Any = None, record_passes: bool = False, iterations: int | None = None
    ) -> Any:
        method: Any = self.run.method
        method.latent_thoughts.num_iterations = 2 if iterations is None else iterations
        return method.think(questions, intervention=intervention, record_passes=record_passes)

    def teacher_chain(self, batch: ReasoningBatch) -> TeacherChain:
        layers = select_in_all_layers(cast(Any, self.run.method).eval(), batch)
        k_t, v_t, columns, *scores = zip(*layers, strict=True)
        choices = {"rkv": columns, "random": columns}
        return TeacherChain(KeysValues(k_t, k_t, v_t), choices, cast(Any, scores), "rkv", (0, 1), True)


@pytest.fixture(scope="module")
def subject() -> InspectedRun:
    method = build_kava(num_latents=4)
    method.latent_thoughts.num_iterations = 2
    parts = SimpleNamespace(decoder=method.decoder, latents=method.latent_thoughts)
    run: Any = SimpleNamespace(method=method, parts=parts, recipe=SimpleNamespace(method="kava"))
    return KavaSubject(run, "run", AnswerDecoding(1, (2,), lambda ids: str(ids[0] % 10)))


EXAMPLES = [ReasoningExample(str(i), f"question {i}", (), str(i)) for i in range(len(SIZES))]
QUESTIONS = QuestionSet("five", Rows(), EXAMPLES, DIGIT, range(len(SIZES)), 6, has_text_answers=False)


def requested(subject: InspectedRun, batch: int, monkeypatch: pytest.MonkeyPatch) -> DatasetInspection:
    monkeypatch.setattr(conditions, "NUM_REFERENCE_QUESTIONS", 4)
    return inspect_dataset(subject, QUESTIONS, batch_size=batch)


@pytest.mark.medium
def test_every_question_is_counted_once_whatever_the_batches(
    subject: InspectedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = requested(subject, 5, monkeypatch), requested(subject, 2, monkeypatch)
    assert whole.audit.row.items_by_seed == parts.audit.row.items_by_seed
    assert np.array_equal(whole.chain_word_rates, parts.chain_word_rates, equal_nan=True)
    assert whole.audit.conditions == list(conditions.list_replacements(4))


def test_a_question_alone_says_what_it_says_in_the_set(subject: InspectedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    result = requested(subject, 5, monkeypatch)
    donors = interventions.choose_donors(len(SIZES), 0)
    for i, item in enumerate(result.audit.row.items_by_seed[0]):
        batch = Rows().batch([i], 0, 0)
        rollout = subject.think(batch, record_passes=True)
        theirs = subject.think(Rows().batch([int(donors[i])], 0, 0), record_passes=True)
        build_inputs = interventions.InterventionInputs(rollout, np.array([i]), donor_rollout=theirs)
        plain = subject.answer(batch, rollout).texts[0]
        swapped = interventions.run_intervention(subject, batch, build_inputs, InterventionSpec("swap"))
        assert item.shared["prediction"] == plain
        assert item.conditions["swap vectors"]["prediction"] == subject.answer(batch, swapped).texts[0]
        assert item.conditions["swap vectors"]["donor"] == str(donors[i])
        top = subject.decoder.logits(rollout.hidden_states[0]).argmax(-1).tolist()
        chain = batch.chain_ids[0, batch.chain_mask[0]].tolist()
        if chain:
            assert result.chain_word_rates[i, 0] == share_in_chain(top, chain)
            assert result.chain_word_rates[i, 2] == lcs_ratio(top, chain)
        else:
            assert np.isnan(result.chain_word_rates[i]).all()


def test_chance_is_taken_of_questions_that_have_a_chain() -> None:
    """Of four questions two have a chain: each is held against the other's, whatever the seed."""
    top, chains = [(1, 2), (3, 4), (5, 6), (7, 8)], [(1, 2), (), (5, 1, 2), ()]
    for seed in range(8):
        built = compute_chain_word_rates(top, chains, seed)
        assert built[0].tolist() == [1.0, 1.0, 1.0]
        assert built[2].tolist() == [0.5, 0.0, 1 / 3]
        assert np.isnan(built[[1, 3]]).all()
    one = compute_chain_word_rates([(1, 2), (3, 4)], [(1, 2), ()], 0)
    assert np.isnan(one).all()  # nothing to hold it against
