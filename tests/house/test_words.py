"""README and `src` avoid words that claim more than a test can show."""

import re

from tests.conftest import REPO

WORDS = re.compile(r"(?<![a-z])(exact|faithful|verified|production-ready)(?![a-z])", re.IGNORECASE)


def claims(text: str) -> list[str]:
    return [f"{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if WORDS.search(line)]


def test_the_words_stand_nowhere() -> None:
    pages = [
        REPO / "README.md",
        *sorted(p for p in (REPO / "src").rglob("*") if p.suffix in {".py", ".toml", ".html", ".md"}),
    ]
    claims_by_page = {str(page.relative_to(REPO)): claims(page.read_text(encoding="utf-8")) for page in pages}
    assert not {page: lines for page, lines in claims_by_page.items() if lines}


def test_the_search_sees_them_and_lets_exactly_pass() -> None:
    assert all(map(claims, ["An Exact copy", "is_verified = True", "production-ready"]))
    assert not claims("Exactly one of prompts, ids, vectors; inexactly; unverified")
