"""`laconic verify`: the checks, as tables."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from laconic.console import progress, write_file
from laconic.errors import InputError


@dataclass(frozen=True)
class VerifyParityCommand:
    """Compares a model with a reference, stage by stage, in units of the noise of each stage.

    Example: laconic verify parity stories260k --out report.html
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """a checkpoint (folder or hub name), or tiny:FAMILY for the random fixture of a family"""
    reference: str | None = None
    """transformers; golden, the bundle shipped for these weights; or the folder of a bundle. By default transformers
    if it is installed, else golden. transformers reads the same config.json: only a bundle tells that it was changed"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """below float32, errors are judged by their ratio to the reference's own in that type"""
    inputs: str = "all"
    """which inputs to try: all, or a list such as I1,I7"""
    layers: str = "all"
    """which layers to look at: all, or a list such as 0,5,last"""
    out: Path | None = None
    """write one HTML page here"""
    json: Path | None = None
    """write the findings as JSON here"""
    write_golden: Path | None = None
    """write what transformers gave as a golden bundle into this folder"""

    def run(self) -> int:
        """0 if every comparison asked for ran and passed, else 1."""
        from rich.console import Console

        from laconic.verification.run import run_parity

        for path in (self.out, self.json):
            if path and not path.absolute().parent.is_dir():
                raise InputError(f"{path}: no folder {path.parent} to write into; make it first")
        with progress("comparing") as show:
            report = run_parity(
                self.model,
                reference=self.reference,
                dtype=self.dtype,
                inputs=self.inputs,
                layers=self.layers,
                write_golden=self.write_golden,
                command=shlex.join(["laconic", *sys.argv[1:]]),
                on_case=show,
            )
        Console().print(report.to_table())
        print(report.summary())
        if self.out:
            from laconic.verification.page import page

            write_file(self.out, page(report))
        if self.json:
            write_file(self.json, json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
        return 0 if report.is_ok else 1


@dataclass(frozen=True)
class Ledger:
    """Compares the papers' equations with the code and its tests.

    Example: laconic verify ledger
    """

    write: bool = False
    """write docs/ledger.md anew"""

    def run(self) -> int:
        """0 if every equation has its function, oracle and misreadings, else 1."""
        from rich.console import Console

        from laconic.verification import ledger

        if self.write:
            write_file(ledger.default_root() / "docs" / "ledger.md", ledger.render_page(ledger.default_root()))
        findings = ledger.check_ledger()
        Console().print(ledger.findings_table(findings))
        return 1 if findings else 0


@dataclass(frozen=True)
class VerifyAllCommand:
    """Runs the ledger, and parity on the random fixture of each family.

    Example: laconic verify
    """

    def run(self) -> int:
        """0 if every check ran and passed, else 1."""
        from laconic.models.config import WEIGHT_NAMES

        return max([Ledger().run(), *(VerifyParityCommand(f"tiny:{family}").run() for family in WEIGHT_NAMES)])
