"""The sections of an inspection page about a set of questions."""

from laconic.evaluation import statistics
from laconic.evaluation.inspection.kv_selection import NUM_CHAIN_PARTS
from laconic.evaluation.inspection.summary import (
    BASELINE_LABELS,
    DatasetSummary,
    InterventionEffect,
    chain_word_rates,
    effects_per_run,
    estimate_map_statistics,
)
from laconic.evaluation.report.page import (
    PagePlot,
    PageSection,
    render_details,
    render_facts,
    render_list,
    render_plots,
    render_table,
)
from laconic.evaluation.report.plots import find_value_range, has_matplotlib, plot_heat_maps
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
        PageSection("Similarity to the teacher's chain", similarity_blocks(summary)),
        PageSection("Tokens selected of the chains", selector_blocks(summary)),
    ]


def effect_cells(effect: InterventionEffect) -> list[str]:
    """Return the table row of an effect."""
    slots = "" if effect.spec.slots is None else ", latents " + ", ".join(str(m + 1) for m in effect.spec.slots)
    change = format_difference(effect.change)
    return [
        effect.spec.kind,
        effect.spec.target + slots,
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


def similarity_blocks(summary: DatasetSummary) -> list[str]:
    """Return contrast and look-ahead of each map, and the mean maps."""
    rows = [
        [
            run.name,
            f"{space} {BASELINE_LABELS[baseline]}",
            f"{contrast.mean:+.3f} ({contrast.low:+.3f} to {contrast.high:+.3f})",
            format_estimate(ahead),
        ]
        for run in summary.runs
        for (space, baseline), (contrast, ahead) in estimate_map_statistics(run).items()
    ]
    if not rows:
        return []
    header = ["run", "map", "diagonal contrast", "look-ahead, %"]
    blocks: list[str] = [render_table(Table(header, rows, num_text_columns=2))]
    keys = dict.fromkeys(key for run in summary.runs for key in run.mean_maps)
    for space, baseline in keys if has_matplotlib() else ():
        panels = [
            (run.name, run.mean_maps[space, baseline].tolist())
            for run in summary.runs
            if (space, baseline) in run.mean_maps
        ]
        labels = number_labels(len(panels[0][1]))
        title = f"{space[0].upper()}{space[1:]}, {BASELINE_LABELS[baseline]}"
        value_range = find_value_range([map for _, map in panels])
        image = plot_heat_maps(panels, labels, labels, title, value_range=value_range, mark_max=True)
        blocks.append(render_plots([PagePlot(title, "Mean over the chains that fill all latents.", image)]))
    return blocks


def selector_blocks(summary: DatasetSummary) -> list[str]:
    """Return what the policies select over all chains."""
    blocks: list[str] = []
    for run in summary.runs:
        if not run.selector_statistics:
            continue
        classes = list(run.selector_statistics[0].class_shares)
        header = ["policy", *classes, *(f"part {i + 1}" for i in range(NUM_CHAIN_PARTS)), "heads", "random", "chance"]
        rows = [
            [
                selector.policy,
                *map(format_percent, (*selector.class_shares.values(), *selector.part_shares)),
                *map(format_percent, (selector.head_overlap, selector.random_overlap, selector.chance_overlap)),
            ]
            for selector in run.selector_statistics
        ]
        whole = f", without {run.num_unreduced_chains} that are selected whole" if run.num_unreduced_chains else ""
        caption = f"{run.name}: {run.selector_statistics[0].num_chains} chains{whole}"
        blocks.append(render_table(Table(header, rows, caption)))
    about = (
        "Share of tokens selected, in percent: of each class, and of each fifth of a chain. Heads: selected tokens "
        "that two heads have in common; random: that a head has in common with policy random; chance: both for "
        "independent choices."
    )
    return [about, *blocks] if blocks else []


def number_labels(n: int) -> list[str]:
    """Return the labels 1 to n."""
    return [str(i + 1) for i in range(n)]
