"""The tables of an inspection of a set of questions, for a terminal and for a page."""

from laconic.evaluation import statistics
from laconic.evaluation.inspection.summary import DatasetSummary, chain_word_rates, effects_per_run
from laconic.evaluation.paired_proportions import describe_test
from laconic.evaluation.statistics import Estimate, format_difference
from laconic.evaluation.tables import Table, format_interval, format_percent


def dataset_tables(summary: DatasetSummary) -> list[tuple[str, Table, str]]:
    """Return titles and tables, without empty ones, and what to know to read each."""
    interventions = (
        f"Changes are paired by question: 95 % interval; {describe_test(1)}, Holm's correction over the interventions "
        "of a run. Donor's: of the questions whose donor has another answer, the share that gives it; without a swap "
        "that is chance."
    )
    chain_words = (
        "Latents whose most likely token after the last pass occurs in the question's chain; in the chain of another "
        "question, which is chance; and the share of the chain that they name in its order."
    )
    tables = [
        ("Accuracy under interventions", effects_table(summary), interventions),
        ("Jacobi iterations at test time", iterations_table(summary), ""),
        ("Tokens named by latents", chain_words_table(summary), chain_words),
    ]
    return [(title, table, note) for title, table, note in tables if table.rows]


def describe_set(summary: DatasetSummary) -> str:
    answer, floor = summary.majority_baseline
    return (
        f"{summary.num_questions:,} questions of {summary.name}, protocol {summary.protocol.name}; majority baseline "
        f"{format_percent(floor)} % (always “{answer}”)"
    )


def effects_table(summary: DatasetSummary) -> Table:
    rows: list[list[str]] = []
    for run, effects in zip(summary.runs, effects_per_run(summary), strict=True):
        baseline = format_estimate(statistics.estimate_proportion(run.baseline.correct))
        rows.append([run.name, "none", "", baseline, "", "", ""])
        for effect in effects:
            change = format_difference(effect.change)
            cells = [
                run.name,
                effect.spec.kind,
                effect.spec.target,
                format_percent(effect.accuracy.mean),
                format_estimate(effect.donor_share) if effect.donor_share else "",
                change if effect.is_significant else f"no difference shown, {change}",
                format_difference(effect.difference_to_first) if effect.difference_to_first else "",
            ]
            rows.append(cells)
    header = ["run", "intervention", "on", "correct, %", "donor's, %", "change, points"]
    header += [f"minus {summary.runs[0].name}'s"] if len(summary.runs) > 1 else []
    return Table(header, [row[: len(header)] for row in rows], num_text_columns=3)


def iterations_table(summary: DatasetSummary) -> Table:
    rows: list[list[str]] = []
    for n in sorted({n for run in summary.runs for n in run.by_iterations}):
        row = [str(n)]
        for run in summary.runs:
            log = run.by_iterations.get(n)
            text = "" if log is None else format_estimate(statistics.estimate_proportion(log.correct))
            row.append(text + (" as trained" if log is not None and n == run.trained_iterations else ""))
        rows.append(row)
    return Table(["iterations", *(f"{run.name}, correct, %" for run in summary.runs)], rows)


def chain_words_table(summary: DatasetSummary) -> Table:
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
    return Table(header, rows, num_text_columns=2)


def format_estimate(estimate: Estimate) -> str:
    return f"{format_percent(estimate.mean)} ({format_interval(estimate)})"
