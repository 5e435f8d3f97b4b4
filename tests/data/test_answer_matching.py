"""Answer protocols: examples from the papers' code and ours, token limits, refused gold answers."""

from decimal import Decimal

import pytest

from laconic.batches import ReasoningExample
from laconic.data.reasoning.answer_matching import (
    COCONUT,
    CODI,
    DIGIT,
    ICOT,
    PROTOCOLS,
    TEXT,
    check_format,
    check_gold,
    decimal_protocol,
    default_protocol,
    max_answer_tokens,
    pccot_protocol,
    require_one_protocol,
)
from laconic.errors import InputError, UsageError

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
def test_extract_last_number_and_decimal(text: str, codi: float | None, ours: str | None) -> None:
    number, exact = CODI.extract(text), decimal_protocol().extract(text)
    assert (None if number is None else float(number)) == codi
    assert (None if exact is None else Decimal(exact)) == (None if ours is None else Decimal(ours))


@pytest.mark.parametrize(
    ("protocol", "text", "gold", "right"),
    [
        ("pccot", "18", "18", True),
        ("pccot", " 18", "18", False),
        ("pccot", "18.", "18", False),
        ("pccot", "18.0", "18", False),
        ("pccot", "The answer is:18", "18", False),  # the prompt was given, so its code compares all that follows
        ("pccot after a chain", "<<9*2=18>>The answer is:18", "18", True),
        ("pccot after a chain", "The answer is:17The answer is:18", "18", True),
        ("pccot after a chain", "<<9*2=18>>18", "18", False),
        ("pccot after a chain", "18", "18", False),  # its code compares question and answer with the gold answer
        ("icot", " #### 18", "18", True),
        ("icot", "<<9*2=18>> #### 1,234\n", "1,234", True),
        ("icot", "### 18", "18", False),
        ("icot", "####18", "18", False),
        ("icot", "##### 18", "18", False),
        ("icot", "####17 #### 18", "18", False),
        ("icot", "#### 17 #### 18", "18", False),
        ("icot", "18", "18", False),
        ("icot", "#### 5 6 0", "5 6 0", True),
        ("pccot", "", "18", False),
        ("coconut", "<<1000+234=1234>>\n### 1,234", "1234", True),
        ("coconut", "<<1000+234=1234>>\n### 1,234", "1,234", True),
        ("coconut", "### 1234.0", "1234", False),
        ("coconut", "1234", "1234", False),
        ("coconut", "### 17\n### 18\n", "18", True),
        ("codi", "18.0", "18", True),
        ("codi", "none at all", "18", False),
        ("codi", "1,234", "1,234", True),
        ("codi", "The answer is: $1,200.", "$1,200", True),
        ("codi", "26%", "26%", True),
        ("codi", "0.26", "26%", False),
        ("codi", "-7", "-$7", True),
        ("codi", "123", "1,2,3", True),
        ("decimal", "1,200 dollars", "$1,200", True),
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
def test_protocols_judge_answers(protocol: str, text: str, gold: str, right: bool) -> None:
    name, _, chain = protocol.partition(" ")
    judge = PROTOCOLS[name].for_chain() if chain else PROTOCOLS[name]
    assert judge.is_valid_gold(gold)
    prediction = judge.extract(text)
    assert (prediction is not None and judge.is_correct(prediction, gold)) is right


def test_decimal_protocol_name_includes_tolerance() -> None:
    exact = decimal_protocol(Decimal(0))
    assert (decimal_protocol().name, exact.name) == ("decimal", "decimal, tolerance 0")
    assert not exact.is_correct("18.0001", "18")
    assert exact.is_correct("18.000", "18")
    assert decimal_protocol(Decimal("0.1")).is_correct("18.1", "18")
    with pytest.raises(UsageError, match="tolerance -1: must be 0, or a number"):
        decimal_protocol(Decimal(-1))


def test_check_gold_refuses_answers_it_cannot_judge() -> None:
    """In public code, an unparsable gold answer and prediction are both infinity and count as equal."""
    for protocol, gold, fits in (
        ("codi", "Sally is a terpus.", "pccot or coconut or icot or text"),
        ("codi", "7 8 0 3", "pccot or coconut or icot or text"),
        ("codi", "inf", "pccot or coconut or icot or text"),
        ("decimal", "3/4", "pccot or coconut or icot or text"),
        ("decimal", "1e9999999999999999999999", "pccot or coconut or icot or text"),
        ("text", "5:45", "pccot or coconut or icot"),
        ("coconut", "#", "pccot or icot or text"),
    ):
        rows = [ReasoningExample("r1", "q", (), "18"), ReasoningExample("r2", "q", (), gold)]
        with pytest.raises(InputError, match=f"own.jsonl: answer of r2: protocol {protocol} expects .* got '{gold}'"):
            check_gold(PROTOCOLS[protocol], rows, "own.jsonl")
        with pytest.raises(InputError, match=f"use --protocol {fits}$"):
            check_gold(PROTOCOLS[protocol], rows, "own.jsonl")
    assert not CODI.is_correct("inf", "inf")
    assert not CODI.is_correct("6", "seven")
    check_gold(CODI, [ReasoningExample("r1", "q", (), "-1,234.5")], "own.jsonl")


def test_check_format_refuses_other_formats() -> None:
    with pytest.raises(UsageError, match=r"--protocol pccot cannot judge runs/x.* coconut; use codi"):
        check_format(pccot_protocol(), "coconut", "runs/x")
    with pytest.raises(UsageError, match=r"--protocol coconut cannot judge runs/x.* pccot"):
        check_format(COCONUT, "pccot", "runs/x")
    for format in ("pccot", "codi", "coconut", "icot", "chat", "digits"):
        check_format(CODI, format, "x")
        for text_answers in (False, True):
            check_format(default_protocol(format, text_answers), format, "x")


def test_max_answer_tokens_are_the_papers() -> None:
    def tokens(name: str, format: str, chain: bool = False, words: bool = False) -> int:
        return max_answer_tokens(PROTOCOLS[name], format, with_chain=chain, text_answers=words)

    assert [tokens("codi", "pccot"), tokens("codi-sampled", "codi"), tokens("codi", "pccot", True)] == [256, 256, 256]
    assert [tokens("pccot", "pccot"), tokens("pccot", "pccot", True)] == [10, 256]
    assert [tokens("coconut", "coconut"), tokens("coconut", "coconut", words=True)] == [64, 128]
    assert [tokens("decimal", f) for f in ("pccot", "codi", "coconut", "icot", "digits")] == [10, 256, 64, 800, 96]
    assert [tokens("coconut", "icot", chain, words) for chain in (True, False) for words in (True, False)] == [800] * 4
    assert [tokens("text", "pccot", words=True), tokens("text", "pccot", True, True)] == [128, 256]
    assert max_answer_tokens(DIGIT, "digits", with_chain=True, text_answers=False) == 96


def test_default_protocol_of_each_format() -> None:
    names = [
        default_protocol(format, text_answers=False).name for format in ("pccot", "codi", "coconut", "icot", "digits")
    ]
    assert names == ["pccot", "codi", "coconut", "icot", "last digit"]
    assert [default_protocol(format, text_answers=True) for format in ("pccot", "codi", "icot")] == [
        TEXT,
        TEXT,
        ICOT,
    ]


def test_codi_question_format_and_sampling() -> None:
    assert CODI.format_question(" Two  balls?\n") == "Two balls?"
    assert pccot_protocol().format_question(" Two  balls?\n") == " Two  balls?\n"
    sampled = PROTOCOLS["codi-sampled"]
    assert (sampled.sampling.temperature, sampled.sampling.top_k, sampled.sampling.top_p) == (0.1, 40, 0.95)
    assert sampled.name != CODI.name
    assert CODI.sampling.temperature == 0


def test_require_one_protocol_refuses_two() -> None:
    assert require_one_protocol(["codi", "codi"]) == "codi"
    with pytest.raises(UsageError, match="protocols codi and pccot cannot share a column"):
        require_one_protocol(["pccot", "codi"])
