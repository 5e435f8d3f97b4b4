"""The blocks of a page: each kind of value has its own form, texts are escaped, and what is empty is left out."""

from collections.abc import Callable

import pytest
from markupsafe import Markup

from laconic.evaluation.report import plots
from laconic.evaluation.report.page import PageDetails, PagePlot, PageSection, build_facts_table, render_page
from laconic.evaluation.tables import Table
from tests.conftest import needs
from tests.evaluation.pages import check_page


def test_render_page_has_a_form_for_each_kind_of_block() -> None:
    plot = PagePlot("Loss", "lower is better", Markup('<img src="data:image/svg+xml;base64," alt="loss">'))
    blocks = [
        "a < b",
        Markup("<b>bold</b>"),
        Table(("run", "n"), [["x", "1"]], "caption"),
        build_facts_table([("seed", "0")]),
        ["first point", "second & last"],
        [plot],
        PageDetails("folded", ["inside", [plot]]),
    ]
    html = render_page("Title", [PageSection("All", blocks)], ["lead"])
    page = check_page(html)
    words = ("lead", "a < b", "bold", "caption", "seed", "first point", "second & last", "lower is better", "inside")
    assert all(text in page.words for text in words)
    tags = [tag for tag, _ in page.tags]
    assert [tags.count(tag) for tag in ("table", "ul", "li", "figure", "details", "thead")] == [2, 1, 2, 2, 1, 1]


def test_render_page_leaves_out_what_is_empty() -> None:
    html = render_page("Title", [PageSection("No notes", [[]]), PageSection("Notes", ["one", []])])
    assert "No notes" not in html
    assert "<ul" not in html


def test_plot_lines_tells_more_lines_apart_than_there_are_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()

    def draw_once(draw: Callable[[Figure], None], *_: object) -> Markup:
        draw(figure)
        return Markup("image")

    monkeypatch.setattr(plots, "render_plot", draw_once)
    series = [plots.PlotSeries(str(i), [(0, i), (1, i)]) for i in range(plots.NUM_COLORS + 2)]
    (plot,) = plots.plot_lines("Title", [plots.PlotSeries("empty", []), *series], x_label="steps")
    styles = [line.get_linestyle() for line in figure.axes[0].lines]
    assert (plot.title, styles) == ("Title", ["-"] * plots.NUM_COLORS + ["--"] * 2)
    assert plots.plot_lines("Title", [plots.PlotSeries("empty", [])], x_label="steps") == []
