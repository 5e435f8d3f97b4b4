"""Figures that papers report: looked up by the table and row of a recipe, marked with their source, or not known."""

import tomllib

from laconic.evaluation.report.page import PageSection, render_page
from laconic.evaluation.report.papers import (
    find_paper_figures,
    format_paper_figures,
    list_papers,
    load_paper_figures,
    load_paper_tables,
)
from tests.conftest import REPO


def test_figures_are_found_by_the_row_of_a_recipe() -> None:
    assert format_paper_figures(find_paper_figures("kava table 6", "1b aug", "gsm8k")) == "56.5 [P]"
    assert (
        format_paper_figures(find_paper_figures("codi table scripts", "llama1b-aug", "gsm8k"))
        == "55.6 [P v1] · 53.9 [P v2]"
    )
    assert format_paper_figures(find_paper_figures("codi table scripts", "gpt2-aug", "multiarith")) == "92.8 [CODI]"
    assert find_paper_figures("kava table 6", "1b aug", "gsm8k-aug") == find_paper_figures(
        "kava table 6", "1b aug", "gsm8k"
    )


def test_figures_that_no_paper_reports_are_not_known() -> None:
    for name in ("gsm-hard", "svamp", "svamp-300", "gsm8k-aug:valid", "gsm8k-nl"):
        assert format_paper_figures(find_paper_figures("kava table 6", "1b aug", name)) == "not known"
    assert format_paper_figures(find_paper_figures("kava table baselines", "nocot 3b aug", "gsm8k")) == "not known"
    assert (
        format_paper_figures(find_paper_figures("ours", "1b aug", "gsm8k"))
        == format_paper_figures(find_paper_figures(None, None, "gsm8k"))
        == "–"
    )


def test_every_row_is_one_that_a_recipe_names() -> None:
    named = {
        (recipe["paper_table"], recipe["table_row"])
        for path in (REPO / "src/laconic/recipes").glob("*.toml")
        if "table_row" in (recipe := tomllib.loads(path.read_text(encoding="utf-8")))
    }
    assert {tuple(row["recipe"]) for row in load_paper_figures()} <= named
    assert all(0 < figure["percent"] <= 100 for row in load_paper_figures() for figure in row["figures"])


def test_paper_tables_are_complete() -> None:
    tables = load_paper_tables()
    assert {table["topic"] for table in tables} == {"tails", "labels", "retrieval", "ablations", "nested"}
    for table in tables:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}, table["title"]
        assert "arXiv:" in table["source"] or table["source"].startswith(("NL ", "Ti "))


def test_list_papers_selects_by_topic() -> None:
    (labels,) = list_papers(["labels"])
    assert "<details" in render_page("Papers", [PageSection("Labels", [labels])])
    assert len(list_papers(["tails", "labels"])) > 1
