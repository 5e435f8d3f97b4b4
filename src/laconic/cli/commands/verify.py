"""`laconic verify`: compare models with a reference implementation."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from laconic.cli.arguments import OptionalPath, OptionalStr, command_line
from laconic.cli.files import check_output_path, write_file
from laconic.console import print_rich, progress
from laconic.errors import UsageError


@dataclass(frozen=True)
class VerifyParityCommand:
    """Compare a model with a reference stage by stage, in units of the float32 rounding noise of each stage.

    It holds two models in float32 with their activations: more than twice the bytes of the float32 weights.

    Example: laconic verify parity stories260k --json parity.json
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """model (folder, .gguf, hub or short name), or tiny:FAMILY for the small random model of a family"""
    reference: OptionalStr = None
    """transformers (default if installed), golden (activations that come with laconic), or a folder of stored
    activations; only the latter two detect a changed config.json, since transformers reads the same file"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype to run in; for bfloat16 and float16, errors are compared with those of the reference in that dtype"""
    inputs: str = "all"
    """test inputs: all, or a comma-separated list of I1 to I17"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, …: where both models run"""
    json: OptionalPath = None
    """file for a summary of each stage as JSON"""
    all_results: bool = False
    """with --json: also write every comparison, some megabytes"""

    def run(self) -> int:
        from laconic.verification.run import run_parity

        if self.all_results and not self.json:
            raise UsageError("--all-results: needs --json FILE")
        if self.json:
            check_output_path("--json", self.json)
        with progress("comparing") as show:
            report = run_parity(
                self.model,
                reference=self.reference,
                dtype=self.dtype,
                inputs=self.inputs,
                device=self.device,
                command=command_line(),
                on_case=show,
            )
        print_rich(report.to_table())
        print(report.summary())
        if self.json:
            data = report.to_json(all_results=self.all_results)
            write_file(self.json, json.dumps(data, indent=1, allow_nan=False) + "\n")
        return 0 if report.is_ok else 1


@dataclass(frozen=True)
class VerifyAllCommand:
    """Compare the tiny random model of every family with its reference.

    Example: laconic verify
    """

    def run(self) -> int:
        from laconic.models.config import WEIGHT_NAMES

        return max(VerifyParityCommand(f"tiny:{family}").run() for family in WEIGHT_NAMES)
