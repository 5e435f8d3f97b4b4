"""`laconic report`: one page on runs that read or learn, of what `laconic evaluate` has kept of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from laconic.cli.arguments import to_utf8
from laconic.errors import InputError, UsageError


@dataclass(frozen=True)
class ReportCommand:
    """Writes one HTML page on what runs that read documents have kept in their evaluations: no model is opened.

    Runs that learn while they read, and plain ones asked the same streams, get a page of their own kind.

    Example: laconic evaluate runs/stop runs/fixed --tasks test && laconic report runs/stop runs/fixed --out report.html
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
        from laconic.evaluation.compression import cli_files
        from laconic.evaluation.compression import cli_runs as compression_cli_runs
        from laconic.evaluation.compression import report as compression_report
        from laconic.evaluation.streams import cli_runs as streams_cli_runs

        paths = list(dict.fromkeys(map(to_utf8, self.runs)))
        if (found := streams_cli_runs.kept_found(paths)).has_results:
            write_file(self.out, streams_cli_runs.render_page(paths, found))
            return 0
        lines, told = (
            compression_cli_runs.load_results(paths),
            cli_files.load_file_results(paths),
        )
        if not lines and not told:
            raise InputError(
                f"{', '.join(paths)}: nothing read of documents is kept; run laconic evaluate on them first"
            )
        write_file(self.out, compression_report.render_page(lines, told, compression_cli_runs.describe_runs(paths)))
        return 0
