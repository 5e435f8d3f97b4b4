"""`laconic data list` and `check`: the sets known by name, and rows looked over."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from laconic.console import progress, status
from laconic.errors import InputError, UsageError

if TYPE_CHECKING:
    from laconic.data.audit import AuditResult, DocumentAudit, LengthQuantiles, ScannedFile
    from laconic.data.reasoning.load import DatasetInfo

MAX_IDS_LISTED = 3  # ids named as examples
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataListCommand:
    """Lists the data sets known by name: their rows, where they are read from, their licences.

    Example: laconic data list
    """

    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Prints them."""
        from laconic.data.reasoning.catalog import DATASETS

        if self.format == "json":
            print(
                json.dumps(
                    {"schema": 1, "sets": [dataset_to_json(found) for found in DATASETS.values()]}, ensure_ascii=False
                )
            )
            return 0
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table("set", *SPLITS, "from", "licence", box=SIMPLE_HEAD)
        for found in DATASETS.values():
            rows = {part: split.num_rows for part, split in found.splits.items()}
            places = [name for name, there in (("files", split_files(found)), ("hub", found.hub_repo)) if there]
            counts = [f"{count:,}" if (count := rows.get(part)) else "" for part in SPLITS]
            table.add_row(found.name, *counts, ", ".join(places or ["sets"]), found.licence)
        Console().print(table)
        for found in DATASETS.values():
            hub = f"; hub: {found.hub_repo}" if found.hub_repo else ""
            more = f"; laconic data make {found.generator} writes training rows" if found.generator else ""
            print(f"{found.name}: {found.description}{hub}{more}")
        return 0


def split_files(found: "DatasetInfo") -> dict[str, str]:
    """The file of each split that has one."""
    return {part: split.file.path for part, split in found.splits.items() if split.file}


def dataset_to_json(found: "DatasetInfo") -> dict[str, Any]:
    """A set as JSON."""
    return {
        "name": found.name,
        "about": found.description,
        "licence": found.licence,
        "rows": {part: split.num_rows for part, split in found.splits.items()},
        "files": split_files(found),
        "rows_in_files": {part: split.file.num_rows for part, split in found.splits.items() if split.file},
        "hub": found.hub_repo,
        "members": list(found.members),
        "chain": found.chain_field,
        "answers": found.answer_kind,
    }


@dataclass(frozen=True)
class DataCheckCommand:
    """Looks rows over: faults, what stands twice, lengths in tokens, rows that would be cut.

    Example: laconic data check train.jsonl --tokenizer meta-llama/Llama-3.2-1B --max-length 256
    """

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """a file of rows (.jsonl, .parquet, iCoT's .txt), or a set by name, as gsm8k-aug:valid"""
    tokenizer: str | None = None
    """folder or hub name of a tokenizer, whose tokens are counted"""
    max_length: int | None = None
    """tokens of question, chain and answer; longer rows would be cut. Of texts: tokens of a row"""
    documents: bool = False
    """the file holds documents: a text, or rows of .jsonl or .parquet whose field text is one"""
    data_dir: Path | None = None
    """folder of the sets' files, for a set by name; without it they come by the hub"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """66 if there are faults, else 0."""
        from laconic.data.audit import audit_documents, audit_examples
        from laconic.data.tokenizer import load_tokenizer
        from laconic.models.weights import find_checkpoint

        if self.max_length is not None and self.tokenizer is None:
            raise UsageError(f"--max-length {self.max_length}: counted in tokens; name a --tokenizer")
        with status("loading the tokenizer"):
            tokenizer = None if self.tokenizer is None else load_tokenizer(find_checkpoint(self.tokenizer))
        if self.documents:
            with progress("checking") as show:
                return self.print_documents(audit_documents(Path(self.file), tokenizer, self.max_length, show))
        with status(f"reading {self.file}"):
            scan = self.scan_rows()
        with progress("checking") as show:
            found = audit_examples(scan, tokenizer, self.max_length, show)
        if self.format == "json":
            print(json.dumps(self.result_to_json(scan, found), ensure_ascii=False))
        else:
            self.print_result(scan, found)
        return InputError.exit_code if found.problems else 0

    def scan_rows(self) -> "ScannedFile":
        """The rows of the file or set."""
        from laconic.config.data import DataConfig, is_row_file
        from laconic.data.audit import ScannedFile, scan_file
        from laconic.data.reasoning import load as reasoning_load

        if is_row_file(self.file) or Path(self.file).is_file():
            return scan_file(Path(self.file))
        how = DataConfig(
            source="catalog", name=(self.file,), data_dir=None if self.data_dir is None else str(self.data_dir)
        )
        read = reasoning_load.load_examples(self.file, "train", how)
        return ScannedFile(read.examples, read.sha256, (), read.notes)

    def result_to_json(self, scan: "ScannedFile", found: "AuditResult") -> dict[str, Any]:
        """What was found as JSON."""
        return {
            "schema": 1,
            "file": self.file,
            "sha256": scan.sha256,
            "rows": found.num_rows,
            "faults": [problem._asdict() for problem in found.problems],
            "notes": list(scan.notes),
            "rows_without_chain": found.num_without_chain,
            "answers_without_number": found.num_without_number,
            "commonest_answer": {"answer": found.majority_answer[0], "share": found.majority_answer[1]},
            "questions_twice": [list(pair) for pair in found.duplicates],
            "tokens": {part: lengths._asdict() for part, lengths in found.lengths.items()},
            "unknown_tokens": found.num_unknown_tokens,
            "context": self.max_length,
            "rows_over_context": list(found.too_long),
        }

    def print_result(self, scan: "ScannedFile", found: "AuditResult") -> None:
        """What was found, for people."""
        from laconic.data.strict_jsonl import format_problems

        if found.problems:
            print(format_problems(found.problems, Path(self.file).name))
        counts = {
            "faults": len(found.problems),
            "rows": found.num_rows,
            "rows without a chain": found.num_without_chain,
            'answers without a number, which data.answer_type = "text" takes': found.num_without_number,
            f"questions that stood before{format_ids(b for _, b in found.duplicates)}": len(found.duplicates),
        }
        if found.lengths:
            counts["tokens of questions and chains that the tokenizer has no word for"] = found.num_unknown_tokens
        if self.max_length is not None:
            counts[f"rows over {self.max_length:,} tokens, which would be cut{format_ids(found.too_long)}"] = len(
                found.too_long
            )
        for text, n in counts.items():
            print(f"{n:>10,}  {text}")
        if found.num_rows:
            print(f"{found.majority_answer[1]:>10.1%}  of the answers are {found.majority_answer[0]!r}, the commonest")
        print("\n".join([*(f"note: {text}" for text in scan.notes), f"sha256 {scan.sha256}"]))
        if found.lengths:
            self.print_lengths(found.lengths)

    def print_documents(self, found: "DocumentAudit") -> int:
        """What was found of documents."""
        if self.format == "json":
            about = {"schema": 1, "file": self.file, "context": self.max_length}
            tokens = None if found.token_lengths is None else found.token_lengths._asdict()
            print(json.dumps(about | asdict(found) | {"tokens": tokens}, ensure_ascii=False))
            return 0
        counts = {
            "documents" if part == "unsaid" else f"documents, part {part}": n
            for part, n in found.documents_by_part.items()
        }
        counts |= {
            "sections of documents": found.num_sections,
            "sections that stood before": found.num_duplicate_sections,
        }
        counts |= {} if found.num_rows is None else {f"rows of {self.max_length:,} tokens": found.num_rows}
        for text, n in counts.items():
            print(f"{n:>10,}  {text}")
        print("\n".join([*(f"note: {text}" for text in found.notes), f"sha256 {found.sha256}"]))
        if found.token_lengths:
            self.print_lengths({"document": found.token_lengths})
        return 0

    def print_lengths(self, found: "Mapping[str, LengthQuantiles]") -> None:
        """Lengths by part."""
        from rich.console import Console
        from rich.table import Table

        table = Table("tokens", "p50", "p90", "p99", "max")
        for part, lengths in found.items():
            table.add_row(part, *(f"{n:,}" for n in lengths))
        Console().print(table)


def format_ids(ids: Iterable[str]) -> str:
    """The first of some ids, in brackets."""
    shown = list(islice(ids, MAX_IDS_LISTED + 1))
    more = ", …" if len(shown) > MAX_IDS_LISTED else ""
    return f" ({', '.join(shown[:MAX_IDS_LISTED])}{more})" if shown else ""
