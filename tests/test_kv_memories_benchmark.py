"""The comparison of KV memories runs on stories260k, and its page states what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kv_memories
from benchmarks.kv_memories_page import estimate_share, is_on_front, summarize_rows
from laconic import load_tokenizer
from tests.conftest import REPO, needs

MODEL = REPO / "src/laconic/checkpoints/stories260k"
STORY = "Once upon a time there was a little girl. She had a red ball. One day the ball was lost in the park. "


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"book": name, "text": STORY * 20}) + "\n" for name in ("a", "a", "b")))
    return path


def build_row(method: str, divisor: int, document: int, nats: float, size: float) -> dict[str, Any]:
    losses = dict.fromkeys(("copied", "answer", "following"), nats)
    return {"method": method, "divisor": divisor, "document": document, "tokens": 8, "cache_bytes": size, **losses}


def test_kv_memories_measure_every_memory_and_write_the_page(texts: Path, tmp_path: Path) -> None:
    needs("matplotlib")
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    command = [str(MODEL), str(texts), "--results", str(results), "--tokens", "192", "--documents", "1"]
    kv_memories.main(command)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(rows) == 2 + 3 * (1 + len(kv_memories.METHODS))
    assert {r["positions"] for r in rows if r["divisor"] == 16} == {12}
    none, full, window = (next(r for r in rows if r["method"] == m) for m in ("no context", "full text", "window"))
    assert full["copied"] < none["copied"]
    assert window["bytes"] == window["cache_bytes"] == full["bytes"] / 16
    unequal, equal = ([r for r in rows if r["method"] == f"kvzip{s}"] for s in ("", ", equal heads"))
    assert all(a["cache_bytes"] > b["cache_bytes"] for a, b in zip(unequal, equal, strict=True))
    kv_memories.main(command)  # finished documents are not measured again
    assert len(results.read_text().splitlines()) == len(rows)
    kv_memories.main(["--results", str(results), "--page", str(page)])
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert "<svg" in page.with_suffix(".svg").read_text()


def test_kv_memories_documents_have_their_facts_and_length(texts: Path) -> None:
    tokenizer = load_tokenizer(MODEL)
    documents = list(kv_memories.iter_documents(texts, tokenizer, 192))
    assert len(documents) == 2, "one of each book"
    for document in documents:
        assert len(document.ids) == 192
        text = tokenizer.decode(document.ids)
        assert len(document.questions) == 4
        assert all(tokenizer.decode(answer).strip() + "." in text for _, answer in document.questions)


def test_estimate_share_is_the_ratio_of_mean_gains() -> None:
    share, low, high = estimate_share([4.0, 6.0], [3.0, 3.0], [2.0, 2.0])
    assert share == pytest.approx(4 / 6)
    assert (low, high) == pytest.approx((1 / 2, 3 / 4))
    assert estimate_share([4.0], [5.0], [2.0])[0] == pytest.approx(-0.5)


def test_is_on_front_compares_memories_of_all_documents() -> None:
    rows = [
        build_row(method, divisor, i, nats, size)
        for method, divisor, nats, size in (
            ("no context", 0, 4.0, 0), ("full text", 1, 1.0, 64), ("a", 8, 3.0, 8), ("b", 8, 2.0, 8), ("c", 4, 2.0, 16)
        )
        for i in range(2)
    ] + [build_row("fit", 8, 0, 1.0, 8)]  # fmt: skip
    points = summarize_rows(rows)
    on_front = {p.method: is_on_front(p, points, "copied") for p in points}
    assert on_front == {"no context": True, "full text": True, "a": False, "b": True, "c": False, "fit": False}
    assert points[-1].shares["copied"] == (1.0, 1.0, 1.0)
