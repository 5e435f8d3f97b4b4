"""`laconic report`: one page on runs that read or learn, of what `laconic evaluate` has kept of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from laconic.core.errors import InputError, UsageError
from laconic.verbs.arguments import short_run_names, to_utf8


@dataclass(frozen=True)
class ReportCommand:
    """Writes one HTML page on what runs that read documents have kept in their evaluations: no model is opened.

    Runs that learn while they read, and plain ones asked the same streams, get a page of their own kind.

    Example: laconic evaluate runs/stop runs/fixed --on test && laconic report runs/stop runs/fixed --out report.html
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
    """what laconic train wrote: a run, or a folder of runs seed-0, seed-1, …"""
    out: Path = Path("report.html")
    """the page to write"""

    def run(self) -> int:
        """0 when the page is written. Raises `BadInput` (66) where nothing was evaluated."""
        if not self.runs:
            raise UsageError("no run given; laconic report RUN")
        from laconic.console import write_file
        from laconic.evaluation import memories
        from laconic.verbs import reading, streaming, telling

        paths = list(dict.fromkeys(map(to_utf8, self.runs)))
        if (found := streaming.kept_found(paths)).has_results:
            write_file(self.out, streaming.render_page(paths, found))
            return 0
        lines, told = reading.load_results(paths), telling.load_file_results(dict(zip(paths, short_run_names(paths), strict=True)))
        if not lines and not told:
            raise InputError(f"{', '.join(paths)}: nothing read of documents is kept; run laconic evaluate on them first")
        write_file(self.out, memories.render_page(lines, told, reading.describe_runs(paths)))
        return 0
