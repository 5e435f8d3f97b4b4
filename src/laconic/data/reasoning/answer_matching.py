"""Judge answers by the protocols of the papers, and by ours.

CODI (arXiv:2502.21074), PCCoT (arXiv:2506.18582), Coconut (arXiv:2412.06769) and iCoT (arXiv:2405.14838), each as in
its code. Protocols are not interchangeable: `18.0` is correct under one and wrong under another, so results of two
protocols never share a column.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Context, Decimal, localcontext
from typing import NamedTuple

from laconic.batches import ReasoningExample
from laconic.errors import InputError, UsageError
from laconic.generation.config import GenerationConfig

NUMBER_PATTERN = re.compile(r"-?\d+\.?\d*")
SIGNED_NUMBER = re.compile(r"([-+−]?)\$?([-+−]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)((?:[eE][-+−]?\d+)?)")
ANSWER_PROMPT = "The answer is:"
GREEDY = GenerationConfig()
SAMPLED = GenerationConfig(temperature=0.1, top_k=40, top_p=0.95)
MAX_DIGITS = 1000  # of a number that is compared exactly
MAX_TOLERANCE_DIGITS = 15
DEFAULT_TOLERANCE = Decimal("0.001")
MAX_CHAIN_TOKENS = 256  # a chain with its answer
MAX_TEXT_TOKENS = 128  # an answer that is text
# Tokens of an answer without a chain, by protocol or format. iCoT's is that of its code and also covers its chains:
# those of nine-digit products are longer than MAX_CHAIN_TOKENS.
MAX_ANSWER_TOKENS: Mapping[str, int] = {
    "codi": 256, "pccot": 10, "coconut": 64, "icot": 800, "chat": 256, "digits": 96,
}  # fmt: skip


class AnswerProtocol(NamedTuple):
    """How answers are extracted and judged; no result is printed without its name."""

    name: str  # in tables
    rule: str  # what is compared, for tables
    extract: Callable[[str], str | None]  # return the answer in a generated text, or None
    is_correct: Callable[[str, str], bool]  # compare an extracted answer with the gold answer
    is_valid_gold: Callable[[str], bool] = bool  # whether a gold answer can be judged against
    expected_answer: str = "a text"  # description of a valid gold answer
    formats: tuple[str, ...] = ()  # formats of recipes whose answers can be extracted; empty for all
    format_question: Callable[[str], str] = str  # how a question is put to the model
    sampling: GenerationConfig = GREEDY  # how answers are sampled
    # the same for a text that begins with a chain, where that differs
    extract_from_chain: Callable[[str], str | None] | None = None

    def for_chain(self) -> "AnswerProtocol":
        return self if self.extract_from_chain is None else self._replace(extract=self.extract_from_chain)


def extract_last_digit(text: str) -> str | None:
    digits = re.findall(r"[0-9]", text)
    return digits[-1] if digits else None


def extract_last_number(text: str) -> str | None:
    """Return the last number, ignoring commas (CODI)."""
    numbers = NUMBER_PATTERN.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def parse_gold_float(gold: str) -> float | None:
    """Return a gold answer that is a finite number, ignoring commas, `$` and `%`; else None."""
    number = parse_gold_decimal(gold.replace(",", ""))
    return None if number is None or not math.isfinite(float(number)) else float(number)


def extract_after_hash(text: str) -> str | None:
    """Return the text after the last `#`, without commas; None if there is no `#` (Coconut)."""
    _, separator, answer = text.rpartition("#")
    return remove_commas(answer) if separator else None


def extract_after_hashes(text: str) -> str | None:
    """Return the text after the first `####` and a space, without commas; None without such a mark (iCoT)."""
    answer = text.strip().replace(",", "").partition("####")[2]
    return answer[1:] if answer.startswith(" ") else None


def remove_commas(text: str) -> str:
    return text.replace(",", "").strip()


def extract_last_line(text: str) -> str | None:
    return re.split(r"[:\n]", text.strip())[-1].strip() or None


def extract_last_decimal(text: str) -> str | None:
    """Return the last number; signs (also U+2212), `$`, thousands separators and exponents are read, `%` is not."""
    matches = list(SIGNED_NUMBER.finditer(text))
    return to_decimal_text(matches[-1]) if matches else None


def parse_gold_decimal(gold: str) -> Decimal | None:
    """Return a gold answer that is a number, with or without `%`; else None."""
    match = SIGNED_NUMBER.fullmatch(gold.strip().removesuffix("%").rstrip())
    if match is None:
        return None
    with localcontext(Context(prec=MAX_DIGITS, traps=[])):  # a huge exponent gives infinity, not an error
        number = Decimal(to_decimal_text(match))
    return number if number.is_finite() else None


def to_decimal_text(match: re.Match[str]) -> str:
    """Return the number of a match in the syntax of `Decimal`."""
    before, after, digits, exponent = match.groups()
    return (before + after)[-1:].replace("−", "-") + digits.replace(",", "") + exponent.replace("−", "-")


def is_within_tolerance(tolerance: Decimal, prediction: str, gold: str) -> bool:
    """Return whether prediction and gold differ by at most `tolerance`, in decimals: 0.1 + 0.2 is 0.3."""
    expected = parse_gold_decimal(gold)
    with localcontext(Context(prec=MAX_DIGITS, traps=[])):  # numbers too large to subtract are not close
        return expected is not None and abs(Decimal(prediction) - expected) <= tolerance


def pccot_protocol(prompt: str = ANSWER_PROMPT) -> AnswerProtocol:
    """Return PCCoT's protocol: the generated text as it is, or after a chain the text after the last prompt."""
    return AnswerProtocol(
        name="pccot",
        rule="the whole text of the answer, as in PCCoT's code",
        extract=lambda text: text or None,
        extract_from_chain=lambda text: text.rpartition(prompt)[2] or None if prompt in text else None,
        is_correct=lambda prediction, gold: prediction == gold,
        formats=("pccot",),
    )


def decimal_protocol(tolerance: Decimal = DEFAULT_TOLERANCE) -> AnswerProtocol:
    """Return our protocol for tables across methods; its name includes a tolerance other than the default.

    Raises `UsageError` for a tolerance that is negative, not finite, or has too many digits on one side of the point.
    """
    is_finite = tolerance.is_finite() and tolerance >= 0
    if not is_finite or (tolerance and abs(tolerance.adjusted()) > MAX_TOLERANCE_DIGITS):
        raise UsageError(f"tolerance {tolerance}: must be 0, or a number such as 0.001")
    is_default = tolerance == DEFAULT_TOLERANCE
    return AnswerProtocol(
        name="decimal" if is_default else f"decimal, tolerance {tolerance.normalize():f}",
        rule="the last number of the answer, within the tolerance",
        extract=extract_last_decimal,
        is_correct=lambda prediction, gold: is_within_tolerance(tolerance, prediction, gold),
        is_valid_gold=lambda answer: parse_gold_decimal(answer) is not None,
        expected_answer="a number",
    )


CODI = AnswerProtocol(
    name="codi",
    rule="the last number of the answer, as in CODI's code",
    extract=extract_last_number,
    is_correct=lambda prediction, gold: float(prediction) == parse_gold_float(gold),
    is_valid_gold=lambda answer: parse_gold_float(answer) is not None,
    expected_answer="a number",
    format_question=lambda question: question.strip().replace("  ", " "),  # as in CODI's code
)
COCONUT = AnswerProtocol(
    name="coconut",
    rule="the text after the last #, as in Coconut's code",
    extract=extract_after_hash,
    is_correct=lambda prediction, gold: prediction == remove_commas(gold),
    is_valid_gold=lambda answer: bool(remove_commas(answer)) and "#" not in answer,
    expected_answer="a text without #",
    formats=("coconut", "icot"),
)
ICOT = AnswerProtocol(
    name="icot",
    rule="the text after ####, as in iCoT's code",
    extract=extract_after_hashes,
    is_correct=lambda prediction, gold: prediction == remove_commas(gold),
    is_valid_gold=lambda answer: bool(remove_commas(answer)) and "####" not in answer,
    expected_answer="a text without ####",
    formats=("icot",),
)
TEXT = AnswerProtocol(
    name="text",
    rule="the last line of the answer",
    extract=extract_last_line,
    is_correct=lambda prediction, gold: prediction == gold.strip(),
    is_valid_gold=lambda answer: extract_last_line(answer) == answer.strip(),
    expected_answer="a text without : and line ends",
    formats=("pccot", "codi", "chat", "digits"),
)
DIGIT = AnswerProtocol(
    name="last digit",
    rule="the last digit of the answer",
    extract=extract_last_digit,
    is_correct=lambda prediction, gold: prediction == gold,
    is_valid_gold=lambda answer: bool(re.fullmatch(r"[0-9]", answer)),
    expected_answer="one digit",
)
CODI_SAMPLED = CODI._replace(
    name="codi-sampled", rule="the last number of the answer, sampled as in CODI's code", sampling=SAMPLED
)
PROTOCOLS: Mapping[str, AnswerProtocol] = {
    protocol.name: protocol
    for protocol in (CODI, CODI_SAMPLED, pccot_protocol(), COCONUT, ICOT, decimal_protocol(), TEXT)
}


def describe_protocol(name: str) -> str:
    protocol = PROTOCOLS.get(name.partition(",")[0])
    return name if protocol is None else f"{name} ({protocol.rule})"


def default_protocol(format: str, text_answers: bool) -> AnswerProtocol:
    if format == "digits":
        return DIGIT
    if text_answers and format not in ("coconut", "icot"):  # whose protocols compare texts
        return TEXT
    return PROTOCOLS["codi" if format == "chat" else format]


def max_answer_tokens(protocol: AnswerProtocol, format: str, *, with_chain: bool, text_answers: bool) -> int:
    """Return how many tokens an answer may have: the protocol's number, else that of the format.

    Under Coconut's protocol, answers in iCoT's format have iCoT's number.
    """
    name = protocol.name.partition("-")[0]
    key = format if name not in MAX_ANSWER_TOKENS or (name, format) == ("coconut", "icot") else name
    if key == "coconut":
        return MAX_TEXT_TOKENS if text_answers else MAX_ANSWER_TOKENS[key]
    if key in ("icot", "digits"):
        return MAX_ANSWER_TOKENS[key]
    if with_chain:
        return MAX_CHAIN_TOKENS
    return MAX_TEXT_TOKENS if text_answers and key != "codi" else MAX_ANSWER_TOKENS[key]


def check_format(protocol: AnswerProtocol, format: str, run_name: str) -> None:
    """Raise `UsageError` if answers in the recipe's format could never be correct under the protocol."""
    if protocol.formats and format not in protocol.formats:
        fitting = ", ".join(name for name, p in PROTOCOLS.items() if not p.formats or format in p.formats)
        problem = f"cannot judge {run_name}, which answers in format {format}"
        raise UsageError(f"--protocol {protocol.name} {problem}; use {fitting}")


def check_gold(
    protocol: AnswerProtocol, examples: Iterable[ReasoningExample], name: str, hint: str | None = None
) -> None:
    """Raise `InputError` for the first gold answer that the protocol cannot judge against."""
    for example in examples:
        if not protocol.is_valid_gold(example.answer):
            fitting = [key for key, p in PROTOCOLS.items() if p.is_valid_gold(example.answer)]
            hint = hint or f"use --protocol {' or '.join(fitting)}"
            problem = f"protocol {protocol.name} expects {protocol.expected_answer}, got {example.answer[:40]!r}"
            raise InputError(f"{name}: answer of {example.label}: {problem}; {hint}")


def require_one_protocol(protocols: Sequence[str]) -> str:
    """Return the only protocol of a column of results. Raises `UsageError` if there are several."""
    names = sorted(set(protocols))
    if len(names) != 1:
        raise UsageError(f"results of protocols {' and '.join(names)} cannot share a column; choose one --protocol")
    return names[0]
