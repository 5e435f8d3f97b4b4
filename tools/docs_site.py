"""Hooks of MkDocs: add the generated pages, make links to files of the repository work, and render formulas."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.docs_reference import reference_pages, source_page

REPO = Path(__file__).resolve().parent.parent
PROJECT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"\s*(```+|~~~+)")
# The section of another page replaces this comment and the line below it, a link for readers of the repository.
SECTION = re.compile(r"^<!-- from (\S+): (.+) -->\n.*$", re.MULTILINE)
UNKNOWN_COMMANDS = {r"\arg": r"\mathrm{arg}", r"\lceil": "⌈", r"\rceil": "⌉"}  # of latex2mathml
FORMULA = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(?<=<code>)[^<\n]+(?=</code>)")
# A word with a hyphen and at most 28 characters; longer ones may break, or they would widen a narrow page.
HYPHENATED = re.compile(r"(?<!\S)(?=\S{1,28}(?!\S))\S*-\S*")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those in docs/."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    pages = reference_pages()
    for name, uri in PROJECT_PAGES.items():
        pages[uri] = (REPO / name).read_text(encoding="utf-8")
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {name: (REPO / name).read_text(encoding="utf-8") for name in ("README.md", *PROJECT_PAGES)}
    for path in sorted(linked_paths(texts)):
        if path not in texts:
            pages[site_uri(path)] = source_page(REPO / path, path)
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Prepare a page of the repository for MkDocs."""
    uri = page.file.src_uri
    names = {site_page: name for name, site_page in PROJECT_PAGES.items()}
    if page.file.generated_by and uri not in names:
        return markdown
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])  # a tab of one page has nothing to list at its left
    markdown = SECTION.sub(lambda match: rewrite_links(read_section(match[1], match[2]), match[1], uri), markdown)
    markdown = FORMULA.sub(lambda match: render_formula(match[1]), markdown)
    markdown = rewrite_links(markdown, names.get(uri, f"docs/{uri}"), uri)
    # Python-Markdown nests lists by four spaces; those of the ledger have two.
    return "\n".join(
        re.sub(r"^ +(?=- )", lambda match: match[0] * 2, line) if is_prose else line
        for line, is_prose in split_lines(markdown)
    )


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keep flags and other short words with hyphens in inline code on one line; browsers break after a hyphen."""
    return INLINE_CODE.sub(lambda code: HYPHENATED.sub(r'<span class="nowrap">\g<0></span>', code[0]), html)


def split_lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a page, and whether each stands outside fenced blocks."""
    fence = ""
    for line in markdown.split("\n"):
        match = FENCE.match(line)
        yield line, not (fence or match)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence):
            fence = ""


def read_section(name: str, heading: str) -> str:
    """Return what stands below a heading of the second level in a page of the repository."""
    sections = re.split(r"^## ", (REPO / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next(section for section in sections if section.startswith(f"{heading}\n")).partition("\n")[2].strip()


def rewrite_links(markdown: str, name: str, uri: str) -> str:
    """Point links to files of the repository at their pages in the site.

    Args:
        markdown: Text of a page.
        name: Path of the page in the repository.
        uri: Path of the page in the site.
    """

    def target(match: re.Match[str]) -> str:
        path = resolve_link(match[1], name)
        if not (REPO / path).exists():
            return match[0]  # a generated page, or a broken link that MkDocs reports
        return posixpath.relpath(site_uri(path), posixpath.dirname(uri) or ".") + (match[2] or "")

    return "\n".join(LINK.sub(target, line) if is_prose else line for line, is_prose in split_lines(markdown))


def linked_paths(texts: dict[str, str]) -> Iterator[str]:
    """Yield the files and folders outside docs/ that pages link to, and the files of these folders."""
    prose = ((name, line) for name, text in texts.items() for line, is_prose in split_lines(text) if is_prose)
    links = {resolve_link(match[1], name) for name, line in prose for match in LINK.finditer(line)}
    for path in links:
        if path.startswith(("docs/", "../")) or not (REPO / path).exists():
            continue
        yield path
        if (REPO / path).is_dir():
            files = (file for file in (REPO / path).iterdir() if file.is_file())
            yield from (file.relative_to(REPO).as_posix() for file in files)


def resolve_link(link: str, name: str) -> str:
    """Return the path in the repository that a link of a page points at."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def site_uri(path: str) -> str:
    """Return where the site has a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    if (REPO / path).is_dir():
        return f"source/{path}/index.md"
    return PROJECT_PAGES.get(path, f"source/{path}.md")


def render_formula(latex: str) -> str:
    """Return a formula as MathML, which browsers render without scripts or fonts from elsewhere.

    Raises:
        ValueError: If the converter does not know a command of the formula.
    """
    from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports]

    for command, text in UNKNOWN_COMMANDS.items():
        latex = latex.replace(command, text)
    formula = convert(" ".join(latex.split()), display="block")
    unknown = re.search(r"\\[A-Za-z]+", formula)
    if unknown is not None:
        raise ValueError(f"latex2mathml does not know {unknown[0]} in {latex}; add it to UNKNOWN_COMMANDS")
    return f'<div class="formula">{formula}</div>'
