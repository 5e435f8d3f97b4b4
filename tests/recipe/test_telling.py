"""A reader asked questions about contexts, and labels behind demonstrations."""

import json
from typing import Any

import pytest
import torch

from laconic.core.errors import BadInput
from laconic.data.contexts import Asked
from laconic.data.labelled import Labelled
from laconic.recipe import telling
from laconic.recipe.telling import Contexts, Labels
from tests.recipe.reading import reader


def test_a_context_is_compressed_once_and_its_answers_are_those_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = reader(), list[str]()
    compress = type(model).compress
    monkeypatch.setattr(type(model), "compress", lambda self, texts: seen.extend(texts) or compress(self, texts))
    rows = [Asked("a long text", "who?", "it is", ("x",), 3), Asked("a long text", "when?", "", ("y",), 2)]
    first, second = map(json.loads, Contexts(model, rows, aware=False).lines(range(2)))
    assert seen == ["a long text"]
    memory = compress(model, ["a long text"])
    (asked,) = model.generate(["who?\nit is"], memory, max_tokens=3)
    assert first["said"]["compressed"] == asked.text
    (whole,) = model.generate(["a long text\nwhen?\n"], max_tokens=2)
    assert (second["said"]["full"], second["answers"], first["vectors"]) == (whole.text, ["y"], 4)
    seen.clear()
    Contexts(model, rows, aware=True).lines(range(2))
    assert seen == ["who?\na long text", "when?\na long text"]


def rows(n: int) -> list[Labelled]:
    return [Labelled(f"t{i}", "ab"[i % 2] * (1 + i % 2)) for i in range(n)]


def test_options_have_the_nats_they_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = reader(segment=40)
    monkeypatch.setattr(telling, "PLAIN", (30, 9999))
    work = Labels(model, rows(8), {"valid": rows(1), "test": rows(2)})
    assert len(work.turns) == 2 * telling.SEEDS * 3
    line = json.loads(work.lines(range(2))[1])
    assert list(line["nats"]) == ["1 segment", "2 segments", "3 segments", "text 30", "zero-shot"]
    (memory, _), (_, shots) = work.before(0, False)["2 segments"], work.before(0, False)["text 30"]
    assert int(memory.lengths[0]) == 8
    assert (line["part"], line["label"], line["tokens"]) == ("test", 0, [2, 3])
    for way, before in (("zero-shot", []), ("text 30", shots)):
        for option, n in ((" a", 0), (" bb", 1)):
            ids = [*before, *work.ids("t0\nlabel:"), *work.ids(option)]
            hidden = model.decoder(model.decoder.embed(torch.tensor([ids]))).hidden
            logits = model.decoder.logits(hidden)[0].log_softmax(-1).detach()
            k = len(work.ids(option))
            alone = -sum(float(logits[t - 1, ids[t]]) for t in range(len(ids) - k, len(ids)))
            assert line["nats"][way][n] == pytest.approx(alone, abs=1e-5)


def test_rows_are_dealt_out_where_a_file_says_no_parts() -> None:
    shown, asked = telling.parts(lambda part: rows(20), 4)
    names = [row.text for part in (shown, *asked.values()) for row in part]
    assert sorted(names) == sorted(row.text for row in rows(20))
    assert {part: len(some) for part, some in asked.items()} == {"valid": 4, "test": 4}


def test_segments_hold_whole_rows() -> None:
    assert telling.packed([[1, 2], [3] * 9, [4, 5], [6]], 4, 2) == [[1, 2, 4, 5], [6]]
    with pytest.raises(BadInput, match="demonstrations: none has 4 tokens or fewer; take a run of longer segments"):
        telling.packed([[3] * 9], 4, 2)
