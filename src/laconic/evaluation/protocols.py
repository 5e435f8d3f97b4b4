"""How a text is judged, and with what budget it is asked for: the papers' ways and ours, each by its name.

CODI arXiv:2502.21074, PCCoT arXiv:2506.18582 and Coconut arXiv:2412.06769, each as its code does it. Protocols are not
interchangeable: `18.0` is right by one and wrong by the other, so their figures are never put into one column.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Context, Decimal, localcontext
from typing import NamedTuple

from laconic.core.contract import Example
from laconic.core.errors import BadInput, Usage
from laconic.core.sampling import Sampling

NUMBER = re.compile(r"-?\d+\.?\d*")
SIGNED = re.compile(r"([-+−]?)\$?([-+−]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)((?:[eE][-+−]?\d+)?)")
PROMPT = "The answer is:"
GREEDY, DRAWN = Sampling(), Sampling(temperature=0.1, top_k=40, top_p=0.95)
DIGITS = 1000  # of a number that is compared exactly; no budget of tokens writes more
TOL = Decimal("0.001")
CHAIN = 256  # tokens of a chain with its answer
WORDS = 128  # tokens of an answer in words
# Tokens of an answer where no chain is written; of formats too, for protocols that leave it to the method. iCoT's is
# that of its code, with a chain or without: products of nine digits have longer chains than CHAIN.
TOKENS: Mapping[str, int] = {"codi": 256, "pccot": 10, "coconut": 64, "icot": 800, "digits": 96}


class Protocol(NamedTuple):
    """How a text is judged; no figure is printed without its name. `predict` gives None where there is no answer.

    `gold` says whether an answer can be judged against, which has to be `asks`; `formats` are those of recipes whose
    answers it can read (empty: all); `question` is how a question is put.
    """

    name: str
    predict: Callable[[str], str | None]
    right: Callable[[str, str], bool]
    gold: Callable[[str], bool] = bool
    asks: str = "a text"
    formats: tuple[str, ...] = ()
    question: Callable[[str], str] = str
    sampling: Sampling = GREEDY


def last_digit(text: str) -> str | None:
    """The last digit of a text."""
    found = re.findall(r"[0-9]", text)
    return found[-1] if found else None


def last_number(text: str) -> str | None:
    """The last number of a text, its commas removed."""
    found = NUMBER.findall(text.replace(",", ""))
    return found[-1] if found else None


def whole_number(gold: str) -> float | None:
    """A gold answer that is a number and nothing else, its commas removed."""
    try:
        found = float(gold.replace(",", ""))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def equal_floats(prediction: str, gold: str) -> bool:
    """Whether the prediction is the gold number; a gold answer that is none is never right."""
    return float(prediction) == whole_number(gold)


def once_spaced(question: str) -> str:
    """A question as CODI's code puts it: stripped, double spaces made one."""
    return question.strip().replace("  ", " ")


def after_hash(text: str) -> str | None:
    """What stands behind the last `#` of a text, commas removed; None without one."""
    _, found, answer = text.rpartition("#")
    return cleaned(answer) if found else None


def cleaned(text: str) -> str:
    """Without commas, and without white space around."""
    return text.replace(",", "").strip()


def last_line(text: str) -> str | None:
    """What stands behind the last `:` or line end of a text, or all of it."""
    return re.split(r"[:\n]", text.strip())[-1].strip() or None


def last_decimal(text: str) -> str | None:
    """The last number of a text: a sign (U+2212 too), `$`, commas of thousands and an exponent are read, `%` is not."""
    found = list(SIGNED.finditer(text))
    return written(found[-1]) if found else None


def whole_decimal(gold: str) -> Decimal | None:
    """A gold answer that is such a number and nothing else but a `%`."""
    found = SIGNED.fullmatch(gold.strip().removesuffix("%").rstrip())
    if found is None:
        return None
    with localcontext(Context(prec=DIGITS, traps=[])):  # an exponent beyond all bounds gives no number
        number = Decimal(written(found))
    return number if number.is_finite() else None


def written(found: re.Match[str]) -> str:
    """The number of a match as `Decimal` reads it."""
    before, behind, digits, power = found.groups()
    return (before + behind)[-1:].replace("−", "-") + digits.replace(",", "") + power.replace("−", "-")


def within(tol: Decimal, prediction: str, gold: str) -> bool:
    """Whether prediction and gold differ by `tol` at most, in decimals: 0.1 + 0.2 is 0.3."""
    asked = whole_decimal(gold)
    with localcontext(Context(prec=DIGITS, traps=[])):  # what is too large to subtract is far away
        return asked is not None and abs(Decimal(prediction) - asked) <= tol


def pccot(prompt: str = PROMPT) -> Protocol:
    """PCCoT's: the text as it was generated; of a written chain, what stands behind its last prompt."""
    return Protocol(
        "pccot", lambda text: text.rpartition(prompt)[2] or None, lambda prediction, gold: prediction == gold,
        formats=("pccot",),
    )  # fmt: skip


def decimal(tol: Decimal = TOL) -> Protocol:
    """Ours, for tables across methods; a tolerance other than the usual one is part of its name."""
    if not (tol.is_finite() and tol >= 0):
        raise Usage(f"tolerance {tol}: give 0 or a positive number")
    name = "decimal" if tol == TOL else f"decimal, tolerance {tol.normalize():f}"
    return Protocol(
        name, last_decimal, lambda prediction, gold: within(tol, prediction, gold),
        gold=lambda answer: whole_decimal(answer) is not None, asks="a number",
    )  # fmt: skip


CODI = Protocol(
    "codi", last_number, equal_floats, lambda answer: whole_number(answer) is not None, "a number", (), once_spaced
)
COCONUT = Protocol(
    "coconut", after_hash, lambda prediction, gold: prediction == cleaned(gold),
    lambda answer: bool(cleaned(answer)) and "#" not in answer, "a text without #", ("coconut", "icot"),
)  # fmt: skip
TEXT = Protocol(
    "text", last_line, lambda prediction, gold: prediction == gold.strip(),
    lambda answer: last_line(answer) == answer.strip(), "a text without : and line ends", ("pccot", "codi", "digits"),
)  # fmt: skip
DIGIT = Protocol(
    "last digit", last_digit, lambda prediction, gold: prediction == gold,
    lambda answer: bool(re.fullmatch(r"[0-9]", answer)), "one digit",
)  # fmt: skip
PROTOCOLS: Mapping[str, Protocol] = {
    "codi": CODI,
    "codi-sampled": CODI._replace(name="codi-sampled", sampling=DRAWN),
    "pccot": pccot(),
    "coconut": COCONUT,
    "decimal": decimal(),
    "text": TEXT,
}


def own(format: str, words: bool) -> Protocol:
    """The protocol that belongs to a format of recipes; `words` where answers are no numbers."""
    if format in ("coconut", "icot"):
        return COCONUT
    if format == "digits":
        return DIGIT
    return TEXT if words else PROTOCOLS[format]


def budget(protocol: Protocol, format: str, *, chain: bool, words: bool) -> int:
    """Tokens an answer may have: the protocol's, else those of the format; of a written `chain`, of `words`.

    iCoT has no protocol of its own and is judged by Coconut's, with its own budget.
    """
    name = protocol.name.partition("-")[0]
    like = format if name not in TOKENS or (name, format) == ("coconut", "icot") else name
    if like == "coconut":
        return WORDS if words else TOKENS[like]
    if like in ("icot", "digits"):
        return TOKENS[like]
    if chain:
        return CHAIN
    return WORDS if words and like != "codi" else TOKENS[like]


def check_format(protocol: Protocol, format: str, run: str) -> None:
    """Raises `Usage` (2) where answers in the format of a recipe could never be right by this protocol."""
    if protocol.formats and format not in protocol.formats:
        fits = ", ".join(name for name, each in PROTOCOLS.items() if not each.formats or format in each.formats)
        raise Usage(f"--protocol {protocol.name}: {run} writes answers in format {format}; judge them by {fits}")


def check_gold(protocol: Protocol, examples: Iterable[Example], name: str, advice: str | None = None) -> None:
    """Raises `BadInput` (66) for the first gold answer that this protocol cannot judge against."""
    bad = next((example for example in examples if not protocol.gold(example.answer)), None)
    if bad is None:
        return
    fits = [fit for fit, each in PROTOCOLS.items() if each.gold(bad.answer)]
    raise BadInput(
        f"{name}: the answer of {bad.id} is {bad.answer[:40]!r}, protocol {protocol.name} asks for {protocol.asks}; "
        + (advice or f"choose --protocol {' or '.join(fits)}")
    )


def same(protocols: Sequence[str]) -> str:
    """The one protocol of figures that are to stand in a column. Raises `Usage` (2) for two."""
    names = sorted(set(protocols))
    if len(names) != 1:
        raise Usage(f"figures of the protocols {' and '.join(names)} do not go into one column; choose one --protocol")
    return names[0]
