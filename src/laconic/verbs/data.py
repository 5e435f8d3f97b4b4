"""`laconic data check`: a file of rows looked over."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from laconic.console import note, progress
from laconic.core.errors import Usage

if TYPE_CHECKING:
    from laconic.data.checking import Checked

SHOWN = 3  # ids named as examples


@dataclass(frozen=True)
class Check:
    """Looks a file of rows over: faults, what stands twice, lengths in tokens, rows that would be cut.

    Example: laconic data check train.jsonl --tokenizer meta-llama/Llama-3.2-1B --context 256
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """a file with one JSON object a line"""
    tokenizer: str | None = None
    """folder or hub name of a tokenizer, whose tokens are counted"""
    context: int | None = None
    """tokens of question, chain and answer; longer rows would be cut"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """66 if there are faults, else 0."""
        from laconic.core.weights import find
        from laconic.data.checking import look
        from laconic.data.tokens import load_tokenizer

        if self.context is not None and self.tokenizer is None:
            raise Usage(f"--context {self.context}: counted in tokens; name a --tokenizer")
        with note("loading the tokenizer"):
            tokenizer = None if self.tokenizer is None else load_tokenizer(find(self.tokenizer))
        with progress("checking") as show:
            found = look(self.file, tokenizer, self.context, show)
        if self.format == "json":
            print(json.dumps(self.told(found), ensure_ascii=False))
        else:
            self.tell(found)
        return 66 if found.faults or not found.rows else 0

    def told(self, found: "Checked") -> dict[str, Any]:
        """What was found as JSON."""
        return {
            "schema": 1,
            "file": str(self.file),
            "sha256": found.sha256,
            "rows": found.rows,
            "faults": [problem._asdict() for problem in found.faults],
            "notes": list(found.notes),
            "rows_without_chain": found.chainless,
            "answers_without_number": found.wordless,
            "commonest_answer": {"answer": found.answer[0], "share": found.answer[1]},
            "questions_twice": [list(pair) for pair in found.twice],
            "tokens": {part: lengths._asdict() for part, lengths in found.lengths.items()},
            "unknown_tokens": found.unknown,
            "context": self.context,
            "rows_over_context": list(found.over),
        }

    def tell(self, found: "Checked") -> None:
        """What was found, for people."""
        from laconic.data.problems import report

        if found.faults:
            print(report(found.faults, self.file.name))
        counts = {
            "faults": len(found.faults),
            "rows": found.rows,
            "rows without a chain": found.chainless,
            'answers without a number, which data.answers = "text" takes': found.wordless,
            f"questions that stood before{named(b for _, b in found.twice)}": len(found.twice),
        }
        if found.lengths:
            counts["tokens of questions and chains that the tokenizer has no word for"] = found.unknown
        if self.context is not None:
            counts[f"rows over {self.context:,} tokens, which would be cut{named(found.over)}"] = len(found.over)
        for text, n in counts.items():
            print(f"{n:>10,}  {text}")
        if found.rows:
            print(f"{found.answer[1]:>10.1%}  of the answers are {found.answer[0]!r}, the commonest")
        print("\n".join([*(f"note: {text}" for text in found.notes), f"sha256 {found.sha256}"]))
        if found.lengths:
            self.table(found)

    def table(self, found: "Checked") -> None:
        """Lengths by part."""
        from rich.console import Console
        from rich.table import Table

        table = Table("tokens", "p50", "p90", "p99", "max")
        for part, lengths in found.lengths.items():
            table.add_row(part, *(f"{n:,}" for n in lengths))
        Console().print(table)


def named(ids: Iterable[str]) -> str:
    """The first of some ids, in brackets."""
    shown = list(islice(ids, SHOWN + 1))
    more = ", …" if len(shown) > SHOWN else ""
    return f" ({', '.join(shown[:SHOWN])}{more})" if shown else ""
