"""Encoding says how far it is."""

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.dataset import ReasoningDataset
from laconic.data.synthetic.digits import build_digits_tokenizer


def test_every_thousand_rows_are_told() -> None:
    rows = [ReasoningExample(str(i), "3 + 4 =", ("7",), "7") for i in range(2500)]
    told: list[tuple[str, int, int]] = []
    ReasoningDataset(
        rows,
        build_digits_tokenizer(),
        DataConfig(source="digits", format="digits"),
        progress=lambda *now: told.append(now),
    )
    assert told == [("rows encoded", done, 2500) for done in (0, 1000, 2000)]
