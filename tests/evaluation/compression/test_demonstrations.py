"""In-context classification with a small compressor, and its accuracy by hand."""

from typing import Any

import pytest
import torch

from laconic.compression.memory import SummaryMemory
from laconic.errors import InputError
from laconic.evaluation.compression import demonstrations
from laconic.evaluation.compression.demonstrations import DemonstrationClassifier
from laconic.evaluation.labelled_texts import LabelledText, order_demonstrations
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.suite import RunResult
from tests.compression.compressors import reader


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
    monkeypatch.setattr(demonstrations, "TEXT_DEMO_TOKENS", (30, 500))
    monkeypatch.setattr(demonstrations, "LABEL_BATCH_SIZE", 2)
    test_rows = {"valid": rows(1), "test": [*rows(2), LabelledText("t9", "only here")]}
    job = DemonstrationClassifier(model, rows(8), test_rows)
    assert len(job.items) == 2 * demonstrations.NUM_ORDERS * 4
    assert job.labels == ["a", "bb", "only here"]
    item = job.run_item(1)
    names = [f"{what} of {n} segment{'s' * (n > 1)}" for n in (1, 2, 3) for what in ("vectors", "last tokens", "text")]
    assert list(item.conditions) == ["zero-shot", *names, "text of 30 tokens", "text of 500 tokens"]
    shared = item.shared
    assert (shared["split"], shared["label"], shared["label_tokens"]) == ("test", 0, [2, 3, 10])
    order = order_demonstrations(job.demonstrations, 0)
    text = "".join(f"{row.text}\nlabel: {row.label}\n\n" for row in order)
    contexts = {context.condition: context for context in job.build_contexts(0, False)}
    assert contexts["text of 500 tokens"].ids == job.encode(text)
    assert contexts["last tokens of 2 segments"].ids == contexts["text of 2 segments"].ids[-8:]
    assert text.startswith(model.tokenizer.decode(contexts["text of 3 segments"].ids))
    assert int(contexts["vectors of 2 segments"].memory.num_vectors[0]) == 8
    for name in (*list(item.conditions)[:3], "text of 500 tokens"):
        context, scores = contexts[name], item.conditions[name]
        assert scores["context_size"] == int(context.memory.num_vectors[0]) + len(context.ids)
        for key, prompt in (("label_nll", "t0"), ("null_nll", "N/A")):
            ids = [*context.ids, *job.encode(f"{prompt}\nlabel:")]
            for label, n in ((" a", 0), (" only here", 2)):
                expected = nll_in_one_pass(model, context.memory, ids, job.encode(label))
                assert scores[key][n] == pytest.approx(expected, abs=1e-5)


def test_icl_leaves_out_texts_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "TEXT_DEMO_TOKENS", (30, 9999))
    job = DemonstrationClassifier(reader(segment=40, room=64), rows(20), {"valid": rows(2), "test": rows(2)})
    assert [context.condition for context in job.build_contexts(0, True) if context.ids] == [
        "last tokens of 1 segment",
        "text of 1 segment",
        "last tokens of 2 segments",
        "last tokens of 3 segments",
        "text of 30 tokens",
    ]


def test_split_demonstrations_without_splits() -> None:
    train, test_rows = demonstrations.split_demonstrations(rows(20), 4)
    names = [row.text for part in (train, *test_rows.values()) for row in part]
    assert sorted(names) == sorted(row.text for row in rows(20))
    assert {split: len(some) for split, some in test_rows.items()} == {"valid": 4, "test": 4}


def test_split_demonstrations_takes_validation_from_training_rows() -> None:
    every = [row._replace(split="test" if i % 2 else "train") for i, row in enumerate(rows(20))]
    train, test_rows = demonstrations.split_demonstrations(every, 3)
    assert {row.split for row in (*train, *test_rows["valid"])} == {"train"}
    assert (len(train), len(test_rows["valid"]), len(test_rows["test"])) == (7, 3, 3)
    assert not {*train} & {*test_rows["valid"]}
    assert {row.split for row in test_rows["test"]} == {"test"}
    tested = test_rows["test"][0]
    again = tested._replace(text=f"{tested.text.upper()}!", split="train")
    train, test_rows = demonstrations.split_demonstrations([*every, again], 3)
    assert tested in test_rows["test"]
    assert again not in train, "its text is to be labelled"


@pytest.mark.parametrize("labelled", [rows(2), [row._replace(split="test") for row in rows(4)]])
def test_split_demonstrations_refuses_too_few_rows(labelled: list[LabelledText]) -> None:
    with pytest.raises(InputError, match=r"\d rows are too few for demonstrations"):
        demonstrations.split_demonstrations(labelled, 4)


def test_pack_rows_keeps_rows_whole() -> None:
    assert demonstrations.pack_rows([[1, 2], [3] * 9, [4, 5], [6]], 4, 2) == [[1, 2, 4, 5], [6]]
    assert demonstrations.pack_rows([[3] * 9], 4, 2) == []


def test_icl_leaves_out_what_no_demonstration_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "TEXT_DEMO_TOKENS", (9, 30))
    parts = rows(8), {"valid": rows(2), "test": rows(2)}
    names = [
        context.condition for context in DemonstrationClassifier(reader(segment=40), *parts).build_contexts(0, False)
    ]
    assert "text of 30 tokens" in names
    assert "text of 9 tokens" not in names, "every demonstration is longer"
    full = reader(segment=40, room=60, max_vectors=8)
    assert full.method.max_segments(40) == 2, "a third reads 16 vectors, 40 tokens and 8 summary positions"
    names = [context.condition for context in DemonstrationClassifier(full, *parts).build_contexts(0, False)]
    assert "vectors of 2 segments" in names
    assert "vectors of 3 segments" not in names
    with pytest.raises(InputError, match="no demonstration has 9 tokens or fewer; use a run with longer segments"):
        DemonstrationClassifier(reader(segment=9), *parts).build_contexts(0, False)


def label_item(
    id: int, split: str, seed: int, balanced: bool, label: int, nll: list[float], null_nll: list[float]
) -> EvalItem:
    shared = {"split": split, "order_seed": seed, "balanced": balanced, "label": label, "label_tokens": [1, 2]}
    condition = {"label_nll": nll, "null_nll": null_nll, "context_size": 4 + seed}
    return EvalItem(str(id), {"condition": {**shared, **condition}})


def test_icl_variant_is_chosen_on_validation_items_only() -> None:
    # Per token 1 against 1.5, so the first label; calibrated 0.5 against 0, the second.
    nll, null_nll = [1.0, 3.0], [0.5, 3.0]
    valid = [label_item(0, "valid", 0, False, 0, nll, null_nll), label_item(1, "valid", 0, True, 1, nll, null_nll)]
    balanced = label_item(2, "valid", 0, True, 1, nll, null_nll)
    combinations = [(b, seed, label) for b in (False, True) for seed in (0, 1) for label in (0, 1, 1)]
    test = [label_item(3 + i, "test", seed, b, label, nll, null_nll) for i, (b, seed, label) in enumerate(combinations)]
    items = [*valid, balanced, *test]
    result = RunResult("run", "file", (0,), [items])
    (score,) = demonstrations.score_conditions(result)
    assert (score.variants, score.context_size) == (("neither",), pytest.approx(4.4))
    assert (score.accuracy, score.std) == (pytest.approx(1 / 3), 0)
    assert score.accuracies == pytest.approx((1 / 3, 1 / 3))
    assert demonstrations.count_items(result) == {"items": 3, "majority_accuracy": 2 / 3, "num_labels": 2}
    table = demonstrations.build_score_table(result)
    assert table.caption == "run, file: 3 texts, 2 labels; majority baseline 66.7 %"
    assert list(table.rows[0]) == ["condition", "4.4", "33.3 ± 0.0", "neither"]
    choices = [demonstrations.choose_label(balanced, "condition", calibrated) for calibrated in (False, True)]
    assert choices == [0, 1]
    other = [label_item(0, "valid", 0, False, 1, nll, null_nll), valid[1]]
    (score,) = demonstrations.score_conditions(RunResult("run", "file", (0, 1), [[*valid, *test], [*other, *test]]))
    assert score.variants == ("neither", "calibrated")
    assert (score.accuracy, len(score.accuracies)) == (pytest.approx(1 / 2), 4)
    assert score.std == pytest.approx(((1 / 6) ** 2 * 4 / 3) ** 0.5)
