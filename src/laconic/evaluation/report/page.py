"""HTML pages from one template: self-contained, without scripts, in light and dark mode."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from laconic.evaluation.tables import Table


class PagePlot(NamedTuple):
    """A plot with its title and caption; `image` comes from `laconic.evaluation.report.plots`."""

    title: str
    caption: str
    image: Markup


class PageDetails(NamedTuple):
    """Blocks that are folded until the reader opens them."""

    summary: str
    blocks: Sequence["PageBlock"]


# A paragraph, or markup as it is; a table; a list of points; plots, side by side on a wide page; folded blocks.
PageBlock = str | Table | Sequence[str] | Sequence[PagePlot] | PageDetails


class PageSection(NamedTuple):
    """A section of a page. Texts are escaped unless they are `Markup`; empty lists show nothing."""

    title: str
    blocks: Sequence[PageBlock]


def render_page(title: str, sections: Sequence[PageSection], lead: Sequence[PageBlock] = ()) -> str:
    """Return a whole page; `lead` stands under the heading, and sections that show nothing are left out."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    visible = [section for section in sections if any(section.blocks)]
    return environment.get_template("page.html").render(title=title, lead=lead, sections=visible)


def build_facts_table(facts: Sequence[tuple[str, str]]) -> Table:
    return Table((), facts, num_text_columns=2)


def mark_tokens(tokens: Sequence[str]) -> Markup:
    return Markup("<p>{}</p>").format(
        Markup(" ").join(Markup('<span class="token">{}</span>').format(t) for t in tokens)
    )
