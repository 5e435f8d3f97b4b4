"""Verdicts of hand-made answers: one for each kind of run, controls, and how often chance alone gives a claim."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laconic.errors import InputError
from laconic.evaluation.inspection.conditions import list_conditions
from laconic.evaluation.inspection.verdict import AS_TRAINED, ThoughtAudit, audit_to_json
from laconic.evaluation.results_store import EvalItem
from tests.evaluation.answers import row

N = 200
NAMES = list(list_conditions(4, 3))


def is_right(share: float) -> np.ndarray:
    """Return answers of which a share is correct, spread over the questions; gold answers are 0 to 4 in turn."""
    return (np.arange(N) * 7919 % N) < share * N


def build_audit(trained: np.ndarray, controls: Sequence[np.ndarray] = (), **changed: Any) -> ThoughtAudit:
    """Return an audit of one seed or several; `changed` has the answers under conditions (spaces as underscores)."""
    by_name = {name.replace("_", " "): np.atleast_2d(right) for name, right in changed.items()}
    trained = np.atleast_2d(trained)
    seeds = tuple(range(len(trained)))
    audited = row("set", "run", trained, seeds=seeds)
    items_by_seed: list[list[EvalItem]] = []
    for seed, answered in enumerate(audited.items_by_seed):
        items: list[EvalItem] = []
        for i, item in enumerate(answered):
            conditions = {AS_TRAINED: item.shared}
            for name in NAMES:
                right = bool(by_name.get(name, trained)[seed][i])
                donor = {"donor": f"q{(i + 1) % N}"} if name.startswith("swap") else {}
                conditions[name] = {"prediction": item.shared["gold"] if right else None, "is_correct": right, **donor}
            items.append(EvalItem(item.id, conditions))
        items_by_seed.append(items)
    others = [row("set", f"control{i}", right) for i, right in enumerate(controls)]
    return ThoughtAudit(replace(audited, items_by_seed=items_by_seed), others)


def test_verdict_of_each_kind_of_run() -> None:
    good, poor, floor = is_right(0.9), is_right(0.3), is_right(0.2)
    audits = {
        "used": build_audit(good, swap_vectors=poor),
        "positions": build_audit(good, swap_cache=poor),
        "presence": build_audit(good, zero_vectors=poor),
        "not shown": build_audit(good, noise_cache=is_right(0.89)),
        "undetermined": build_audit(floor, swap_cache=is_right(0.19)),
    }
    assert {name: audit.verdict.name for name, audit in audits.items()} == {name: name for name in audits}
    assert "falls by 60.0 points" in audits["used"].verdict.text
    assert "from 90.0 % to 30.0 %" in audits["used"].verdict.text
    unchanged = build_audit(np.zeros(N)).verdict
    assert unchanged.name == "not shown"  # no answer changes at all
    assert f"change none of its {N} answers; but the run has learned little: it answers 0.0 %" in unchanged.text


def test_verdict_needs_a_loss_to_say_that_something_is_needed() -> None:
    """A condition that raises accuracy shows that the thoughts do harm. Conditions have the names of the table."""
    good, better = is_right(0.6), is_right(0.8)
    harmful = build_audit(good, first_0=better).verdict
    assert harmful.name == "not shown"
    assert "they make the answers worse (with no thoughts, accuracy rises by 20.0 points" in harmful.text
    both = build_audit(good, first_0=is_right(0.95), zero_vectors=is_right(0.3)).verdict
    assert both.name == "presence"
    assert "(with zeros as vectors, accuracy falls by 30.0 points" in both.text


def test_verdict_of_no_effect_names_the_bound_and_the_detectable_loss() -> None:
    audit = build_audit(is_right(0.9))
    assert f"at most {-100 * audit.swaps[0].change.low:.1f} points" in audit.verdict.text
    assert f"a loss of {100 * audit.detectable_loss:.1f} points" in audit.verdict.text
    assert 0.05 < audit.detectable_loss < 0.08  # 200 questions, 14 tests


def test_verdict_compares_with_controls() -> None:
    same, worse = is_right(0.88), is_right(0.5)
    audit = build_audit(is_right(0.9), (same, worse), swap_vectors=is_right(0.1))
    assert audit.num_tests == len(NAMES) + 2
    assert [c.is_significant for c in audit.comparisons] == [False, True]
    assert audit.verdict.text.endswith("more accurate than control1, not shown to differ in accuracy from control0.")
    alone = build_audit(is_right(0.9), (same,), swap_vectors=is_right(0.1))
    assert "but the run is not shown to differ" in alone.verdict.text
    assert audit_to_json(audit)["controls"][1]["difference"]["mean"] == pytest.approx(0.4)


def test_audit_refuses_a_control_with_other_questions() -> None:
    audit = build_audit(is_right(0.9))
    other = row("set", "other", is_right(0.9)[: N // 2])
    with pytest.raises(InputError, match="different questions"):
        replace(audit, controls=[other])


def test_donor_share_counts_questions_whose_donor_has_another_answer() -> None:
    audit = build_audit(np.ones(N), swap_vectors=np.zeros(N))
    assert audit.donor_share("swap cache") == 0  # every question keeps its answer; donors have the next gold answer
    for item in audit.row.items_by_seed[0]:
        item.conditions["swap cache"]["prediction"] = str((int(item.shared["gold"]) + 1) % 5)  # pyright: ignore
    assert audit.donor_share("swap cache") == 1
    assert audit.donor_share("zero vectors") is None


def test_verdict_of_several_seeds_is_about_seeds() -> None:
    """One seed of three that uses its thoughts does not show that runs of the recipe do."""
    trained = np.stack([is_right(0.9)] * 3)
    one, all_three = trained.copy(), np.stack([is_right(0.3)] * 3)
    one[0] = is_right(0.3)
    assert build_audit(trained, swap_vectors=all_three).verdict.name == "used"
    assert build_audit(trained, swap_vectors=one).verdict.name != "used"


@pytest.mark.medium
def test_verdict_claims_by_chance_are_rare() -> None:
    """Answers that change at random, as many for the better as for the worse, in every condition."""
    rng, claims, trials = np.random.default_rng(3), 0, 60
    for _ in range(trials):
        levels = rng.uniform(0.3, 0.9, N)  # how likely each question is to be right, whatever the thoughts
        changed: dict[str, Any] = {name.replace(" ", "_"): rng.random(N) < levels for name in NAMES}
        claims += any(is_clear for _, _, is_clear in build_audit(rng.random(N) < levels, **changed).tests)
    assert claims <= 7  # at a rate of 5 %, 8 or more of 60 happen once in a hundred times
