"""The rows of a recipe as a plan sees them: how many, how long; counted where they are at hand, else assumed.

Those of documents are found in stretches.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from laconic import rng
from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.config.data import DataConfig, is_row_file
from laconic.config.recipe import DOCUMENT_SOURCES, Recipe
from laconic.data.reasoning import load as reasoning_load
from laconic.data.reasoning.catalog import find_dataset, split_name
from laconic.data.reasoning.dataset import ReasoningDataset, pad_rows
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.build_data import load_training_rows
from laconic.experiment.stretches import stretches
from laconic.interfaces import TrainingData

SAMPLE = 2000  # rows looked at, of a file that has more
STEP = 9  # tokens of a step of a chain whose steps are not at hand
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
Lengths = NDArray[np.int64]  # [n, parts]: question, chain, answer; or document
Curve = tuple[int, ...]


class Kind(NamedTuple):
    """Rows of a set that is published and not at hand: how many, and quantiles of its lengths in GPT-2's tokens.

    `short` is the chain without its last step. Lengths were counted on the rows that are in ../shared/data: 10,432 of
    GSM8K-Aug, the solutions of GSM8K for chains in words, and the validation rows of the others.
    """

    rows: int
    question: Curve
    chain: Curve
    short: Curve
    answer: Curve


AUG = Kind(385_620, (14, 40, 60, 86, 143), (0, 18, 33, 51, 93), (0, 9, 25, 42, 78), (6, 6, 7, 8, 13))
WORDS = Kind(385_620, (10, 51, 83, 121, 213), (16, 58, 108, 172, 269), (7, 40, 87, 144, 238), (6, 6, 6, 7, 8))
PUBLISHED: Mapping[str, Kind] = {
    **dict.fromkeys(("gsm8k-aug", "zen-E/GSM8k-Aug"), AUG),
    **dict.fromkeys(("gsm8k-aug-nl", "zen-E/GSM8k-Aug-NL"), WORDS),
}
MADE: Mapping[str, Kind] = {  # by laconic data make
    "prosqa": Kind(17_886, (210, 362, 432, 495, 525), (28, 41, 52, 66, 68), (18, 31, 42, 56, 58), (8, 9, 10, 11, 11)),
    **{
        f"mult-{n}": Kind(808_000, (2 * n + 3,) * 5, (chain,) * 5, (0,) * 5, (2 * n + 5,) * 5)
        for n, chain in ((4, 47), (5, 75), (7, 149), (9, 247))
    },
}


class Foreseen(NamedTuple):
    """Rows: how many there are, batches of some of them, the lengths of those by part, and what is to be said."""

    rows: int
    source: TrainingData
    lengths: Lengths
    notes: tuple[str, ...]
    assumed: bool
    parts: tuple[str, ...] = ("question", "chain", "answer")


def foreseen(recipe: Recipe, tokenizer: Tokenizer, context: int) -> Foreseen:
    """The rows a recipe is trained on. Raises `BadInput` (66) where they are bad, or neither at hand nor known."""
    data = recipe.data
    if data.source in DOCUMENT_SOURCES:
        return Foreseen(*stretches(recipe, tokenizer, context), ("document",))
    if data.source == "digits":
        rows = load_training_rows(recipe, tokenizer, context)
        n = min(len(rows.source), SAMPLE)
        batch = cast(ReasoningBatch, rows.source.batch(range(n), 0, 0))
        return Foreseen(len(rows.source), rows.source, of_batch(batch), rows.notes, False)
    kind = None if at_hand(data) else kind_of(data)
    return sampled(recipe, tokenizer, context) if kind is None else assumed(data, kind)


def at_hand(data: DataConfig) -> bool:
    """Whether all rows trained on lie in files."""
    return data.source != "catalog" or all(reasoning_load.is_local(name, data) for name in data.name or ())


def kind_of(data: DataConfig) -> Kind | None:
    """What is known of rows that are not at hand; a file yet to be made is of the kind that it is validated on."""
    if data.name is None or len(data.name) != 1:
        return None
    if is_row_file(data.name[0]):
        return MADE.get(split_name(data.valid or "")[0])
    found = find_dataset(data.name[0])
    return PUBLISHED.get(found.name) if found else None


def sampled(recipe: Recipe, tokenizer: Tokenizer, context: int) -> Foreseen:
    """The first rows, looked at one by one, and how many there are in all."""
    data = recipe.data
    n = min((count for count in (counted(data), data.max_train_rows) if count is not None), default=None)
    asked = {"max_train_rows": None if n is None else min(n, SAMPLE), "valid": None, "test": None}
    rows = load_training_rows(recipe.model_copy(update={"data": data.model_copy(update=asked)}), tokenizer, context)
    source, notes = cast(ReasoningDataset, rows.source), rows.notes
    lengths = source.lengths.astype(np.int64)
    if n is None or n <= SAMPLE:
        return Foreseen(len(source), source, lengths, notes, False)
    return Foreseen(n * len(source) // SAMPLE, source, lengths, (f"of the first {SAMPLE:,} rows:", *notes), False)


def counted(data: DataConfig) -> int | None:
    """How many rows the files have, by their lines; None where nobody says."""
    counts = [lines(Path(name)) if is_row_file(name) else reasoning_load.count_training_rows(data.model_copy(update={"name": (name,)}))
              for name in (data.name or (data.path or "",))]  # fmt: skip
    return None if None in counts else sum(count or 0 for count in counts)


def lines(path: Path) -> int | None:
    """Lines of a text file."""
    if path.suffix == ".parquet" or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def of_batch(batch: ReasoningBatch) -> Lengths:
    """Tokens of question, chain and answer of each row."""
    parts = (batch.question_mask, batch.chain_mask, batch.answer_mask)
    return torch.stack([live.sum(1) for live in parts], 1).numpy()


def assumed(data: DataConfig, kind: Kind) -> Foreseen:
    """Rows made of quantiles, long questions with long chains, in an order of their own."""
    curves = (kind.question, kind.chain if data.chain_steps == "all" else kind.short, kind.answer)
    at = (rng.permuted_index(0, 0, np.arange(SAMPLE), SAMPLE) + 0.5) / SAMPLE
    rows = np.stack([np.interp(at, QUANTILES, curve).round().astype(np.int64) for curve in curves], 1)
    over = rows.sum(1) > data.max_tokens if data.max_tokens else np.zeros(SAMPLE, dtype=bool)
    if data.on_too_long == "drop":
        rows = rows[~over]
    n = min(kind.rows, data.max_train_rows or kind.rows) * len(rows) // SAMPLE
    where = data.name[0] if data.name else ""
    notes = [
        f"{where} is not at hand: rows as published, lengths as counted elsewhere in GPT-2's tokens, "
        "so both are assumed; data.name=FILE counts yours"
    ]
    if over.any():
        what = {"drop": "left out", "truncate_question": "cut", "error": "an error"}[data.on_too_long]
        notes.append(f"about {over.mean():.2%} of the rows are over {data.max_tokens} tokens: {what}")
    return Foreseen(n, Blank(rows), rows, tuple(notes), True)


class Blank:
    """Rows that say nothing, of some lengths (contract.Source)."""

    fingerprint = ""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        """The rows on a grid, every token the first of the vocabulary."""
        asked, chains, answers = ([[0] * n for n in part] for part in self.lengths[list(rows)].T.tolist())
        (question, question_live), (chain, chain_live) = pad_rows(asked, pad_left=True), pad_rows(chains)
        answer, answer_live = pad_rows(answers)
        n = answer_live.sum(1)
        column = torch.arange(answer.shape[1])
        return ReasoningBatch(
            question_ids=question, question_mask=question_live, chain_ids=chain, chain_mask=chain_live,
            chain_step_index=(torch.arange(chain.shape[1]) // STEP).expand_as(chain).masked_fill(~chain_live, 0),
            answer_ids=answer, answer_mask=answer_live, question_target=torch.zeros(len(n), dtype=torch.long),
            chain_targets=chain.masked_fill(~chain_live, IGNORE_INDEX),
            answer_targets=answer.masked_fill(column >= n[:, None] - 1, IGNORE_INDEX),
            distill_column=(n - 3).clamp(min=0), answer_number_mask=column == (n - 2)[:, None],
            row_index=torch.as_tensor(rows, dtype=torch.long), ids=tuple(map(str, rows)), epoch=epoch, step=step,
        )  # fmt: skip


def pieces(lengths: Lengths, micro: int) -> list[list[int]]:
    """Rows as micro-batches in an order of their own, by the width of their grids; fewer rows than one: some twice."""
    order = rng.permuted_index(0, 0, np.arange(len(lengths)), len(lengths))
    found = [order[i : i + micro] for i in range(0, max(1, len(order) - micro + 1), micro)]
    found.sort(key=lambda rows: int(lengths[rows].max(0).sum()))
    return [np.resize(rows, micro).tolist() for rows in found]
