"""`laconic data make`: generate rows and write them as JSONL."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, filterfalse, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

from tyro.conf import Positional, arg

from laconic.cli.arguments import OptionalInt, OptionalPath, OutputFormat, check_minimum, refuse_flags
from laconic.cli.files import check_output_path, print_json
from laconic.console import ProgressFn, log_message, progress, status
from laconic.errors import UsageError

if TYPE_CHECKING:
    from laconic.batches import ReasoningExample
    from laconic.config.data import DataConfig
    from laconic.data.generators.digits import DigitChain
    from laconic.data.generators.gsm_variants import QuestionTemplate

JsonRow = Mapping[str, Any]
CHAIN_STYLES = {  # the default first
    "digits": ("brackets", "equations", "results"),
    "gsm-variants": ("equations", "results"),
}
OPTIONS = {  # those that not every generator has
    "digits": {"held_out_fraction", "results_only_fraction", "num_operations", "min_operations"},
    "gsm-variants": {
        "held_out_fraction", "results_only_fraction", "include_originals", "allow_ambiguous", "min_steps", "max_steps",
        "max_value", "integers_only", "new_numbers_fraction",
    },
}  # fmt: skip
MAX_OPERATIONS = 12  # as DigitsConfig allows
EXCLUDED_SETS = ("gsm8k-aug:valid", "gsm8k-aug:test", "gsm8k:test", "svamp:test", "multiarith:test", "gsm-hard:test")


class OutputFile(NamedTuple):
    path: Path
    description: str
    num_rows: int
    rows: Iterable[JsonRow]


@dataclass(frozen=True)
class DataMakeCommand:
    """Generate rows and write them as JSONL; the same arguments write the same bytes.

    Example: laconic data make gsm-variants --rows 200000 --out variants.jsonl --data-dir ../shared/data
    """

    generator: Annotated[
        Positional[Literal["digits", "gsm-variants", "mult-4", "mult-5", "mult-7", "mult-9", "prosqa"]],
        arg(metavar="GENERATOR"),
    ]
    """gsm-variants: GSM8K with other numbers; mult-4, -5, -7, -9: multiplication; prosqa: paths in graphs; digits:
    chains of operations on digits"""
    rows: int
    """number of rows to write"""
    out: Path
    """file to write; an existing file with other rows is refused"""
    data_dir: OptionalPath = None
    """folder of the data sets' files, whose validation and test rows are excluded (gsm-variants: default the hub)"""
    seed: int = 0
    """random seed; it does not change which templates are held out"""
    held_out_fraction: float = 0.05
    """gsm-variants: fraction of the templates to hold out; the same fraction of --rows goes to OUT.held_out.jsonl;
    digits: number of validation rows in that file, as a fraction of --rows"""
    include_originals: bool = False
    """gsm-variants: begin with the original questions, which count towards --rows"""
    allow_ambiguous: bool = False
    """gsm-variants: include templates where a word may mean the same number (2, twice); some chains are then wrong"""
    min_steps: OptionalInt = None
    """gsm-variants: leave out questions with fewer steps in their chain"""
    max_steps: OptionalInt = None
    """gsm-variants: leave out questions with more steps in their chain"""
    max_value: OptionalInt = None
    """gsm-variants: leave out questions with a larger result in their chain"""
    integers_only: bool = False
    """gsm-variants: leave out questions with no step, or with a result that is not a whole number"""
    new_numbers_fraction: float = 0.0
    """gsm-variants: rows in OUT.new_numbers.jsonl, as a fraction of --rows: templates of OUT with other numbers"""
    num_operations: int = 4
    """digits: operations in each question"""
    min_operations: OptionalInt = None
    """digits: smallest number of operations; each number up to --num-operations then has as many questions"""
    chain_style: Annotated[str | None, arg(metavar="STYLE")] = None
    """style of the chains. digits: brackets (<8><0>), equations (8*1=8;8*5=0;) or results (80); gsm-variants: equations
    (<<8*3=24>>) or results (#2 #4 #, only rows with results to 99). Without this flag, the first of them"""
    results_only_fraction: float = 0.0
    """digits, gsm-variants: mean fraction of the questions that end in : and whose chain has results only (24)"""
    format: OutputFormat = "human"

    def run(self) -> int:
        self.validate()
        files = self.list_files()
        with progress("writing") as show:
            write_all(files, show)
        for path, _, _, _ in files:
            log_message(f"wrote {path}")
        if self.format == "json":
            written = [{"file": str(path), "rows": n, "description": text} for path, text, n, _ in files]
            print_json({"schema": 1, "generator": self.generator, "seed": self.seed, "files": written})
            return 0
        for path, text, n, _ in files:
            print(f"{path}: {n:,} {text}")
        return 0

    def validate(self) -> None:
        foreign = set[str]().union(*OPTIONS.values()) - OPTIONS.get(self.generator, set())
        refuse_flags(self, sorted(foreign), f"{self.generator} has no such option")
        check_minimum(1, rows=self.rows, min_steps=self.min_steps, max_steps=self.max_steps, max_value=self.max_value)
        check_minimum(1, num_operations=self.num_operations, min_operations=self.min_operations)
        if self.num_operations > MAX_OPERATIONS:
            raise UsageError(f"--num-operations {self.num_operations}: give at most {MAX_OPERATIONS}")
        if (self.min_operations or 1) > self.num_operations:
            raise UsageError(f"--min-operations {self.min_operations} exceeds --num-operations {self.num_operations}")
        if self.max_steps is not None and (self.min_steps or 1) > self.max_steps:
            raise UsageError(f"--min-steps {self.min_steps} exceeds --max-steps {self.max_steps}")
        styles = CHAIN_STYLES.get(self.generator, ())
        if self.chain_style is not None and self.chain_style not in styles:
            expected = f"give {' or '.join(styles)}" if styles else f"{self.generator} has one style"
            raise UsageError(f"--chain-style {self.chain_style}: {expected}")
        if not 0 <= self.results_only_fraction <= 1:
            raise UsageError(f"--results-only-fraction {self.results_only_fraction:g}: give a number from 0 to 1")
        if self.results_only_fraction and self.chain_style == "results":
            raise UsageError("--results-only-fraction: --chain-style results has results only")
        for flag, fraction in (("held-out", self.held_out_fraction), ("new-numbers", self.new_numbers_fraction)):
            if not 0 <= fraction < 1:
                raise UsageError(f"--{flag}-fraction {fraction:g}: must be at least 0 and below 1")
        check_output_path("--out", self.out)

    def list_files(self) -> list[OutputFile]:
        """Return the files of the generator; those without rows are left out."""
        files = {"gsm-variants": self.gsm_variant_files, "digits": self.digit_files}.get(self.generator)
        return [file for file in files() if file.num_rows] if files else [self.generator_file()]

    def digit_files(self) -> list[OutputFile]:
        from laconic.data.generators.digits import iter_digit_rows

        num_valid = round(self.rows * self.held_out_fraction)
        low, high = self.min_operations, self.num_operations
        style = cast("DigitChain", self.chain_style or "brackets")
        make_rows = partial(iter_digit_rows, seed=self.seed, num_operations=high, min_operations=low, chain=style)
        rows = make_rows(self.rows, part="train", results_only_fraction=self.results_only_fraction)
        valid_rows = make_rows(num_valid, part="valid")
        valid_path = self.out.with_suffix(f".held_out{self.out.suffix}")
        numbers = f"{high}" if low in (None, high) else f"{low} to {high}"
        return [
            OutputFile(self.out, f"chains of {numbers} operations", self.rows, rows),
            OutputFile(valid_path, f"rows that {self.out.name} does not contain", num_valid, valid_rows),
        ]

    def gsm_variant_files(self) -> list[OutputFile]:
        """Return the files of training variants, of held-out templates, and of other numbers in training templates."""
        from laconic.data.generators.gsm_variants import NEW_NUMBERS_KEY, interleave_variants, is_held_out, mask_numbers
        from laconic.data.generators.write_jsonl import example_to_row

        def holds_out(masked: str) -> bool:
            return is_held_out(masked, self.held_out_fraction)

        def is_new(example: "ReasoningExample") -> bool:
            return is_held_out(example.question, self.new_numbers_fraction, NEW_NUMBERS_KEY)

        def make_variants(templates: "list[QuestionTemplate]") -> "Iterator[ReasoningExample]":
            return filter(self.is_within_limits, interleave_variants(templates, self.seed, excluded, self.max_value))

        def make_training_rows() -> "Iterator[ReasoningExample]":
            rows = chain(originals, filterfalse(is_new, make_variants(training)))
            return islice(self.convert_chains(rows, self.results_only_fraction), self.rows)

        def make_new_rows() -> "Iterator[ReasoningExample]":
            used = {row.metadata.get("template") for row in make_training_rows()}
            variants = (row for row in make_variants(training) if is_new(row) and row.metadata["template"] in used)
            return islice(self.convert_chains(variants), num_new)

        sources, templates, excluded = self.load_templates()
        held_out = [template for template in templates if holds_out(template.masked_question)]
        training = [template for template in templates if not holds_out(template.masked_question)]
        originals = [
            replace(example, metadata={})
            for example in (sources if self.include_originals else ())
            if not holds_out(mask_numbers(example.question))
        ]
        num_held_out, num_new = (round(self.rows * f) for f in (self.held_out_fraction, self.new_numbers_fraction))
        held_out_rows = islice(self.convert_chains(make_variants(held_out)), num_held_out)
        held_out_description = f"rows of {len(held_out):,} templates that {self.out.name} does not contain"
        held_out_path, new_path = (
            self.out.with_suffix(f".{name}{self.out.suffix}") for name in ("held_out", "new_numbers")
        )
        new_description = f"rows with other numbers in the templates of {self.out.name}"
        num_originals = min(len(originals), self.rows)
        start = f": {num_originals:,} original questions, {self.rows - num_originals:,} variants" if originals else ""
        description = f"rows{start} of {len(training):,} templates"
        return [
            OutputFile(self.out, description, self.rows, map(example_to_row, make_training_rows())),
            OutputFile(held_out_path, held_out_description, num_held_out, map(example_to_row, held_out_rows)),
            OutputFile(new_path, new_description, num_new, map(example_to_row, make_new_rows() if num_new else ())),
        ]

    def convert_chains(
        self, examples: "Iterable[ReasoningExample]", results_only_fraction: float = 0.0
    ) -> "Iterator[ReasoningExample]":
        """Yield rows with chains in the style of `--chain-style`, a fraction of them with results only."""
        from laconic.data.generators.result_chains import convert_chain, shorten_chains

        if self.chain_style == "results":
            return (row for example in examples if (row := convert_chain(example)) is not None)
        return shorten_chains(examples, results_only_fraction, self.seed)

    def load_templates(self) -> "tuple[tuple[ReasoningExample, ...], list[QuestionTemplate], set[str]]":
        """Return the training questions, their templates, and the questions that no variant may equal."""
        from laconic.data.generators.gsm_variants import build_templates, mask_numbers
        from laconic.data.reasoning.load import load_training_examples

        config = self.data_config(("gsm8k-aug" if self.data_dir is None else "gsm8k-aug-subset", "gsm8k"))
        with status("reading"):
            sources = load_training_examples(config).examples
            excluded = {example.question for name in EXCLUDED_SETS for example in self.load_split(name)}
            masked = {mask_numbers(question) for question in excluded}
            easy = tuple(example for example in sources if self.is_within_limits(example))
            templates = [t for t in build_templates(easy) if t.masked_question not in masked]
        usable = [template for template in templates if self.allow_ambiguous or not template.is_ambiguous]
        num_left = len(templates) - len(usable)
        left_out = f", {num_left:,} left out as ambiguous" if num_left else ""
        log_message(f"{len(easy):,} questions, {len(templates):,} templates{left_out}")
        return easy, usable, excluded | {example.question for example in sources}

    def is_within_limits(self, example: "ReasoningExample") -> bool:
        """Return whether a question's chain respects `--integers-only`, `--min-steps`, `--max-steps`, `--max-value`."""
        from laconic.data.generators.gsm_variants import largest_result
        from laconic.data.generators.result_chains import list_results

        if self.integers_only and not list_results(example):
            return False
        num_steps = len(example.steps)
        has_length = (self.min_steps or 0) <= num_steps <= (self.max_steps or num_steps)
        return has_length and (self.max_value is None or largest_result(example.steps) <= self.max_value)

    def generator_file(self) -> OutputFile:
        from laconic.data.generators.multiplication import iter_products
        from laconic.data.generators.prosqa import iter_problems

        if self.generator == "prosqa":
            excluded = {example.question for example in self.load_held_out("prosqa")} if self.data_dir else set[str]()
            rows = (row for row in iter_problems(self.seed) if row["question"] not in excluded)
            return OutputFile(self.out, "graphs", self.rows, islice(rows, self.rows))
        if self.data_dir is None:
            raise UsageError(f"{self.generator} requires --data-dir with the files whose rows are excluded")
        pairs = [(example.metadata["a"], example.metadata["b"]) for example in self.load_held_out(self.generator)]
        rows = iter_products(int(self.generator[-1]), self.seed, pairs)
        return OutputFile(self.out, "products", self.rows, islice(rows, self.rows))

    def load_held_out(self, name: str) -> "list[ReasoningExample]":
        return [example for part in ("valid", "test") for example in self.load_split(f"{name}:{part}")]

    def load_split(self, name: str) -> "tuple[ReasoningExample, ...]":
        from laconic.data.reasoning.load import load_examples

        return load_examples(name, "test", self.data_config((name,))).examples

    def data_config(self, names: tuple[str, ...]) -> "DataConfig":
        from laconic.config.data import DataConfig

        data_dir = None if self.data_dir is None else str(self.data_dir)
        return DataConfig(source="catalog", name=names, data_dir=data_dir)


def write_all(files: list[OutputFile], show: ProgressFn) -> None:
    """Write all files or none: a file is put in place once all later ones are written."""
    from laconic.data.generators.write_jsonl import write_jsonl

    def report(rows: Iterable[JsonRow]) -> Iterator[JsonRow]:
        for n, row in enumerate(rows):
            if n % 100 == 0:
                show(f"{path.name}, rows", n, num_rows)
            yield row

    if files:
        path, _, num_rows, rows = files[0]
        write_jsonl(path, report(rows), num_rows, lambda: write_all(files[1:], show))
