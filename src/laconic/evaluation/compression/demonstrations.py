"""In-context classification: a run labels texts after demonstrations, as vectors and as text.

A label's score is its mean NLL per token; calibrated, minus that after an empty input (Eq. AC11). Whether scores are
calibrated, and demonstrations balanced by label, is chosen on validation texts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic import rng
from laconic.batches.padding import pad_rows
from laconic.compression.memory import SummaryMemory
from laconic.console import pluralize
from laconic.errors import InputError
from laconic.evaluation.compression.scores import mean_context_size
from laconic.evaluation.labelled_texts import LabelledText, load_labelled_texts, normalise_text, order_demonstrations
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalMetadata
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import Column, Table, build_table, format_count, format_percent
from laconic.experiment.text_models.compressor import TextCompressor

DEFAULT_LABEL_ROWS = 100  # texts to label, for validation and for testing each
MAX_DEMO_SEGMENTS = 3
TEXT_DEMO_TOKENS = (150, 750)  # lengths of demonstrations as text, those of the paper
NUM_ORDERS = 5  # orders of demonstrations
NULL_INPUT = "N/A"  # replaces the text, for calibration
LABEL_BATCH_SIZE = 64
LabelledSplits = dict[str, list[LabelledText]]


class LabelItem(NamedTuple):
    """A text to label after demonstrations in the order of a seed."""

    split: str
    order_seed: int
    balanced: bool
    row: LabelledText


class DemonstrationContext(NamedTuple):
    """Demonstrations in front of a prompt: vectors, and ids of text."""

    condition: str
    memory: SummaryMemory
    ids: list[int]


def build_label_job(compressor: TextCompressor, file: Path, metadata: EvalMetadata) -> EvalJob:
    rows = split_demonstrations(load_labelled_texts(file), metadata.limit or DEFAULT_LABEL_ROWS)
    classifier = DemonstrationClassifier(compressor, *rows)
    return EvalJob(
        metadata, len(classifier.items), lambda indices: [[classifier.run_item(i)] for i in indices], batch_size=8
    )


class DemonstrationClassifier:
    """Scores the labels of texts, which are given by split, after demonstrations."""

    def __init__(
        self, compressor: TextCompressor, demonstrations: Sequence[LabelledText], test_rows: LabelledSplits
    ) -> None:
        self.compressor, self.demonstrations = compressor, demonstrations
        to_label = [row for rows in test_rows.values() for row in rows]
        self.labels = sorted({row.label for row in (*demonstrations, *to_label)})
        self.label_ids = [self.encode(f" {label}") for label in self.labels]
        prompt_tokens = max(len(self.encode(label_prompt(row.text))) for row in to_label)
        self.max_prompt_tokens = prompt_tokens + max(map(len, self.label_ids))
        self.items = [
            LabelItem(split, seed, balanced, row)
            for balanced, seed in product((False, True), range(NUM_ORDERS))
            for split, rows in test_rows.items()
            for row in rows
        ]
        self.read_demonstrations = lru_cache(maxsize=1)(self.score_null_input)

    def score_null_input(self, seed: int, balanced: bool) -> list[tuple[DemonstrationContext, list[float]]]:
        """Return the contexts of an order of demonstrations, each with the nats of the labels after an empty input."""
        null_ids = self.encode(label_prompt(NULL_INPUT))
        return [(x, self.label_nlls(x, null_ids)) for x in self.build_contexts(seed, balanced)]

    def build_contexts(self, seed: int, balanced: bool) -> list[DemonstrationContext]:
        """Build the contexts of an order of demonstrations.

        These are: no demonstrations; vectors of one, two and three segments, as many last tokens of them, and their
        whole text; and text of the paper's lengths. Texts and segments that do not fit the model are left out.
        """
        order = order_demonstrations(self.demonstrations, seed, balanced=balanced)
        method = self.compressor.method
        demos = [self.encode(f"{label_prompt(row.text)} {row.label}\n\n") for row in order]
        segment_tokens = self.compressor.segment_tokens
        segments = pack_rows(demos, segment_tokens, MAX_DEMO_SEGMENTS)[: method.max_segments(segment_tokens)]
        if not segments:
            raise InputError(f"no demonstration has {segment_tokens} tokens or fewer; use a run with longer segments")
        none = memory = method.segment_model.empty_memory(1)
        contexts = [DemonstrationContext("zero-shot", none, [])]
        text: list[int] = []
        for k, segment in enumerate(segments, 1):
            memory = method.compress(self.to_tensor([segment]), None, memory)
            method.segment_model.check_fits(memory, self.max_prompt_tokens, compresses=False)
            text = text + segment
            n = int(memory.num_vectors[0])
            name = pluralize(k, "segment")
            contexts += [
                DemonstrationContext(f"vectors of {name}", memory, []),
                DemonstrationContext(f"last tokens of {name}", none, text[-n:]),
                DemonstrationContext(f"text of {name}", none, text),
            ]
        for n in TEXT_DEMO_TOKENS:
            contexts += [DemonstrationContext(f"text of {n} tokens", none, demo) for demo in pack_rows(demos, n, 1)]
        config, prefix = self.compressor.decoder.config, method.segment_model.prefix_length
        room = config.max_position_embeddings - self.max_prompt_tokens - prefix
        return [context for context in contexts if len(context.ids) <= room]

    def run_item(self, i: int) -> EvalItem:
        split, seed, balanced, row = self.items[i]
        prompt_ids = self.encode(label_prompt(row.text))
        shared = {"split": split, "order_seed": seed, "balanced": balanced, "label": self.labels.index(row.label)}
        shared["label_tokens"] = [len(ids) for ids in self.label_ids]
        conditions: dict[str, dict[str, Any]] = {}
        for context, null_nll in self.read_demonstrations(seed, balanced):
            metrics = {"label_nll": self.label_nlls(context, prompt_ids), "null_nll": null_nll}
            size = int(context.memory.num_vectors[0]) + len(context.ids)
            conditions[context.condition] = shared | metrics | {"context_size": size}
        return EvalItem(str(i), conditions)

    @torch.inference_mode()
    def label_nlls(self, context: DemonstrationContext, prompt_ids: Sequence[int]) -> list[float]:
        """Compute the summed nats of each label after a context and a prompt, which is run once."""
        model, decoder = self.compressor.method.segment_model, self.compressor.decoder
        input_ids = self.to_tensor([[*context.ids, *prompt_ids]])
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        prompt_positions = model.build_prompt(context.memory, mask).position_ids
        nlls: list[float] = []
        with self.compressor.reading_mode():
            output = model.forward_segment(context.memory, decoder.embed(input_ids), mask)
            for i in range(0, len(self.label_ids), LABEL_BATCH_SIZE):
                ids, mask = pad_rows(self.label_ids[i : i + LABEL_BATCH_SIZE], device=input_ids.device)
                n, T = ids.shape
                position_ids = None
                if prompt_positions is not None:
                    position_ids = (prompt_positions[:, -1:] + 1 + torch.arange(T, device=ids.device)).expand(n, -1)
                cache = output.cache.repeat_rows(n)
                after = decoder(decoder.embed(ids), cache, attention_mask=mask, position_ids=position_ids).hidden_states
                states = torch.cat([output.text_states[:, -1:].expand(n, -1, -1), after[:, :-1]], 1)
                log_p = decoder.logits(states).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
                nlls += (-log_p.masked_fill(~mask, 0.0).double().sum(1)).tolist()
        return [round(x, 6) for x in nlls]

    def encode(self, text: str) -> list[int]:
        return self.compressor.tokenizer.encode(text, add_special_tokens=False)

    def to_tensor(self, rows: Sequence[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self.compressor.decoder.device)


def label_prompt(text: str) -> str:
    return f"{text}\nlabel:"


def pack_rows(rows: Iterable[list[int]], max_tokens: int, max_segments: int) -> list[list[int]]:
    """Pack whole rows in order into at most `max_segments` segments; rows that are too long are skipped."""
    segments: list[list[int]] = [[]]
    for row in rows:
        if len(row) > max_tokens:
            continue
        if len(segments[-1]) + len(row) > max_tokens:
            if len(segments) == max_segments:
                break
            segments.append([])
        segments[-1] = segments[-1] + row
    return segments if segments[0] else []


def split_demonstrations(rows: Sequence[LabelledText], limit: int) -> tuple[list[LabelledText], LabelledSplits]:
    """Split texts into demonstrations, and `limit` texts to label for validation and for testing.

    A split that no row names is taken from the training rows. Demonstrations whose text is to be labelled are left out.
    """

    def sample(split: str, limit: int | None = None) -> list[LabelledText]:
        named = [row for row in rows if (row.split or "train") == split]
        return [named[i] for i in rng.permutation(len(named), 0, limit=limit)]

    train = sample("train")
    n = min(limit, len(train) // 3)
    test_rows: LabelledSplits = {}
    for split in ("valid", "test"):
        test_rows[split] = sample(split, limit)
        if not test_rows[split]:
            test_rows[split] = train[:n]
            train = train[n:]
    held_out = {normalise_text(row.text) for some in test_rows.values() for row in some}
    train = [row for row in train if normalise_text(row.text) not in held_out]
    if not (train and all(test_rows.values())):
        raise InputError(f"{len(rows)} rows are too few for demonstrations, validation and testing; give more")
    return train, test_rows


class LabelAccuracy(NamedTuple):
    """Accuracy after demonstrations under one condition.

    `context_size` is the mean number of vectors or tokens of demonstrations. The standard deviation is over orders of
    demonstrations of all runs, None for a single order. `variants` are those chosen for each run.
    """

    condition: str
    context_size: float
    accuracy: float
    std: float | None
    accuracies: tuple[float, ...]
    variants: tuple[str, ...]


VARIANTS = {  # balanced, calibrated
    (False, False): "neither",
    (False, True): "calibrated",
    (True, False): "balanced",
    (True, True): "balanced and calibrated",
}


def score_conditions(result: RunResult) -> list[LabelAccuracy]:
    """Choose the variant of each condition on validation texts, and compute its test accuracy for each order."""
    scores: list[LabelAccuracy] = []
    for condition in result.conditions:
        accuracies, variants = list[float](), list[str]()
        for items in result.items_by_seed:
            validation = {
                (balanced, calibrated): label_accuracy(select_items(items, "valid", balanced), condition, calibrated)
                for balanced, calibrated in VARIANTS
            }
            balanced, calibrated = max(VARIANTS, key=lambda variant: validation[variant])
            test = select_items(items, "test", balanced)
            for seed in sorted({item.shared["order_seed"] for item in test}):
                same_order = [item for item in test if item.shared["order_seed"] == seed]
                accuracies.append(label_accuracy(same_order, condition, calibrated))
            variants.append(VARIANTS[balanced, calibrated])
        std = float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None
        size = mean_context_size(result, condition)
        mean = float(np.mean(accuracies))
        scores.append(LabelAccuracy(condition, size, mean, std, tuple(accuracies), tuple(variants)))
    return scores


def select_items(items: Sequence[EvalItem], split: str, balanced: bool) -> list[EvalItem]:
    return [item for item in items if (item.shared["split"], item.shared["balanced"]) == (split, balanced)]


def label_accuracy(items: Sequence[EvalItem], condition: str, calibrated: bool) -> float:
    return float(np.mean([choose_label(item, condition, calibrated) == item.shared["label"] for item in items]))


def choose_label(item: EvalItem, condition: str, calibrated: bool) -> int:
    """Return the label of smallest mean NLL per token; `calibrated` subtracts the NLL without the text (Eq. AC11)."""
    scores = item.conditions[condition]
    tokens = np.array(item.shared["label_tokens"])
    nll = np.array(scores["label_nll"]) / tokens
    return int((nll - np.array(scores["null_nll"]) / tokens if calibrated else nll).argmin())


def count_items(result: RunResult) -> dict[str, Any]:
    """Return the numbers of texts to label and of labels, and the accuracy of always choosing the most common one."""
    test = [item.shared for item in select_items(result.items_by_seed[0], "test", False)]
    texts = [shared["label"] for shared in test if shared["order_seed"] == 0]
    majority = Counter(texts).most_common(1)[0][1] / len(texts)
    return {"items": len(texts), "majority_accuracy": majority, "num_labels": len(test[0]["label_tokens"])}


COLUMNS = (
    Column("demonstrations", lambda score: score.condition, is_text=True),
    Column("before", lambda score: format_count(score.context_size)),
    Column(
        "accuracy, %",
        lambda score: format_percent(score.accuracy) + ("" if score.std is None else f" ± {format_percent(score.std)}"),
    ),
    Column("chosen on validation", lambda score: ", ".join(dict.fromkeys(score.variants))),
)
LEGEND = (
    "The label with the least mean nats per token is chosen. before: vectors or tokens of demonstrations. ±: standard "
    "deviation over orders of demonstrations and seeds. last tokens: as many of the demonstrations' text as they have "
    "vectors. Whether demonstrations are balanced by label and scores are calibrated is chosen on validation texts. A "
    "condition at or below the majority baseline shows no in-context learning."
)


def build_score_table(result: RunResult) -> Table:
    counts = count_items(result)
    majority = f"majority baseline {format_percent(counts['majority_accuracy'])} %"
    caption = f"{pluralize(counts['items'], 'text')}, {counts['num_labels']} labels; {majority}"
    return build_table(COLUMNS, score_conditions(result), f"{result.run}, {result.task}: {caption}")
