"""Law 5 on the whole method: the head's gradient, every outcome of its draws counted, is that of the expectation."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.core.contract import Documents, followers
from laconic.core.memory import Memory
from laconic.methods import windows
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.halting import probabilities
from laconic.methods.settings import Halting, Reading
from laconic.methods.summaries import Summaries
from tests import tolerances
from tests.core.readings import fresh
from tests.oracles.compare import distance

BETA, TOKENS = 0.7, 4
GENERATOR = pytest.mark.parametrize("generator", ["parallel", "self"])


def method(generator: str, K: int, **halting: Any) -> AutoCompressor:
    """A reader in float64 whose head tells states apart."""
    reading = Reading(generator=generator, length="stop", cap=K, summary_init="normal")  # type: ignore[arg-type]
    how, decoder = Halting(price=BETA, **halting), fresh("llama").double()
    summaries = Summaries(decoder, reading, how, eos=None).double()
    assert summaries.u is not None
    assert summaries.b is not None
    noise = torch.randn(48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        summaries.u.copy_(noise * 0.05)
        summaries.b.fill_(1.0)
    return AutoCompressor(decoder, summaries, reading, how, steps=100)


def documents(w: int) -> Documents:
    """Two documents of one window at its full price, the second a segment shorter if there are three."""
    text = torch.randint(3, 97, (2, w * TOKENS), generator=torch.Generator().manual_seed(2))
    live = torch.ones(2, w * TOKENS, dtype=torch.bool)
    live[1, max(2 * TOKENS, (w - 1) * TOKENS) :] = False
    scored = live.clone()
    scored[:, 0] = False
    cuts = tuple(TOKENS * i for i in range(1, w + 1))
    return Documents(text, live, scored, cuts, torch.arange(2), ("a", "b"), step=99, windows=(w, 0))


def worlds(
    reader: AutoCompressor, row: Documents, memory: Memory, i: int, lengths: tuple[int, ...], p: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """(lengths, chance, cost) of every way through the segments from `i` on; a row's last is not compressed."""
    at = row.segments[i]
    text, live = row.text[:, at], row.live[:, at]
    targets = followers(row.text, row.live, row.scored)[:, at]
    nats = reader.unit.nats(reader.unit.read(memory, text, live), targets).sum[0]
    if i == len(row.cuts) - 1 or not row.live[:, row.segments[i + 1]].any():
        yield lengths, p, nats.detach()
        return
    K = reader.reading.cap
    written = reader.unit.write(memory, text, live, K)
    P = probabilities(reader.summaries.stops(reader.decoder, written.states))[0]
    for n in range(1, K + 1):
        kept = reader.unit.kept(written, live, torch.tensor([n]))
        after = reader.unit.after(memory, kept, live.sum(1))
        for found, chance, cost in worlds(reader, row, after, i + 1, (*lengths, n), p * P[n - 1]):
            yield found, chance, cost + nats.detach() + BETA * n


def exact(reader: AutoCompressor, batch: Documents) -> tuple[tuple[Tensor, ...], list[dict[tuple[int, ...], float]]]:
    """Gradient of the mean cost to the head, and the chance of every world of each row."""
    total, chances = torch.zeros(()).double(), []
    for row in range(batch.B):
        found = list(worlds(reader, batch.take([row]), reader.unit.empty(1), 0, (), torch.ones(()).double()))
        total = total + torch.stack([chance * cost for _, chance, cost in found]).sum()
        chances.append({lengths: float(chance.detach()) for lengths, chance, _ in found})
    return head(reader, total / batch.scored.sum()), chances


def head(reader: AutoCompressor, loss: Tensor) -> tuple[Tensor, ...]:
    """The gradient of u and b."""
    assert reader.summaries.u is not None
    assert reader.summaries.b is not None
    return torch.autograd.grad(loss, (reader.summaries.u, reader.summaries.b))


@GENERATOR
@pytest.mark.parametrize(("w", "K"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_two_draws_over_every_outcome(generator: str, w: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of worlds, each by its chance; in longer windows later stops hang on what was written before."""
    reader, batch = method(generator, K, estimator="sample", joint=True, explore=0.0), documents(w).take([0])
    want, (chances,) = exact(reader, batch)
    assert abs(sum(chances.values()) - 1) < tolerances.ORACLE
    found = [torch.zeros_like(x) for x in want]
    for pair in product(chances, repeat=2):
        script = iter([n for lengths in pair for n in lengths])
        monkeypatch.setattr(windows, "drawn", lambda p, u, script=script: torch.tensor([next(script) - 1]))
        for sum_, part in zip(found, head(reader, reader(batch).loss), strict=True):
            sum_ += chances[pair[0]] * chances[pair[1]] * part
    assert distance(tuple(found), want) < tolerances.ORACLE


@GENERATOR
@pytest.mark.parametrize("joint", [False, True])
def test_every_length_read_is_exact(generator: str, joint: bool) -> None:
    """w = 2: the head's gradient is that of the expectation, alone or beside a decoder that reads a drawn length."""
    reader, batch = method(generator, 3, estimator="ponder", joint=joint), documents(2)
    want, _ = exact(reader, batch)
    assert distance(head(reader, reader(batch).loss), want) < tolerances.ORACLE


def test_a_row_that_has_ended_is_paid_for_no_more() -> None:
    """Of three segments the second row has two: its second compression is read by nobody."""
    reader, batch = method("parallel", 3, estimator="ponder", joint=True), documents(3)
    whole = head(reader, reader(batch).loss * batch.scored.sum())
    parts = [head(reader, reader(row).loss * row.scored.sum()) for row in (batch.take([0]), batch.take([1]))]
    summed = tuple(a + b for a, b in zip(*parts, strict=True))
    assert distance(whole, summed) < tolerances.ORACLE
    want, _ = exact(reader, batch.take([1]))
    assert distance(tuple(x / batch.take([1]).scored.sum() for x in parts[1]), want) < tolerances.ORACLE
