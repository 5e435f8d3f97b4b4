"""Evaluate a compressor on held-out documents: its readers, its conditions, and the data sets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
    ContextTail,
    evaluate_batch,
    split_context,
)
from laconic.evaluation.compression.tails import EXCERPT_TOKENS, sample_tails
from laconic.evaluation.results_store import EvalItem, EvalJob
from laconic.evaluation.suite import EvalRequest, describe_evaluation
from laconic.experiment.from_recipe import build_data, build_model
from laconic.experiment.from_recipe.methods import build_method
from laconic.experiment.load_run import LoadedRun, load_initial_decoder
from laconic.halting.estimators import best_length_label
from laconic.interfaces import TrainingData

EXCERPT = "excerpt"
CONTEXT_QUARTERS = (1, 4, 8, 12)  # lengths of contexts, in quarters of a segment
MAX_FIXED_LENGTHS = 8  # fixed lengths that one run is evaluated with
QUANTILES = (0.1, 0.25, 0.75, 0.9)
BATCH_TOKENS = 16_384  # tokens of contexts and tails per batch
DEFAULT_DOCUMENTS = 200


@dataclass(frozen=True)
class ContextCompressor:
    """An AutoCompressor that compresses contexts; `seed` is that of sampled lengths."""

    method: AutoCompressor
    seed: int

    def compress(self, split: ContextTail, rule: StopRule | None = None) -> CompressedContext:
        """Compress the segments of a context in order, by default with the run's own rule."""
        rule, memory = default_rule(self.method.segment_model) if rule is None else rule, None
        lengths, expected = list[Tensor](), list[Tensor]()
        for i, columns in enumerate(split.segments):
            rule = add_uniforms(rule, self.seed, split.row_index, i, self.method.config.fixed_length)
            memory = self.method.compress(split.context[:, columns], None, memory, rule)
            lengths.append(memory.vectors_per_segment[:, -1])
            if memory.log_s is not None:
                is_new = memory.segment_ids == memory.num_segments - 1
                expected.append((memory.log_s.exp() * is_new).sum(1))
        assert memory is not None
        return CompressedContext(memory, torch.stack(lengths, 1), torch.stack(expected, 1) if expected else None)

    def compress_with_best_lengths(self, split: ContextTail) -> CompressedContext:
        """Compress each segment to the length that minimises the NLL of what follows plus the length cost (Eq. VL24).

        What follows is the next segment, and after the last one the tail itself, so this is an upper bound and not a
        method. Later segments are not considered. Each segment is compressed and read once per length, with at most
        `MAX_FIXED_LENGTHS` lengths. The cost is the run's, or 0 if it has none.
        """
        method, lengths = self.method, spread_lengths(self.method.config.possible_lengths)
        price = 0.0 if method.stop_head_config is None else method.stop_head_config.length_cost
        memory, best_lengths, segments = None, list[Tensor](), split.segments
        for columns, after in zip(segments, (*segments[1:], None), strict=True):
            ids = split.context[:, columns]
            trials = [method.compress(ids, None, memory, StopRule("fixed", num_vectors=n)) for n in lengths]
            following = split.tail if after is None else split.context[:, after]
            mask = torch.ones_like(following, dtype=torch.bool)
            loss_mask = split.loss_mask if after is None else mask
            nll = torch.stack([method.nll(following, mask, loss_mask, trial) for trial in trials], 1)
            best = best_length_label(nll, tuple(lengths), price)
            rows = best * len(ids) + torch.arange(len(ids), device=best.device)
            memory = SummaryMemory.concat_rows(*trials).select_rows(rows).compact()
            best_lengths.append(memory.vectors_per_segment[:, -1])
        assert memory is not None
        return CompressedContext(memory, torch.stack(best_lengths, 1), None)

    def compress_other_text(self, split: ContextTail, source: TrainingData) -> CompressedContext:
        """Compress the context of another row for each tail: that of the row half a data set away.

        What such a memory gains over none is not about the text: vectors of any text from a book can help with a book.
        """
        rows = [(row + len(source) // 2) % len(source) for row in split.row_index.tolist()]
        return self.compress(split_context(source.batch(rows, 0, 0).to(split.row_index.device)))


def load_untrained_method(run: LoadedRun) -> AutoCompressor:
    """Build the method as it was before the run's first step."""
    recipe, device = run.recipe, run.parts.decoder.token_embedding.weight.device
    decoder, tokenizer = load_initial_decoder(recipe, device)
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
    run: LoadedRun,
    source: TrainingData,
    C: int,
    T: int,
    *,
    all_lengths: bool,
    untrained: AutoCompressor | None = None,
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
    compressor = ContextCompressor(method, run.recipe.seed)
    conditions = [
        ContextCondition("none", method),
        ContextCondition("compressed", method, compressor.compress),
        ContextCondition("truncated", method, end_tokens="compressed"),
    ]
    if len(source) > 1:
        compress_other_text = partial(compressor.compress_other_text, source=source)
        conditions.append(ContextCondition("other text", method, compress_other_text))
    if C + method.segment_model.prefix_length <= room:
        conditions.append(ContextCondition("full", method, end_tokens=ALL_TOKENS))
    if untrained is not None:
        before = ContextCompressor(untrained, run.recipe.seed)
        conditions.append(ContextCondition("untrained none", untrained))
        conditions.append(ContextCondition("untrained", untrained, before.compress))
    if method.config.length_policy != "fixed":
        conditions.append(ContextCondition("oracle length", method, compressor.compress_with_best_lengths))
    return conditions + (length_conditions(compressor) if all_lengths else [])


def length_conditions(compressor: ContextCompressor) -> list[ContextCondition]:
    """Return the fixed lengths of a method with equally long text, and the rules of its stop head."""
    method, conditions = compressor.method, list[ContextCondition]()
    policy, rules = method.config.length_policy, dict[str, StopRule]()
    for n in () if policy == "fixed" else spread_lengths(method.config.possible_lengths):
        compress = partial(compressor.compress, rule=StopRule("fixed", num_vectors=n))
        conditions.append(ContextCondition(f"n = {n}", method, compress))
        conditions.append(ContextCondition(f"end, n = {n}", method, end_tokens=f"n = {n}"))
    if policy == "stop_head":
        rules = {f"quantile {q:g}": StopRule("quantile", quantile=q) for q in QUANTILES}
        rules |= {"sampled": StopRule("sample"), "soft": StopRule("soft")}
    rest = [ContextCondition(name, method, partial(compressor.compress, rule=rule)) for name, rule in rules.items()]
    return [*conditions, *rest]


def build_document_job(
    request: EvalRequest,
    run: LoadedRun,
    name: str,
    source: TrainingData,
    conditions: Sequence[ContextCondition],
    num_tokens: int,
) -> EvalJob:
    """Return the evaluation of a run on a data set whose rows have at most `num_tokens`."""
    key = {"data": source.fingerprint, "conditions": ",".join(condition.name for condition in conditions)}
    metadata = describe_evaluation(run, "compression", name, limit=request.limit, key=key)

    def evaluate(indices: Sequence[int]) -> list[list[EvalItem]]:
        split = split_context(source.batch(indices, 0, 0).to(request.device))
        return [[item] for item in evaluate_batch(split, conditions)]

    return EvalJob(metadata, len(source), evaluate, max(BATCH_TOKENS // num_tokens, 1))


def collect_recipe_info(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a run that its figures depend on."""
    config, head = recipe.compression, recipe.stop_head
    info: dict[str, Any] = {"method": recipe.method, "source": recipe.data.source, "table_row": recipe.table_row}
    if config is None or recipe.method == "lm":
        return info | {"length_policy": None}
    info |= {name: getattr(config, name) for name in ("summary", "length_policy", "memory_policy")}
    info |= {"max_vectors": config.fixed_length}
    if config.length_policy != "stop_head" or head is None:
        return info
    return info | {name: getattr(head, name) for name in ("estimator", "soft_gate", "head", "length_cost")}


def build_document_jobs(request: EvalRequest, run: LoadedRun, split: str) -> list[EvalJob]:
    """Build the evaluations on what a run's recipe holds out: "test", "valid", or "excerpt" of the test split.

    Text has one for each context length that fits the run, with all lengths of vectors after one whole segment.
    """
    recipe, max_positions = run.recipe, run.parts.decoder.config.max_position_embeddings
    untrained = load_untrained_method(run) if isinstance(run.method, AutoCompressor) else None
    part: SplitName = "valid" if split == "valid" else "test"
    if recipe.data.source == "recall":
        if split == EXCERPT:
            raise InputError("excerpt: fact recall has no text to copy an excerpt from; use test")
        source = build_data.load_held_out_rows(recipe, run.parts.tokenizer, max_positions, part, request.limit).source
        task = recipe.data.recall
        C, T = task.segment_tokens * task.num_segments, 2 * task.num_queries
        conditions = build_conditions(run, source, C, T, all_lengths=True, untrained=untrained)
        return [build_document_job(request, run, part, source, conditions, C + T)]
    source = build_data.load_held_out_rows(recipe, run.parts.tokenizer, max_positions, part).source
    assert isinstance(source, DocumentDataset)
    S = recipe.data.text.mean_segment_tokens
    lengths = list(map(len, source.ids))
    contexts = choose_contexts(lengths, S)
    tails = sample_tails(source.names, source.ids, max(contexts), S, request.limit or DEFAULT_DOCUMENTS)
    if num_short := sum(length < max(contexts) + S for length in lengths):
        needs = f"{max(contexts) + S:,} tokens, {max(contexts):,} to compress and {S:,} to score"
        log_note(f"{split}: left out {num_short:,} of {pluralize(len(lengths), 'document')}, shorter than {needs}")
    excerpt, name = (EXCERPT_TOKENS, f"{part}-{EXCERPT}") if split == EXCERPT else (None, part)
    limit, jobs = run.method.max_segments(S) if isinstance(run.method, AutoCompressor) else None, list[EvalJob]()
    for n in (quarters * S // 4 for quarters in CONTEXT_QUARTERS):
        if (excerpt or 1) <= n <= tails.context_tokens and (limit is None or -(-n // S) < limit):
            data = replace(tails, context_tokens=n, excerpt_tokens=excerpt)
            conditions = build_conditions(run, data, n, excerpt or S, all_lengths=n == S, untrained=untrained)
            jobs.append(build_document_job(request, run, f"{name}-{n}", data, conditions, n + S))
    if not jobs:
        needs = f"holds an excerpt of {EXCERPT_TOKENS} and fits" if split == EXCERPT else "fits"
        raise InputError(
            f"{split}: no context of up to {tails.context_tokens} tokens {needs} the run; use a run with other segments"
        )
    return jobs


def choose_contexts(lengths: Sequence[int], segment_tokens: int) -> list[int]:
    """Return the lengths of contexts that leave a segment to score in half of the documents or more."""
    room = sorted(lengths)[(len(lengths) - 1) // 2] - segment_tokens
    contexts = [quarters * segment_tokens // 4 for quarters in CONTEXT_QUARTERS]
    return [context for context in contexts if context <= room] or contexts[:1]
