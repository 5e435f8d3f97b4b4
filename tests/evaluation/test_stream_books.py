"""Books before, after and with another in between; levels that stand still; the section read changes nothing."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from laconic.batches import DocumentBatch
from laconic.errors import InputError
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.streams import texts
from laconic.evaluation.streams.evaluate import build_metrics
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.streams.report import compute_gains, retained_share
from laconic.evaluation.streams.tasks import name_ablations
from laconic.evaluation.streams.texts import drop_cache, split_sections
from laconic.evaluation.suite import RunResult
from laconic.nested.ablations import freeze_levels
from laconic.nested.state import FastWeightState
from tests.evaluation.streamed import V, attending, evaluate_stream, remembering
from tests.nested.helpers import states_equal

pytestmark = pytest.mark.usefixtures("unchecked")
W = 8


class Sections:
    """Two texts of sections of `W` tokens, each with a habit of its own."""

    fingerprint = hashlib.sha256(b"sections").hexdigest()

    def __init__(self, counts: Sequence[int] = (6, 5)) -> None:
        g = torch.Generator().manual_seed(1)
        self.rows: list[tuple[str, torch.Tensor]] = []
        for b, n in enumerate(counts):
            habit = torch.randint(V, (W,), generator=g)
            for i in range(n):
                noise = torch.randint(V, (W,), generator=g)
                ids = torch.where(torch.rand(W, generator=g) < 0.8, habit, noise)
                self.rows.append((f"book {b}@{i * W}", ids))

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        text = torch.stack([self.rows[i][1] for i in rows])
        live = torch.ones_like(text, dtype=torch.bool)
        return DocumentBatch(
            text, live, live.clone(), (W,), torch.tensor([*rows]), tuple(self.rows[i][0] for i in rows)
        )


def learners() -> list[Any]:
    return [attending(eta=2.0), remembering()]


def nats(row: EvalItem, way: str) -> float:
    total, n = row.conditions[way]["sums"][OVERALL]
    return total / n


def by_hand(model: Any, source: Sections, before: Sequence[int], section: int, blind: bool) -> float:
    """A section after others, read one after the other: attention sees one at a time."""
    state = model.initial_state(1)
    for row in before:
        state = drop_cache(cast(FastWeightState, model.read_tokens(source.rows[row][1][None], state).cache))
    ids = source.rows[section][1]
    with torch.no_grad():
        seen = model.read_tokens(ids[None], state, update_weights=blind)
        loss = torch.nn.functional.cross_entropy(model.logits(seen.hidden_states)[0, :-1].double(), ids[1:])
    return float(loss)


@pytest.mark.medium
@pytest.mark.parametrize("which", [0, 1])
def test_evaluate_books_scores_every_fifth_section_against_a_loop(which: int) -> None:
    model, source = learners()[which], Sections()
    rows, blind = evaluate_stream(model, "books", source), which == 1
    assert [row.id for row in rows] == [f"book 0@{4 * W}", f"book 1@{4 * W}"]
    read, another = [0, 1, 2, 3, 5], [6, 7, 8, 9]
    for way, before in (("fresh", []), ("after", read), ("after another", read + another)):
        assert nats(rows[0], way) == pytest.approx(by_hand(model, source, before, 4, blind), rel=1e-4)
    assert len({nats(rows[0], way) for way in rows[0].conditions}) == 3
    assert rows[0].conditions["fresh"]["level_updates"] in ([0.0], [0.0, 0.0])
    assert all(n > 0 for n in rows[0].conditions["after"]["level_updates"])


@pytest.mark.medium
def test_evaluate_books_resumes_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = attending(eta=2.0), Sections()
    requested = evaluate_stream(model, "books", source)
    one, calls = texts.evaluate_book, list[int]()

    def stopping(*args: Any) -> list[EvalItem]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return one(*args)

    monkeypatch.setattr(texts, "evaluate_book", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate_stream(model, "books", source, folder=tmp_path)
    assert evaluate_stream(model, "books", source, folder=tmp_path) == requested
    assert len(calls) == 3, "the first book is not read twice"
    assert evaluate_stream(model, "books", source, folder=tmp_path) == requested
    assert len(calls) == 3


@pytest.mark.medium
def test_evaluate_levels_reads_each_ablation(tmp_path: Path) -> None:
    model, source = attending(eta=2.0), Sections()
    variants = {"all levels": model} | {f"without {C}": freeze_levels(model, l) for l, C in enumerate((4, 8))}
    conditions = name_ablations(variants)
    rows = evaluate_stream(model, "levels", source, conditions=conditions, folder=tmp_path)
    assert [row.id for row in rows] == ["book 0", "book 1"]
    ways = rows[0].conditions
    assert {*ways} == {"all levels", "without 4", "without 8", "all levels, frozen"}
    assert len({nats(rows[0], way) for way in ways}) == 4
    assert ways["all levels, frozen"]["level_updates"] == [0.0, 0.0]
    assert evaluate_stream(model, "levels", source, conditions=conditions, folder=tmp_path) == rows


def item(id: str, **output: float) -> EvalItem:
    return EvalItem(id, {way: build_metrics({OVERALL: (10 * x, 10)}, (), 0) for way, x in output.items()})


def test_compute_gains_pairs_items() -> None:
    ways = {"fresh": (2.0, 3.0, 4.0), "after": (1.5, 2.4, 3.7), "after another": (1.9, 2.8, 3.9)}
    rows = [item(str(i), **{way: x[i] for way, x in ways.items()}) for i in range(3)]
    after, another = compute_gains(RunResult("run", "books", (0, 1), [rows, rows]))
    assert (after.condition, another.condition) == ("after", "after another")
    assert after.nats_saved == pytest.approx((0.5 + 0.6 + 0.3) / 3)
    spread = (0.5, 0.6, 0.3)
    mean = sum(spread) / 3
    assert after.standard_error == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in spread) / 2 / 3))
    share = retained_share([after, another])
    assert share == pytest.approx(((0.1 + 0.2 + 0.1) / 3) / after.nats_saved)
    assert retained_share([after._replace(nats_saved=-0.1), another]) is None


def test_split_sections_refuses_short_texts() -> None:
    with pytest.raises(InputError, match="book 1: 4 sections, but every 5th"):
        evaluate_stream(attending(), "books", Sections((6, 4)))
    assert split_sections(range(6), "x") == ([0, 1, 2, 3, 5], [4])


def test_drop_cache_keeps_fast_weights() -> None:
    model = attending()
    state = cast(FastWeightState, model.read_tokens(Sections().rows[0][1][None]).cache)
    after = drop_cache(state)
    assert all(layer.cache is not None and layer.cache.S == 0 for layer in after.layers)
    assert states_equal(after.layers[0].cms, state.layers[0].cms)
    assert torch.equal(after.position, state.position)
