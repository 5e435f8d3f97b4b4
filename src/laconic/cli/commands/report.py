"""`laconic report`: write an HTML report from stored evaluation results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from laconic.cli.files import check_page_path, write_file
from laconic.errors import UsageError


@dataclass(frozen=True)
class ReportCommand:
    """Write an HTML report from stored evaluation results (no model is loaded).

    Example: laconic report runs/stop runs/fixed --out report.html

    Example: laconic report smollm2 --out memories.html
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN ...", help_behavior_hint="")]
    """run of laconic train, directory of runs seed-0, seed-1, …, exported run, or model (folder, .gguf, name); evaluate
    them with laconic evaluate first"""
    out: Path = Path("report.html")
    """HTML file to write"""

    def run(self) -> int:
        """Write the page. Raises `InputError` (66) if there are no results."""
        if not self.runs:
            raise UsageError("no run given; laconic report RUN")
        check_page_path("--out", self.out)
        from laconic.evaluation.checkpoints import find_results
        from laconic.evaluation.suites import build_report

        paths = [str(folder) for run in self.runs for folder in find_results(run)]
        write_file(self.out, build_report(list(dict.fromkeys(paths))))
        return 0
