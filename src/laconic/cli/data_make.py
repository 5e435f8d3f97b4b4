"""`laconic data make`: rows that are generated, as JSONL."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tyro.conf import Positional, arg

from laconic.console import log_message, progress, status
from laconic.errors import InputError, UsageError

if TYPE_CHECKING:
    from laconic.batches import ReasoningExample
    from laconic.config.data import DataConfig
    from laconic.data.generators.gsm_variants import QuestionTemplate

JsonRow = Mapping[str, Any]
GENERATORS = ("gsm-variants", "mult-4", "mult-5", "mult-7", "mult-9", "prosqa")
HELD_OUT_SETS = ("gsm8k-aug:valid", "gsm8k-aug:test", "gsm8k:test", "svamp:test", "multiarith:test", "gsm-hard:test")


class OutputFile(NamedTuple):
    """A file to write: where, what its rows are of, how many, they."""

    path: Path
    description: str
    num_rows: int
    rows: Iterable[JsonRow]


@dataclass(frozen=True)
class DataMakeCommand:
    """Writes generated rows as JSONL, one object a line; the same arguments write the same bytes.

    Example: laconic data make gsm-variants --rows 200000 --out variants.jsonl --data-dir ../shared/data
    """

    generator: Annotated[Positional[str], arg(metavar="WHAT")]
    """gsm-variants: questions of GSM8K with other numbers; mult-4, -5, -7, -9: products as iCoT's; prosqa: graphs"""
    rows: int
    """how many rows to write"""
    out: Path
    """the file to write; one that is there is kept if it is equal, else refused"""
    data_dir: Path | None = None
    """folder of the data sets' files; the rows that they hold out are left out. gsm-variants without it: by the hub"""
    seed: int = 0
    """another seed gives other rows; the same templates are held out"""
    held_out_fraction: float = 0.05
    """gsm-variants: share of the templates held out; their rows, the same share of --rows, go to OUT.held.jsonl"""
    include_originals: bool = False
    """gsm-variants: the questions as they are come first, but for those of held-out templates; --rows counts them"""
    allow_ambiguous: bool = False
    """gsm-variants: take templates, too, whose numbers a word may mean as well (2, twice); some chains are wrong"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Generates, writes, counts."""
        from laconic.models.nearest import closest_word

        if self.generator not in GENERATORS:
            near = closest_word(self.generator, GENERATORS)
            raise UsageError(
                f"{self.generator}: not made here; "
                + (f"did you mean {near}?" if near else f"there are {', '.join(GENERATORS)}")
            )
        if self.rows < 1:
            raise UsageError(f"--rows {self.rows}: give at least 1")
        if not 0 <= self.held_out_fraction < 1:
            raise UsageError(f"--held-out-fraction {self.held_out_fraction:g}: give a share of at least 0 and below 1")
        if not self.out.absolute().parent.is_dir():
            raise InputError(f"{self.out}: no folder {self.out.parent} to write into; make it first")
        files = self.gsm_variant_files() if self.generator == "gsm-variants" else [self.generator_file()]
        done, total = count(1), sum(file.num_rows for file in files)
        with progress("writing") as show:
            write_all(files, lambda: None if (n := next(done)) % 100 else show("rows", n, total))
        for file in files:
            log_message(f"wrote {file.path}")
        if self.format == "json":
            made = [{"file": str(file.path), "rows": file.num_rows, "about": file.description} for file in files]
            print(json.dumps({"schema": 1, "what": self.generator, "seed": self.seed, "made": made}))
            return 0
        for file in files:
            print(f"{file.path}: {file.num_rows:,} {file.description}")
        return 0

    def gsm_variant_files(self) -> list[OutputFile]:
        """New numbers for the training questions, and for those whose templates are held out."""
        from laconic.data.generators.gsm_variants import interleave_variants, is_held_out, mask_numbers
        from laconic.data.generators.write_jsonl import example_to_row

        sources, found, taken = self.load_templates()
        held = [template for template in found if is_held_out(template.masked_question, self.held_out_fraction)]
        used = [template for template in found if not is_held_out(template.masked_question, self.held_out_fraction)]
        first = [
            replace(e, metadata={})
            for e in sources
            if self.include_originals and not is_held_out(mask_numbers(e.question), self.held_out_fraction)
        ]
        rows = map(example_to_row, chain(first, interleave_variants(used, self.seed, taken)))
        apart = map(example_to_row, interleave_variants(held, self.seed, taken))
        beside, few = self.out.with_suffix(f".held{self.out.suffix}"), round(self.rows * self.held_out_fraction)
        files = [
            OutputFile(self.out, self.describe_rows(len(first), len(used)), self.rows, islice(rows, self.rows)),
            OutputFile(
                beside, f"rows of {len(held):,} templates that {self.out.name} has none of", few, islice(apart, few)
            ),
        ]
        return [file for file in files if file.num_rows]

    def describe_rows(self, originals: int, templates: int) -> str:
        """What the rows are of."""
        if self.rows <= originals:
            return f"of {originals:,} questions as they are, and no variant; ask for more --rows"
        as_they_are = f": {originals:,} questions as they are, then" if originals else ""
        return f"rows{as_they_are} of {templates:,} templates"

    def load_templates(self) -> "tuple[tuple[ReasoningExample, ...], list[QuestionTemplate], set[str]]":
        """The training questions, their templates, and the questions that no variant may be."""
        from laconic.data.generators.gsm_variants import build_templates, mask_numbers
        from laconic.data.reasoning import load as reasoning_load

        how = self.data_config(("gsm8k-aug" if self.data_dir is None else "gsm8k-aug-subset", "gsm8k"))
        with status("reading"):
            sources = reasoning_load.load_training_examples(how).examples
            asked = {example.question for name in HELD_OUT_SETS for example in load_split(name, how)}
            texts = {mask_numbers(question) for question in asked}
            found = [template for template in build_templates(sources) if template.masked_question not in texts]
        kept = [template for template in found if self.allow_ambiguous or not template.is_ambiguous]
        left = f", {len(found) - len(kept):,} left out as doubtful" if len(kept) < len(found) else ""
        log_message(f"{len(sources):,} questions, {len(found):,} templates{left}")
        return sources, kept, asked | {example.question for example in sources}

    def generator_file(self) -> OutputFile:
        """Products or graphs, without those that are held out."""
        from laconic.data.generators.multiplication import iter_products
        from laconic.data.generators.prosqa import iter_problems

        if self.generator == "prosqa":
            asked = {e.question for e in self.load_held_out("prosqa")} if self.data_dir else set[str]()
            rows = (row for row in iter_problems(self.seed) if row["question"] not in asked)
            return OutputFile(self.out, "graphs", self.rows, islice(rows, self.rows))
        if self.data_dir is None:
            raise UsageError(
                f"{self.generator}: no --data-dir; name the folder of the sets' files, whose pairs are left out"
            )
        pairs = [(example.metadata["a"], example.metadata["b"]) for example in self.load_held_out(self.generator)]
        rows = iter_products(int(self.generator[-1]), self.seed, pairs)
        return OutputFile(self.out, "products", self.rows, islice(rows, self.rows))

    def load_held_out(self, name: str) -> "list[ReasoningExample]":
        """The rows of validation and test of a set."""
        how = self.data_config((name,))
        return [example for part in ("valid", "test") for example in load_split(f"{name}:{part}", how)]

    def data_config(self, names: tuple[str, ...]) -> "DataConfig":
        """How sets are read."""
        from laconic.config.data import DataConfig

        return DataConfig(source="catalog", name=names, data_dir=None if self.data_dir is None else str(self.data_dir))


def load_split(name: str, how: "DataConfig") -> "tuple[ReasoningExample, ...]":
    """The rows of a set's split."""
    from laconic.data.reasoning import load as reasoning_load

    return reasoning_load.load_examples(name, "test", how).examples


def write_all(files: list[OutputFile], show: Callable[[], object]) -> None:
    """All files or none: each has its name when those after it are written."""
    from laconic.data.generators.write_jsonl import write_jsonl

    if files:
        file = files[0]
        write_jsonl(file.path, report_rows(file, show), file.num_rows, lambda: write_all(files[1:], show))


def report_rows(file: OutputFile, show: Callable[[], object]) -> Iterator[JsonRow]:
    """The rows, each of which is shown as done."""
    for row in file.rows:
        yield row
        show()
