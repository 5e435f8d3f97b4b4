"""What contexts are worth, recall by the number of facts, and the page: against figures made by hand."""

import json
import re
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from laconic.evaluation.compression import fact_recall, perplexity
from laconic.evaluation.compression import report as compression_report
from laconic.evaluation.compression import table as compression_table
from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.table import CompressionResult
from tests.evaluation.compression.results import fixed, line, said


def books(seeds: int = 1) -> CompressionResult:
    """Six stretches of two books."""
    ways = [
        fixed(d) | {
            "compressed": said(2 + 0.1 * d + 0.01 * d, 12, (2,)), "untrained none": said(5, 0, ()),
            "untrained": said(4.5 + 0.1 * (d % 2), 0, (4,)),
        }
        for d in range(6)
    ]  # fmt: skip
    return line("stop", ways, seeds=seeds)


def facts() -> CompressionResult:
    """Six documents of one or two facts, of which those of two have two vectors."""
    ways = [
        {
            "none": said(3, 2, ()), "compressed": said(1, 30 - 10 * (d % 2), (1 + d % 2,)),
            "sampled": said(1, 30, (1 + (d // 2) % 2,)), "soft": said(0.9, 39, (4,), (1.5 + 0.1 * d,)),
        }
        for d in range(6)
    ]  # fmt: skip
    return line("recall", ways, facts=True)


def test_what_a_way_saves_is_paired_by_document() -> None:
    found = {w.condition: w for w in perplexity.context_gains(books().documents_by_seed)}
    each = [1 - 0.01 * d for d in range(6)]
    mean, se = sum(each) / 6, (sum((x - sum(each) / 6) ** 2 for x in each) / 5 / 6) ** 0.5
    w = found["compressed"]
    assert (w.gain.mean, w.se, w.mean_vectors, w.context_size) == (pytest.approx(mean), pytest.approx(se), 2, 2)
    assert w.share_of_full == pytest.approx(mean / (3 + 0.25 - 1))
    assert w.late_gain is not None
    assert w.late_gain.mean == pytest.approx(mean)
    assert found["untrained"].gain.mean == pytest.approx(0.45)
    assert found["untrained"].share_of_full is None
    assert found["full"].share_of_full == pytest.approx(1)
    assert perplexity.nll_by_position(books().documents_by_seed, "compressed") == pytest.approx([2 + 0.11 * 2.5] * 2)


def test_documents_of_one_text_are_not_independent_where_there_are_texts_enough() -> None:
    apart = np.array([[1.0, 2.0, 4.0, 1.0, 0.0, 4.0]])
    sums = [1 + 2 - 4, 4 + 1 + 0 + 4 - 8]
    assert perplexity.clustered_standard_error(apart, list("aabbbb")) == pytest.approx(
        (2 * sum(x * x for x in sums)) ** 0.5 / 6
    )
    assert perplexity.clustered_standard_error(apart) == perplexity.clustered_standard_error(apart, list("abcdef"))
    assert perplexity.clustered_standard_error(apart) == pytest.approx(apart.std(ddof=1) / 6**0.5)
    names = [f"text {d // 2}@{d}" for d in range(2 * perplexity.MIN_TEXT_GROUPS)]
    assert perplexity.group_by_text(names) == [f"text {d // 2}" for d in range(2 * perplexity.MIN_TEXT_GROUPS)]
    assert perplexity.group_by_text(names[:-2]) is None


def test_there_is_no_share_of_nothing() -> None:
    ways = [fixed(d) | {"full": said(3 + 0.1 * d + (-1) ** d, 0, ())} for d in range(6)]
    assert {w.share_of_full for w in perplexity.context_gains(line("stop", ways).documents_by_seed)} == {None}


def test_recall_by_facts_and_the_gap_between_soft_and_hard() -> None:
    rows = facts().pooled_documents
    one, two = fact_recall.recall_by_facts(rows, "compressed")
    assert (one.num_facts, one.num_documents, one.accuracy, one.mean_vectors, one.expected_vectors) == (
        1,
        3,
        30 / 39,
        1,
        None,
    )
    assert (two.num_facts, two.accuracy, two.mean_vectors) == (2, 20 / 39, 2)
    assert fact_recall.length_fact_correlation(rows, "compressed") == pytest.approx(1)
    assert fact_recall.length_fact_correlation(rows, "soft") is None
    gap = fact_recall.soft_hard_gap(rows)
    assert gap is not None
    assert gap.nll == pytest.approx(-0.1)
    assert gap.accuracy == pytest.approx(1 - 25 / 39)
    assert (gap.expected_length, gap.num_vectors, gap.sampled_length) == pytest.approx((1.75, 0.25, 4 / 3))
    assert fact_recall.length_histogram(rows, "compressed") == {1: 3, 2: 3}
    assert fact_recall.soft_hard_gap(books().pooled_documents) is None


def test_lengths_begin_with_none_where_a_segment_kept_none() -> None:
    ways = [fixed(d) | {"compressed": said(2, 12, (2 * (d % 2),))} for d in range(4)]
    (found,) = compression_report.length_histograms([compression_report.build_section(0, [line("before", ways)])])
    assert found[1] == [(0, 0.5), (1, 0), (2, 0.5), (3, 0), (4, 0)]
    (found,) = compression_report.length_histograms([compression_report.build_section(0, [facts()])])
    assert found[1] == [(1, 0.5), (2, 0.5), (3, 0), (4, 0)]


def test_the_page_says_what_the_figures_say() -> None:
    text = compression_report.render_page([books(2), facts()], run_descriptions=[("stop", "autocompressor")])
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    for asked in (
        "test, stop: 2.00 vectors a segment save +0.9750 ± 0.0076 nats a token (127.7 standard errors), 43.3 % of what",
        "no context, untrained", "learned length", "best length, by trial", "AutoCompressor-2.7B",
        "Recall by the number of facts", "correlation of N with facts 1.000", "Soft reading against hard",
        "Lengths that were learned", "Seeds: 1 of some runs", "stretches of 2 texts", "is not known",
        "stop, compressed its own 2.00 2.2750 2.2500 -0.0250 ± 0.0076 below the line",
    ):  # fmt: skip
        assert asked in plain, asked
    assert text.count("<svg") == 4
    assert not re.search(r"(?:src|href)=.?(?:https?:)?//", text)
    assert "-0.0000" not in plain


def told(kind: str) -> ContextTaskResult:
    """Two questions about a context, or two texts behind two orders of demonstrations."""
    if kind == "answers":
        ways = [{"way": way, "said": said, "held": n} for way, said, n in (("none", "", 0), ("compressed", "cat", 2))]
        rows = [{"id": i, "context": i, "task": None, "answers": ["cat"], "ways": ways} for i in range(2)]
    else:
        ways = [{"way": "vectors of 1 segment", "nats": [1.0, 2.0], "without": [0.0, 0.0], "held": 4}]
        parts = [
            (part, seed, b) for b in (False, True) for seed in (0, 1) for part in ("valid", "test", "test", "test")
        ]
        rows = [
            {"id": i, "part": part, "seed": seed, "balanced": b, "ways": ways, "tokens": [1, 1], "label": i % 2}
            for i, (part, seed, b) in enumerate(parts)
        ]
    return ContextTaskResult("stop", "file", cast(Any, kind), False, (0,), [[json.dumps(row) for row in rows]])


def test_answers_and_labels_stand_on_the_page_beside_the_papers() -> None:
    text = compression_report.render_page([], [told("labels"), told("answers")])
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    for asked in (
        "Labels behind demonstrations: file 3 texts, 2 labels.", "the majority floor is 66.7 %",
        "vectors of 1 segment 4 33.3 ± 0.0 neither",
        "2 orders of demonstrations. Before", "zero-shot 68.2 78.0",
        "Questions about contexts: file 2 questions about 2 contexts",
        "compressed 2 100.0 ± 0.0 +100.0 ± 0.0", "REPLUG, passages of 512 tokens 6.65 10.87 11.59 11.81 not run",
        "better on 8 of 11 tasks not run",
    ):  # fmt: skip
        assert asked in plain, asked
    assert plain.index("zero-shot 68.2") < plain.index("Questions about contexts") < plain.index("What papers report")
    assert plain.count("zero-shot 68.2") == 1


def test_a_plain_run_beside_is_the_control_of_those_that_read_the_same() -> None:
    run = books(2)
    plain = line("plain", [{"none": said(4, 0, ()), "full": said(1.5, 0, ())} for _ in range(6)])
    plain = replace(plain, description={"method": "lm"})
    other = replace(line("other", [{"none": said(4, 0, ()), "full": said(9, 0, ())}] * 5), description={"method": "lm"})
    found = compression_table.add_controls([run, other, plain])
    assert found[1:] == [other, plain]
    worths = {w.condition: w for w in found[0].gains}
    assert worths["full-tuned"].nll.mean == pytest.approx(1.5)
    assert worths["full-tuned"].gain.mean == pytest.approx(1.75)  # against the run's own no context
    assert worths["full-tuned"].gain.num_seeds == 2
    text = compression_report.render_page(found)
    plain_text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    for asked in ("whole text, full-tuned", "the plain run beside", "trained as long saves +1.7500 with the whole text",
                  "–·– stop: whole text, full-tuned"):  # fmt: skip
        assert asked in plain_text, asked
