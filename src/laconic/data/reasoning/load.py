"""Data sets by name, of files or of the hub: loaded, sizes checked, merged for training by the rules for that."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, SplitName, is_row_file
from laconic.data.parquet_and_hub import load_hub_split
from laconic.data.reasoning.catalog import (
    DATASETS,
    GSM8K_AUG_TRAIN_SHA256,
    AnswerKind,
    DatasetInfo,
    DatasetSplit,
    find_dataset,
    get_dataset,
    iter_whole_split_files,
    split_name,
)
from laconic.data.reasoning.contamination import (
    check_dataset_names,
    check_known_files,
    check_marks,
    check_overlap,
    merge_deduplicated,
    normalise_question,
)
from laconic.data.reasoning.read_examples import ExampleReader, ExamplesFile, gc_disabled, read_examples
from laconic.errors import InputError

__all__ = [
    "DATASETS",
    "get_answer_kind",
    "merge_training_files",
    "is_local",
    "load_held_out",
    "load_examples",
    "get_dataset",
    "count_training_rows",
    "load_training_examples",
]

HELD_OUT_PARTS: tuple[SplitName, ...] = ("valid", "test")


def load_examples(asked: str, part: SplitName, config: DataConfig, max_rows: int | None = None) -> ExamplesFile:
    """The rows of a set, of a name on the hub or of a file; of the split that `asked` names, else of `part`.

    Raises `BadInput` for an unknown name or split, a size that is not the known one, and rows that are bad.
    """
    if is_row_file(asked):
        return note_published(asked, read_examples(asked, config, max_rows))
    name, split = split_name(asked)
    split = split or part
    if find_dataset(asked) is None and name.count("/") == 1:
        return load_from_hub(
            f"{name}:{split}",
            DatasetInfo(name, "", "", {}, name),
            DatasetSplit(None, hub_split=hub_split_name(split)),
            config,
            max_rows,
        )
    found = get_dataset(asked)
    there = next((one for key, one in found.splits.items() if key == split), None)
    if there is None:
        more = (
            f"; laconic data make {found.generator} makes rows to train on"
            if found.generator and split == "train"
            else ""
        )
        raise InputError(f"{found.name} has no split {split}; it has {', '.join(found.splits)}{more}")
    label = f"{found.name}:{split}"
    if found.members:
        return load_union(label, found, config, max_rows)
    path = find_local_file(asked, found, there, config)
    if path is None:
        return load_from_hub(label, found, there, config, max_rows)
    return load_from_file(label, path, found, there, config, max_rows)


def load_training_examples(config: DataConfig) -> ExamplesFile:
    """The rows trained on, questions of several sets once. Raises `BadInput` where a rule of contamination says so."""
    check_dataset_names(config)
    names = config.name or ()
    every = [asked for asked in (*names, config.valid, config.test) if asked]
    if config.chain_field and not any(is_row_file(asked) or find_dataset(asked) is None for asked in every):
        raise InputError(
            f"data.chain_field {config.chain_field}: sets known by name have their own chain; leave the key out"
        )
    reads = {asked: load_examples(asked, "train", config, config.max_train_rows) for asked in names}
    return merge_training_files(
        config, reads, {part: load_held_out(config, part) for part in HELD_OUT_PARTS if getattr(config, part)}
    )


def merge_training_files(
    config: DataConfig, reads: Mapping[str, ExamplesFile], held_out: Mapping[SplitName, ExamplesFile]
) -> ExamplesFile:
    """The rows of `reads`, files or sets by what was asked, none of which is held out. Raises `BadInput`."""
    all_of = dict(iter_whole_split_files())
    found = [*reads.items(), *((str(getattr(config, part)), read) for part, read in held_out.items())]
    whole = {name: all_of[read.sha256] for name, read in found if read.sha256 in all_of}
    check_known_files(
        config, {name: split for name, split in whole.items() if config.source == "file" or is_row_file(name)}
    )
    for name, read in reads.items():
        check_marks(name, read.examples, config.allow_contamination)
    examples, notes = merge_deduplicated(list(reads), [read.examples for read in reads.values()])
    check_overlap(examples, [e for read in held_out.values() for e in read.examples], config.allow_contamination)
    check_held_out_disjoint(held_out)
    return combine_files(list(reads.values()), examples[: config.max_train_rows], notes)


def load_held_out(config: DataConfig, part: SplitName, max_rows: int | None = None) -> ExamplesFile:
    """The rows of validation or test. Raises `BadInput`, also where the recipe names none."""
    asked = config.valid if part == "valid" else config.test
    if asked is None:
        raise InputError(f"data.{part}: absent; name the rows that are held out, a file or a set")
    return load_examples(asked, part, config, max_rows)


def check_held_out_disjoint(held_out: Mapping[SplitName, ExamplesFile]) -> None:
    """Raises `BadInput` where a question of test stands in validation."""
    if len(held_out) < 2:
        return
    tested = {normalise_question(example.question) for example in held_out["test"].examples}
    shared = sum(normalise_question(example.question) in tested for example in held_out["valid"].examples)
    if shared:
        raise InputError(
            f"{shared:,} questions of data.valid stand in data.test: test rows choose nothing; take others"
        )


def get_answer_kind(config: DataConfig) -> AnswerKind:
    """What the answers of the sets trained on are: numbers, unless one of them has others."""
    for asked in config.name or ():
        found = find_dataset(asked)
        if found and found.answer_kind != "number":
            return found.answer_kind
    return "number"


def count_training_rows(config: DataConfig) -> int | None:
    """How many rows the sets trained on have by what is known of them, with nothing read; None where it is not."""
    whole = 0
    for asked in config.name or ():
        found = find_dataset(asked)
        split = found.splits.get("train") if found else None
        here = split.file if found and split and config.data_dir and asked == found.name else None
        count = here.num_rows if here and split and split.required_mark is None else split.num_rows if split else None
        if count is None:
            return None
        whole += count
    return whole if config.max_train_rows is None else min(whole, config.max_train_rows)


def find_local_file(asked: str, info: DatasetInfo, split: DatasetSplit, config: DataConfig) -> Path | None:
    """Where the file of a split has to lie; None where its rows come from the hub."""
    if config.data_dir is None or split.file is None or split_name(asked)[0] != info.name:
        return None
    return Path(config.data_dir) / split.file.path


def is_local(asked: str, config: DataConfig) -> bool:
    """Whether all training rows of a file or set lie in files here."""
    if is_row_file(asked):
        return Path(asked).is_file()
    found = find_dataset(asked)
    if found is None or "train" not in found.splits:
        return False
    if found.members:
        return all(is_local(member, config) for member in found.members)
    path = find_local_file(asked, found, found.splits["train"], config)
    return path is not None and path.is_file()


def load_from_file(
    label: str, path: Path, info: DatasetInfo, split: DatasetSplit, config: DataConfig, max_rows: int | None
) -> ExamplesFile:
    """The rows of a set's local file."""
    file = split.file
    assert file is not None
    if not path.is_file():
        raise InputError(f"{label}: no file {path}; data.data_dir is the folder that holds {file.path}")
    if config.size_check == "strict" and file.num_rows != split.published_rows:
        raise InputError(
            f"{label}: {file.path} holds {file.num_rows:,} rows, the set {split.published_rows:,}; "
            'data.size_check = "off" takes what is there, gsm8k-aug-subset names just these'
        )
    with gc_disabled():
        read = read_examples(path, apply_dataset_fields(config, info))
    there = len(read.examples) + len(read.skipped)
    if config.size_check == "off":
        return take_first(filter_marked(note_size(read, label, there, split), split), max_rows)
    if there != file.num_rows:
        raise size_error(label, there, file.num_rows)
    if read.sha256 != file.sha256:
        raise InputError(
            f"{label}: {path} is not the file known: SHA-256 {read.sha256[:12]}…, not {file.sha256[:12]}…; "
            'copy it again, or set data.size_check = "off"'
        )
    return take_first(filter_marked(read, split), max_rows)


def load_from_hub(
    label: str, info: DatasetInfo, split: DatasetSplit, config: DataConfig, max_rows: int | None
) -> ExamplesFile:
    """The rows of a set from the hub."""
    if info.hub_repo is None or split.hub_split is None:
        raise InputError(f"{label} is not on the hub; set data.data_dir to the folder that holds its files")
    trained = {
        other.hub_repo if (other := find_dataset(asked)) else split_name(asked)[0] for asked in config.name or ()
    }
    table = load_hub_split(
        info.hub_repo, info.hub_config, split.hub_split, config.revision if info.hub_repo in trained else None
    )
    if config.size_check == "strict" and split.published_rows not in (None, table.num_rows):
        raise size_error(label, table.num_rows, split.published_rows or 0)
    columns = info.columns if info.splits else None
    reader = ExampleReader(
        label, apply_dataset_fields(config, info), None if split.required_mark else max_rows, columns=columns
    )
    with gc_disabled():
        reader.read_table(table.rows)
    read = note_size(reader.result(), label, table.num_rows, split)
    if split.required_mark:
        read = add_mark(read, config, split.required_mark[0], "gsm8k-aug:valid", ("valid", "train"))
    if info.name == "gsm-hard":
        read = add_mark(read, config, "unchanged_from_gsm8k", "gsm8k:test", (True, False))
    return take_first(filter_marked(read, split), max_rows)


def size_error(label: str, num_rows: int, expected: int) -> InputError:
    return InputError(
        f'{label}: {num_rows:,} rows, the set has {expected:,}; fetch it again, or set data.size_check = "off"'
    )


def note_size(read: ExamplesFile, label: str, num_rows: int, split: DatasetSplit) -> ExamplesFile:
    """With a note where rows are taken that are not as many as the set has."""
    if split.published_rows in (None, num_rows):
        return read
    return replace(
        read, notes=(*read.notes, f"{label}: {num_rows:,} rows, of the {split.published_rows:,} that the set has")
    )


def apply_dataset_fields(config: DataConfig, info: DatasetInfo) -> DataConfig:
    """How the rows of a set are read: by its own chain."""
    chain = {"chain_field": info.chain_field, "chain_split": info.chain_split} if info.splits else {}
    return config.model_copy(update={**chain, "forbid_unknown_fields": False})


def hub_split_name(split: str) -> str:
    """What the hub calls a split."""
    return "validation" if split == "valid" else split


def add_mark(
    read: ExamplesFile, config: DataConfig, mark: str, reference: str, values: tuple[object, object]
) -> ExamplesFile:
    """Rows of the hub with a mark that the local file has: the first value where a question stands in another set."""
    there = {normalise_question(example.question) for example in load_examples(reference, "test", config).examples}
    examples = [
        replace(e, metadata={**e.metadata, mark: values[normalise_question(e.question) not in there]})
        for e in read.examples
    ]
    return replace(read, examples=tuple(examples))


def filter_marked(read: ExamplesFile, split: DatasetSplit) -> ExamplesFile:
    """The rows that have the mark of a split."""
    if split.required_mark is None:
        return read
    mark, value = split.required_mark
    at = [i for i, example in enumerate(read.examples) if example.metadata.get(mark) == value]
    return select_examples(read, at)


def take_first(read: ExamplesFile, rows: int | None) -> ExamplesFile:
    """The first rows."""
    return read if rows is None else select_examples(read, range(min(rows, len(read.examples))))


def select_examples(read: ExamplesFile, at: Sequence[int]) -> ExamplesFile:
    """Some of the rows."""
    return replace(read, examples=tuple(read.examples[i] for i in at), offsets=tuple(read.offsets[i] for i in at))


def note_published(asked: str, read: ExamplesFile) -> ExamplesFile:
    """A file that is known by its hash, with a note of what it is."""
    if read.sha256 != GSM8K_AUG_TRAIN_SHA256:
        return read
    return replace(read, notes=(*read.notes, f"{Path(asked).name}: all training rows of GSM8K-Aug, as published"))


def load_union(label: str, info: DatasetInfo, config: DataConfig, max_rows: int | None) -> ExamplesFile:
    """The rows of a set that is several."""
    reads = [load_examples(member, "train", config) for member in info.members]
    examples, notes = merge_deduplicated(info.members, [read.examples for read in reads])
    size = info.splits["train"].published_rows
    if config.size_check == "strict" and len(examples) != size:
        raise size_error(label, len(examples), size or 0)
    return combine_files(reads, examples[:max_rows], notes)


def combine_files(
    reads: Sequence[ExamplesFile], examples: Sequence[ReasoningExample], notes: Sequence[str]
) -> ExamplesFile:
    """Several reads as one; a row begins where it does in its own file."""
    if len(reads) == 1:
        return replace(reads[0], examples=tuple(examples))
    starts = {example.id: at for read in reads for example, at in zip(read.examples, read.offsets, strict=True)}
    every = (*(note for read in reads for note in read.notes), *notes)
    digest = hashlib.sha256("".join(read.sha256 for read in reads).encode()).hexdigest()
    skipped = tuple(text for read in reads for text in read.skipped)
    return ExamplesFile(tuple(examples), digest, tuple(starts[example.id] for example in examples), every, skipped)
