"""What inspection says and shows: figures by hand, pages of real size, of runs without a teacher, of hostile text."""

import json
from dataclasses import replace

import numpy as np
import pytest

from laconic.evaluation import findings, inspected
from laconic.evaluation.edits import Intervention
from laconic.evaluation.findings import Question, Questions
from laconic.evaluation.inspect import Guess, Inspection
from laconic.evaluation.looked import Effect, Looked, Scores
from laconic.evaluation.protocols import CODI, DIGIT
from laconic.evaluation.selected import Selection
from laconic.evaluation.similarity import SPACES, Map
from laconic.evaluation.survey import Answered, Survey
from tests.evaluation.test_report import LARGEST, Page, outside

HOSTILE = '<script src="https://a.b/c.js"></script><img src=x onerror=1>'
SELECTORS = ("rkv", "cosine", "attention", "crop", "uniform", "random")
ZERO, SWAP = Intervention("zero"), Intervention("swap", "vectors", (1,))


def looked(layers: int, heads: int, M: int, N: int, name: str = "run") -> Looked:
    """A run on a question with a chain of N tokens."""
    chain = tuple(f"t{i}" for i in range(N))
    guesses = (Guess(chain[0], 0.9), Guess("&", 0.1))
    words = Inspection(("q",), chain, "7", ((guesses,) * (M + 1),) * 3)
    across = {"chain": N, "kept": min(M, N)}
    maps = [
        Map(what, against, ((0.5,) * n,) * M, ((tuple(i / n for i in range(n)),) * M,) * layers, 0.125, 0.75)
        for against, n in across.items()
        for what in SPACES
    ]
    kept = np.zeros((layers, heads, N), dtype=bool)
    kept[:, :, :M] = True
    scores = (tuple(i / N for i in range(N)),) * (layers * heads)
    return Looked(
        name, "kava", 2, "7", words, tuple(maps), tuple(Selection(how, kept) for how in SELECTORS),
        ("operand",) * N, Scores(scores, scores, scores), "rkv", tuple(range(layers)), True,
        effects=(Effect(ZERO, "8"), Effect(SWAP, "9", "9")), alone=(Effect(ZERO, "7"), Effect(ZERO, "8")),
    )  # fmt: skip


def question(*sides: Looked, text: str = "How many?") -> Question:
    return Question(
        text, "as given", sides[0].words.chain, "7", "t0 7", sides, DIGIT, ("a note",), (("run", "step 3"),)
    )


def survey(name: str, right: list[int], zeroed: list[int], reads: list[list[float]]) -> Survey:
    """Four questions; digits as predictions: the gold one is 1."""
    answered = [Answered([str(x) for x in each], [x == 1 for x in each]) for each in (right, zeroed)]
    return Survey(name, "kava", answered[0], {ZERO: answered[1], SWAP: answered[1]}, {2: answered[0]},
                  np.array([1, 2, 3, 0]), 2, np.array(reads), {}, {}, ())  # fmt: skip


READS = [[0.5, 0.1, 0.2], [0.7, 0.3, 0.4], [np.nan] * 3, [0.1, 0.1, 0.1]]
FIRST = survey("a", [1, 1, 2, 3], [1, 2, 1, 3], READS)
SECOND = survey("b", [2, 1, 1, 1], [2, 1, 1, 1], [[np.nan] * 3] * 4)
SET = Questions("gsm", DIGIT, ("1", 0.5), (FIRST, SECOND), ("a note",))


def test_changes_by_hand() -> None:
    zero, swap = findings.changes(FIRST, None, DIGIT)
    assert (zero.found.mean, zero.change.mean, zero.claim, zero.apart) == (0.5, 0.0, False, None)
    assert swap.donor is not None
    assert swap.donor.questions == 3  # question 1 has its donor's answer anyway
    assert swap.donor.mean == pytest.approx(1 / 3)  # question 2, which is answered 2 now
    other = findings.changes(SECOND, FIRST, DIGIT)[0]
    assert other.apart is not None
    assert (other.change.mean, other.apart.mean) == (0.0, 0.0)


def test_words_of_right_and_wrong_answers() -> None:
    found = findings.words_of(FIRST)
    assert found["right"] == {"questions": 2, "spoken": 0.6, "elsewhere": 0.2, "common": pytest.approx(0.3)}
    assert found["wrong"] == {"questions": 1, "spoken": 0.1, "elsewhere": 0.1, "common": 0.1}
    assert found["all"]["questions"] == 3
    assert findings.words_of(SECOND) == {}


def test_where_little_is_right_an_edit_that_costs_nothing_says_nothing() -> None:
    low, note = findings.limits(SET)[0], findings.limits(SET)[-1]
    assert low.startswith("a is not shown to be above the majority floor (50.0 % right, floor 50.0 %): where little")
    assert note == "a note"
    assert "not shown to be above the majority floor" in inspected.page(SET)
    good = survey("c", [1, 1, 1, 1], [1, 1, 1, 1], READS)
    assert findings.limits(replace(SET, sides=(good,), floor=("1", 0.1))) == ["a note"]


def test_answers_are_held_against_the_one_given() -> None:
    found = question(looked(1, 1, 2, 3))
    assert findings.verdict("7 ", found) == ", right"
    assert findings.verdict("8", found) == ", asked was 7"
    assert findings.verdict("8", replace(found, gold=None)) == ""
    assert findings.verdict("The answer is: 7", replace(found, protocol=CODI)) == ", right"


@pytest.mark.parametrize("found", [question(looked(2, 2, 3, 5), looked(2, 2, 3, 5, "other")), SET])
def test_pages_and_json_hold_the_same_figures(found: Question | Questions) -> None:
    html = inspected.page(found)
    page = Page(html)
    assert not outside(html)
    assert not page.problems
    assert not page.open
    assert inspected.page(found) == html
    assert json.loads(json.dumps(findings.plain(found), allow_nan=False))["notes"][-1] == "a note"
    text = " ".join(page.text.split())
    both = findings.said(found)
    for name in ("run", "other") if isinstance(found, Question) else ("a", "b"):
        assert name in text
        assert name in both
    said = ("diagonal less rest +0.125", "looking ahead 75.0 %", "t0 7", "the donor’s is 9", "7, right", "step 3",
            "one slot alone, in the vectors")  # fmt: skip
    for words in said if isinstance(found, Question) else ("slots 2", "no difference shown", "as trained", "50.0"):
        assert words in text, words


def test_a_page_of_real_size_stays_within_its_bound() -> None:
    """Llama 3.2 1B: 16 layers of 8 heads, 24 thoughts, a chain of 64 tokens; beside another run."""
    found = question(looked(16, 8, 24, 64), looked(16, 8, 24, 64, "other"))
    assert len(inspected.page(found).encode()) <= LARGEST


def test_text_of_others_is_text() -> None:
    side = looked(1, 1, 2, 3, HOSTILE)
    html = inspected.page(question(replace(side, answer=HOSTILE), text=HOSTILE))
    assert not outside(html)
    assert not [tag for tag, _ in Page(html).tags if tag in ("script", "img")]
    assert HOSTILE in Page(html).text
    hostile = replace(SET, name=HOSTILE, sides=(replace(FIRST, name=HOSTILE),))
    assert not outside(inspected.page(hostile))


def test_without_a_teacher_there_are_words_and_edits_alone() -> None:
    words = Inspection(("q",), (), "", (((Guess("7", 1.0),) * 3,),))
    side = Looked("run", "coconut", None, "7", words, effects=(Effect(ZERO, "7"),))
    found = Question("q", "as given", (), None, None, (side,), DIGIT)
    text = " ".join(Page(inspected.page(found)).text.split())
    assert "There is none." in text
    assert "in turn" in text
    assert "What selection keeps" not in text
    assert "Keys and values beside" not in text
    assert "in turn" in findings.said(found)


def test_what_is_kept_whole_is_said_in_words() -> None:
    text = " ".join(Page(inspected.page(question(looked(1, 2, 4, 4)))).text.split())
    assert "Everything: there are as many slots as chain tokens, so nothing is chosen." in text
