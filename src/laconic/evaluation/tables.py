"""Tables of results: columns declared once, printed on a terminal or rendered on a page; figures as text."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from laconic.console import print_rich
from laconic.evaluation.statistics import Estimate

MIN_SEEDS = 3  # fewer seeds give no standard deviation beside a mean
WIDTH_WITHOUT_TERMINAL = 240


class Column(NamedTuple):
    """A column of a table: its title, the text of its cell for a row, and whether it is aligned left."""

    title: str
    format: Callable[[Any], str]
    is_text: bool = False


class Table(NamedTuple):
    """A table of cells; the first `num_text_columns` columns are aligned left, the others right.

    `header` may be empty, and rows may be short. On pages, cells are escaped unless they are `Markup`.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    num_text_columns: int = 1


def build_table(columns: Sequence[Column], rows: Sequence[Any], caption: str = "") -> Table:
    """Return the table of some rows; columns of text come first."""
    cells = [[column.format(row) for column in columns] for row in rows]
    return Table([column.title for column in columns], cells, caption, sum(column.is_text for column in columns))


def print_table(table: Table) -> None:
    """Print a table; where the output is not a terminal, no line is cut to its width."""
    print_rich(to_rich(table), None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def to_rich(table: Table) -> Any:
    from rich.table import Table as RichTable

    rich = RichTable(box=None, pad_edge=False, header_style="", title=table.caption or None)
    for i, name in enumerate(table.header):
        rich.add_column(name, justify="left" if i < table.num_text_columns else "right", no_wrap=True)
    for row in table.rows:
        rich.add_row(*row)
    return rich


def figures_to_json(value: Any) -> Any:
    """Return figures as JSON values, at any depth: named tuples become objects and NaN, which JSON lacks, None."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: figures_to_json(x) for key, x in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [figures_to_json(x) for x in cast(Sequence[Any], value)]
    return None if isinstance(value, float) and math.isnan(value) else value


def format_percent(share: float) -> str:
    """Format a share as a percentage with one decimal, without the sign."""
    return f"{100 * share:.1f}"


def format_accuracy(estimate: Estimate) -> str:
    """Format an accuracy; with three seeds or more, its standard deviation follows."""
    return f"{format_percent(estimate.mean)}{format_spread(estimate, format_percent)} %"


def format_interval(estimate: Estimate) -> str:
    """Format the 95 % interval of a share in percent."""
    return f"{format_percent(estimate.low)} – {format_percent(estimate.high)}"


def format_mean(estimate: Estimate) -> str:
    """Format a mean of nats; with three seeds or more, its standard deviation follows."""
    return f"{estimate.mean:.4f}{format_spread(estimate, '{:.4f}'.format)}"


def format_spread(estimate: Estimate, format: Callable[[float], str]) -> str:
    """Format the standard deviation over seeds after a mean; empty for fewer than three seeds."""
    return "" if estimate.sd is None or estimate.num_seeds < MIN_SEEDS else f" ± {format(estimate.sd)}"


def format_with_error(text: str, standard_error: float, digits: int) -> str:
    """Append the standard error, unless it is NaN, as that of a single document."""
    return text if math.isnan(standard_error) else f"{text} ± {standard_error:.{digits}f}"


def format_count(x: float) -> str:
    """Format a mean count: without decimals if it is whole."""
    return f"{x:.0f}" if abs(x - round(x)) < 0.005 else f"{x:.1f}"
