"""A reader asked questions about contexts, and labels behind demonstrations."""

import json
from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.errors import InputError
from laconic.evaluation.compression import context_qa_run
from laconic.evaluation.compression.context_qa_data import ContextQuestion
from laconic.evaluation.compression.context_qa_run import ContextQA, ICLClassification
from laconic.evaluation.compression.icl_data import LabelledText, order_demonstrations
from tests.compression.compressors import reader


def test_a_context_is_compressed_once_and_its_answers_are_those_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = reader(), list[str]()
    compress = type(model).compress
    monkeypatch.setattr(type(model), "compress", lambda self, texts: seen.extend(texts) or compress(self, texts))
    rows = [
        ContextQuestion("a long text", "who?", "it is", ("x",), 3), ContextQuestion("other", "where?", "", ("z",), 2),
        ContextQuestion("a long text", "when?", "", ("y",), 2),
    ]  # fmt: skip
    first, second, other = map(json.loads, ContextQA(model, rows, query_aware=False).run_items(range(3)))
    assert seen == ["a long text", "other"]
    assert [(row["id"], row["context"], row["answers"]) for row in (first, second, other)] == [
        (0, 0, ["x"]), (2, 0, ["y"]), (1, 1, ["z"])
    ]  # fmt: skip
    ways = {each["way"]: (each["said"], each["held"]) for each in first["ways"]}
    asked = {
        "none": model.generate(["who?\nit is"], max_tokens=3),
        "compressed": model.generate(["who?\nit is"], compress(model, ["a long text"]), max_tokens=3),
        "truncated": model.generate(["ext\nwho?\nit is"], max_tokens=3),
        "full": model.generate(["a long text\nwho?\nit is"], max_tokens=3),
    }
    held = {"none": 0, "compressed": 4, "truncated": 4, "full": 12}
    assert ways == {way: (said[0].text, held[way]) for way, said in asked.items()}
    seen.clear()
    ContextQA(model, rows, query_aware=True).run_items(range(3))
    assert seen == ["who?\na long text", "when?\na long text", "where?\nother"]


def test_a_text_for_which_there_is_no_room_is_left_out() -> None:
    rows = [ContextQuestion("a long text of some forty signs, or more so", "who?", "", ("x",), 3)]
    (line,) = map(json.loads, ContextQA(reader(room=48), rows, query_aware=False).run_items(range(1)))
    assert [each["way"] for each in line["ways"]] == ["none", "compressed", "truncated"]


def rows(n: int) -> list[LabelledText]:
    return [LabelledText(f"t{i}", "ab"[i % 2] * (1 + i % 2)) for i in range(n)]


def behind(model: Any, memory: SummaryMemory, ids: list[int], end: list[int]) -> float:
    """Nats of an end behind ids and vectors, by one pass over all of it."""
    text = torch.tensor([[*ids, *end]])
    hidden = model.method.read(text, states=memory)
    logits = model.decoder.logits(hidden)[0].log_softmax(-1).detach()
    return -sum(float(logits[t - 1, text[0, t]]) for t in range(len(ids), len(ids) + len(end)))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_options_have_the_nats_they_have_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = reader(family, segment=40)
    monkeypatch.setattr(context_qa_run, "TEXT_DEMO_TOKENS", (30, 500))
    monkeypatch.setattr(context_qa_run, "LABEL_BATCH_SIZE", 2)
    work = ICLClassification(model, rows(8), {"valid": rows(1), "test": [*rows(2), LabelledText("t9", "only here")]})
    assert len(work.items) == 2 * context_qa_run.NUM_ORDERS * 4
    assert work.labels == ["a", "bb", "only here"]
    line = json.loads(work.run_items(range(1, 2))[0])
    named = [f"{what} of {n} segment{'s' * (n > 1)}" for n in (1, 2, 3) for what in ("vectors", "last tokens", "text")]
    assert [each["way"] for each in line["ways"]] == ["zero-shot", *named, "text of 30 tokens", "text of 500 tokens"]
    assert (line["part"], line["label"], line["tokens"]) == ("test", 0, [2, 3, 10])
    order = order_demonstrations(work.demonstrations, 0)
    text = "".join(f"{row.text}\nlabel: {row.label}\n\n" for row in order)
    before = {shots.condition: shots for shots, _ in work.contexts_for_order(0, False)}
    assert before["text of 500 tokens"].ids == work.encode(text)
    assert before["last tokens of 2 segments"].ids == before["text of 2 segments"].ids[-8:]
    assert text.startswith(model.tokenizer.decode(before["text of 3 segments"].ids))
    assert int(before["vectors of 2 segments"].memory.num_vectors[0]) == 8
    for each in line["ways"][:3] + line["ways"][-1:]:
        shots = before[each["way"]]
        assert each["held"] == shots.size
        for what, words in (("nats", "t0"), ("without", "N/A")):
            ids = [*shots.ids, *work.encode(f"{words}\nlabel:")]
            for option, n in ((" a", 0), (" only here", 2)):
                asked = behind(model, shots.memory, ids, work.encode(option))
                assert each[what][n] == pytest.approx(asked, abs=1e-5)


def test_texts_for_which_there_is_no_room_are_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_qa_run, "TEXT_DEMO_TOKENS", (30, 9999))
    work = ICLClassification(reader(segment=40, room=64), rows(20), {"valid": rows(2), "test": rows(2)})
    assert [shots.condition for shots in work.build_contexts(0, True) if shots.ids] == [
        "last tokens of 1 segment", "text of 1 segment", "last tokens of 2 segments", "last tokens of 3 segments",
        "text of 30 tokens",
    ]  # fmt: skip


def test_rows_are_dealt_out_where_a_file_says_no_parts() -> None:
    shown, asked = context_qa_run.split_demonstrations(rows(20), 4)
    names = [row.text for part in (shown, *asked.values()) for row in part]
    assert sorted(names) == sorted(row.text for row in rows(20))
    assert {part: len(some) for part, some in asked.items()} == {"valid": 4, "test": 4}


def test_rows_for_validation_are_taken_out_of_those_for_training_where_a_file_has_none() -> None:
    every = [row._replace(split="test" if i % 2 else "train") for i, row in enumerate(rows(20))]
    shown, asked = context_qa_run.split_demonstrations(every, 3)
    assert {row.split for row in (*shown, *asked["valid"])} == {"train"}
    assert (len(shown), len(asked["valid"])) == (7, 3)
    assert not {*shown} & {*asked["valid"]}
    assert len(asked["test"]) == 3
    assert {row.split for row in asked["test"]} == {"test"}


def test_segments_hold_whole_rows() -> None:
    assert context_qa_run.pack_rows([[1, 2], [3] * 9, [4, 5], [6]], 4, 2) == [[1, 2, 4, 5], [6]]
    with pytest.raises(InputError, match="demonstrations: none has 4 tokens or fewer; take a run of longer segments"):
        context_qa_run.pack_rows([[3] * 9], 4, 2)
