"""Intent data sets (CLINC150, Banking77), DBpedia and files of labelled texts as class-incremental streams.

CLINC150: Larson et al. 2019 (arXiv:1909.02027); Banking77: Casanueva et al. 2020 (arXiv:2003.04807). A line is
`utterance → label`. Training rows whose text is also held out are dropped, because the published splits overlap.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from laconic import rng
from laconic.config.data import SplitName
from laconic.console import pluralize
from laconic.data.parquet_and_hub import load_hub_split
from laconic.data.strict_jsonl import read_rows
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance, TokenIds
from laconic.evaluation.labelled_texts import LabelledText, find_words, normalise_text, parse_labelled_text

ARROW, LINE_END = "→", "\n"
RowFilter = Callable[[Sequence[LabelledText]], list[LabelledText]]
CLASS_ORDER_KEY, HOLD_OUT_KEY, LIMIT_KEY, LINE_ORDER_KEY = 1, 2, 3, 100  # LINE_ORDER_KEY + task for lines
FILE_PREFIX = "classes:"  # of a task that is a file of labelled texts
MAX_FILE_TASKS, HELD_OUT_FRACTION = 5, 0.2  # of a file


@dataclass(frozen=True)
class IntentDatasetInfo:
    """A data set of labelled utterances.

    The file lies below the folder of data sets. `splits` are our splits and the Hub's names of them. Utterances with
    the out-of-scope label belong to no class; they are left out.
    """

    name: str
    file: str
    classes_per_task: int
    hub_repo: str | None = None
    hub_config: str | None = None
    splits: tuple[tuple[SplitName, str], ...] = (("train", "train"), ("test", "test"))
    out_of_scope_label: str | None = None


INTENT_CATALOG = (
    IntentDatasetInfo(
        name="clinc150",
        file="clinc150/clinc150.jsonl",  # CC BY 3.0
        classes_per_task=15,
        hub_repo="clinc/clinc_oos",
        hub_config="plus",
        splits=(("train", "train"), ("valid", "validation"), ("test", "test")),
        out_of_scope_label="oos",
    ),
    IntentDatasetInfo("banking77", "banking77/banking77.jsonl", 11, "PolyAI/banking77"),  # CC BY 4.0
    IntentDatasetInfo("dbpedia14", "dbpedia14/dbpedia14-sample.jsonl", 2),  # CC BY-SA
)
INTENT_DATASETS: Mapping[str, IntentDatasetInfo] = {info.name: info for info in INTENT_CATALOG}


class IntentRows(NamedTuple):
    """The rows of a data set by split, and how many were dropped: too long, or with a text of another split."""

    train: list[LabelledText]
    valid: list[LabelledText]
    test: list[LabelledText]
    num_dropped: int


def is_class_task(task: str) -> bool:
    return task in INTENT_DATASETS or task.startswith(FILE_PREFIX)


def find_class_file(task: str) -> Path | None:
    if not task.startswith(FILE_PREFIX):
        return None
    file = Path(task.removeprefix(FILE_PREFIX)).expanduser()
    if not file.is_file():
        raise InputError(f"--tasks {task}: no such file; give a .jsonl or .parquet file of rows with text and label")
    return file


def load_intents(task: str, path: str | Path | None = None, keep: RowFilter = list) -> IntentRows:
    """Load `classes:FILE`, or a data set: from a file, the folder that contains the data sets, or without a path the
    Hub. `keep` returns the rows to be used.
    """
    if (file := find_class_file(task)) is not None:
        rows = read_rows(file, parse_labelled_text)
        return deduplicate_splits(hold_out_rows(keep(rows)), file.name, len(rows))
    info = INTENT_DATASETS[task]
    if path is None:
        rows = load_hub_utterances(info)
    else:
        file = Path(path) / info.file if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InputError(f"{task}: no file {file}; give the folder that contains {info.file}, or the file")
        rows = read_rows(file, parse_labelled_text)
    rows = [row for row in rows if row.label != info.out_of_scope_label]
    return deduplicate_splits(keep(rows), task, len(rows))


def hold_out_rows(rows: list[LabelledText]) -> list[LabelledText]:
    """Hold out a fifth of the distinct texts of each class, if no row is a test row."""
    if any(row.split == "test" for row in rows):
        return rows
    firsts = dict[tuple[str, str], int]()
    for i, row in enumerate(rows):
        firsts.setdefault((row.label, normalise_text(row.text)), i)
    train = [i for i in firsts.values() if rows[i].split != "valid"]
    held_out = set[int]()
    for group in group_by_label(rows[i] for i in train).values():
        num_held_out = max(1, round(HELD_OUT_FRACTION * len(group)))
        held_out |= {train[group[j]] for j in rng.permutation(len(group), 0, HOLD_OUT_KEY, num_held_out)}
    return [row._replace(split="test") if i in held_out else row for i, row in enumerate(rows)]


def load_hub_utterances(info: IntentDatasetInfo) -> list[LabelledText]:
    if info.hub_repo is None:
        raise InputError(f"{info.name} is not on the Hub; give the folder that contains {info.file}")
    rows: list[LabelledText] = []
    for part, split in info.splits:
        for row in load_hub_split(info.hub_repo, info.hub_config, split, None).rows:
            rows.append(LabelledText(row["text"], row["intent" if "intent" in row else "label"], part))
    return rows


def label_to_text(label: str) -> str:
    """Return the words of a published label, without underscores and punctuation."""
    return find_words(label.replace("_", " "))


def deduplicate_splits(rows: Sequence[LabelledText], name: str, num_published: int | None = None) -> IntentRows:
    """Group rows by split and drop those whose text is in a later split (train, valid, test).

    `num_published` is the number of rows before others were dropped.
    """
    by_part: dict[SplitName, list[LabelledText]] = {"train": [], "valid": [], "test": []}
    held_out: set[str] = set()
    for part in ("test", "valid", "train"):
        by_part[part] = [
            row for row in rows if (row.split or "train") == part and normalise_text(row.text) not in held_out
        ]
        held_out |= {normalise_text(row.text) for row in by_part[part]}
    labels = {row.label for row in rows}
    for part in ("train", "test"):
        if missing := sorted(labels - {row.label for row in by_part[part]}):
            hint = "give it rows with two different texts; a train row with the text of a test row is left out"
            raise InputError(f"{name}: class {missing[0]} has no {part} row; {hint}")
    by_words = dict[str, str]()
    for label in sorted(labels):
        words = label_to_text(label)
        if not words or by_words.setdefault(words, label) != label:
            raise InputError(f"{name}: the label {label!r} has no words, or those of another label; rename it")
    num_dropped = (num_published or len(rows)) - sum(map(len, by_part.values()))
    return IntentRows(by_part["train"], by_part["valid"], by_part["test"], num_dropped)


def group_by_label(rows: Iterable[LabelledText]) -> dict[str, list[int]]:
    """Return the indices of each label's rows, sorted by label."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.label, []).append(i)
    return dict(sorted(groups.items()))


def limit_per_label(rows: Sequence[LabelledText], max_per_label: int | None) -> list[LabelledText]:
    """Return at most `max_per_label` rows of each label, the same ones every time, in their order."""
    if max_per_label is None:
        return list(rows)
    groups = group_by_label(rows).values()
    selected = {group[i] for group in groups for i in rng.permutation(len(group), 0, LIMIT_KEY, max_per_label)}
    return [row for i, row in enumerate(rows) if i in selected]


class PromptFormat(NamedTuple):
    """The ids of a line's fixed parts: the beginning of a document, the arrow, the line end."""

    tokenizer: Tokenizer
    start_ids: TokenIds
    arrow_ids: TokenIds
    line_end_ids: TokenIds

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "PromptFormat":
        arrow = tokenizer.encode(ARROW, add_special_tokens=False)
        with_end = tokenizer.encode(ARROW + LINE_END, add_special_tokens=False)
        if with_end[: len(arrow)] != arrow or len(with_end) == len(arrow):
            raise InputError(f"the tokenizer merges {ARROW} with what follows, or drops line ends; use another one")
        line_end = tuple(with_end[len(arrow) :])
        special = next((id for id in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id is not None), None)
        return cls(tokenizer, line_end if special is None else (special,), tuple(arrow), line_end)

    def encode_prompt(self, text: str) -> TokenIds:
        return tuple(self.tokenizer.encode(f"{text} {ARROW}", add_special_tokens=False))

    def encode_label(self, words: str) -> TokenIds:
        """Return the ids of a label as they follow the arrow."""
        return tuple(self.tokenizer.encode(f"{ARROW} {words}", add_special_tokens=False)[len(self.arrow_ids) :])


def drop_long_texts(
    rows: Sequence[LabelledText], tokenizer: Tokenizer, max_tokens: int, name: str
) -> list[LabelledText]:
    """Drop rows whose text does not fit into `max_tokens` with every label; a warning says how many."""
    prompt_format = PromptFormat.from_tokenizer(tokenizer)
    labels = sorted({row.label for row in rows})
    longest = max((len(prompt_format.encode_label(label_to_text(label))) for label in labels), default=0)
    room = max_tokens - longest - len(prompt_format.start_ids) - len(prompt_format.line_end_ids)
    short = [row for row in rows if len(prompt_format.encode_prompt(row.text)) <= room]
    positions = f"the model's {max_tokens:,} positions"
    if lost := sorted(set(labels) - {row.label for row in short}):
        raise InputError(f"{name}: every text of class {lost[0]} exceeds {positions}; shorten them")
    if n := len(rows) - len(short):
        warnings.warn(f"{name}: {pluralize(n, 'row')} left out: longer than {positions}")
    return short


def build_stream(
    intents: IntentRows,
    tokenizer: Tokenizer,
    seed: int,
    *,
    name: str,
    classes_per_task: int | None = None,
    max_test_per_class: int | None = None,
    max_train_per_class: int | None = None,
) -> ClassIncrementalStream:
    """Build the stream of a seed: the shuffled classes divided into tasks, and the lines of each task shuffled.

    Without `classes_per_task`, there are up to five tasks of two or more classes, whose sizes differ by at most one.
    Limits on the rows of a class leave the same rows for every seed.
    """
    labels = list(group_by_label([*intents.train, *intents.test]))
    K = len(labels)
    n = min(MAX_FILE_TASKS, K // 2) if classes_per_task is None else K // classes_per_task
    if n < 2 and classes_per_task is None:
        raise InputError(f"{name}: {K} classes; give at least four, for two tasks of two classes")
    if n < 2 or (classes_per_task is not None and K % classes_per_task):
        raise InputError(f"{name}: {K} classes do not divide into two or more tasks of {classes_per_task}")
    shuffled = rng.permutation(K, seed, CLASS_ORDER_KEY)
    ends = [K * i // n for i in range(n + 1)]
    task_classes = [tuple(shuffled[start:end]) for start, end in pairwise(ends)]
    number = {label: i for i, label in enumerate(labels)}
    prompt_format = PromptFormat.from_tokenizer(tokenizer)

    def encode(rows: Sequence[LabelledText], classes: tuple[int, ...]) -> list[LabelledUtterance]:
        return [
            LabelledUtterance(prompt_format.encode_prompt(row.text), number[row.label])
            for row in rows
            if number[row.label] in classes
        ]

    train_rows = limit_per_label(intents.train, max_train_per_class)
    test_rows = limit_per_label(intents.test, max_test_per_class)
    train = [encode(train_rows, classes) for classes in task_classes]
    return ClassIncrementalStream(
        name=name,
        seed=seed,
        label_ids=tuple(prompt_format.encode_label(label_to_text(label)) for label in labels),
        task_classes=tuple(task_classes),
        train=tuple(
            tuple(items[j] for j in rng.permutation(len(items), seed, LINE_ORDER_KEY + i))
            for i, items in enumerate(train)
        ),
        test=tuple(tuple(encode(test_rows, classes)) for classes in task_classes),
        start_ids=prompt_format.start_ids,
        line_end_ids=prompt_format.line_end_ids,
    )
