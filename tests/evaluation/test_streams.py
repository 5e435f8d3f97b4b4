"""Streams measured with models whose answers are known: cells, forks, ways, texts in order, rows kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.errors import InputError
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.streams.evaluate import CacheAsState, build_metrics, score_tokens
from laconic.evaluation.streams.metrics import contiguous_slices, merge_sums, score_mqar
from laconic.evaluation.streams.report import build_stream_table, result_to_json
from laconic.evaluation.streams.tasks import list_conditions
from laconic.evaluation.streams.texts import group_rows_by_text
from laconic.evaluation.suite import RunResult
from laconic.interfaces import StatefulLM
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder, DecoderOutput
from laconic.nested.state import CMSLevelState, CMSState, FastWeightState, LayerState, reset_rows
from tests.evaluation.streamed import evaluate_stream, sums

V = 16
CONFIG = DecoderConfig.tiny("llama", vocab_size=V)


def level(read: Tensor) -> CMSLevelState:
    return CMSLevelState({}, {}, {}, {}, torch.zeros_like(read), read)


@dataclass
class Remembers:
    """Says a word that it has learned stood behind this one, else word 0; its memory is a table in the state."""

    config: DecoderConfig = CONFIG

    def initial_state(self, batch_size: int) -> FastWeightState:
        zero = torch.zeros(batch_size, dtype=torch.long)
        return FastWeightState(
            (LayerState({"table": torch.zeros(batch_size, V, 1)}, cms=CMSState((level(zero),))),), zero
        )

    def read_tokens(
        self,
        input_ids: Tensor,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        update_weights: bool = True,
    ) -> DecoderOutput:
        ids, learn = input_ids, update_weights
        state = self.initial_state(len(ids)) if state is None else state
        live = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask
        table, outputs = state.layers[0].conv_tails["table"].clone(), torch.zeros(*ids.shape, 1)
        last = state.layers[0].cms.levels[0].num_updates.clone()  # the token before, 0 for none
        for b, t in live.nonzero().tolist():
            word = int(ids[b, t])
            if learn and int(last[b]):
                table[b, int(last[b])] = word
            last[b] = word if learn else last[b]
            outputs[b, t] = table[b, word]
        layer = LayerState({"table": table}, cms=CMSState((level(last),)))
        return DecoderOutput(outputs, cast(Any, FastWeightState((layer,), state.position + live.sum(1))), {})

    def logits(self, hidden_states: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden_states[..., 0].long(), V).float() * 50


@dataclass(frozen=True)
class Fixed:
    """Documents that are given."""

    result: DocumentBatch
    fingerprint: str = "f"

    def __len__(self) -> int:
        return self.result.B

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        return self.result.select_rows(rows)


def documents(rows: Sequence[Sequence[int]], names: Sequence[str], scored: Sequence[Sequence[int]] | None = None,
              **options: Any) -> DocumentBatch:  # fmt: skip
    """Rows of ids, padded right; all of them scored, or the columns given."""
    T = max(map(len, rows))
    text = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows])
    live = torch.arange(T) < torch.tensor([len(row) for row in rows])[:, None]
    at = live.clone()
    if scored is not None:
        at = torch.stack([torch.isin(torch.arange(T), torch.tensor(columns)) for columns in scored])
    return DocumentBatch(text, live, at, (T,), torch.arange(len(rows)), tuple(names), **options)


def test_score_mqar_counts_queries_by_pairs_and_gap() -> None:
    # pairs 1→9, 2→8; asked 2 at once, 1 after a silence of 15; and one pair asked for what it is not
    result = documents([[1, 9, 2, 8, 2, 8, 15, 1, 9], [3, 7, 15, 15, 3, 6, 15, 15, 15]], "ab", [[5, 8], [5]],
                      num_facts=torch.tensor([2, 1]))  # fmt: skip
    model = Remembers()
    assert isinstance(model, StatefulLM)
    rows = evaluate_stream(model, "mqar", Fixed(result), batch_size=2)
    learn = sums(rows[0], "learn")
    assert learn == {
        "all": (2, 2), "2 pairs": (2, 2), "2 pairs, gap 2-3": (1, 1), "2 pairs, gap 4-7": (1, 1)
    }  # fmt: skip
    assert {cell: score for cell, (score, _) in sums(rows[0], "frozen").items()} == dict.fromkeys(learn, 0)
    assert sums(rows[1], "learn") == {"all": (0, 1), "1 pairs": (0, 1), "1 pairs, gap 4-7": (0, 1)}
    assert rows[0].conditions["learn"]["level_updates"] == [9]  # what the stand-in calls so: the last word
    assert rows[0].conditions["learn"]["state_bytes"] == 4 * V + 3 * 8


def test_score_mqar_takes_a_key_of_several_tokens_whole() -> None:
    # two keys that share a word, 1 2 and 1 3; of the second's value the last word is not what was told
    result = documents([[1, 2, 8, 9, 1, 3, 7, 6, 1, 3, 7, 5, 15, 15, 15, 15, 1, 2, 8, 9]], "a",
                      [[10, 11, 18, 19]], num_facts=torch.tensor([2]))  # fmt: skip
    right = torch.zeros(20, dtype=torch.bool)
    right[[9, 17, 18]] = True
    cells = score_mqar(result, 0, right)
    assert cells == {"all": (1, 2), "2 pairs": (1, 2), "2 pairs, gap 4-7": (0, 1), "2 pairs, gap 16-31": (1, 1)}


def test_score_languages_wants_all_sets_correct() -> None:
    labels = torch.full((2, 13), -100)
    labels[0, :13], labels[1, :4] = 0, 0
    labels[1, 3] = 5
    result = documents([[1] * 13, [1] * 4], ["a", "b"], labels=labels)
    rows = evaluate_stream(Remembers(), "formal_languages", Fixed(result), batch_size=2)
    assert sums(rows[0], "frozen") == {"all": (1, 1), "length 11-20": (1, 1), "positions": (13, 13)}
    assert sums(rows[1], "frozen") == {"all": (0, 1), "length 1-10": (0, 1), "positions": (3, 4)}


def test_score_needle_counts_runs_of_targets() -> None:
    # a haystack with 1→9, 2→8 and the answers 9 and 4 5, of which the second is no more than half right
    result = replace(
        documents([[1, 9, 7, 2, 4, 2, 8, 1, 9, 3, 4, 5]], ["MV@12@0.5#3"], [[8, 10, 11]]), segment_ends=(8, 12)
    )
    (row,) = evaluate_stream(Remembers(), "needle", Fixed(result), batch_size=1)
    assert sums(row, "learn") == dict.fromkeys(("all", "MV", "MV, 12 tokens", "MV, depth 0.5"), (1, 2))
    assert contiguous_slices(torch.tensor([0, 1, 1, 0, 1]).bool()) == [slice(1, 3), slice(4, 5)]


def test_score_tokens_freezes_the_last_segment_where_attention_sees_it() -> None:
    result = replace(documents([[1, 9, 2, 8]], ["x"]), segment_ends=(2, 4))
    calls: list[bool] = []

    class Notes(Remembers):
        def read_tokens(
            self, input_ids: Tensor, state: Any = None, *, update_weights: bool = True, **options: Any
        ) -> DecoderOutput:
            calls.append(update_weights)
            return super().read_tokens(input_ids, state, update_weights=update_weights, **options)

    class WithCache(Notes):
        def read_tokens(self, input_ids: Tensor, state: Any = None, **options: Any) -> DecoderOutput:
            seen = super().read_tokens(input_ids, state, **options)
            built = cast(FastWeightState, cast(Any, seen.cache))
            cache = CacheAsState(Decoder(self.config)).initial_state(len(input_ids)).layers[0].cache
            after = replace(built, layers=(replace(built.layers[0], cache=cache),))
            return DecoderOutput(seen.hidden_states, cast(Any, after), {})

    for model, update, taught in (
        (Notes(), True, [True, True]),
        (WithCache(), True, [True, False]),
        (Notes(), False, [False, False]),
    ):
        calls.clear()
        score_tokens(model, result, model.initial_state(1), update_weights=update, freeze_last_segment=True)
        assert calls == taught


def test_evaluate_stream_reads_items_on_forks() -> None:
    result = documents([[1, 9, 1, 9], [2, 7, 1, 9]], ["S-1@4@0#0", "S-1@4@0#1"], [[3], [3]])
    rows = evaluate_stream(Remembers(), "needle", Fixed(result), batch_size=2)
    assert [sums(row, "learn")["all"] for row in rows] == [(1, 1), (0, 1)]
    assert rows == evaluate_stream(Remembers(), "needle", Fixed(result), batch_size=1)  # no item sees another


def text_of(n: int = 40, W: int = 8) -> DocumentBatch:
    """Two texts in stretches of W, out of their order; every word is followed by its own next one but for some."""
    first, second = [1 + t % 5 for t in range(n)], [6 + t % 7 for t in range(20)]
    parts = {f"a@{t}": first[t : t + W] for t in range(0, n, W)} | {
        f"b@{t}": second[t : t + W] for t in range(0, 20, W)
    }
    names = sorted(parts, key=lambda name: (len(name), name[::-1]))
    return documents([parts[name] for name in names], names)


def test_evaluate_stream_reads_texts_in_order_carried_or_reset() -> None:
    rows = evaluate_stream(Remembers(), "ppl", Fixed(text_of()), batch_size=2, bytes_per_token=torch.full((V,), 2))
    by_name = {row.id: row for row in rows}
    assert set(by_name) == {"a", "b"}
    for name, length, period, stretches in (("a", 40, 5, 5), ("b", 20, 7, 3)):
        ways = by_name[name].conditions
        n = length - stretches  # the first of each stretch is nobody's target
        wrong = {way: round(sums(by_name[name], way)["all"][0] / 50) for way in ways}
        assert all(metrics["sums"]["all"][1] == n for metrics in ways.values())
        assert all(metrics["sums"]["per byte"][1] == 2 * n for metrics in ways.values())
        assert wrong["frozen, carry"] == wrong["frozen, reset"] == n
        assert wrong["learn, carry"] == period  # once each, and never again
        assert wrong["learn, reset"] > 2 * period
        assert ways["learn, carry"]["sums"]["0-256"] == ways["learn, carry"]["sums"]["all"]


@pytest.mark.usefixtures("unchecked")
def test_evaluate_stream_reports_the_state_of_each_text() -> None:
    """A text that ends first has the state after its own last passage, not after that of a longer text."""
    passages = {"a@0": [1] * 8, "a@8": [1] * 2, "b@0": [2] * 8}

    class Unpadded(Fixed):
        def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
            names = [[*passages][row] for row in rows]
            return documents([passages[name] for name in names], names)

    source = Unpadded(documents([*passages.values()], [*passages]))
    model = CacheAsState(Decoder(CONFIG))
    alone, together = (evaluate_stream(model, "ppl", source, batch_size=n) for n in (1, 2))
    state_bytes = [[row.conditions["lm"]["state_bytes"] for row in rows] for rows in (alone, together)]
    assert state_bytes[0] == state_bytes[1]
    assert state_bytes[0][0] < state_bytes[0][1]


def test_score_passage_sums_nll_by_position() -> None:
    rows = [[1] * 600, [1] * 10]
    result = replace(documents(rows, ["a@0", "a@600"]))
    (row,) = evaluate_stream(Remembers(), "ppl", Fixed(result), batch_size=1)
    carried, reset = sums(row, "learn, carry"), sums(row, "learn, reset")
    assert {cell: n for cell, (_, n) in carried.items()} == {"all": 608, "0-256": 255, "256-512": 256, "512-1024": 97}
    assert {cell: n for cell, (_, n) in reset.items()} == {"all": 608, "0-256": 264, "256-512": 256, "512-1024": 88}
    assert merge_sums([carried, reset])["all"][1] == 1216


def test_group_rows_by_text_refuses_missing_passages() -> None:
    whole = text_of()
    ordered = [[whole.document_ids[i] for i in rows] for rows in group_rows_by_text(Fixed(whole)).values()]
    assert sorted(ordered) == [[f"a@{t}" for t in range(0, 40, 8)], [f"b@{t}" for t in range(0, 20, 8)]]
    for gone in (0, 1):
        rows_kept = [i for i in range(8) if i != gone]
        with pytest.raises(InputError, match="its passages do not follow"):
            group_rows_by_text(Fixed(whole.select_rows(rows_kept)))


@pytest.mark.usefixtures("unchecked")
def test_cache_as_state_scores_like_the_decoder() -> None:
    decoder = Decoder(DecoderConfig.tiny("llama", vocab_size=V)).eval()
    model = CacheAsState(decoder)
    assert isinstance(model, StatefulLM)
    assert [way.name for way in list_conditions(model, "ppl")] == ["lm"]
    text = torch.randint(1, V, (2, 9), generator=torch.Generator().manual_seed(0))
    result = replace(documents(text.tolist(), ["a", "b"]), segment_ends=(4, 9))
    with torch.no_grad():
        got = score_tokens(model, result, model.initial_state(2), update_weights=False, freeze_last_segment=True)
        logits = decoder.logits(decoder(decoder.embed(text)).hidden_states[:, :-1]).double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(got.nll[:, :-1].flatten(), nats, rtol=1e-4, atol=1e-5)
    assert got.correct[:, :-1].equal(logits.argmax(-1) == text[:, 1:])
    assert got.state.position.tolist() == [9, 9]
    assert not bool(reset_rows(got.state, [0]).layers[0].cache.valid[0].any())  # pyright: ignore[reportOptionalMemberAccess]


def row(id: str, right: float, long: bool) -> EvalItem:
    cells = {"all": (right, 2.0)} | ({"16 pairs": (right, 2.0)} if long else {"8 pairs": (right, 2.0)})
    return EvalItem(
        id, {"learn": build_metrics(cells, (3.0, 1.0), 100), "frozen": build_metrics(cells, (0.0, 0.0), 50)}
    )


def test_result_to_json_means_over_items_and_seeds() -> None:
    rows = [[row("a", 2, False), row("b", right, True), row("c", 1, True)] for right in (0, 2)]
    result = result_to_json(RunResult("run", "mqar", (0, 1), rows, {"step": 5}))
    cells = result["conditions"]["learn"]["metrics"]
    assert list(cells) == ["all", "8 pairs", "16 pairs"]
    assert cells["all"]["mean"] == pytest.approx(np.mean([1, 0, 0.5, 1, 1, 0.5]))
    assert cells["all"]["sd"] == pytest.approx(np.std([0.5, 2.5 / 3], ddof=1))
    assert (cells["8 pairs"]["mean"], cells["8 pairs"]["num_items"]) == (1, 1)
    assert (cells["16 pairs"]["mean"], cells["16 pairs"]["num_items"]) == (0.5, 2)
    assert (result["unit"], result["items"], result["step"], result["seeds"]) == ("share", 3, 5, [0, 1])
    assert result["conditions"]["learn"]["level_updates"] == [3, 1]
    assert result["conditions"]["frozen"]["state_bytes"] == 50


def test_build_stream_table() -> None:
    results = [
        RunResult("run", "mqar", (0,), [[row("a", 2, False), row("b", 0, True)]]),
        RunResult("run", "ppl", (0, 1, 2), [[row("a", n, False)] for n in (2, 1, 0)]),
    ]
    table = build_stream_table(results)
    assert table.rows[0][2:5] == ["learn", "all", "50.0 %"]
    assert "3, 1" in table.rows[0]
    assert any("0.5000 ± 0.5000" in cells for cells in table.rows)


def test_build_stream_table_gives_no_interval_for_one_item() -> None:
    table = build_stream_table([RunResult("run", "ppl", (0,), [[row("a", 2, False)]])])
    assert table.rows[0][5] == "–"
