"""What inspection says and shows: figures by hand, pages of real size, of runs without a teacher, of hostile text."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup

from laconic.data.reasoning.answer_matching import CODI, DIGIT
from laconic.evaluation.inspection import dataset
from laconic.evaluation.inspection import page as inspection_page
from laconic.evaluation.inspection.chain_comparison import KV_SPACES, ChainComparison, SimilarityMap
from laconic.evaluation.inspection.dataset import DatasetInspection, DatasetSummary
from laconic.evaluation.inspection.logit_lens import LogitLens, TokenGuess
from laconic.evaluation.inspection.question import (
    ChangedAnswer,
    QuestionInspection,
    QuestionSummary,
    correctness_suffix,
    format_inspection,
    question_to_json,
)
from laconic.evaluation.inspection.verdict import AS_TRAINED, ThoughtAudit
from laconic.evaluation.reasoning.evaluate import AnswerRecord
from laconic.evaluation.reasoning.table import ReasoningRow
from laconic.evaluation.report import plots
from laconic.evaluation.results_store import EvalItem
from tests.conftest import needs
from tests.evaluation.answers import PASSES
from tests.evaluation.pages import ParsedPage, check_page, leave_out_images

HOSTILE = '<script src="https://a.b/c.js"></script><img src=x onerror=1>'
SELECTORS = ("rkv", "cosine", "attention", "crop", "uniform", "random")


def build_inspection(layers: int, heads: int, M: int, N: int, name: str = "run") -> QuestionInspection:
    """A run on a question with a chain of N tokens."""
    chain = tuple(f"t{i}" for i in range(N))
    guesses = (TokenGuess(chain[0], 0.9), TokenGuess("&", 0.1))
    words = LogitLens(("q",), chain, ((guesses,) * (M + 1),) * 3)
    across = {"chain": N, "selected": min(M, N)}
    maps = [
        SimilarityMap(what, against, ((0.5,) * n,) * M, ((tuple(i / n for i in range(n)),) * M,) * layers, 0.125, 0.75)
        for against, n in across.items()
        for what in KV_SPACES
    ]
    selected = np.zeros((layers, heads, N), dtype=bool)
    selected[:, :, :M] = True
    scores = (tuple(i / N for i in range(N)),) * (layers * heads)
    comparison = ChainComparison(
        tuple(maps),
        dict.fromkeys(SELECTORS, selected),
        ("operand",) * N,
        (scores,) * 3,
        "rkv",
        tuple(range(layers)),
        True,
    )
    return QuestionInspection(
        name,
        "kava",
        2,
        "7",
        words,
        comparison,
        effects=(ChangedAnswer("zero", "vectors", "8\n9"), ChangedAnswer("swap", "vectors", "9", "9")),
    )


def question(*sides: QuestionInspection, text: str = "How many?") -> QuestionSummary:
    return QuestionSummary(text, "as given", "7", "t0 7", sides, DIGIT, ("a note",), (("run", "step 3"),))


def survey(
    name: str, right: list[int], zeroed: list[int], reads: list[list[float]], gold: str = "1123"
) -> DatasetInspection:
    """Four questions; digits as predictions: 1 counts as correct."""
    items: list[EvalItem] = []
    for i, (x, y, answer) in enumerate(zip(right, zeroed, gold, strict=True)):
        trained = AnswerRecord("", answer, "", str(x), x == 1, PASSES._asdict(), (50, 60))._asdict()
        changed = {"prediction": str(y), "is_correct": y == 1, "donor": str((i + 1) % 4)}
        names = ("zero vectors", "swap vectors", "swap cache")
        items.append(EvalItem(str(i), {AS_TRAINED: trained, **dict.fromkeys(names, changed)}))
    audit = ThoughtAudit(ReasoningRow("gsm", name, "", (0,), [items], "digit"))
    return DatasetInspection(name, "kava", audit, {2: audit.row.accuracy}, 2, np.array(reads))


READS = [[0.5, 0.1, 0.2], [0.7, 0.3, 0.4], [np.nan] * 3, [0.1, 0.1, 0.1]]
FIRST = survey("a", [1, 1, 2, 3], [1, 2, 1, 3], READS)
SECOND = survey("b", [2, 1, 1, 1], [2, 1, 1, 1], [[np.nan] * 3] * 4)
SET = DatasetSummary((FIRST, SECOND), ("a note",))


def test_effects_by_hand() -> None:
    zero, swap, _ = FIRST.audit.effects
    assert (zero.accuracy.mean, zero.change.mean, zero.is_significant, zero.donor_share) == (0.5, 0.0, False, None)
    assert swap.donor_share == pytest.approx(1 / 3)  # question 1 has its donor's answer anyway; 2 is answered 2 now
    assert [x.mean for x in dataset.subtract_effects(SECOND, FIRST)] == [0.0] * 3
    rows = dataset.effects_table(SET).rows
    assert [row[-1] for row in rows[:4]] == [""] * 4
    assert rows[5][-1].startswith("+0.0 (")


def test_chain_word_rates_of_correct_and_wrong_answers() -> None:
    result = dataset.chain_word_rates(FIRST)
    assert result["correct"] == (2, 0.6, 0.2, pytest.approx(0.3))
    assert result["wrong"] == (1, 0.1, 0.1, 0.1)
    assert result["all"].questions == 3
    assert dataset.chain_word_rates(SECOND) == {}


def test_list_caveats_names_runs_at_the_majority_baseline() -> None:
    low, note = dataset.list_caveats(SET)[0], dataset.list_caveats(SET)[-1]
    assert low.startswith("a is not shown to be above the majority baseline (50.0 %")
    assert note == "a note"
    assert "not shown to be above the majority baseline" in inspection_page.render_inspection_page(SET)
    good = survey("c", [1, 1, 1, 1], [1, 1, 1, 1], READS, gold="1234")
    assert dataset.list_caveats(replace(SET, runs=(good,))) == ["a note"]


def test_correctness_suffix() -> None:
    result = question(build_inspection(1, 1, 2, 3))
    assert correctness_suffix("7 ", result) == ", correct"
    assert correctness_suffix("8", result) == ", expected 7"
    assert correctness_suffix("8", replace(result, gold=None)) == ""
    assert correctness_suffix("The answer is: 7", replace(result, protocol=CODI)) == ", correct"


@pytest.mark.medium
@pytest.mark.parametrize("result", [question(build_inspection(2, 2, 3, 5), build_inspection(2, 2, 3, 5, "other")), SET])
def test_render_inspection_page_text_and_json_agree(
    result: QuestionSummary | DatasetSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out_images(monkeypatch)
    html = inspection_page.render_inspection_page(result)
    page = check_page(html)
    assert inspection_page.render_inspection_page(result) == html
    text = page.words
    if isinstance(result, QuestionSummary):
        data, both = question_to_json(result), format_inspection(result)
        assert "zero in vectors: 8 9\n" in both
    else:
        data, both = dataset.dataset_to_json(result), str(dataset.dataset_tables(result))
    assert json.loads(json.dumps(data, allow_nan=False))["notes"][-1] == "a note"
    for name in ("run", "other") if isinstance(result, QuestionSummary) else ("a", "b"):
        assert name in text
        assert name in both
    output = (
        "diagonal contrast +0.125", "diagonal contrast: mean", "look-ahead 75.0 %", "t0 7", "donor: 9", "7, correct",
        "step 3",
    )  # fmt: skip
    for words in (
        output if isinstance(result, QuestionSummary) else ("another question's thoughts", "as trained", "50.0")
    ):
        assert words in text, words


def test_plot_heat_maps_has_room_for_a_title_longer_than_the_map() -> None:
    needs("matplotlib")
    widths = [
        int(re.findall(r'width="(\d+)"', plots.plot_heat_maps([(title, [[1.0]])], ["1"], ["1"], "one cell"))[0])
        for title in ("", "kava/seed-0, not distilled")
    ]
    assert widths[1] - widths[0] > 5 * len("kava/seed-0, not distilled")  # pixels of a letter


@pytest.mark.medium
def test_render_inspection_page_of_real_size_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3.2 1B: 16 layers of 8 heads, 24 thoughts, a chain of 64 tokens; beside another run."""
    images: dict[str, Markup] = {}

    def draw_once(panels: Any, rows: Any, columns: Any, alt_text: str, **options: Any) -> Markup:
        """Most maps of the page differ only in their alternative texts, and drawing takes seconds."""
        key = repr((panels, rows, columns, options))
        if key not in images:
            images[key] = plots.plot_heat_maps(panels, rows, columns, "?", **options)
        return images[key].replace('alt="?"', Markup('alt="{}"').format(alt_text))

    monkeypatch.setattr(inspection_page, "plot_heat_maps", draw_once)
    result = question(build_inspection(16, 8, 24, 64), build_inspection(16, 8, 24, 64, "other"))
    check_page(inspection_page.render_inspection_page(result))


def test_render_inspection_page_escapes_hostile_text() -> None:
    side = build_inspection(1, 1, 2, 3, HOSTILE)
    html = inspection_page.render_inspection_page(question(replace(side, answer=HOSTILE), text=HOSTILE))
    page = check_page(html)
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert not [attributes for tag, attributes in page.tags if tag == "img" and attributes.get("src") == "x"]
    assert HOSTILE in page.text
    hostile = replace(SET, runs=(replace(FIRST, name=HOSTILE),), notes=(HOSTILE,))
    check_page(inspection_page.render_inspection_page(hostile))


def test_render_inspection_page_of_runs_with_different_numbers_of_latents() -> None:
    runs = build_inspection(1, 1, 2, 5), build_inspection(1, 1, 4, 5, "other")
    page = check_page(inspection_page.render_inspection_page(question(*runs)))
    assert "other: diagonal contrast" in page.words


def test_render_inspection_page_without_a_teacher() -> None:
    words = LogitLens(("q",), (), (((TokenGuess("7", 1.0),) * 3,),))
    side = QuestionInspection("run", "coconut", None, "7", words, effects=(ChangedAnswer("zero", "vectors", "7"),))
    result = QuestionSummary("q", "as given", None, None, (side,), DIGIT)
    text = ParsedPage(inspection_page.render_inspection_page(result)).words
    assert "as given: none" in text
    assert "sequential" in text
    assert "Tokens selected" not in text
    assert "Similarity to" not in text
    assert "sequential" in format_inspection(result)


@pytest.mark.medium
def test_render_inspection_page_says_where_all_tokens_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_images(monkeypatch)
    text = ParsedPage(inspection_page.render_inspection_page(question(build_inspection(1, 2, 4, 4)))).words
    assert "as many latents as chain tokens" in text
