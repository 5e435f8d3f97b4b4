"""How a text is judged, and with what budget it is asked for: the papers' ways and ours, each by its name.

CODI arXiv:2502.21074, PCCoT arXiv:2506.18582 and Coconut arXiv:2412.06769, each as its code does it. Protocols are not
interchangeable: `18.0` is right by one and wrong by the other, so their figures are never put into one column.
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
MAX_DIGITS = 1000  # of a number that is compared exactly; no budget of tokens writes more
DEFAULT_TOLERANCE = Decimal("0.001")
MAX_CHAIN_TOKENS = 256  # tokens of a chain with its answer
MAX_TEXT_TOKENS = 128  # tokens of an answer in words
# Tokens of an answer where no chain is written; of formats too, for protocols that leave it to the method. iCoT's is
# that of its code, with a chain or without: products of nine digits have longer chains than CHAIN.
MAX_ANSWER_TOKENS: Mapping[str, int] = {"codi": 256, "pccot": 10, "coconut": 64, "icot": 800, "digits": 96}


class AnswerProtocol(NamedTuple):
    """How a text is judged; no figure is printed without its name. `predict` gives None where there is no answer.

    `gold` says whether an answer can be judged against, which has to be `asks`; `formats` are those of recipes whose
    answers it can read (empty: all); `question` is how a question is put.
    """

    name: str
    extract: Callable[[str], str | None]
    is_correct: Callable[[str, str], bool]
    is_valid_gold: Callable[[str], bool] = bool
    expected_answer: str = "a text"
    formats: tuple[str, ...] = ()
    format_question: Callable[[str], str] = str
    sampling: GenerationConfig = GREEDY


def extract_last_digit(text: str) -> str | None:
    """The last digit of a text."""
    found = re.findall(r"[0-9]", text)
    return found[-1] if found else None


def extract_last_number(text: str) -> str | None:
    """The last number of a text, its commas removed."""
    found = NUMBER_PATTERN.findall(text.replace(",", ""))
    return found[-1] if found else None


def parse_gold_float(gold: str) -> float | None:
    """A gold answer that is a number and nothing else, its commas removed."""
    try:
        found = float(gold.replace(",", ""))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def is_equal_float(prediction: str, gold: str) -> bool:
    """Whether the prediction is the gold number; a gold answer that is none is never right."""
    return float(prediction) == parse_gold_float(gold)


def collapse_double_spaces(question: str) -> str:
    """A question as CODI's code puts it: stripped, double spaces made one."""
    return question.strip().replace("  ", " ")


def extract_after_hash(text: str) -> str | None:
    """What stands behind the last `#` of a text, commas removed; None without one."""
    _, found, answer = text.rpartition("#")
    return remove_commas(answer) if found else None


def remove_commas(text: str) -> str:
    """Without commas, and without white space around."""
    return text.replace(",", "").strip()


def extract_last_line(text: str) -> str | None:
    """What stands behind the last `:` or line end of a text, or all of it."""
    return re.split(r"[:\n]", text.strip())[-1].strip() or None


def extract_last_decimal(text: str) -> str | None:
    """The last number of a text: a sign (U+2212 too), `$`, commas of thousands and an exponent are read, `%` is not."""
    found = list(SIGNED_NUMBER.finditer(text))
    return to_decimal_text(found[-1]) if found else None


def parse_gold_decimal(gold: str) -> Decimal | None:
    """A gold answer that is such a number and nothing else but a `%`."""
    found = SIGNED_NUMBER.fullmatch(gold.strip().removesuffix("%").rstrip())
    if found is None:
        return None
    with localcontext(Context(prec=MAX_DIGITS, traps=[])):  # an exponent beyond all bounds gives no number
        number = Decimal(to_decimal_text(found))
    return number if number.is_finite() else None


def to_decimal_text(found: re.Match[str]) -> str:
    """The number of a match as `Decimal` reads it."""
    before, behind, digits, power = found.groups()
    return (before + behind)[-1:].replace("−", "-") + digits.replace(",", "") + power.replace("−", "-")


def is_within_tolerance(tolerance: Decimal, prediction: str, gold: str) -> bool:
    """Whether prediction and gold differ by `tol` at most, in decimals: 0.1 + 0.2 is 0.3."""
    asked = parse_gold_decimal(gold)
    with localcontext(Context(prec=MAX_DIGITS, traps=[])):  # what is too large to subtract is far away
        return asked is not None and abs(Decimal(prediction) - asked) <= tolerance


def pccot_protocol(prompt: str = ANSWER_PROMPT) -> AnswerProtocol:
    """PCCoT's: the text as it was generated; of a written chain, what stands behind its last prompt."""
    return AnswerProtocol(
        "pccot", lambda text: text.rpartition(prompt)[2] or None, lambda prediction, gold: prediction == gold,
        formats=("pccot",),
    )  # fmt: skip


def decimal_protocol(tolerance: Decimal = DEFAULT_TOLERANCE) -> AnswerProtocol:
    """Ours, for tables across methods; a tolerance other than the usual one is part of its name."""
    if not (tolerance.is_finite() and tolerance >= 0):
        raise UsageError(f"tolerance {tolerance}: give 0 or a positive number")
    name = "decimal" if tolerance == DEFAULT_TOLERANCE else f"decimal, tolerance {tolerance.normalize():f}"
    return AnswerProtocol(
        name, extract_last_decimal, lambda prediction, gold: is_within_tolerance(tolerance, prediction, gold),
        is_valid_gold=lambda answer: parse_gold_decimal(answer) is not None, expected_answer="a number",
    )  # fmt: skip


CODI = AnswerProtocol(
    "codi",
    extract_last_number,
    is_equal_float,
    lambda answer: parse_gold_float(answer) is not None,
    "a number",
    (),
    collapse_double_spaces,
)
COCONUT = AnswerProtocol(
    "coconut", extract_after_hash, lambda prediction, gold: prediction == remove_commas(gold),
    lambda answer: bool(remove_commas(answer)) and "#" not in answer, "a text without #", ("coconut", "icot"),
)  # fmt: skip
TEXT = AnswerProtocol(
    "text", extract_last_line, lambda prediction, gold: prediction == gold.strip(),
    lambda answer: extract_last_line(answer) == answer.strip(), "a text without : and line ends", ("pccot", "codi", "digits"),
)  # fmt: skip
DIGIT = AnswerProtocol(
    "last digit", extract_last_digit, lambda prediction, gold: prediction == gold,
    lambda answer: bool(re.fullmatch(r"[0-9]", answer)), "one digit",
)  # fmt: skip
PROTOCOLS: Mapping[str, AnswerProtocol] = {
    "codi": CODI,
    "codi-sampled": CODI._replace(name="codi-sampled", sampling=SAMPLED),
    "pccot": pccot_protocol(),
    "coconut": COCONUT,
    "decimal": decimal_protocol(),
    "text": TEXT,
}


def default_protocol(format: str, text_answers: bool) -> AnswerProtocol:
    """The protocol that belongs to a format of recipes; `words` where answers are no numbers."""
    if format in ("coconut", "icot"):
        return COCONUT
    if format == "digits":
        return DIGIT
    return TEXT if text_answers else PROTOCOLS[format]


def max_answer_tokens(protocol: AnswerProtocol, format: str, *, with_chain: bool, text_answers: bool) -> int:
    """Tokens an answer may have: the protocol's, else those of the format; of a written `chain`, of `words`.

    iCoT has no protocol of its own and is judged by Coconut's, with its own budget.
    """
    name = protocol.name.partition("-")[0]
    like = format if name not in MAX_ANSWER_TOKENS or (name, format) == ("coconut", "icot") else name
    if like == "coconut":
        return MAX_TEXT_TOKENS if text_answers else MAX_ANSWER_TOKENS[like]
    if like in ("icot", "digits"):
        return MAX_ANSWER_TOKENS[like]
    if with_chain:
        return MAX_CHAIN_TOKENS
    return MAX_TEXT_TOKENS if text_answers and like != "codi" else MAX_ANSWER_TOKENS[like]


def check_format(protocol: AnswerProtocol, format: str, run_name: str) -> None:
    """Raises `Usage` (2) where answers in the format of a recipe could never be right by this protocol."""
    if protocol.formats and format not in protocol.formats:
        fits = ", ".join(name for name, each in PROTOCOLS.items() if not each.formats or format in each.formats)
        raise UsageError(
            f"--protocol {protocol.name}: {run_name} writes answers in format {format}; judge them by {fits}"
        )


def check_gold(
    protocol: AnswerProtocol, examples: Iterable[ReasoningExample], name: str, hint: str | None = None
) -> None:
    """Raises `BadInput` (66) for the first gold answer that this protocol cannot judge against."""
    bad = next((example for example in examples if not protocol.is_valid_gold(example.answer)), None)
    if bad is None:
        return
    fits = [fit for fit, each in PROTOCOLS.items() if each.is_valid_gold(bad.answer)]
    raise InputError(
        f"{name}: the answer of {bad.id} is {bad.answer[:40]!r}, protocol {protocol.name} asks for {protocol.expected_answer}; "
        + (hint or f"choose --protocol {' or '.join(fits)}")
    )


def require_one_protocol(protocols: Sequence[str]) -> str:
    """The one protocol of figures that are to stand in a column. Raises `Usage` (2) for two."""
    names = sorted(set(protocols))
    if len(names) != 1:
        raise UsageError(
            f"figures of the protocols {' and '.join(names)} do not go into one column; choose one --protocol"
        )
    return names[0]
