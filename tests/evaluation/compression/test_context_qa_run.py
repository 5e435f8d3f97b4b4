"""Running context question answering and in-context classification with a small compressor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.errors import InputError
from laconic.evaluation.compression import context_qa_run
from laconic.evaluation.compression.context_qa_data import ContextQuestion
from laconic.evaluation.compression.context_qa_run import ContextQA, ICLClassification
from laconic.evaluation.labelled_texts import LabelledText, order_demonstrations
from laconic.generation.config import GenerationConfig
from tests.compression.compressors import reader


def test_context_qa_compresses_each_context_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = reader(), list[str]()
    compress = type(model).compress
    monkeypatch.setattr(type(model), "compress", lambda self, new: texts.extend(new) or compress(self, new))
    questions = [
        ContextQuestion("a long text", "who?", "it is", ("x",), 3),
        ContextQuestion("other", "where?", "", ("z",), 2),
        ContextQuestion("a long text", "when?", "", ("y",), 2),
    ]
    job = ContextQA(model, questions)
    assert job.order == [0, 2, 1]
    first, second, other = map(job.run_item, job.order)
    assert texts == ["a long text", "other"]
    assert [(item.id, item.shared["context"], item.shared["answers"]) for item in (first, second, other)] == [
        ("0", 0, ["x"]),
        ("2", 0, ["y"]),
        ("1", 1, ["z"]),
    ]
    config = GenerationConfig(max_tokens=3)
    expected = {
        "none": (model.generate(["who?\nit is"], config=config), 0),
        "compressed": (model.generate(["who?\nit is"], config, memory=compress(model, ["a long text"])), 4),
        "truncated": (model.generate(["ext\nwho?\nit is"], config=config), 4),
        "full": (model.generate(["a long text\nwho?\nit is"], config=config), 12),
    }
    assert {name: {k: m[k] for k in ("output", "context_size")} for name, m in first.conditions.items()} == {
        name: {"output": output[0].text, "context_size": size} for name, (output, size) in expected.items()
    }


def test_context_qa_leaves_out_contexts_that_do_not_fit() -> None:
    questions = [ContextQuestion("a long text of some forty signs, or more so", "who?", "", ("x",), 3)]
    item = ContextQA(reader(room=48), questions).run_item(0)
    assert list(item.conditions) == ["none", "compressed", "truncated"]


def rows(n: int) -> list[LabelledText]:
    return [LabelledText(f"t{i}", "ab"[i % 2] * (1 + i % 2)) for i in range(n)]


def nll_in_one_pass(model: Any, memory: SummaryMemory, ids: list[int], label_ids: list[int]) -> float:
    """Nats of a label after ids and a memory, by one pass over all of it."""
    text = torch.tensor([[*ids, *label_ids]])
    hidden = model.method.read_text(text, memory=memory)
    log_p = model.decoder.logits(hidden)[0].log_softmax(-1).detach()
    return -sum(float(log_p[t - 1, text[0, t]]) for t in range(len(ids), len(ids) + len(label_ids)))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_icl_label_nlls_equal_one_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = reader(family, segment=40)
    monkeypatch.setattr(context_qa_run, "TEXT_DEMO_TOKENS", (30, 500))
    monkeypatch.setattr(context_qa_run, "LABEL_BATCH_SIZE", 2)
    test_rows = {"valid": rows(1), "test": [*rows(2), LabelledText("t9", "only here")]}
    job = ICLClassification(model, rows(8), test_rows)
    assert len(job.items) == 2 * context_qa_run.NUM_ORDERS * 4
    assert job.labels == ["a", "bb", "only here"]
    item = job.run_item(1)
    names = [f"{what} of {n} segment{'s' * (n > 1)}" for n in (1, 2, 3) for what in ("vectors", "last tokens", "text")]
    assert list(item.conditions) == ["zero-shot", *names, "text of 30 tokens", "text of 500 tokens"]
    shared = item.shared
    assert (shared["split"], shared["label"], shared["label_tokens"]) == ("test", 0, [2, 3, 10])
    order = order_demonstrations(job.demonstrations, 0)
    text = "".join(f"{row.text}\nlabel: {row.label}\n\n" for row in order)
    contexts = {context.condition: context for context, _ in job.contexts_for_order(0, False)}
    assert contexts["text of 500 tokens"].ids == job.encode(text)
    assert contexts["last tokens of 2 segments"].ids == contexts["text of 2 segments"].ids[-8:]
    assert text.startswith(model.tokenizer.decode(contexts["text of 3 segments"].ids))
    assert int(contexts["vectors of 2 segments"].memory.num_vectors[0]) == 8
    for name in (*list(item.conditions)[:3], "text of 500 tokens"):
        context, scores = contexts[name], item.conditions[name]
        assert scores["context_size"] == context.size
        for key, prompt in (("label_nll", "t0"), ("null_nll", "N/A")):
            ids = [*context.ids, *job.encode(f"{prompt}\nlabel:")]
            for label, n in ((" a", 0), (" only here", 2)):
                expected = nll_in_one_pass(model, context.memory, ids, job.encode(label))
                assert scores[key][n] == pytest.approx(expected, abs=1e-5)


def test_icl_leaves_out_texts_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_qa_run, "TEXT_DEMO_TOKENS", (30, 9999))
    job = ICLClassification(reader(segment=40, room=64), rows(20), {"valid": rows(2), "test": rows(2)})
    assert [context.condition for context in job.build_contexts(0, True) if context.ids] == [
        "last tokens of 1 segment",
        "text of 1 segment",
        "last tokens of 2 segments",
        "last tokens of 3 segments",
        "text of 30 tokens",
    ]


def test_split_demonstrations_without_splits() -> None:
    demonstrations, test_rows = context_qa_run.split_demonstrations(rows(20), 4)
    names = [row.text for part in (demonstrations, *test_rows.values()) for row in part]
    assert sorted(names) == sorted(row.text for row in rows(20))
    assert {split: len(some) for split, some in test_rows.items()} == {"valid": 4, "test": 4}


def test_split_demonstrations_takes_validation_from_training_rows() -> None:
    every = [row._replace(split="test" if i % 2 else "train") for i, row in enumerate(rows(20))]
    demonstrations, test_rows = context_qa_run.split_demonstrations(every, 3)
    assert {row.split for row in (*demonstrations, *test_rows["valid"])} == {"train"}
    assert (len(demonstrations), len(test_rows["valid"])) == (7, 3)
    assert not {*demonstrations} & {*test_rows["valid"]}
    assert len(test_rows["test"]) == 3
    assert {row.split for row in test_rows["test"]} == {"test"}


def test_split_demonstrations_leaves_out_texts_to_label() -> None:
    every = [row._replace(split="test" if i % 2 else "train") for i, row in enumerate(rows(20))]
    tested = context_qa_run.split_demonstrations(every, 3)[1]["test"][0]
    again = tested._replace(text=f"{tested.text.upper()}!", split="train")
    demonstrations, test_rows = context_qa_run.split_demonstrations([*every, again], 3)
    assert tested in test_rows["test"]
    assert again not in demonstrations


@pytest.mark.parametrize(
    ("labelled", "message"),
    [
        (rows(2), "2 rows give 2 demonstrations, 0 texts for validation and 0 for testing"),
        ([row._replace(split="test") for row in rows(4)], "4 rows give 0 demonstrations, 0 texts for validation and 4"),
    ],
)
def test_split_demonstrations_refuses_too_few_rows(labelled: list[LabelledText], message: str) -> None:
    with pytest.raises(InputError, match=message):
        context_qa_run.split_demonstrations(labelled, 4)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('{"text": "a", "label": "context"}', "labels"),
        ('{"context": "the \\"text\\"", "question": "who?"}', "answers"),
        ("", "contains no row"),
        ('{"context": "na\udcefve"}', "is not UTF-8"),
    ],
)
def test_detect_kind_parses_the_first_row(tmp_path: Path, line: str, kind: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(line, encoding="utf-8", errors="surrogateescape")
    if " " in kind:
        with pytest.raises(InputError, match=kind):
            context_qa_run.detect_kind(file)
    else:
        assert context_qa_run.detect_kind(file) == kind


def test_pack_rows_keeps_rows_whole() -> None:
    assert context_qa_run.pack_rows([[1, 2], [3] * 9, [4, 5], [6]], 4, 2) == [[1, 2, 4, 5], [6]]
    assert context_qa_run.pack_rows([[3] * 9], 4, 2) == []


def test_icl_leaves_out_what_no_demonstration_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_qa_run, "TEXT_DEMO_TOKENS", (9, 30))
    parts = rows(8), {"valid": rows(2), "test": rows(2)}
    names = [context.condition for context in ICLClassification(reader(segment=40), *parts).build_contexts(0, False)]
    assert "text of 30 tokens" in names
    assert "text of 9 tokens" not in names, "every demonstration is longer"
    full = reader(segment=40, room=60, max_vectors=8)
    assert full.method.max_segments(40) == 2, "a third reads 16 vectors, 40 tokens and 8 summary positions"
    names = [context.condition for context in ICLClassification(full, *parts).build_contexts(0, False)]
    assert "vectors of 2 segments" in names
    assert "vectors of 3 segments" not in names
    with pytest.raises(InputError, match="no demonstration has 9 tokens or fewer; use a run with longer segments"):
        ICLClassification(reader(segment=9), *parts).build_contexts(0, False)
