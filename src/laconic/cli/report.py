"""`laconic report`: write an HTML report from stored evaluation results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from laconic.cli.arguments import to_utf8
from laconic.console import write_file
from laconic.errors import InputError, UsageError


@dataclass(frozen=True)
class ReportCommand:
    """Write an HTML report from stored evaluation results (no model is loaded).

    Example: laconic report runs/stop runs/fixed --out report.html
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]
    """run of laconic train, or a directory of runs seed-0, seed-1, …; evaluate them with laconic evaluate first"""
    out: Path = Path("report.html")
    """page to write"""

    def run(self) -> int:
        """Write the page. Raises `InputError` (66) if there are no results."""
        if not self.runs:
            raise UsageError("no run given; laconic report RUN")
        from laconic.evaluation.compression import cli_runs as compression_runs
        from laconic.evaluation.compression.cli_files import load_file_results
        from laconic.evaluation.compression.report import render_page
        from laconic.evaluation.streams import cli_runs as stream_runs

        paths = list(dict.fromkeys(map(to_utf8, self.runs)))
        if (stream_results := stream_runs.kept_found(paths)).has_results:
            write_file(self.out, stream_runs.render_page(paths, stream_results))
            return 0
        results = compression_runs.load_results(paths)
        file_results = load_file_results(paths)
        if not results and not file_results:
            raise InputError(f"{', '.join(paths)}: no evaluation results; run laconic evaluate first")
        write_file(self.out, render_page(results, file_results, compression_runs.describe_runs(paths)))
        return 0
