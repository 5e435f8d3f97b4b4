"""Start-up time of help and import, and the time of a complete parity run."""

import json
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.measure import ABSENT, PEERS, STORIES, Scale, Table, run_python, verdict

HEAVY = ("torch", "transformers", "peft", "datasets")
IMPORTED = f"import json, sys, laconic; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
PUBLIC = f"import json, sys, laconic; laconic.Decoder; print(json.dumps([m for m in {HEAVY[1:]} if m in sys.modules]))"


def start(scale: Scale) -> Table:
    """Return the table of CPU seconds of help and import."""

    def cpu(*arguments: str) -> float:
        return median(run_python(*arguments).elapsed.cpu for _ in range(scale.children))

    nothing = cpu("-c", "pass")
    rows = [("`python -c pass`", f"{nothing:.2f}", "–", "–")]
    for arguments in ("--help", "generate --help", "verify parity --help"):
        seconds = cpu("-m", "laconic.cli.main", *arguments.split())
        rows.append((f"`laconic {arguments}`", f"{seconds:.2f}", verdict(seconds, most=0.35), "–"))
    seconds, imported = cpu("-c", IMPORTED), json.loads(run_python("-c", IMPORTED).out)
    rows.append(("`import laconic`", f"{seconds:.2f}", verdict(seconds, most=0.2), none_of(HEAVY, imported)))
    seconds, imported = cpu("-c", PUBLIC), json.loads(run_python("-c", PUBLIC).out)
    rows.append(("`laconic.Decoder`", f"{seconds:.2f}", "–", none_of(HEAVY[1:], imported)))
    if PEERS and scale.peers_alone:
        seconds = cpu("-c", "from transformers.models.llama.modeling_llama import LlamaForCausalLM")
        rows.append(("for comparison: importing `LlamaForCausalLM`", f"{seconds:.2f}", "–", "–"))
    text = f"CPU seconds, user and system, of a child process, median of {scale.children}."
    return Table("Start", text, ("command", "CPU s", "target", "imports"), rows)


def none_of(names: tuple[str, ...], imported: list[str]) -> str:
    """Say which of the heavy packages were imported."""
    return f"missed: {', '.join(imported)}" if imported else f"none of {', '.join(names)}: met"


def parity(scale: Scale) -> Table:
    """Return the table of a complete parity run of the small real model."""
    head = ("reference", "wall s", "CPU s", "target", "outcome")
    text = "`laconic verify parity stories260k` with all inputs and a JSON report, start-up included."
    reference = "transformers" if PEERS else "golden bundle"
    if not STORIES.is_dir():
        return Table("Parity run", text, head, [(reference, *[ABSENT] * 4)])
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "report.json"
        run = run_python(
            "-m", "laconic.cli.main", "verify", "parity", str(STORIES), "--inputs", scale.parity,
            "--json", str(results),
        )  # fmt: skip
    outcome = "passed" if run.code == 0 else f"missed: exit {run.code}"
    row = (reference, f"{run.elapsed.wall:.1f}", f"{run.elapsed.cpu:.1f}", verdict(run.elapsed.wall, most=30), outcome)
    return Table("Parity run", text, head, [row])
