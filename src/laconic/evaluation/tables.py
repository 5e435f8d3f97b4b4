"""Tables on a terminal, and figures as text."""

from collections.abc import Sequence
from typing import Any

from laconic.evaluation.statistics import Estimate

MIN_SEEDS = 3  # fewer seeds give no standard deviation beside an accuracy
WIDTH_WITHOUT_TERMINAL = 240


def build_terminal_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 1, title: str | None = None
) -> Any:
    """Return a `rich` table; the first `num_text_columns` columns are aligned left. Rows may be short."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="", title=title)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < num_text_columns else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(table: Any) -> None:
    """Print a `rich` table; where the output is no terminal, no line is cut to its width."""
    from rich.console import Console

    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)).print(table)


def format_percent(share: float) -> str:
    """Format a share as a percentage with one decimal, without the sign."""
    return f"{100 * share:.1f}"


def format_accuracy(estimate: Estimate) -> str:
    """Format an accuracy; with three seeds or more, its standard deviation follows."""
    if estimate.sd is not None and estimate.num_seeds >= MIN_SEEDS:
        return f"{format_percent(estimate.mean)} ± {format_percent(estimate.sd)} %"
    return f"{format_percent(estimate.mean)} %"


def format_interval(estimate: Estimate) -> str:
    """Format the 95 % interval of a share in percent."""
    return f"{format_percent(estimate.low)} – {format_percent(estimate.high)}"


def format_count(x: float) -> str:
    """Format a mean count: without decimals if it is whole."""
    return f"{x:.0f}" if abs(x - round(x)) < 0.005 else f"{x:.1f}"
