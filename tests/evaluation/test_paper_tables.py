"""Tables of papers are complete."""

from laconic.evaluation.report.paper_tables import load_paper_tables, render_papers


def test_paper_tables_are_complete() -> None:
    tables = load_paper_tables()
    assert {table["topic"] for table in tables} == {"tails", "labels", "retrieval", "ablations", "nested"}
    for table in tables:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}, table["title"]
        assert "arXiv:" in table["source"] or table["source"].startswith(("NL ", "Ti "))


def test_render_papers_selects_by_topic() -> None:
    (labels,) = render_papers(["labels"])
    assert "<details" in labels
    assert len(render_papers(["tails", "labels"])) > 1
