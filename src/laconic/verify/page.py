"""A parity report as one HTML file that asks nothing of the network and reads without script."""

import math
from typing import Any

from jinja2 import Environment

from laconic.verify.cases import INPUTS
from laconic.verify.parity import FACTOR, Finding
from laconic.verify.report import Report, data, show

STEPS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4)
"""Bounds of the colours, in floors: five for what passes, three for what does not."""
RATIO_STEPS = (0.5, 0.9, 1.1, 1.5, 3.0, 10.0, 100.0)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Parity: {{ r.model }}</title>
<style>
:root { color-scheme: light dark; --text: #1b1f24; --soft: #5b6470; --line: #d5dae0; --page: #ffffff; --card: #f5f7f9;
  --good: #1a6b3c; --bad: #a3160f;
  --c0: #eef4fa; --c1: #d6e6f4; --c2: #b3d2ea; --c3: #86b7dc; --c4: #5a97c8; --c5: #f2a65a; --c6: #dd5f3a; --c7: #a3160f;
  --i0: #1b1f24; --i4: #081726; --i7: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa4b0; --line: #363d46; --page: #14171b;
  --card: #1d2126; --good: #6fcf97; --bad: #ff8a80;
  --c0: #1b2733; --c1: #1f3547; --c2: #24465f; --c3: #2a5a7b; --c4: #346f98; --c5: #b26a1f; --c6: #c04a2a; --c7: #e0352b;
  --i0: #e6e9ed; --i4: #ffffff; --i7: #ffffff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.25rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; } .soft { color: var(--soft); font-size: .875rem; }
.verdict { font-weight: 600; } .pass { color: var(--good); } .fail { color: var(--bad); }
.box { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .75rem 1rem; margin: 1rem 0; }
code { font: .875em ui-monospace, monospace; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th, td { padding: .3rem .6rem; text-align: left; }
.map { font-size: .8125rem; width: 100%; } .map td { text-align: right; min-width: 3.25rem; border: 1px solid var(--page); }
.map th { font-weight: 500; white-space: nowrap; } .map thead th { text-align: right; }
.map tbody th, .map thead th:first-child { position: sticky; left: 0; background: var(--page); text-align: left; }
.map td.h0, .map td.h1, .map td.h2, .map td.h3 { color: var(--i0); } .map td.h4, .map td.h5 { color: var(--i4); }
.map td.h6, .map td.h7 { color: var(--i7); font-weight: 600; } .map td.none { color: var(--bad); font-weight: 600; }
{% for i in range(8) %}.h{{ i }} { background: var(--c{{ i }}); } {% endfor %}
td.first { outline: 3px solid var(--bad); outline-offset: -3px; }
.key { display: flex; flex-wrap: wrap; gap: .25rem .75rem; margin: .5rem 0; font-size: .8125rem; list-style: none; padding: 0; }
.key i { display: inline-block; width: 1rem; height: 1rem; vertical-align: -.15rem; border: 1px solid var(--line);
  margin-right: .3rem; }
.facts { width: 100%; font-size: .9rem; } .facts td, .facts th { border-top: 1px solid var(--line); vertical-align: top; }
.facts th { font-weight: 500; } .facts tr:first-child > * { border-top: 0; } .facts .n { text-align: right; }
details { margin: .5rem 0; } summary { cursor: pointer; }
@media (max-width: 40rem) { body { padding: .75rem; font-size: 15px; } th, td { padding: .25rem .4rem; } }
</style></head><body>
<header><h1>Parity of <code>{{ r.model }}</code></h1>
<p>against {{ r.reference }}, {{ r.dtype }}, <span class="verdict {{ 'pass' if r.ok else 'fail' }}">
{{- 'every comparison ran and passed' if r.ok else 'not passed' }}</span></p></header>
<section class="box" aria-label="Result"><p>{{ r.sentence() }}</p></section>
<section><h2>{{ 'Ratio to the reference’s own error' if low else 'Local error in floors' }}, stage by layer</h2>
<p class="soft">{% if low %}Ours against float64, divided by the reference's against float64; up to 3 passes.{% else -%}
Each stage's own function fed with the reference's inputs; one floor is what float32 makes of that stage against float64,
at least 1e-7. Up to {{ factor }} floors pass. The worst case of all inputs is shown; 0 is equal to the bit.{% endif %}
Hold the pointer over a number for the case, the error and the place.</p>
<ul class="key">{% for i, text in key %}<li><i class="h{{ i }}"></i>{{ text }}</li>{% endfor %}</ul>
<div class="scroll" tabindex="0" role="region" aria-label="Heat map"><table class="map"><thead><tr><th>stage</th>
{%- for l in layers %}<th scope="col">{{ l }}</th>{% endfor %}</tr></thead><tbody>
{% for stage, cells in rows %}<tr><th scope="row">{{ stage }}</th>{% for c in cells %}
<td class="{{ c.css }}"{% if c.span %} colspan="{{ c.span }}"{% endif %}{% if c.title %} title="{{ c.title }}"{% endif %}>
{{- c.text }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></section>
<section><h2>Run</h2><table class="facts"><tbody>
{% for name, value in facts %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></section>
<section><h2>Inputs</h2><table class="facts"><tbody>
{% for i in r.inputs %}<tr><th scope="row">{{ i.name }}</th><td>{{ what[i.name] }}</td><td
 class="{{ 'pass' if i.ok else 'fail' }}">{{ i.status }}</td><td class="soft">{{ i.why }}</td></tr>
{% endfor %}</tbody></table></section>
<section><h2>All stages</h2><div class="scroll" tabindex="0" role="region" aria-label="All stages"><table class="facts"><thead>
<tr><th>stage</th><th class="n">first layer</th><th class="n">worst layer</th><th class="n">last layer</th>
<th class="n">propagated</th><th>verdict</th></tr></thead><tbody>
{% for row in r.rows() %}<tr><th scope="row">{{ row[0] }}</th>{% for x in row[1:5] %}<td class="n">{{ x }}</td>{% endfor %}
<td class="{{ row[5] if row[5] in ('pass', 'fail') else 'fail' }}">{{ row[5] }}</td></tr>
{% endfor %}</tbody></table></div>
<details><summary>Worst findings, and whatever failed ({{ worst | length }})</summary><div class="scroll"><table class="facts">
<thead><tr><th>case</th><th>stage</th><th>kind</th><th class="n">error</th><th class="n">floor</th><th class="n">floors</th>
<th class="n">largest</th><th>at</th><th class="n">cosine</th><th>verdict</th></tr></thead><tbody>
{% for f in worst %}<tr><td>{{ f.case }}</td><td>{{ f.stage }}{{ '' if f.layer is none else '.' ~ f.layer }}</td><td>{{ f.kind }}</td>
<td class="n">{{ '%.2e' % f.error }}</td><td class="n">{{ '%.2e' % f.floor }}</td><td class="n">{{ show(f.floors) }}</td>
<td class="n">{{ '%.2e' % f.max_abs }}</td><td>{{ f.index | list }}</td><td class="n">{{ '%.6f' % f.cosine }}</td>
<td>{{ f.verdict }}{{ ' ' ~ f.note if f.note }}</td></tr>
{% endfor %}</tbody></table></div></details></section>
</body></html>
"""


def page(report: Report) -> str:
    """The whole file."""
    low = any(f.kind == "ratio" for f in report.findings)
    steps, kinds = (RATIO_STEPS, ("ratio",)) if low else (STEPS, ("local",))
    if not any(f.kind in kinds for f in report.findings):
        kinds = ("propagated",)
    bad = [f for f in report.findings if f.verdict in ("fail", "not run")]
    ranked = sorted((f for f in report.findings if f not in bad and f.verdict == "pass"), key=floors, reverse=True)
    environment = Environment(autoescape=True)
    environment.filters["list"] = list
    return environment.from_string(PAGE).render(
        r=report, low=low, factor=int(FACTOR), key=legend(steps), layers=list(range(report.L)), what=INPUTS, show=show,
        rows=heat(report, steps, kinds), facts=facts(report), worst=(bad[:200] + ranked)[: max(40, len(bad[:200]))],
    )  # fmt: skip


def floors(found: Finding) -> float:
    """The error in floors, nothing where there is none."""
    return -1.0 if math.isnan(found.floors) else found.floors


def legend(steps: tuple[float, ...]) -> list[tuple[int, str]]:
    """What the eight colours mean."""
    texts = [f"< {steps[0]:g}", *(f"{a:g} – {b:g}" for a, b in zip(steps, steps[1:], strict=False)), f"> {steps[-1]:g}"]
    return list(enumerate(texts))


def heat(report: Report, steps: tuple[float, ...], kinds: tuple[str, ...]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows of the map; a stage outside the layers is one wide cell."""
    first, made = report.divergence, []
    for stage in report.order:
        held = {f.layer for f in report.findings if f.stage == stage and f.kind in kinds}
        if not held:
            continue
        wide = held == {None}
        cells = [square(report.worst(stage, l, kinds), steps, first) for l in ([None] if wide else range(report.L))]
        made.append((stage, [{**cell, "span": report.L if wide and report.L > 1 else 0} for cell in cells]))
    return made


def square(found: Finding | None, steps: tuple[float, ...], first: Finding | None) -> dict[str, Any]:
    """One cell: the number, its colour, and what is said of it."""
    if found is None:
        return {"css": "", "text": "", "title": ""}
    if found.verdict == "not run":
        return {"css": "none", "text": "not run", "title": found.note}
    css = f"h{sum(floors(found) >= step for step in steps)}"
    if first is not None and (first.stage, first.layer) == (found.stage, found.layer):
        css += " first"
    title = f"{found.case}: error {found.error:.3g}, floor {found.floor:.3g}, largest {found.max_abs:.3g} at {list(found.index)}"
    return {"css": css, "text": "0" if found.error == 0 else show(found.floors), "title": title}


def facts(report: Report) -> list[tuple[str, str]]:
    """What ran, on what, by which command."""
    found = report.divergence
    logits = [f for f in report.findings if f.stage == "logits" and f.kl is not None]
    rows = [
        ("command", report.command or f"laconic verify parity {report.model}"),
        ("model", f"{report.family}, {report.L} layers, weights {report.fingerprint[:16]}…"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
        ("attention", f"eager for every stage; {report.backend}, the default back end, held to it at context and logits"),
        ("comparisons", f"{len(report.findings):,} in {report.seconds:.1f} s"),
    ]
    if logits:
        kl, top1 = max(f.kl or 0.0 for f in logits), min(f.top1 or 0.0 for f in logits)
        rows.append(("logits", f"KL at most {kl:.2e} nats a slot, equal most likely ids at least {top1:.1%}"))
    if found is not None:
        rows.append(("first divergence", ", ".join(f"{k} {v}" for k, v in data(found).items() if v not in (None, ""))))
        rows.append(("likely cause", report.cause or "–"))
    return rows
