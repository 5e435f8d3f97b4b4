"""Pages of measured tables: run the sections that a command line selects, and replace them in a Markdown file."""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.measure import FULL, QUICK, Scale, Table, describe_machine, load_average


@dataclass(frozen=True)
class Page:
    """A page in docs/ with one table per section, which `python SCRIPT` writes."""

    path: Path
    script: str
    introduction: str
    sections: Mapping[str, Callable[[Scale], Table]]

    def render_section(self, name: str, scale: Scale, command: str) -> str:
        """Measure one table and render it with the conditions of the measurement."""
        before, start = load_average(), time.perf_counter()
        text = self.sections[name](scale).markdown()
        seconds = time.perf_counter() - start
        threads = torch.get_num_threads()
        caption = (
            f"`{command}` · {datetime.now(UTC):%Y-%m-%d} · {threads} thread{'s' * (threads > 1)} · "
            f"{describe_machine()} · load average {before} before, {load_average()} after · {seconds:.0f} s"
        )
        return f"<!-- {name} -->\n{text}\n\n<sub>{caption}</sub>\n<!-- end -->\n"

    def merge(self, page: str, rendered: Mapping[str, str]) -> str:
        """Return the page with these tables replaced; the other tables stay as they are."""
        return merge_sections(page, rendered, self.sections, self.introduction)

    def run(self, arguments: Sequence[str] | None = None, scale: Scale | None = None) -> None:
        """Measure and print the tables; write the page unless the run is quick."""
        parser = argparse.ArgumentParser(description="Compare speed and memory with the installed peer libraries.")
        parser.add_argument("--only", nargs="+", choices=self.sections, default=list(self.sections), metavar="NAME")
        parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes; only print")
        parser.add_argument("--threads", type=int, default=1, help="threads of torch, for both sides (default 1)")
        arguments = sys.argv[1:] if arguments is None else arguments
        options = parser.parse_args(arguments)
        torch.set_num_threads(options.threads)
        scale = scale or (QUICK if options.quick else FULL)
        command = " ".join([f"python {self.script}", *arguments])
        rendered: dict[str, str] = {}
        for name in options.only:
            print(f"[{name}]", file=sys.stderr, flush=True)
            rendered[name] = self.render_section(name, scale, command)
            print(rendered[name], flush=True)
        if scale is FULL:
            page = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            self.path.write_text(self.merge(page, rendered), encoding="utf-8")


def merge_sections(page: str, rendered: Mapping[str, str], names: Iterable[str], introduction: str) -> str:
    """Return a page with some sections replaced; the others stay as they are, in the order of `names`."""
    old = {m[1]: m[0] for m in re.finditer(r"<!-- (\w+) -->\n.*?<!-- end -->\n", page, re.DOTALL)}
    parts = [rendered.get(name) or old.get(name) or "" for name in names]
    return "\n".join(filter(None, [introduction, *parts]))
