"""The results of an inspection as an HTML page."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from laconic.evaluation.inspection.chain_comparison import KV_SPACES
from laconic.evaluation.inspection.dataset import DatasetSummary, dataset_tables, describe_set, list_caveats
from laconic.evaluation.inspection.logit_lens import TokenGuess
from laconic.evaluation.inspection.question import (
    BASELINE_LABELS,
    SIMILARITY_TERMS,
    QuestionInspection,
    QuestionSummary,
    correctness_suffix,
    name_passes,
)
from laconic.evaluation.inspection.verdict import TARGETS_NOTE, label_condition
from laconic.evaluation.report.page import (
    PageBlock,
    PageDetails,
    PagePlot,
    PageSection,
    build_facts_table,
    mark_tokens,
    render_page,
)
from laconic.evaluation.report.plots import plot_heat_maps, show_whitespace
from laconic.evaluation.tables import Table, format_percent


def render_inspection_page(summary: QuestionSummary | DatasetSummary) -> str:
    title = f"Latents of {summary.runs[0].name}"
    if isinstance(summary, QuestionSummary):
        lead: list[str] = [Markup("<blockquote>{}</blockquote>").format(summary.text)]
        sections = question_sections(summary)
        notes = summary.notes
    else:
        lead = [
            f"{describe_set(summary)}.",
            "The questions are answered as trained and with changed latents. An answer that stays correct when its "
            "latents are zeros, or those of another question, does not depend on them.",
        ]
        sections = [PageSection(x, [table, *filter(None, [note])]) for x, table, note in dataset_tables(summary)]
        notes = list_caveats(summary)
    end = [
        PageSection("What this does not show", [notes]),
        PageSection("Runs", [build_facts_table(summary.facts)] if summary.facts else []),
    ]
    return render_page(title, [*sections, *end], lead)


def question_sections(summary: QuestionSummary) -> list[PageSection]:
    answers = [
        (f"{run.name} ({run.method})", run.answer + correctness_suffix(run.answer, summary)) for run in summary.runs
    ]
    if summary.teacher_output is not None:
        answers.append(("its teacher, with the chain written out", summary.teacher_output))
    chain = mark_tokens(list(map(show_whitespace, summary.chain))) if summary.chain else "none"
    maps = [
        block
        for space in KV_SPACES
        for baseline in BASELINE_LABELS
        for block in map_blocks(summary.runs, space, baseline)
    ]
    return [
        PageSection("Answers", [build_facts_table(answers), f"The chain, {summary.chain_source}:", chain]),
        PageSection("Logit lens", lens_blocks(summary.runs)),
        PageSection("Similarity to the teacher's chain", [*maps, SIMILARITY_TERMS] if maps else []),
        PageSection(
            "Tokens selected of the chain",
            [block for run in summary.runs if run.chain.selections for block in selection_blocks(run)],
        ),
        PageSection("Answers under interventions", effect_blocks(summary)),
    ]


def lens_blocks(runs: Sequence[QuestionInspection]) -> list[PageBlock]:
    blocks: list[PageBlock] = [
        "The most likely token at each latent after each pass, with its probability in percent. A hidden state becomes "
        "the next latent, so a token stands one column before its own. That a token can be read there does not show "
        "that it is used."
    ]
    for run in runs:
        passes = list(zip(name_passes(run), run.lens.passes, strict=True))
        header = ["pass", "bot", *(str(i + 1) for i in range(len(run.lens.top_tokens)))]
        rows = [[name, *(shade_guess(slot[0]) for slot in row)] for name, row in passes]
        blocks.append(Table(header, rows, run.name, len(header)))
        if run.lens.chain:
            blocks.append(
                f"After the last pass, {format_percent(run.lens.share_in_chain)} % of the latents name a token of the "
                f"chain; in order, {format_percent(run.lens.lcs_ratio)} % of it."
            )
        rows = [
            [f"{name}, {'bot' if i == 0 else f'latent {i}'}", " · ".join(map(describe_guess, slot))]
            for name, row in passes
            for i, slot in enumerate(row)
        ]
        most_likely = f"The {len(passes[0][1][0])} most likely tokens of each latent"
        blocks.append(PageDetails(most_likely, [Table((), rows, num_text_columns=2)]))
    return blocks


def shade_guess(guess: TokenGuess) -> Markup:
    """Return a token with its probability, darker where that is high."""
    percent = f"{100 * guess.probability:.0f}"
    cell = Markup('<span class="token" style="--p: {}">{} <small>{}</small></span>')
    return cell.format(percent, show_whitespace(guess.token), percent)


def describe_guess(guess: TokenGuess) -> str:
    return f"{show_whitespace(guess.token)} {format_percent(guess.probability)} %"


def map_blocks(runs: Sequence[QuestionInspection], space: str, baseline: str) -> list[PageBlock]:
    matches = [(run, map) for run in runs for map in run.chain.maps if (map.space, map.baseline) == (space, baseline)]
    if not matches:
        return []
    means = [(run.name, np.array(map.mean)) for run, map in matches]
    rows, numbers = (number_labels(max(mean.shape[axis] for _, mean in means)) for axis in (0, 1))
    columns = list(runs[0].lens.chain) if baseline == "chain" else numbers
    title = f"{space[0].upper()}{space[1:]}, {BASELINE_LABELS[baseline]}"
    captions = "; ".join(
        f"{run.name}: diagonal contrast {map.diagonal_contrast:+.3f}, look-ahead {format_percent(map.look_ahead)} %"
        for run, map in matches
    )
    value_range = min(mean.min() for _, mean in means), max(mean.max() for _, mean in means)
    image = plot_heat_maps(means, rows, columns, f"{title}. {captions}", value_range=value_range, mark_max=True)
    caption = (
        "Cosine of each latent (down) with each token (across), mean over the matched layers; a dot marks the most "
        f"similar token. {captions}."
    )
    layers: list[PagePlot] = []
    for run, map in matches:
        names = [
            f"layer {l}{'' if l in run.chain.matched_layers else ', not distilled'}" for l in range(len(map.layers))
        ]
        panels = list(zip(names, map.layers, strict=True))
        maps = plot_heat_maps(panels, rows, columns, f"{title}, {run.name}, each layer")
        layers.append(PagePlot(run.name, "Layers that are not distilled are named so.", maps))
    return [
        [PagePlot(title, caption, image)],
        PageDetails("Each layer, on its own scale", [layers]),
    ]


def selection_blocks(run: QuestionInspection) -> list[PageBlock]:
    chain, tokens = run.chain, run.lens.chain
    trained = f"trained with policy {chain.policy}" if chain.is_distilled else "trained without KV distillation"
    if next(iter(chain.selections.values())).all():
        return [f"{run.name}, {trained}: all tokens, since there are as many latents as chain tokens."]
    classes = list(dict.fromkeys(chain.token_classes))
    class_of_token = np.array(chain.token_classes)
    rows = [
        [policy, *(format_percent(float(mask[..., class_of_token == name].mean())) for name in classes)]
        for policy, mask in chain.selections.items()
    ]
    by_class = Table(["selected, %", *classes], rows, f"{run.name}, {trained}: share selected by token class")
    heads = [f"{l}.{g}" for l in chain.matched_layers for g in range(chain.selections[chain.policy].shape[1])]
    policies = list(chain.selections)
    token_shares = [mask.mean((0, 1)).tolist() for mask in chain.selections.values()]
    alt_text = f"{run.name}: share of layers and heads that select each chain token, by policy"
    shares = plot_heat_maps([("", token_shares)], policies, tokens, alt_text, value_range=(0.0, 1.0))
    masks = [(x, mask.reshape(-1, len(tokens)).astype(float).tolist()) for x, mask in chain.selections.items()]
    alt_text = f"{run.name}: tokens selected in each layer and head, by policy"
    per_head = plot_heat_maps(masks, heads, tokens, alt_text, value_range=(0.0, 1.0))
    panels = list(zip(("importance I", "redundancy R", f"score S of {chain.policy}"), chain.scores, strict=True))
    scores = plot_heat_maps(panels, heads, tokens, f"{run.name}: scores of each token")
    details = [PagePlot("Selected in each layer and head", "", per_head), PagePlot("Scores", "", scores)]
    return [
        [PagePlot(run.name, f"{trained}: share of layers and heads that select each token", shares)],
        by_class,
        PageDetails("Every layer and head, and scores", [details]),
    ]


def number_labels(n: int) -> list[str]:
    return [str(i + 1) for i in range(n)]


def effect_blocks(summary: QuestionSummary) -> list[PageBlock]:
    changed = Markup("<b>{}</b> <small>changed</small>")
    rows: list[list[str]] = [["none", "", *(run.answer for run in summary.runs)]]
    for effect in summary.runs[0].effects:
        row = [*label_condition(f"{effect.intervention} {effect.target}")]
        for run in summary.runs:
            same = next((x for x in run.effects if x[:2] == effect[:2]), effect._replace(answer="–", donor_answer=None))
            cell = same.answer if same.answer in (run.answer, "–") else changed.format(same.answer or "(nothing)")
            if same.donor_answer is not None:
                cell = Markup("{} <small>donor: {}</small>").format(cell, same.donor_answer)
            row.append(cell)
        rows.append(row)
    header = ["thoughts", "in", *(run.name for run in summary.runs)]
    return [
        "One question shows what can happen, not how often; laconic inspect RUN --task SET asks many.",
        Table(header, rows, num_text_columns=len(header)),
        f"{TARGETS_NOTE}.",
    ]
