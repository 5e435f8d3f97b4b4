"""HTML pages from one template: self-contained, without scripts, in light and dark mode."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from laconic.evaluation.tables import Table

NO_PLOTS = "Plots need matplotlib: in a clone of laconic, pip install '.[report]'."


class PageSection(NamedTuple):
    """A section of a page. Strings become paragraphs and are escaped; `Markup` blocks come from the functions below."""

    title: str
    blocks: Sequence[str | Markup | Table]


class PagePlot(NamedTuple):
    """A plot with its title and caption; `image` comes from `laconic.evaluation.report.plots`."""

    title: str
    caption: str
    image: Markup


def render_page(title: str, sections: Sequence[PageSection], lead: Sequence[str] = ()) -> str:
    """Return a whole page; `lead` are paragraphs under the heading, and sections without blocks are left out."""
    template = _environment().get_template("page.html")
    return template.render(title=title, lead=lead, sections=[section for section in sections if section.blocks])


def render_table(table: Table) -> Markup:
    """Return a table that scrolls horizontally if it is wider than the page."""
    return _render_macro("table", table)


def render_list(items: Sequence[str]) -> Markup:
    return _render_macro("bullets", items)


def render_plots(plots: Sequence[PagePlot]) -> Markup:
    """Return plots, side by side if the page is wide enough."""
    return _render_macro("figures", plots)


def render_details(summary: str, blocks: Sequence[str | Markup]) -> Markup:
    """Return blocks that are folded until the reader opens them."""
    return _render_macro("details", summary, blocks)


def render_tokens(tokens: Sequence[str]) -> Markup:
    """Return tokens in boxes, one after the other."""
    return Markup("<p>{}</p>").format(
        Markup(" ").join(Markup('<span class="token">{}</span>').format(t) for t in tokens)
    )


def render_facts(facts: Sequence[tuple[str, str]]) -> Markup:
    """Return names and values as a table without a header."""
    return render_table(Table((), facts, num_text_columns=2))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def _render_macro(name: str, *arguments: Any) -> Markup:
    module: Any = _environment().get_template("blocks.html").module
    return getattr(module, name)(*arguments)
