"""How a text is judged: the vectors of the papers' protocols and ours, budgets, and what is refused at load."""

from decimal import Decimal

import pytest

from laconic.core.contract import Example
from laconic.core.errors import BadInput, Usage
from laconic.evaluation.protocols import (
    COCONUT,
    CODI,
    DIGIT,
    PROTOCOLS,
    TEXT,
    budget,
    check_format,
    check_gold,
    decimal,
    own,
    pccot,
    same,
)

NUMBERS: list[tuple[str, float | None, str | None]] = [
    ("18", 18, "18"),
    ("18.", 18, "18"),
    ("18.0", 18, "18"),
    ("The answer is: 1,234", 1234, "1234"),
    ("$1,234.50", 1234.5, "1234.50"),
    ("16-3", -3, "-3"),
    ("3/4", 4, "4"),
    ("50%", 50, "50"),
    (".5", 5, "0.5"),
    ("1e5", 5, "100000"),
    ("−5", 5, "-5"),
    ("2 000", 0, "0"),
    ("18, not 20", 20, "20"),
    ("seven", None, None),
    ("", None, None),
    ("it costs -$7", 7, "-7"),
    ("$−7.25 a day", 7.25, "-7.25"),
    ("2.0107e-06", -6, "0.0000020107"),
    ("1,2,3", 123, "3"),
]


@pytest.mark.parametrize(("text", "codi", "ours"), NUMBERS)
def test_the_last_number_by_codi_and_by_decimal(text: str, codi: float | None, ours: str | None) -> None:
    found, exact = CODI.predict(text), decimal().predict(text)
    assert (None if found is None else float(found)) == codi
    assert (None if exact is None else Decimal(exact)) == (None if ours is None else Decimal(ours))


@pytest.mark.parametrize(
    ("protocol", "text", "gold", "right"),
    [
        ("pccot", "18", "18", True),
        ("pccot", " 18", "18", False),
        ("pccot", "18.", "18", False),
        ("pccot", "18.0", "18", False),
        ("pccot", "<<9*2=18>>The answer is:18", "18", True),
        ("pccot", "The answer is:17The answer is:18", "18", True),
        ("pccot", "", "18", False),
        ("coconut", "<<1000+234=1234>>\n### 1,234", "1234", True),
        ("coconut", "<<1000+234=1234>>\n### 1,234", "1,234", True),
        ("coconut", "### 1234.0", "1234", False),
        ("coconut", "1234", "1234", False),
        ("coconut", "### 17\n### 18\n", "18", True),
        ("codi", "18.0", "18", True),
        ("codi", "none at all", "18", False),
        ("codi", "1,234", "1,234", True),
        ("codi", "9" * 400, "18", False),
        ("codi", "-6", "2.0107e-06", False),  # the gold answer is read whole
        ("decimal", "18.0009", "18", True),
        ("decimal", "18.0011", "18", False),
        ("decimal", "0.30", "0.3", True),
        ("decimal", "1e999999999", "18", False),
        ("decimal", "50", "50%", True),
        ("text", "The answer is: yes ", "yes", True),
        ("text", "Yes", "yes", False),
    ],
)
def test_right_and_wrong(protocol: str, text: str, gold: str, right: bool) -> None:
    judge = PROTOCOLS[protocol]
    assert judge.gold(gold)
    prediction = judge.predict(text)
    assert (prediction is not None and judge.right(prediction, gold)) is right


def test_the_tolerance_of_decimals_is_part_of_its_name() -> None:
    exact = decimal(Decimal(0))
    assert (decimal().name, exact.name) == ("decimal", "decimal, tolerance 0")
    assert not exact.right("18.0001", "18")
    assert exact.right("18.000", "18")
    assert decimal(Decimal("0.1")).right("18.1", "18")
    with pytest.raises(Usage, match="tolerance -1: give 0 or a positive number"):
        decimal(Decimal(-1))


def test_a_gold_answer_that_cannot_be_judged_is_an_error_at_load() -> None:
    """In public code a gold answer and a prediction that do not parse are both infinity, and so count as right."""
    for protocol, gold, fits in (
        ("codi", "Sally is a terpus.", "pccot or coconut or text"),
        ("codi", "7 8 0 3", "pccot or coconut or text"),
        ("codi", "inf", "pccot or coconut or text"),
        ("decimal", "3/4", "pccot or coconut or text"),
        ("decimal", "1e9999999999999999999999", "pccot or coconut or text"),
        ("text", "5:45", "pccot or coconut"),
        ("coconut", "#", "pccot or text"),
    ):
        rows = [Example("r1", "q", (), "18"), Example("r2", "q", (), gold)]
        with pytest.raises(BadInput, match=f"own.jsonl: the answer of r2 is '{gold}', protocol {protocol} asks for"):
            check_gold(PROTOCOLS[protocol], rows, "own.jsonl")
        with pytest.raises(BadInput, match=f"choose --protocol {fits}$"):
            check_gold(PROTOCOLS[protocol], rows, "own.jsonl")
    assert not CODI.right("inf", "inf")
    assert not CODI.right("6", "seven")
    check_gold(CODI, [Example("r1", "q", (), "-1,234.5")], "own.jsonl")


def test_a_protocol_that_cannot_read_a_format_is_refused() -> None:
    with pytest.raises(Usage, match="--protocol pccot: runs/x writes answers in format coconut; judge them by codi"):
        check_format(pccot(), "coconut", "runs/x")
    with pytest.raises(Usage, match="--protocol coconut: runs/x writes answers in format pccot"):
        check_format(COCONUT, "pccot", "runs/x")
    for format in ("pccot", "codi", "coconut", "icot", "digits"):
        check_format(CODI, format, "x")
        check_format(own(format, words=False), format, "x")


def test_budgets_are_the_papers() -> None:
    def tokens(name: str, format: str, chain: bool = False, words: bool = False) -> int:
        return budget(PROTOCOLS[name], format, chain=chain, words=words)

    assert [tokens("codi", "pccot"), tokens("codi-sampled", "codi"), tokens("codi", "pccot", True)] == [256, 256, 256]
    assert [tokens("pccot", "pccot"), tokens("pccot", "pccot", True)] == [10, 256]
    assert [tokens("coconut", "coconut"), tokens("coconut", "coconut", words=True)] == [64, 128]
    assert [tokens("decimal", f) for f in ("pccot", "codi", "coconut", "icot", "digits")] == [10, 256, 64, 800, 96]
    assert [tokens("coconut", "icot", chain, words) for chain in (True, False) for words in (True, False)] == [800] * 4
    assert [tokens("text", "pccot", words=True), tokens("text", "pccot", True, True)] == [128, 256]
    assert budget(DIGIT, "digits", chain=True, words=False) == 96


def test_each_format_has_a_protocol_of_its_own() -> None:
    names = [own(format, words=False).name for format in ("pccot", "codi", "coconut", "icot", "digits")]
    assert names == ["pccot", "codi", "coconut", "coconut", "last digit"]
    assert [own(format, words=True) for format in ("pccot", "codi", "icot")] == [TEXT, TEXT, COCONUT]


def test_questions_as_codi_puts_them_and_its_sampling() -> None:
    assert CODI.question(" Two  balls?\n") == "Two balls?"
    assert pccot().question(" Two  balls?\n") == " Two  balls?\n"
    drawn = PROTOCOLS["codi-sampled"]
    assert (drawn.sampling.temperature, drawn.sampling.top_k, drawn.sampling.top_p) == (0.1, 40, 0.95)
    assert drawn.name != CODI.name
    assert CODI.sampling.temperature == 0


def test_figures_of_two_protocols_do_not_go_into_one_column() -> None:
    assert same(["codi", "codi"]) == "codi"
    with pytest.raises(Usage, match="figures of the protocols codi and pccot do not go into one column"):
        same(["pccot", "codi"])
