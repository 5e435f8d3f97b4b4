"""Speed of the data generators: variants of GSM8K questions, products, graphs."""

from collections.abc import Callable, Iterable
from itertools import islice
from time import process_time

from benchmarks.measure import ABSENT, CORPUS, Scale, Table, verdict
from laconic.config.data import DataConfig
from laconic.data.generators.gsm_variants import build_templates, interleave_variants
from laconic.data.generators.multiplication import iter_products
from laconic.data.generators.prosqa import iter_problems
from laconic.data.reasoning import load as reasoning_load

TARGET = 20_000  # rows per minute


def generating(scale: Scale) -> Table:
    """Return the table of rows per minute on one core."""
    head = ("rows", "count", "CPU s", "rows per minute", "target")
    text = "CPU seconds of the process, one run each, without reading the sources and without writing."
    rows: list[tuple[str, ...]] = [variants(scale)] if (CORPUS / "data").is_dir() else [("variants", *[ABSENT] * 4)]
    rows.append(time_rows("products of 4 by 4 digits", lambda n: islice(iter_products(4, 0), n), scale.num_generated))
    rows.append(time_rows("products of 9 by 9 digits", lambda n: islice(iter_products(9, 0), n), scale.num_generated))
    rows.append(time_rows("graphs", lambda n: islice(iter_problems(0), n), max(1, scale.num_generated // 10)))
    return Table("Generated rows", text, head, rows)


def variants(scale: Scale) -> tuple[str, ...]:
    """Return the row of question variants from the local part of GSM8K-Aug."""
    config = DataConfig(source="catalog", name=("gsm8k-aug-subset",), data_dir=str(CORPUS / "data"))
    examples = reasoning_load.load_examples("gsm8k-aug-subset", "train", config, scale.num_generated).examples
    start = process_time()
    templates = build_templates(examples)
    name = f"variants of {len(templates):,} templates, {process_time() - start:.1f} s to find them"
    return time_rows(name, lambda n: islice(interleave_variants(templates, 0), n), scale.num_generated)


def time_rows(name: str, generate: Callable[[int], Iterable[object]], count: int) -> tuple[str, ...]:
    """Generate `count` rows and return their row of the table."""
    start = process_time()
    num_rows = sum(1 for _ in generate(count))
    seconds = process_time() - start
    speed = num_rows / seconds * 60
    return (name, f"{num_rows:,}", f"{seconds:.2f}", f"{speed:,.0f}", verdict(speed, least=TARGET))
