"""The page: what it says, that it asks for nothing, that it is read without eyes and without script."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from laconic.evaluation.inspection.kv_selection import ChainSelection
from laconic.evaluation.inspection.kv_similarity import SimilarityMap
from laconic.evaluation.inspection.logit_lens import LogitLens, TokenGuess
from laconic.evaluation.inspection.question import QuestionInspection
from laconic.evaluation.reasoning.latency import Latency
from laconic.evaluation.report import runs_table
from laconic.evaluation.report.runs_table import ComparisonReport, MethodResult
from tests.conftest import needs

N, M, NC = 200, 3, 6
LARGEST = 6_000_000  # bytes of a page


def right(share: float, seeds: int) -> np.ndarray:
    """Every seed right on the same share of questions, shifted by a few."""
    return np.stack([np.roll(np.arange(N) < share * N, 7 * seed) for seed in range(seeds)]).astype(float)


def made(seeds: int = 1) -> ComparisonReport:
    def line(name: str, title: str, share: float, passes: tuple[float, ...], **more: object) -> MethodResult:
        a, b, c, d = passes
        return MethodResult(name, title, f"how {title}", right(share, seeds), (a, b, c, d), (9.0, 9.0 + d), **more)  # pyright: ignore

    curve = [[(10, 0.2), (20, 0.5), (30, 0.8)]] * seeds
    guesses = (TokenGuess("3", 0.9), TokenGuess("<<", 0.1))
    held = np.zeros((2, 2, NC), dtype=bool)
    held[..., [0, 2, 4]] = True
    looked = QuestionInspection(
        "kava", "kava", 2, "7", LogitLens(("3", "+", "<", "="), tuple("3+4=7;"), "7", ((guesses,) * (M + 1),) * 3),
        (SimilarityMap("values", "chain", ((0.5,) * NC,) * M, (((0.5,) * NC,) * M,) * 2, 0.0, 0.0),),
        (ChainSelection("rkv", held),), policy="rkv", matched_layers=(0, 1), best_tokens=(("3", 1.0), ("4", 0.5), ("7", 0.75)),
    )  # fmt: skip
    return ComparisonReport(
        title="Thoughts & chains",
        lead="What is shown.",
        results=[
            line("chain", "Chain", 0.99, (1, 0, 0, 20), learning_curves=curve, latency=Latency(12.34, 15.0, 50)),
            line(
                "pccot", "PCCoT", 0.30, (0, 1, 2, 2), learning_curves=curve, sweep={0: [0.2] * seeds, 1: [0.3] * seeds}
            ),
            line(
                "kava",
                "KaVa",
                0.95,
                (0, 1, 2, 2),
                learning_curves=curve,
                sweep={0: [0.2], 1: [0.9], 2: [0.95]},
                trained_iterations=2,
            ),
            line("random", "random", 0.95, (0, 1, 2, 2), control=True),
        ],
        focus="kava",
        cot_baseline="chain",
        majority_baseline=("0", 0.18),
        protocol="last digit",
        seeds=list(range(seeds)),
        caveats=["A limit <of> mine."],
        recipe_differences=[("chain", "all", "a quickstart")],
        facts=[("versions", "laconic 0")],
        command="laconic demo --num-seeds 1",
        inspection=looked,
    )


class Page(HTMLParser):
    """Tags, attributes, ids, text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open, self.problems = "", list[str](), list[str]()
        self.mlp_forward(html)

    VOID = frozenset({"meta", "br", "link", "img", "input", "use", "path"})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.text += data if not self.open or self.open[-1] != "style" else ""


def outside(html: str) -> list[str]:
    """Everything that a browser would fetch."""
    page = Page(html)
    names = ("src", "href", "xlink:href", "srcset", "poster", "data", "action", "background")
    found = [value for _, attributes in page.tags for name in names if (value := attributes.get(name))]
    found += re.findall(r"url\(\s*['\"]?([^)'\"]*)", html) + re.findall(r"@import[^;]*", html)
    found += [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "object", "embed", "base")]
    return [value for value in found if not value.startswith("#")]


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_page_is_one_file_that_asks_for_nothing(seeds: int) -> None:
    needs("matplotlib")
    html = runs_table.render_report(made(seeds))
    page = Page(html)
    assert not outside(html)
    assert "http" not in html
    assert not page.problems
    assert not page.open
    assert len(html.encode()) <= LARGEST
    assert "prefers-color-scheme: dark" in html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_the_search_for_requests_sees_them() -> None:
    for bad in (
        "<img src=a.png>", "<p style='background: url(a.png)'>", "<script>1</script>", "<style>@import 'a';</style>",
        "<link href=a.css>", "<a href=https://a.b>c</a>",
    ):  # fmt: skip
        assert outside(bad), bad


def test_drawings_have_a_text_and_ids_of_their_own() -> None:
    needs("matplotlib")
    page = Page(runs_table.render_report(made()))
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 2
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert "KaVa" in str(attributes["aria-label"])
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert runs_table.render_report(made()) == runs_table.render_report(made())


def test_what_the_page_says() -> None:
    text = " ".join(Page(runs_table.render_report(made())).text.split())
    for said in (
        "Thoughts & chains", "95.0 %", "n=1", "21", "1 place + 2 think + 2 answer", "9 → 11", "12.3", "in 18.0 %",
        "Question", "3 of 3 slots name a word", "A limit <of> mine.", "laconic demo --num-seeds 1", "a quickstart",
        "over PCCoT", "+65.0 points (n=1,", "no difference shown (n=1, interval",
    ):  # fmt: skip
        assert said in text, said


def test_a_headline_needs_three_seeds() -> None:
    one, two, three = (runs_table.result_cells(made(n).results[2])[0] for n in (1, 2, 3))
    assert (one, two, three) == ("95.0 %", "95.0 %", "95.0 ± 0.0 %")
    assert any("Seeds: 2 runs of each" in text for text in runs_table.list_caveats(made(2)))
    assert not any("Seeds:" in text for text in runs_table.list_caveats(made(3)))


def test_limits_come_from_the_figures() -> None:
    told = runs_table.list_caveats(made(3))
    assert any(text.startswith("That KaVa does more than random: no difference shown") for text in told)
    assert not any("Passes are not saved" in text or "cache is not shorter" in text for text in told)
    page = made(3)
    short = [
        replace(line, mean_passes=(1, 0, 0, 5), mean_cache_positions=(9.0, 10.0)) if line.name == "chain" else line
        for line in page.results
    ]
    told = runs_table.list_caveats(replace(page, results=short))
    assert "Passes are not saved: KaVa takes 5 a question, the chain 6." not in told
    short = [
        replace(line, mean_passes=(1, 0, 0, 4), mean_cache_positions=(9.0, 10.0)) if line.name == "chain" else line
        for line in page.results
    ]
    told = runs_table.list_caveats(replace(page, results=short))
    assert "Passes are not saved: KaVa takes 5 a question, the chain 5." in told
    assert "The cache is not shorter: 11 positions at the end, 10 with the chain." in told


def test_seeds_that_are_missing_are_left_out_of_a_comparison() -> None:
    page = made(3)
    fewer = replace(page.results[1], correct=page.results[1].correct[:2])
    found = runs_table.compare_to_focus(replace(page, results=[page.results[0], fewer, *page.results[2:]]))
    assert [c.difference.num_seeds for c in found] == [3, 2, 3]
    assert runs_table.compare_to_focus(replace(page, focus="nobody")) == []


def test_without_matplotlib_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = runs_table.render_report(made())
    assert "<svg" not in html
    assert "pip install &#39;laconic[report]&#39;" in html or "pip install 'laconic[report]'" in html


def test_a_page_without_a_question_or_runs_that_were_stopped() -> None:
    page = replace(made(), inspection=None, results=made().results[:1], recipe_differences=[], caveats=[])
    html = runs_table.render_report(page)
    assert "looked into" not in html
    assert "Differences" not in html


def test_everything_kept_is_said_in_words() -> None:
    page = made()
    assert page.inspection is not None
    whole = replace(page.inspection, selections=(ChainSelection("rkv", np.ones((2, 2, NC), dtype=bool)),))
    text = Page(runs_table.render_report(replace(page, inspection=whole))).text
    assert "as many slots as chain tokens, so nothing was chosen" in " ".join(text.split())


def test_numbers_for_people() -> None:
    assert [runs_table.format_count(x) for x in (3.0, 3.004, 3.25)] == ["3", "3", "3.2"]
    assert runs_table.format_passes((1, 0, 4, 2)) == "1 read + 4 think + 2 answer"
