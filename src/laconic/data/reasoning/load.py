"""Load reasoning data sets from local files or the Hub, check their sizes, and merge them for training."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, SplitName, is_row_file
from laconic.data.parquet_and_hub import load_hub_split
from laconic.data.reasoning.catalog import (
    HELD_OUT_PARTS,
    AnswerKind,
    DatasetInfo,
    DatasetSplit,
    find_dataset,
    get_dataset,
    iter_whole_split_files,
    parse_hub_name,
    split_name,
)
from laconic.data.reasoning.contamination import (
    check_dataset_names,
    check_known_files,
    check_marks,
    check_overlap,
    identify_question,
    merge_deduplicated,
)
from laconic.data.reasoning.read_examples import (
    ExampleConverter,
    ExamplesFile,
    check_problems,
    collect_examples,
    read_examples,
    to_json_lines,
)
from laconic.errors import InputError


def load_examples(name: str, part: SplitName, config: DataConfig, max_rows: int | None = None) -> ExamplesFile:
    """Load the examples of a file, a catalog or Hub name, `NAME:SPLIT`, or `NAME:CONFIG:SPLIT`; `part` is the default.

    Raises `InputError` for an unknown name or split, an unexpected number of rows, or invalid rows.
    """
    if is_row_file(name):
        return read_examples(name, config, max_rows)
    base, split = split_name(name)
    split = split or part
    parts = Path(base).parts
    is_hub_name = base.count("/") == 1 and len(parts) == 2 and parts[0] not in ("/", "..", "~")
    hub_config = parse_hub_name(name).config
    if find_dataset(name) is None and is_hub_name:
        info = DatasetInfo(base, description="", licence="", splits={}, hub_repo=base, hub_config=hub_config)
        entry = DatasetSplit(hub_split="validation" if split == "valid" else split)
    else:
        info = get_dataset(name)
        entry = info.splits.get(split)
    if entry is None:
        hint = f"; generate training rows with `laconic data make {info.generator}`"
        hint = hint if info.generator and split == "train" else ""
        raise InputError(f"{info.name} has no split {split}; it has {', '.join(info.splits)}{hint}")
    label = ":".join(filter(None, (info.name, hub_config, split)))
    if info.members:
        return load_union(label, info, config, max_rows)
    path = find_local_file(name, info, entry, config)
    if path is None:
        file = load_from_hub(label, info, entry, config, None if entry.required_mark else max_rows)
    else:
        file = load_from_file(label, path, info, entry, config)
    if entry.required_mark is not None:
        mark, value = entry.required_mark
        file = replace(file, examples=tuple(row for row in file.examples if row.metadata.get(mark) == value))
    return replace(file, examples=file.examples[:max_rows])


def load_training_examples(config: DataConfig, reads_documents: bool = False) -> ExamplesFile:
    """Load the file of a recipe, or load and merge its training sets, without questions that an earlier set has.

    If the recipe reads documents, the same question about another document is another question. Raises `InputError`,
    also if training, validation and test rows overlap.
    """
    if config.source == "file":
        files = {str(config.path): read_examples(str(config.path), config, config.max_train_rows)}
    else:
        check_dataset_names(config)
        names = config.name or ()
        all_names = [name for name in (*names, config.valid, config.test) if name]
        if config.chain_field and not any(is_row_file(name) or find_dataset(name) is None for name in all_names):
            raise InputError(f"data.chain_field {config.chain_field}: catalog entries have their own; remove the key")
        files = {name: load_examples(name, "train", config, config.max_train_rows) for name in names}
    held_out: dict[SplitName, ExamplesFile] = {
        part: load_held_out(config, part) for part in HELD_OUT_PARTS if getattr(config, part)
    }
    return merge_training_files(config, files, held_out, reads_documents)


def merge_training_files(
    config: DataConfig,
    files: Mapping[str, ExamplesFile],
    held_out: Mapping[SplitName, ExamplesFile],
    reads_documents: bool,
) -> ExamplesFile:
    """Merge training files, keyed by the name in the recipe. Raises `InputError` if a row is held out."""
    splits = dict(iter_whole_split_files())
    all_files = {**files, **{str(getattr(config, part)): file for part, file in held_out.items()}}
    own_files = {name: file for name, file in all_files.items() if config.source == "file" or is_row_file(name)}
    check_known_files(config, {name: splits[f.sha256] for name, f in own_files.items() if f.sha256 in splits})
    for name, file in files.items():
        check_marks(name, file.examples, config.allow_contamination)
    examples, notes = merge_deduplicated(list(files), [file.examples for file in files.values()], reads_documents)
    held_out_examples = [e for file in held_out.values() for e in file.examples]
    check_overlap(examples, held_out_examples, config.allow_contamination, reads_documents)
    check_held_out_disjoint(held_out, reads_documents)
    return combine_files(list(files.values()), examples[: config.max_train_rows], notes)


def load_held_out(config: DataConfig, part: SplitName, max_rows: int | None = None) -> ExamplesFile:
    """Load the validation or test rows. Raises `InputError`, also if the recipe names none."""
    name = config.valid if part == "valid" else config.test
    if name is None:
        remedy = ", or remove the table [validation]" if part == "valid" else ""
        raise InputError(f"data.{part} is not set; name a file or a data set to hold out{remedy}")
    if config.source == "file":
        return read_examples(name, config, max_rows)
    return load_examples(name, part, config, max_rows)


def check_held_out_disjoint(held_out: Mapping[SplitName, ExamplesFile], reads_documents: bool) -> None:
    if len(held_out) < 2:
        return
    test = {identify_question(example, reads_documents) for example in held_out["test"].examples}
    shared = sum(identify_question(example, reads_documents) in test for example in held_out["valid"].examples)
    if shared:
        problem = f"{shared:,} questions of data.valid are also in data.test"
        raise InputError(f"{problem}; test rows must not select a checkpoint")


def get_answer_kind(config: DataConfig) -> AnswerKind:
    """Return the kind of answer of the training sets: "number", unless one of them has another."""
    for name in config.name or ():
        info = find_dataset(name)
        if info and info.answer_kind != "number":
            return info.answer_kind
    return "number"


def find_local_file(name: str, info: DatasetInfo, split: DatasetSplit, config: DataConfig) -> Path | None:
    """Return the path that the file of a split must have; None if its rows come from the Hub."""
    if config.data_dir is None or split.file is None or split_name(name)[0] != info.name:
        return None
    return Path(config.data_dir) / split.file.path


def is_local(name: str, config: DataConfig, part: SplitName = "train") -> bool:
    """Return whether all rows of a split of a file or data set, by default for training, are in local files."""
    if is_row_file(name):
        return Path(name).is_file()
    info = find_dataset(name)
    split = info.splits.get(split_name(name)[1] or part) if info else None
    if info is None or split is None:
        return False
    if info.members:
        return all(is_local(member, config, part) for member in info.members)
    path = find_local_file(name, info, split, config)
    return path is not None and path.is_file()


def load_from_file(label: str, path: Path, info: DatasetInfo, split: DatasetSplit, config: DataConfig) -> ExamplesFile:
    """Load the local file of a split. Raises `InputError` if it is not the published one, unless allowed."""
    entry = split.file
    assert entry is not None
    if not path.is_file():
        raise InputError(f"{label}: no file {path}; data.data_dir must be the folder that contains {entry.path}")
    if config.size_check == "strict" and entry.num_rows != split.published_rows:
        raise InputError(f'{label}: {entry.path} is only a part; name gsm8k-aug-subset, or set data.size_check = "off"')
    file = read_examples(path, apply_dataset_fields(config, info))
    num_rows = len(file.examples) + len(file.problems)
    if config.size_check == "off":
        return note_size(file, label, num_rows, split)
    if num_rows != entry.num_rows:
        raise size_error(label, num_rows, entry.num_rows)
    if file.sha256 != entry.sha256:
        hint = 'copy it again, or set data.size_check = "off"'
        raise InputError(f"{label}: {path} differs from the published file; {hint}")
    return file


def get_hub_repo(name: str) -> str | None:
    """Return the repository of a named data set, or that of a Hub name."""
    entry = find_dataset(name)
    return split_name(name)[0] if entry is None else entry.hub_repo


def load_from_hub(
    label: str, info: DatasetInfo, split: DatasetSplit, config: DataConfig, max_rows: int | None
) -> ExamplesFile:
    """Load the rows of a split, or the first of them, from the Hub. Raises `InputError`."""
    if info.hub_repo is None or split.hub_split is None:
        raise InputError(f"{label} is not on the Hub; set data.data_dir to the folder of its files")
    is_for_training = info.hub_repo in map(get_hub_repo, config.name or ())
    revision = config.revision if is_for_training else None
    table = load_hub_split(info.hub_repo, info.hub_config, split.hub_split, revision)
    if config.size_check == "strict" and split.published_rows not in (None, table.num_rows):
        raise size_error(label, table.num_rows, split.published_rows or 0)
    columns = info.columns if info.splits else None
    converter = ExampleConverter(apply_dataset_fields(config, info), columns)
    file = check_problems(collect_examples(label, to_json_lines(table.rows), converter, max_rows), label, config)
    file = note_size(file, label, table.num_rows, split)
    if split.required_mark:
        file = add_mark(file, config, split.required_mark[0], "gsm8k-aug:valid", ("valid", "train"))
    if info.name == "gsm-hard":
        file = add_mark(file, config, "unchanged_from_gsm8k", "gsm8k:test", (True, False))
    return file


def size_error(label: str, num_rows: int, expected: int) -> InputError:
    hint = 'download it again, or set data.size_check = "off"'
    return InputError(f"{label}: {num_rows:,} rows, expected {expected:,}; {hint}")


def note_size(file: ExamplesFile, label: str, num_rows: int, split: DatasetSplit) -> ExamplesFile:
    if split.published_rows in (None, num_rows):
        return file
    return replace(file, notes=(*file.notes, f"{label}: {num_rows:,} of {split.published_rows:,} published rows"))


def apply_dataset_fields(config: DataConfig, info: DatasetInfo) -> DataConfig:
    """Return the configuration with the chain field and split of a catalog entry."""
    chain = {"chain_field": info.chain_field or None, "chain_split": info.chain_split, "columns": {}}
    return config.model_copy(update=chain if info.splits else {})


def add_mark(
    file: ExamplesFile, config: DataConfig, mark: str, reference: str, values: tuple[object, object]
) -> ExamplesFile:
    """Add a field of the local files to rows of the Hub: `values[0]` for questions of the set `reference`."""
    questions = {identify_question(example) for example in load_examples(reference, "test", config).examples}
    examples: list[ReasoningExample] = []
    for example in file.examples:
        value = values[0] if identify_question(example) in questions else values[1]
        examples.append(replace(example, metadata={**example.metadata, mark: value}))
    return replace(file, examples=tuple(examples))


def load_union(label: str, info: DatasetInfo, config: DataConfig, max_rows: int | None) -> ExamplesFile:
    files = [load_examples(member, "train", config) for member in info.members]
    examples, notes = merge_deduplicated(info.members, [file.examples for file in files])
    size = info.splits["train"].published_rows
    if config.size_check == "strict" and len(examples) != size:
        raise size_error(label, len(examples), size or 0)
    return combine_files(files, examples[:max_rows], notes)


def combine_files(
    files: Sequence[ExamplesFile], examples: Sequence[ReasoningExample], notes: Sequence[str]
) -> ExamplesFile:
    if len(files) == 1:
        return replace(files[0], examples=tuple(examples))
    return ExamplesFile(
        tuple(examples),
        hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest(),
        (*(note for file in files for note in file.notes), *notes),
        tuple(problem for file in files for problem in file.problems),
    )
