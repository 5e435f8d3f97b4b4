"""Evaluate a compressor on held-out documents: its readers, its conditions, and the data sets."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import StopRule, add_uniforms, default_rule
from laconic.compression.lm_baseline import LanguageModelBaseline
from laconic.compression.memory import SummaryMemory
from laconic.config.data import SplitName
from laconic.config.recipe import Recipe
from laconic.console import log_note, pluralize
from laconic.data.documents.dataset import DocumentDataset
from laconic.errors import InputError
from laconic.evaluation.compression.evaluate import (
    ALL_TOKENS,
    CompressedContext,
    ContextCondition,
    evaluate_batch,
    find_scored_tokens,
)
from laconic.evaluation.compression.tails import EXCERPT_TOKENS, sample_tails
from laconic.evaluation.results_store import EvalItem, EvalJob
from laconic.evaluation.suite import EvalRequest, describe_evaluation
from laconic.experiment.from_recipe import build_data, build_model
from laconic.experiment.from_recipe.methods import build_method
from laconic.experiment.load_run import LoadedRun, load_initial_model
from laconic.halting.estimators import best_length_label
from laconic.interfaces import TrainingData

EXCERPT = "excerpt"
CONTEXT_QUARTERS = (1, 4, 8, 12)  # lengths of contexts, in quarters of a segment
MAX_FIXED_LENGTHS = 8  # fixed lengths that one run is evaluated with
QUANTILES = (0.1, 0.25, 0.75, 0.9)
BATCH_TOKENS = 16_384  # tokens of contexts and tails per batch
DEFAULT_DOCUMENTS = 200


def compress_context(method: AutoCompressor, batch: DocumentBatch, rule: StopRule | None = None) -> CompressedContext:
    """Compress the segments of a context in order, by default with the run's own rule."""
    if rule is None:
        rule = default_rule(method.segment_model)
    memory = None
    lengths, expected = list[Tensor](), list[Tensor]()
    for i, columns in enumerate(batch.segment_slices[:-1]):
        rule = add_uniforms(rule, method.seed, batch.row_index, i, method.config.fixed_length)
        memory = method.compress(batch.input_ids[:, columns], None, memory, rule)
        lengths.append(memory.vectors_per_segment[:, -1])
        if memory.log_s is not None:
            is_new = memory.segment_ids == memory.num_segments - 1
            expected.append((memory.log_s.exp() * is_new).sum(1))
    assert memory is not None
    return CompressedContext(memory, torch.stack(lengths, 1), torch.stack(expected, 1) if expected else None)


def compress_with_best_lengths(method: AutoCompressor, batch: DocumentBatch) -> CompressedContext:
    """Compress each segment to the length that minimises the NLL of what follows plus the length cost (Eq. VL24).

    What follows is the next segment, and after the last one the tail itself, so this is an upper bound and not a
    method. Later segments are not considered. Each segment is compressed and read once per length, with at most
    `MAX_FIXED_LENGTHS` lengths. The cost is the run's, or 0 if it has none.
    """
    lengths = spread_lengths(method.config.possible_lengths)
    memory = None
    best_lengths: list[Tensor] = []
    price = 0.0 if method.stop_head_config is None else method.stop_head_config.length_cost
    for columns, after in pairwise(batch.segment_slices):
        ids, following = batch.input_ids[:, columns], batch.input_ids[:, after]
        trials = [method.compress(ids, None, memory, StopRule("fixed", num_vectors=n)) for n in lengths]
        mask = torch.ones_like(following, dtype=torch.bool)
        loss_mask = find_scored_tokens(batch) if after == batch.segment_slices[-1] else mask
        nll = torch.stack([method.nll(following, mask, loss_mask, trial) for trial in trials], 1)
        best = best_length_label(nll, tuple(lengths), price)
        rows = best * len(ids) + torch.arange(len(ids), device=best.device)
        memory = SummaryMemory.concat_rows(*trials).select_rows(rows).compact()
        best_lengths.append(memory.vectors_per_segment[:, -1])
    assert memory is not None
    return CompressedContext(memory, torch.stack(best_lengths, 1), None)


def compress_other_text(method: AutoCompressor, source: TrainingData, batch: DocumentBatch) -> CompressedContext:
    """Compress the context of another row for each tail: that of the row half a data set away.

    What such a memory gains over none is not about the text: vectors of any text from a book can help with a book.
    """
    rows = [(row + len(source) // 2) % len(source) for row in batch.row_index.tolist()]
    return compress_context(method, cast(DocumentBatch, source.batch(rows, 0, 0)).to(batch.row_index.device))


def load_untrained_method(run: LoadedRun) -> AutoCompressor:
    recipe, device = run.recipe, run.parts.decoder.device
    decoder, tokenizer, _ = load_initial_model(recipe, device)
    method = build_method(build_model.build_parts(recipe, decoder, tokenizer, ""), recipe, 1).to(device).eval()
    assert isinstance(method, AutoCompressor)
    return method


def spread_lengths(lengths: Sequence[int]) -> list[int]:
    """Return all lengths, or `MAX_FIXED_LENGTHS` of them in a roughly geometric series."""
    if len(lengths) <= MAX_FIXED_LENGTHS:
        return [*lengths]
    ratio = (lengths[-1] / lengths[0]) ** (1 / (MAX_FIXED_LENGTHS - 1))
    targets = [lengths[0] * ratio**i for i in range(MAX_FIXED_LENGTHS)]
    return sorted({min(lengths, key=lambda n: abs(n - target)) for target in targets})


def build_conditions(
    run: LoadedRun, source: TrainingData, C: int, T: int, *, all_lengths: bool, untrained: AutoCompressor | None = None
) -> list[ContextCondition]:
    """Return the conditions under which a run reads a tail of T tokens after a context of C.

    With `all_lengths`, every length and every stop rule of the run is included; `untrained` is the method before
    training, for comparison. Texts that do not fit the model are left out.
    """
    method = run.method
    room = run.parts.decoder.config.max_position_embeddings - T
    if isinstance(method, LanguageModelBaseline):
        ends = [2**i for i in range(C.bit_length()) if 2**i < C and 2**i <= room] if all_lengths else []
        return [
            ContextCondition("none", method),
            *(ContextCondition(f"end {n}", method, end_tokens=n) for n in ends),
            *([ContextCondition("full", method, end_tokens=ALL_TOKENS)] if room >= C else []),
        ]
    assert isinstance(method, AutoCompressor)
    conditions = [
        ContextCondition("none", method),
        ContextCondition("compressed", method, partial(compress_context, method)),
        ContextCondition("truncated", method, end_tokens="compressed"),
    ]
    if len(source) > 1:
        conditions.append(ContextCondition("other text", method, partial(compress_other_text, method, source)))
    if C + method.segment_model.prefix_length <= room:
        conditions.append(ContextCondition("full", method, end_tokens=ALL_TOKENS))
    if untrained is not None:
        conditions.append(ContextCondition("untrained none", untrained))
        conditions.append(ContextCondition("untrained", untrained, partial(compress_context, untrained)))
    if method.config.length_policy != "fixed":
        conditions.append(ContextCondition("oracle length", method, partial(compress_with_best_lengths, method)))
    return conditions + (length_conditions(method) if all_lengths else [])


def length_conditions(method: AutoCompressor) -> list[ContextCondition]:
    policy = method.config.length_policy
    conditions: list[ContextCondition] = []
    rules: dict[str, StopRule] = {}
    for n in () if policy == "fixed" else spread_lengths(method.config.possible_lengths):
        compress = partial(compress_context, method, rule=StopRule("fixed", num_vectors=n))
        conditions.append(ContextCondition(f"n = {n}", method, compress))
        conditions.append(ContextCondition(f"end, n = {n}", method, end_tokens=f"n = {n}"))
    if policy == "stop_head":
        rules = {f"quantile {q:g}": StopRule("quantile", quantile=q) for q in QUANTILES}
        rules |= {"sampled": StopRule("sample"), "soft": StopRule("soft")}
    rest = [ContextCondition(name, method, partial(compress_context, method, rule=r)) for name, r in rules.items()]
    return [*conditions, *rest]


def collect_recipe_info(recipe: Recipe) -> dict[str, Any]:
    info: dict[str, Any] = {"method": recipe.method, "source": recipe.data.source, "length_policy": None}
    if recipe.compression is None or recipe.method == "lm":
        return info
    names = ("length_policy", "summary", "memory_policy")
    return info | {name: getattr(recipe.compression, name) for name in names}


def build_document_jobs(request: EvalRequest, run: LoadedRun, split: str) -> list[EvalJob]:
    """Build the evaluations on what a run's recipe holds out: "test", "valid", or "excerpt" of the test split.

    Text has one for each context length that fits the run, with all lengths of vectors after one whole segment.
    """
    recipe, max_positions = run.recipe, run.parts.decoder.config.max_position_embeddings
    untrained = load_untrained_method(run) if isinstance(run.method, AutoCompressor) else None
    part: SplitName = "valid" if split == "valid" else "test"

    def build_job(name: str, source: TrainingData, C: int, T: int, *, all_lengths: bool) -> EvalJob:
        conditions = build_conditions(run, source, C, T, all_lengths=all_lengths, untrained=untrained)
        key = {"data": source.fingerprint, "conditions": ",".join(condition.name for condition in conditions)}
        metadata = describe_evaluation(run, "compression", name, limit=request.limit, key=key)

        def evaluate(indices: Sequence[int]) -> list[list[EvalItem]]:
            batch = cast(DocumentBatch, source.batch(indices, 0, 0)).to(request.device)
            return [[item] for item in evaluate_batch(batch, conditions)]

        return EvalJob(metadata, len(source), evaluate, max(BATCH_TOKENS // (C + T), 1))

    if recipe.data.source == "recall":
        if split == EXCERPT:
            raise InputError("excerpt: fact recall has no text to copy an excerpt from; use test")
        source = build_data.load_held_out_rows(recipe, run.parts.tokenizer, max_positions, part, request.limit).source
        task = recipe.data.recall
        return [
            build_job(part, source, task.segment_tokens * task.num_segments, 2 * task.num_queries, all_lengths=True)
        ]
    source = build_data.load_held_out_rows(recipe, run.parts.tokenizer, max_positions, part).source
    assert isinstance(source, DocumentDataset)
    S = recipe.data.text.mean_segment_tokens
    lengths = list(map(len, source.ids))
    contexts = choose_contexts(lengths, S)
    longest = max(contexts)
    tails = sample_tails(source.names, source.ids, longest, S, request.limit or DEFAULT_DOCUMENTS)
    num_short = sum(length < longest + S for length in lengths)
    if num_short:
        needs = f"{longest + S:,} tokens, {longest:,} to compress and {S:,} to score"
        log_note(f"{split}: left out {num_short:,} of {pluralize(len(lengths), 'document')}, shorter than {needs}")
    excerpt = EXCERPT_TOKENS if split == EXCERPT else None
    name = f"{part}-{EXCERPT}" if split == EXCERPT else part
    limit = run.method.max_segments(S) if isinstance(run.method, AutoCompressor) else None
    jobs = [
        build_job(
            f"{name}-{n}", replace(tails, context_tokens=n, excerpt_tokens=excerpt), n, excerpt or S, all_lengths=n == S
        )
        for n in contexts
        if n >= (excerpt or 1) and (limit is None or -(-n // S) < limit)
    ]
    if not jobs:
        task = f"holds an excerpt of {excerpt} tokens and fits" if excerpt else "fits"
        raise InputError(f"{split}: no context of up to {max(contexts)} tokens {task} the run; use longer segments")
    return jobs


def choose_contexts(lengths: Sequence[int], segment_tokens: int) -> list[int]:
    """Return the lengths of contexts that leave a segment to score in half of the documents or more."""
    room = sorted(lengths)[(len(lengths) - 1) // 2] - segment_tokens
    contexts = [quarters * segment_tokens // 4 for quarters in CONTEXT_QUARTERS]
    return [context for context in contexts if context <= room] or contexts[:1]
