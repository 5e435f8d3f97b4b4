"""`laconic data list` and `laconic data check`: list the known data sets, and audit rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import Positional, arg

from laconic.cli.arguments import (
    OptionalInt,
    OptionalPath,
    OptionalStr,
    OutputFormat,
    check_minimum,
    refuse_flags,
    split_commas,
)
from laconic.cli.files import print_json, print_rows
from laconic.console import progress, status
from laconic.errors import InputError, UsageError

if TYPE_CHECKING:
    from laconic.config.data import DataConfig
    from laconic.data.audit import DocumentAudit, RowsAudit
    from laconic.data.reasoning.catalog import DatasetInfo

MAX_IDS_LISTED = 3
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataListCommand:
    """List the known data sets: rows, files or hub repository, licence.

    Example: laconic data list
    """

    format: OutputFormat = "human"

    def run(self) -> int:
        from laconic.data.reasoning.catalog import DATASETS

        if self.format == "json":
            print_json({"schema": 1, "sets": [dataset_to_json(info) for info in DATASETS.values()]})
            return 0
        rows: list[list[str]] = []
        for info in DATASETS.values():
            entry = dataset_to_json(info)
            sources = [name for name in ("files", "hub") if entry[name]] or ["sets"]
            counts = [f"{count:,}" if (count := entry["rows"].get(name)) else "" for name in SPLITS]
            rows.append([info.name, *counts, ", ".join(sources), info.licence])
        print_rows(("set", *SPLITS, "from", "licence"), rows)
        for info in DATASETS.values():
            hub = f"; hub: {info.hub_repo}" if info.hub_repo else ""
            generator = f"; laconic data make {info.generator} generates training rows" if info.generator else ""
            print(f"{info.name}: {info.description}{hub}{generator}")
        return 0


def dataset_to_json(info: "DatasetInfo") -> dict[str, Any]:
    files = {name: split.file for name, split in info.splits.items() if split.file}
    return {
        "name": info.name,
        "description": info.description,
        "licence": info.licence,
        "rows": {name: split.num_rows for name, split in info.splits.items()},
        "files": {name: file.path for name, file in files.items()},
        "rows_in_files": {name: file.num_rows for name, file in files.items()},
        "hub": info.hub_repo,
        "members": list(info.members),
        "chain_field": info.chain_field or None,
        "answers": info.answer_kind,
    }


@dataclass(frozen=True)
class DataCheckCommand:
    """Check a data file: errors, duplicates, lengths in tokens, rows that would be truncated.

    Keys data.* of the recipe that will read the rows are given as to laconic train.

    Example: laconic data check train.jsonl data.format=chat data.answer_type=text --tokenizer smollm2 --max-length 256
    """

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """file of rows (.jsonl, .parquet, iCoT's .txt), or a data set by name such as gsm8k-aug:valid"""
    overrides: Annotated[Positional[tuple[str, ...]], arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")] = ()
    """keys of the recipe's table [data], such as data.format=chat"""
    tokenizer: OptionalStr = None
    """tokenizer to count tokens with: folder or hub name"""
    columns: OptionalStr = None
    """names of the file's fields that differ from laconic's, comma-separated: question=prompt,answer=response;
    with --documents: text=FIELD"""
    max_length: OptionalInt = None
    """tokens of question, chain and answer above which rows are reported; with --documents, tokens per row"""
    documents: bool = False
    """the file contains documents: plain text, or rows (.jsonl, .parquet) with a field named text"""
    data_dir: OptionalPath = None
    """folder of the data sets' files, for a data set by name (default: the hub)"""
    format: OutputFormat = "human"

    def run(self) -> int:
        """Return 66 if rows are invalid, else 0."""
        from laconic.config.data import FieldName
        from laconic.data.audit import audit_documents, audit_examples, scan_file
        from laconic.data.reasoning.load import load_examples
        from laconic.data.tokenizer import load_tokenizer

        if self.max_length is not None and self.tokenizer is None:
            raise UsageError(f"--max-length {self.max_length}: counts tokens; add --tokenizer")
        check_minimum(1, max_length=self.max_length)
        if self.documents and self.overrides:
            raise UsageError(f"{self.overrides[0]}: keys of the recipe are for questions; remove it, or --documents")
        if self.documents or self.is_file:
            refuse_flags(self, ("data_dir",), f"{self.file} is a file, not a data set by name")
        else:
            refuse_flags(self, ("columns",), "only for a file")
        columns = parse_columns(self.columns, ("text",) if self.documents else get_args(FieldName))
        with status("loading the tokenizer"):
            tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        if self.documents:
            with progress("checking") as show:
                audit = audit_documents(Path(self.file), tokenizer, self.max_length, show, columns.get("text", "text"))
                return self.print_documents(audit)
        with status(f"reading {self.file}"):
            config = self.build_config(columns)
            file = scan_file(Path(self.file), config) if self.is_file else load_examples(self.file, "train", config)
        with progress("checking") as show:
            audit = audit_examples(file, tokenizer, self.max_length, show, config)
        if self.format == "json":
            print_json({"schema": 1, "file": self.file, "max_length": self.max_length} | asdict(audit))
        else:
            self.print_rows_audit(audit)
        return InputError.exit_code if audit.problems else 0

    @property
    def is_file(self) -> bool:
        from laconic.config.data import is_row_file

        return is_row_file(self.file) or Path(self.file).is_file()

    def build_config(self, columns: dict[str, str]) -> "DataConfig":
        from laconic.config.load import build_data_config

        if self.is_file:
            return build_data_config({"path": self.file, "columns": columns}, self.overrides)
        folder = {} if self.data_dir is None else {"data_dir": str(self.data_dir)}
        return build_data_config({"source": "catalog", "name": self.file} | folder, self.overrides)

    def print_rows_audit(self, audit: "RowsAudit") -> None:
        from laconic.data.strict_jsonl import RowProblem, format_problems

        if audit.problems:
            print(format_problems([RowProblem(**problem) for problem in audit.problems], Path(self.file).name))
        counts = {
            "problem" if len(audit.problems) == 1 else "problems": len(audit.problems),
            "rows": audit.rows,
            "rows without a chain": audit.rows_without_chain,
            f"duplicate questions{format_ids(b for _, b in audit.duplicates)}": len(audit.duplicates),
        }
        if audit.unclear_answers:
            title = f"answers that are not plain numbers{format_ids(audit.unclear_answers)}"
            counts[f"{title}, which protocols codi and decimal cannot judge"] = len(audit.unclear_answers)
        if audit.tokens:
            counts["unknown tokens in questions and chains"] = audit.unknown_tokens
        if self.max_length is not None:
            title = f"rows of more than {self.max_length:,} tokens, which would be truncated"
            counts[f"{title}{format_ids(audit.too_long)}"] = len(audit.too_long)
        print_counts(counts)
        if audit.rows:
            answer, share = audit.majority_answer.values()
            print(f"{share:>10.1%}  of the answers are {answer!r}, the most common one")
        if audit.answer_type == "text" and not any("answer_type" in key for key in self.overrides):
            print('note: most answers are texts; set data.answer_type = "text" in a recipe')
        print_origin(audit.notes, audit.sha256, audit.tokens)

    def print_documents(self, audit: "DocumentAudit") -> int:
        if self.format == "json":
            print_json({"schema": 1, "file": self.file, "max_length": self.max_length} | asdict(audit))
            return 0
        parts = audit.documents_by_part.items()
        counts = {"documents" if part == "unspecified" else f"documents, part {part}": n for part, n in parts}
        counts |= {"sections": audit.num_sections, "duplicate sections": audit.num_duplicate_sections}
        counts |= {} if audit.num_rows is None else {f"rows of {self.max_length:,} tokens": audit.num_rows}
        print_counts(counts)
        print_origin(audit.notes, audit.sha256, {"document": audit.token_lengths} if audit.token_lengths else {})
        return 0


def print_counts(counts: Mapping[str, int]) -> None:
    for text, n in counts.items():
        print(f"{n:>10,}  {text}")


def print_origin(notes: Iterable[str], sha256: str, lengths: Mapping[str, Mapping[str, int]]) -> None:
    print("\n".join([*(f"note: {text}" for text in notes), f"sha256 {sha256}"]))
    if lengths:
        rows = [(part, *(f"{n:,}" for n in quantiles.values())) for part, quantiles in lengths.items()]
        print_rows(("tokens", "p50", "p90", "p99", "max"), rows)


def parse_columns(text: str | None, known: Sequence[str]) -> dict[str, str]:
    """Parse --columns. Raises `UsageError` (2) unless it is a list of NAME=COLUMN with our names of fields."""
    pairs = [part.partition("=") for part in split_commas(text or "")]
    if any(name not in known or not column for name, _, column in pairs):
        raise UsageError(f"--columns {text}: expected NAME=COLUMN with the names {', '.join(known)}")
    return {name: column for name, _, column in pairs}


def format_ids(ids: Iterable[str]) -> str:
    first = list(islice(ids, MAX_IDS_LISTED + 1))
    more = ", …" if len(first) > MAX_IDS_LISTED else ""
    return f" ({', '.join(first[:MAX_IDS_LISTED])}{more})" if first else ""
