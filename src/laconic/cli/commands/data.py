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
    from laconic.data.audit import AuditResult, DocumentAudit, LengthQuantiles, ScannedFile
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
            sources = [name for name, value in (("files", split_files(info)), ("hub", info.hub_repo)) if value]
            sizes = {name: split.num_rows for name, split in info.splits.items()}
            counts = [f"{count:,}" if (count := sizes.get(name)) else "" for name in SPLITS]
            rows.append([info.name, *counts, ", ".join(sources or ["sets"]), info.licence])
        print_rows(("set", *SPLITS, "from", "licence"), rows)
        for info in DATASETS.values():
            hub = f"; hub: {info.hub_repo}" if info.hub_repo else ""
            generator = f"; laconic data make {info.generator} generates training rows" if info.generator else ""
            print(f"{info.name}: {info.description}{hub}{generator}")
        return 0


def split_files(info: "DatasetInfo") -> dict[str, str]:
    return {name: split.file.path for name, split in info.splits.items() if split.file}


def dataset_to_json(info: "DatasetInfo") -> dict[str, Any]:
    return {
        "name": info.name,
        "description": info.description,
        "licence": info.licence,
        "rows": {name: split.num_rows for name, split in info.splits.items()},
        "files": split_files(info),
        "rows_in_files": {name: split.file.num_rows for name, split in info.splits.items() if split.file},
        "hub": info.hub_repo,
        "members": list(info.members),
        "chain_field": info.chain_field or None,
        "answers": info.answer_kind,
    }


@dataclass(frozen=True)
class DataCheckCommand:
    """Check a data file: errors, duplicates, lengths in tokens, rows that would be truncated.

    Example: laconic data check train.jsonl --tokenizer meta-llama/Llama-3.2-1B --max-length 256
    """

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """file of rows (.jsonl, .parquet, iCoT's .txt), or a data set by name such as gsm8k-aug:valid"""
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
        from laconic.data.audit import audit_documents, audit_examples
        from laconic.data.tokenizer import load_tokenizer

        if self.max_length is not None and self.tokenizer is None:
            raise UsageError(f"--max-length {self.max_length}: counts tokens; add --tokenizer")
        check_minimum(1, max_length=self.max_length)
        self.refuse_folder()
        self.refuse_other_flags()
        columns = parse_columns(self.columns, ("text",) if self.documents else get_args(FieldName))
        with status("loading the tokenizer"):
            tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        if self.documents:
            with progress("checking") as show:
                audit = audit_documents(Path(self.file), tokenizer, self.max_length, show, columns.get("text", "text"))
                return self.print_documents(audit)
        with status(f"reading {self.file}"):
            scanned = self.scan_rows(columns)
        with progress("checking") as show:
            result = audit_examples(scanned, tokenizer, self.max_length, show)
        if self.format == "json":
            print_json(self.result_to_json(scanned, result))
        else:
            self.print_result(scanned, result)
        return InputError.exit_code if result.problems else 0

    @property
    def is_file(self) -> bool:
        """Whether to read a file rather than a data set by name."""
        from laconic.config.data import is_row_file

        return is_row_file(self.file) or Path(self.file).is_file()

    def refuse_folder(self) -> None:
        """Raise `InputError` (66) for a path that is no file; the library `datasets` would search it for minutes.

        A folder named as a hub data set, `owner/name`, is a local copy, which that library reads.
        """
        from laconic.data.reasoning.catalog import find_dataset, split_name

        path, base = Path(self.file), split_name(self.file)[0]
        if self.documents or self.is_file or find_dataset(self.file) is not None:
            return
        parts = Path(base).parts
        if path.is_dir() and (path.is_absolute() or len(parts) != 2 or parts[0] in ("..", "~")):
            hint = "name a data set of several files FOLDER/NAME, from the folder above"
            raise InputError(f"{path} is a folder; give a .jsonl, .parquet or .txt file, or {hint}")
        if path.is_absolute():
            raise InputError(f"no file {path}; give a .jsonl, .parquet or .txt file, or a data set by name")

    def refuse_other_flags(self) -> None:
        """Raise `UsageError` (2) for flags that what is read has no use for."""
        if self.documents or self.is_file:
            refuse_flags({"data_dir": self.data_dir}, f"{self.file} is a file, not a data set by name")
        if not self.documents and not self.is_file:
            refuse_flags({"columns": self.columns}, "only for a file")

    def scan_rows(self, columns: Mapping[str, str]) -> "ScannedFile":
        from laconic.config.data import DataConfig
        from laconic.data.audit import AUDIT_CONFIG, ScannedFile, scan_file
        from laconic.data.reasoning.load import load_examples

        if self.is_file:
            return scan_file(Path(self.file), AUDIT_CONFIG.model_copy(update={"columns": columns}))
        data_dir = None if self.data_dir is None else str(self.data_dir)
        examples = load_examples(self.file, "train", DataConfig(source="catalog", name=(self.file,), data_dir=data_dir))
        return ScannedFile(examples.examples, examples.sha256, (), examples.notes)

    def result_to_json(self, scanned: "ScannedFile", result: "AuditResult") -> dict[str, Any]:
        return {
            "schema": 1,
            "file": self.file,
            "sha256": scanned.sha256,
            "rows": result.num_rows,
            "problems": [problem._asdict() for problem in result.problems],
            "notes": list(scanned.notes),
            "rows_without_chain": result.num_without_chain,
            "answer_type": result.answer_type,
            "unclear_answers": list(result.unclear_answers),
            "majority_answer": {"answer": result.majority_answer[0], "share": result.majority_answer[1]},
            "duplicates": [list(pair) for pair in result.duplicates],
            "tokens": {part: lengths._asdict() for part, lengths in result.lengths.items()},
            "unknown_tokens": result.num_unknown_tokens,
            "max_length": self.max_length,
            "too_long": list(result.too_long),
        }

    def print_result(self, scanned: "ScannedFile", result: "AuditResult") -> None:
        from laconic.data.strict_jsonl import format_problems

        if result.problems:
            print(format_problems(result.problems, Path(self.file).name))
        counts = {
            "problems": len(result.problems),
            "rows": result.num_rows,
            "rows without a chain": result.num_without_chain,
            f"duplicate questions{format_ids(b for _, b in result.duplicates)}": len(result.duplicates),
        }
        if result.unclear_answers:
            title = f"answers that are not plain numbers{format_ids(result.unclear_answers)}"
            counts[f"{title}, which protocols codi and decimal cannot judge"] = len(result.unclear_answers)
        if result.lengths:
            counts["unknown tokens in questions and chains"] = result.num_unknown_tokens
        if self.max_length is not None:
            title = f"rows of more than {self.max_length:,} tokens, which would be truncated"
            counts[f"{title}{format_ids(result.too_long)}"] = len(result.too_long)
        print_counts(counts)
        if result.num_rows:
            answer, share = result.majority_answer
            print(f"{share:>10.1%}  of the answers are {answer!r}, the most common one")
        if result.answer_type == "text":
            print('note: most answers are texts; set data.answer_type = "text" in a recipe')
        print_origin(scanned.notes, scanned.sha256, result.lengths)

    def print_documents(self, audit: "DocumentAudit") -> int:
        if self.format == "json":
            metadata = {"schema": 1, "file": self.file, "max_length": self.max_length}
            tokens = None if audit.token_lengths is None else audit.token_lengths._asdict()
            print_json(metadata | asdict(audit) | {"token_lengths": tokens})
            return 0
        counts = {
            "documents" if part == "unspecified" else f"documents, part {part}": n
            for part, n in audit.documents_by_part.items()
        }
        counts |= {"sections": audit.num_sections, "duplicate sections": audit.num_duplicate_sections}
        counts |= {} if audit.num_rows is None else {f"rows of {self.max_length:,} tokens": audit.num_rows}
        print_counts(counts)
        print_origin(audit.notes, audit.sha256, {"document": audit.token_lengths} if audit.token_lengths else {})
        return 0


def print_counts(counts: Mapping[str, int]) -> None:
    for text, n in counts.items():
        print(f"{n:>10,}  {text}")


def print_origin(notes: Iterable[str], sha256: str, lengths: "Mapping[str, LengthQuantiles]") -> None:
    """Print notes, the hash of the file, and lengths in tokens by part, if they were counted."""
    print("\n".join([*(f"note: {text}" for text in notes), f"sha256 {sha256}"]))
    if lengths:
        rows = [(part, *(f"{n:,}" for n in quantiles)) for part, quantiles in lengths.items()]
        print_rows(("tokens", "p50", "p90", "p99", "max"), rows)


def parse_columns(text: str | None, known: Sequence[str]) -> dict[str, str]:
    """Parse --columns. Raises `UsageError` (2) unless it is a list of NAME=COLUMN with our names of fields."""
    pairs = [part.partition("=") for part in split_commas(text or "")]
    if any(name not in known or not column for name, _, column in pairs):
        raise UsageError(f"--columns {text}: expected NAME=COLUMN with the names {', '.join(known)}")
    return {name: column for name, _, column in pairs}


def format_ids(ids: Iterable[str]) -> str:
    """Return the first few ids in brackets."""
    first = list(islice(ids, MAX_IDS_LISTED + 1))
    more = ", …" if len(first) > MAX_IDS_LISTED else ""
    return f" ({', '.join(first[:MAX_IDS_LISTED])}{more})" if first else ""
