"""How fast rows are generated: variants of GSM8K's questions, products, graphs."""

from collections.abc import Callable, Iterable
from itertools import islice
from time import process_time

from benchmarks.measure import ABSENT, CORPUS, Scale, Table, verdict
from laconic.config.data import DataConfig
from laconic.data.generators.gsm_variants import build_templates, interleave_variants
from laconic.data.generators.multiplication import iter_products
from laconic.data.generators.prosqa import iter_problems
from laconic.data.reasoning import load as reasoning_load

MIN_ROWS_PER_MINUTE = 20_000  # rows a minute


def generating(scale: Scale) -> Table:
    """Rows a minute on one core."""
    head = ("rows", "count", "CPU s", "rows a minute", "target")
    text = "CPU seconds of the process, one run each, without reading the sources and without writing."
    rows: list[tuple[str, ...]] = [variants(scale)] if (CORPUS / "data").is_dir() else [("variants", *[ABSENT] * 4)]
    rows.append(
        generation_row("products of 4 by 4 digits", lambda n: islice(iter_products(4, 0), n), scale.generated_rows)
    )
    rows.append(
        generation_row("products of 9 by 9 digits", lambda n: islice(iter_products(9, 0), n), scale.generated_rows)
    )
    rows.append(generation_row("graphs", lambda n: islice(iter_problems(0), n), max(1, scale.generated_rows // 10)))
    return Table("Generated rows", text, head, rows)


def variants(scale: Scale) -> tuple[str, ...]:
    """Of the local part of GSM8K-Aug."""
    config = DataConfig(source="catalog", name=("gsm8k-aug-subset",), data_dir=str(CORPUS / "data"))
    examples = reasoning_load.load_examples("gsm8k-aug-subset", "train", config, scale.generated_rows).examples
    began = process_time()
    templates = build_templates(examples)
    name = f"variants of {len(templates):,} templates, {process_time() - began:.1f} s to find them"
    return generation_row(name, lambda n: islice(interleave_variants(templates, 0), n), scale.generated_rows)


def generation_row(name: str, make: Callable[[int], Iterable[object]], count: int) -> tuple[str, ...]:
    """One kind of rows."""
    began = process_time()
    got = sum(1 for _ in make(count))
    took = process_time() - began
    speed = got / took * 60
    return (name, f"{got:,}", f"{took:.2f}", f"{speed:,.0f}", verdict(speed, least=MIN_ROWS_PER_MINUTE))
