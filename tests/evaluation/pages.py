"""Read HTML pages in tests: tags, text, and everything a browser would fetch."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from laconic.evaluation.report import plots

MAX_PAGE_BYTES = 6_000_000


class ParsedPage(HTMLParser):
    """Tags with their attributes, visible text, and problems of nesting."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "source"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open_tags, self.problems = "", list[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and (not self.open_tags or self.open_tags.pop() != tag):
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.text += data if not self.open_tags or self.open_tags[-1] != "style" else ""

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join(self.text.split())


def leave_out_images(patch: pytest.MonkeyPatch, *, only_dark: bool = False) -> None:
    """Let pages have empty images, or only those for dark pages; `test_runs_table` draws all, which takes seconds."""
    to_data_uri = plots._to_data_uri

    def draw_some(draw: Callable[[Any], None], size: tuple[float, float], layout: Any, colors: Any) -> str:
        is_dark = "axes.prop_cycle" in colors
        return to_data_uri(draw, size, layout, colors) if only_dark and not is_dark else "data:image/svg+xml;base64,"

    patch.setattr(plots, "_to_data_uri", draw_some)


def find_requests(html: str, page: ParsedPage | None = None) -> list[str]:
    """Everything that a browser would fetch or run."""
    page = page or ParsedPage(html)
    names = ("src", "href", "xlink:href", "srcset", "poster", "data", "action", "background")
    requests = [value for _, attributes in page.tags for name in names if (value := attributes.get(name))]
    requests += re.findall(r"url\(\s*['\"]?([^)'\"]*)", html) + re.findall(r"@import[^;]*", html)
    requests += [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "object", "embed", "base")]
    return [value for value in requests if not value.startswith(("#", "data:image/svg+xml;base64,"))]


def check_page(html: str) -> ParsedPage:
    """Assert that a page is sound, self-contained and not too large."""
    page = ParsedPage(html)
    assert not find_requests(html, page)
    assert not page.problems
    assert not page.open_tags
    assert len(html.encode()) <= MAX_PAGE_BYTES
    return page
