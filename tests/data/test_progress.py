"""Encoding says how far it is."""

from laconic.core.contract import Example
from laconic.data.reasoning import Questions
from laconic.data.settings import Data
from laconic.data.synthetic import digits_tokenizer


def test_every_thousand_rows_are_told() -> None:
    rows = [Example(str(i), "3 + 4 =", ("7",), "7") for i in range(2500)]
    told: list[tuple[str, int, int]] = []
    Questions(rows, digits_tokenizer(), Data(kind="digits", format="digits"), show=lambda *now: told.append(now))
    assert told == [("rows encoded", done, 2500) for done in (0, 1000, 2000)]
