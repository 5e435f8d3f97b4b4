"""One question looked into: thought once, every intervention that is possible, and what is kept for each slot."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.evaluation.inspection.inspected_run import InspectedRun, SelectorChoice
from laconic.evaluation.inspection.interventions import list_interventions
from laconic.evaluation.inspection.kv_selection import best_token_per_slot
from laconic.evaluation.inspection.question import inspect_question
from laconic.latent.rkv import SelectedColumns
from tests.evaluation.test_inspect_dataset import Rows, subject

__all__ = ["subject"]  # the fixture


def test_a_question_is_thought_about_once(subject: InspectedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, think = list[bool](), type(subject).think

    def count(run: Any, questions: Any, intervention: Any = None, record_passes: bool = False) -> Any:
        calls.append(intervention is None)
        return think(run, questions, intervention, record_passes)

    monkeypatch.setattr(type(subject), "think", count)
    result = inspect_question(subject, Rows().batch([0], 0, 0))
    assert calls == [True, *[False] * 3]  # interventions on vectors think again
    assert len(result.lens.passes) == 3
    (selection,) = (selection for selection in result.selections if selection.policy == result.policy)
    assert selection.mask.sum(-1).tolist() == [[4, 4]] * 2
    assert len(result.best_tokens) == 4


@pytest.mark.parametrize("has_others", [True, False])
def test_every_possible_intervention_is_made_and_reported(subject: InspectedRun, has_others: bool) -> None:
    reports = list[tuple[str, int, int]]()
    result = inspect_question(
        subject, Rows().batch([0], 0, 0), Rows() if has_others else None, progress=lambda *x: reports.append(x)
    )
    assert [done for _, done, _ in reports] == list(range(len(reports)))
    assert all(len(reports) <= total for _, _, total in reports[1:])
    possible = [x for x in list_interventions(4) if has_others or x.kind not in ("mean", "swap")]
    assert [item[:2] for item in result.effects] == possible


def test_what_most_heads_keep_for_a_slot_stands_for_it() -> None:
    """Two layers of two heads and two slots; the second slot of one head has no token."""
    selected: Any = tuple(
        SelectedColumns(torch.tensor([index]), torch.tensor([live]))
        for index, live in (
            ([[0, 2], [1, 2]], [[True, True], [True, True]]),
            ([[1, 1], [1, 0]], [[True, True], [True, False]]),
        )
    )
    left: Any = SimpleNamespace(choices={"rkv": SelectorChoice(selected, ())}, policy="rkv", matched_layers=(0, 1))
    assert best_token_per_slot(left, "abc") == (("b", 0.75), ("c", pytest.approx(2 / 3)))
    none: Any = SelectedColumns(torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(1, 1, 1) > 0)
    left.choices, left.matched_layers = {"rkv": SelectorChoice((none,), ())}, (0,)
    assert best_token_per_slot(left, "abc") == (("–", 0.0),)
