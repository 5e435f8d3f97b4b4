"""A parity report as one HTML file that asks nothing of the network and reads without script."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment

from laconic.verification.inputs import REQUIRED_INPUTS
from laconic.verification.parity import MAX_ERROR_IN_FLOORS, StageResult
from laconic.verification.report import ParityReport, format_number, result_to_json

STEPS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4)
"""Bounds of the colours, in floors: five for what passes, three for what does not."""
RATIO_STEPS = (0.5, 0.9, 1.1, 1.5, 3.0, 10.0, 100.0)

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")


def page(report: ParityReport) -> str:
    """The whole file."""
    low = any(f.kind == "ratio" for f in report.results)
    steps, kinds = (RATIO_STEPS, ("ratio",)) if low else (STEPS, ("local",))
    if not any(f.kind in kinds for f in report.results):
        kinds = ("propagated",)
    bad = [f for f in report.results if f.verdict in ("fail", "not run")]
    ranked = sorted((f for f in report.results if f not in bad and f.verdict == "pass"), key=floors, reverse=True)
    environment = Environment(autoescape=True)
    environment.filters["list"] = list
    return environment.from_string(PAGE).render(
        r=report, low=low, factor=int(MAX_ERROR_IN_FLOORS), key=legend(steps), layers=list(range(report.num_layers)), what=REQUIRED_INPUTS, show=format_number,
        rows=heat(report, steps, kinds), facts=facts(report), worst=(bad[:200] + ranked)[: max(40, len(bad[:200]))],
    )  # fmt: skip


def floors(found: StageResult) -> float:
    """The error in floors, nothing where there is none."""
    return -1.0 if math.isnan(found.error_in_floors) else found.error_in_floors


def legend(steps: tuple[float, ...]) -> list[tuple[int, str]]:
    """What the eight colours mean."""
    texts = [f"< {steps[0]:g}", *(f"{a:g} – {b:g}" for a, b in pairwise(steps)), f"> {steps[-1]:g}"]
    return list(enumerate(texts))


def heat(
    report: ParityReport, steps: tuple[float, ...], kinds: tuple[str, ...]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows of the map; a stage outside the layers is one wide cell."""
    first, made = report.first_divergence, []
    for stage in report.stage_order:
        held = {f.layer for f in report.results if f.stage == stage and f.kind in kinds}
        if not held:
            continue
        wide = held == {None}
        cells = [
            square(report.worst_result(stage, l, kinds), steps, first)
            for l in ([None] if wide else range(report.num_layers))
        ]
        made.append(
            (stage, [{**cell, "span": report.num_layers if wide and report.num_layers > 1 else 0} for cell in cells])
        )
    return made


def square(found: StageResult | None, steps: tuple[float, ...], first: StageResult | None) -> dict[str, Any]:
    """One cell: the number, its colour, and what is said of it."""
    if found is None:
        return {"css": "", "text": "", "title": ""}
    if found.verdict == "not run":
        return {"css": "none", "text": "not run", "title": found.note}
    css = f"h{sum(floors(found) >= step for step in steps)}"
    if first is not None and (first.stage, first.layer) == (found.stage, found.layer):
        css += " first"
    numbers = f"error {found.error:.3g}, floor {found.floor:.3g}, largest {found.max_abs:.3g}"
    title = f"{found.case}: {numbers} at {list(found.index)}"
    return {"css": css, "text": "0" if found.error == 0 else format_number(found.error_in_floors), "title": title}


def facts(report: ParityReport) -> list[tuple[str, str]]:
    """What ran, on what, by which command."""
    found = report.first_divergence
    logits = [f for f in report.results if f.stage == "logits" and f.kl is not None]
    rows = [
        ("command", report.command or f"laconic verify parity {report.model}"),
        ("model", f"{report.family}, {report.num_layers} layers, weights {report.fingerprint[:16]}…"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
        ("attention", f"eager for every stage; {report.backend}, the default, held to it at context and logits"),
        ("comparisons", f"{len(report.results):,} in {report.seconds:.1f} s"),
    ]
    if logits:
        kl, top1 = max(f.kl or 0.0 for f in logits), min(f.top1 or 0.0 for f in logits)
        rows.append(("logits", f"KL at most {kl:.2e} nats a slot, equal most likely ids at least {top1:.1%}"))
    if found is not None:
        said = {
            k: f"{v:.4g}" if isinstance(v, float) else v
            for k, v in result_to_json(found).items()
            if v not in (None, "")
        }
        rows.append(("first divergence", ", ".join(f"{k} {v}" for k, v in said.items())))
        rows.append(("likely cause", report.cause or "–"))
    return rows
