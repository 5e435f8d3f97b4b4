"""What it costs to start: help, import, and a whole parity run."""

import json
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.measure import ABSENT, PEERS, STORIES, Scale, Table, child, verdict

HEAVY = ("torch", "transformers", "peft", "datasets")
IMPORTED = f"import json, sys, laconic; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
PUBLIC = f"import json, sys, laconic; laconic.Decoder; print(json.dumps([m for m in {HEAVY[1:]} if m in sys.modules]))"


def start(scale: Scale) -> Table:
    """CPU seconds of help and import."""

    def cpu(*arguments: str) -> float:
        return median(child(*arguments).took.cpu for _ in range(scale.children))

    nothing = cpu("-c", "pass")
    rows = [("`python -c pass`", f"{nothing:.2f}", "–", "–")]
    for words in ("--help", "generate --help", "verify parity --help"):
        took = cpu("-m", "laconic", *words.split())
        rows.append((f"`laconic {words}`", f"{took:.2f}", verdict(took, most=0.35), "–"))
    took, modules = cpu("-c", IMPORTED), json.loads(child("-c", IMPORTED).out)
    rows.append(("`import laconic`", f"{took:.2f}", verdict(took, most=0.2), none_of(HEAVY, modules)))
    took, modules = cpu("-c", PUBLIC), json.loads(child("-c", PUBLIC).out)
    rows.append(("`laconic.Decoder`", f"{took:.2f}", "–", none_of(HEAVY[1:], modules)))
    if PEERS and scale.peers_alone:
        took = cpu("-c", "from transformers.models.llama.modeling_llama import LlamaForCausalLM")
        rows.append(("beside: `LlamaForCausalLM` imported", f"{took:.2f}", "–", "–"))
    text = f"CPU seconds, user and system, of a child process, median of {scale.children}."
    return Table("Start", text, ("command", "CPU s", "target", "imports"), rows)


def none_of(names: tuple[str, ...], modules: list[str]) -> str:
    """Which of the heavy packages were imported."""
    return f"missed: {', '.join(modules)}" if modules else f"none of {', '.join(names)}: met"


def parity(scale: Scale) -> Table:
    """Seconds of a whole parity run of the small real model."""
    head = ("reference", "wall s", "CPU s", "target", "outcome")
    text = "`laconic verify parity stories260k` with all inputs and a JSON report, start-up included."
    reference = "transformers" if PEERS else "golden bundle"
    if not STORIES.is_dir():
        return Table("Parity run", text, head, [(reference, *[ABSENT] * 4)])
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "report.json"
        run = child(
            "-m", "laconic.cli.main", "verify", "parity", str(STORIES), "--inputs", scale.parity,
            "--json", str(results),
        )  # fmt: skip
    outcome = "passed" if run.code == 0 else f"missed: exit {run.code}"
    row = (reference, f"{run.took.wall:.1f}", f"{run.took.cpu:.1f}", verdict(run.took.wall, most=30), outcome)
    return Table("Parity run", text, head, [row])
