"""The sections of an inspection page about a set of questions."""

from laconic.evaluation import statistics
from laconic.evaluation.inspection.summary import (
    DatasetSummary,
    InterventionEffect,
    chain_word_rates,
    effects_per_run,
)
from laconic.evaluation.report.page import PageSection, render_details, render_facts, render_list, render_table
from laconic.evaluation.statistics import Estimate, format_difference
from laconic.evaluation.tables import Table, format_interval, format_percent

INTERVENTION_LABELS = {
    "zero": "zeros in their place",
    "mean": "each latent's mean over other questions",
    "shuffle": "the question's latents change places",
    "swap": "the latents of another question",
    "noise": "Gaussian vectors of equal norm",
    "vectors": "replaced just before they are read, in every pass; everything after them is recomputed",
    "cache": "keys and values replaced in the finished cache; keys are rotated to their new position",
}


def dataset_sections(summary: DatasetSummary) -> list[PageSection]:
    """Return the sections about a set."""
    all_effects = effects_per_run(summary)
    baselines = [statistics.estimate_proportion(run.baseline.correct) for run in summary.runs]
    headlines: list[str] = []
    for run, baseline, effects in zip(summary.runs, baselines, all_effects, strict=True):
        swap = next((x for x in effects if (x.spec.kind, x.spec.target) == ("swap", "vectors")), None)
        if swap:
            text = f"{run.name}: {format_percent(baseline.mean)} % correct; with another question's latents "
            text += f"{format_percent(swap.accuracy.mean)} %"
            if swap.donor_share:
                text += f", and {format_estimate(swap.donor_share)} of the answers become that question's"
            headlines.append(f"{text}.")
    answer, floor = summary.majority_baseline
    tables: list[str] = [render_list(headlines)] if headlines else []
    for run, baseline, effects in zip(summary.runs, baselines, all_effects, strict=True):
        rows = [["none", "", format_estimate(baseline), "", "", ""], *map(effect_cells, effects)]
        header = ["intervention", "on", "correct, %", "donor's, %", "change, points", f"minus {summary.runs[0].name}'s"]
        caption = f"{run.name} ({run.method})"
        width = 5 if run is summary.runs[0] else 6
        tables.append(render_table(Table(header[:width], [row[:width] for row in rows], caption, 2)))
    note = (
        f"Protocol {summary.protocol.name}; the majority baseline, always “{answer}”, is correct in "
        f"{format_percent(floor)} %. Changes are paired by question, with a 95 % bootstrap interval and Holm's "
        "correction over the interventions of a run. Donor's: of the questions whose donor has another answer, the "
        "share that gives it; without a swap that is chance."
    )
    labels = render_details("The interventions", [render_facts(list(INTERVENTION_LABELS.items()))])
    return [
        PageSection("Accuracy under interventions", [*tables, note, labels]),
        PageSection("Jacobi iterations at test time", iteration_blocks(summary)),
        PageSection("Tokens named by latents", chain_word_blocks(summary)),
    ]


def effect_cells(effect: InterventionEffect) -> list[str]:
    """Return the table row of an effect."""
    change = format_difference(effect.change)
    return [
        effect.spec.kind,
        effect.spec.target,
        format_percent(effect.accuracy.mean),
        format_estimate(effect.donor_share) if effect.donor_share else "",
        change if effect.is_significant else f"no difference shown, {change}",
        format_difference(effect.difference_to_first) if effect.difference_to_first else "",
    ]


def format_estimate(estimate: Estimate) -> str:
    """Return a share in percent with its interval."""
    return f"{format_percent(estimate.mean)} ({format_interval(estimate)})"


def iteration_blocks(summary: DatasetSummary) -> list[str]:
    """Return the accuracy by number of Jacobi iterations."""
    numbers = sorted({n for run in summary.runs for n in run.by_iterations})
    rows: list[list[str]] = []
    for n in numbers:
        row = [str(n)]
        for run in summary.runs:
            log = run.by_iterations.get(n)
            text = "" if log is None else format_estimate(statistics.estimate_proportion(log.correct))
            row.append(text + (" as trained" if log is not None and n == run.trained_iterations else ""))
        rows.append(row)
    header = ["iterations", *(f"{run.name}, correct, %" for run in summary.runs)]
    return [render_table(Table(header, rows))] if rows else []


def chain_word_blocks(summary: DatasetSummary) -> list[str]:
    """Return how often latents name tokens of their chain."""
    rows = [
        [
            run.name,
            name,
            str(x["questions"]),
            *(format_percent(x[key]) for key in ("share_in_chain", "share_in_other_chain", "lcs_ratio")),
        ]
        for run in summary.runs
        for name, x in chain_word_rates(run).items()
    ]
    header = ["run", "answers", "questions", "own chain, %", "another's, %", "in order, %"]
    about = (
        "Latents whose most likely token after the last pass occurs in the question's chain; in the chain of another "
        "question, which is chance; and the share of the chain that they name in its order."
    )
    return [about, render_table(Table(header, rows, num_text_columns=2))] if rows else []


def number_labels(n: int) -> list[str]:
    return [str(i + 1) for i in range(n)]
