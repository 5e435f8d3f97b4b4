"""A run as evaluation reads it: what compresses its contexts, in how many ways, and which documents are held out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.estimators import best_length_label
from laconic.compression.halting.inference import StopRule, default_rule
from laconic.compression.halting.stop_distribution import draw_uniforms
from laconic.compression.lm_baseline import LanguageModelBaseline
from laconic.compression.memory import SummaryMemory
from laconic.config.data import SplitName
from laconic.data.documents.dataset import DocumentDataset
from laconic.errors import InputError
from laconic.evaluation.compression.evaluate import ALL_TOKENS, CompressedContext, ContextCondition, ContextTail
from laconic.evaluation.compression.tails import EXCERPT_TOKENS, DocumentTails, sample_tails
from laconic.experiment import build_data, build_model
from laconic.experiment.load_run import LoadedRun, load_initial_decoder
from laconic.experiment.methods import build_method
from laconic.interfaces import TrainingData
from laconic.storage.strict_json import to_canonical_json

EXCERPT = "excerpt"
CONTEXT_QUARTERS = (1, 4, 8, 12)  # quarters of a segment: how much text stands before a tail
MAX_FIXED_LENGTHS = 8  # fixed lengths that one run is read with
QUANTILES = (0.1, 0.25, 0.75, 0.9)
BATCH_TOKENS = 16_384  # tokens of contexts and tails read at once
DEFAULT_DOCUMENTS = 200  # of a set of documents, where nobody says how many


@dataclass(frozen=True)
class AutoCompressorReader:
    """A method that compresses, as evaluation asks it; `seed` is of lengths that are drawn."""

    method: AutoCompressor
    seed: int

    def compress(self, split: ContextTail, rule: StopRule | None) -> CompressedContext:
        """The segments of a context one after another; what is soft is read as its gate was in training."""
        told, memory = default_rule(self.method.segment_model) if rule is None else rule, None
        written, expected = list[Tensor](), list[Tensor]()
        for i, columns in enumerate(split.segments):
            if told.name == "sample":
                drawn = draw_uniforms("length", self.seed, 0, split.row_index.cpu(), i, self.method.config.fixed_length)
                told = told._replace(uniforms=drawn.to(split.row_index.device))
            memory = self.method.compress(split.context[:, columns], None, memory, told)
            written.append(memory.vectors_per_segment[:, -1])
            if memory.log_s is not None:
                new = memory.segment_ids == memory.num_segments - 1
                expected.append((memory.log_s.exp() * new).sum(1))
        assert memory is not None
        return CompressedContext(memory, torch.stack(written, 1), torch.stack(expected, 1) if expected else None)

    def compress_with_best_lengths(self, split: ContextTail) -> CompressedContext:
        """Eq. VL24: of each segment the length with the least nats of what follows it, and price, found by trial.

        What follows is the next segment, and behind the last one the tail itself: a bound, not a method. What a vector
        is worth further on is not seen. It takes as many compressions and readings of a segment as there are lengths,
        `MOST` at most. The price is the run's; 0 where it has none.
        """
        method, lengths = self.method, spread_lengths(self.method.config.possible_lengths)
        price = 0.0 if method.stop_head_config is None else float(method.summaries.price_state[0])
        memory, written, segments = None, list[Tensor](), split.segments
        for columns, after in zip(segments, (*segments[1:], None), strict=True):
            text = split.context[:, columns]
            tried = [method.compress(text, None, memory, StopRule("fixed", num_vectors=n)) for n in lengths]
            following = split.tail if after is None else split.context[:, after]
            live = torch.ones_like(following, dtype=torch.bool)
            scored = split.loss_mask if after is None else live
            nats = torch.stack([method.nll(following, live, scored, each) for each in tried], 1)
            best = best_length_label(nats, tuple(lengths), price)
            memory = (
                SummaryMemory.concat_rows(*tried)
                .select_rows(best * len(text) + torch.arange(len(text), device=best.device))
                .compact()
            )
            written.append(memory.vectors_per_segment[:, -1])
        assert memory is not None
        return CompressedContext(memory, torch.stack(written, 1), None)

    def with_rule(self, rule: StopRule | None = None) -> Callable[[ContextTail], CompressedContext]:
        """`compress` with its lengths said; None: as the run has them."""
        return partial(self.compress, rule=rule)

    def hidden_states(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], memory: SummaryMemory | None
    ) -> Float[Tensor, "B T D"]:
        """A text behind a memory, or alone; a text alone needs no room for summaries."""
        unit = self.method.segment_model
        return unit.read_segment(
            unit.empty_memory(len(input_ids)) if memory is None else memory, input_ids, attention_mask
        )

    def logits(self, hidden_states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Of words alone, whatever control rows there are."""
        return self.method.decoder.logits(hidden_states)


@dataclass(frozen=True)
class BaselineReader:
    """A plain language model: the control, which reads text."""

    method: LanguageModelBaseline

    def hidden_states(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"], memory: SummaryMemory | None
    ) -> Float[Tensor, "B T D"]:
        """A text alone."""
        return self.method.decoder(self.method.decoder.embed(input_ids), live=attention_mask).hidden

    def logits(self, hidden_states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Of words."""
        return self.method.decoder.logits(hidden_states)


def load_untrained_method(run: LoadedRun) -> AutoCompressor:
    """The method as its run began, before a step."""
    recipe, device = run.recipe, run.parts.decoder.token_embedding.weight.device
    decoder, tokenizer = load_initial_decoder(recipe, device)
    method = build_method(build_model.build_parts(recipe, decoder, tokenizer, ""), recipe, 1).to(device).eval()
    assert isinstance(method, AutoCompressor)
    return method


def spread_lengths(lengths: Sequence[int]) -> list[int]:
    """All of some lengths, or `MOST` of them from the first to the last, about as many times longer each time."""
    if len(lengths) <= MAX_FIXED_LENGTHS:
        return [*lengths]
    ratio = (lengths[-1] / lengths[0]) ** (1 / (MAX_FIXED_LENGTHS - 1))
    wanted = [lengths[0] * ratio**i for i in range(MAX_FIXED_LENGTHS)]
    return sorted({min(lengths, key=lambda n: abs(n - each)) for each in wanted})


def build_conditions(
    run: LoadedRun, C: int, T: int, *, all_lengths: bool, untrained: AutoCompressor | None = None
) -> list[ContextCondition]:
    """The ways in which a run reads a tail of T tokens behind a context of C.

    With `lengths`, in every length and by every rule that it has learned; `begun` is the method before training.
    """
    method = run.method
    if isinstance(method, LanguageModelBaseline):
        ends = [2**i for i in range(C.bit_length()) if 2**i < C] if all_lengths else []
        reader = BaselineReader(method)
        return [
            ContextCondition("none", reader),
            *(ContextCondition(f"end {n}", reader, end_tokens=n) for n in ends),
            ContextCondition("full", reader, end_tokens=ALL_TOKENS),
        ]
    assert isinstance(method, AutoCompressor)
    reader = AutoCompressorReader(method, run.recipe.seed)
    found = [
        ContextCondition("none", reader),
        ContextCondition("compressed", reader, reader.with_rule()),
        ContextCondition("truncated", reader, end_tokens="compressed"),
    ]
    if C + T + method.segment_model.prefix_length <= method.decoder.config.max_position_embeddings:
        found.append(ContextCondition("full", reader, end_tokens=ALL_TOKENS))
    if untrained is not None:
        first = AutoCompressorReader(untrained, run.recipe.seed)
        found += [ContextCondition("untrained none", first), ContextCondition("untrained", first, first.with_rule())]
    if method.config.length_policy != "fixed":
        found.append(ContextCondition("oracle length", reader, reader.compress_with_best_lengths))
    return found + (length_conditions(reader) if all_lengths else [])


def length_conditions(reader: AutoCompressorReader) -> list[ContextCondition]:
    """The lengths that a method can be told, with ends of text as long, and the rules of one that stops."""
    reading, found = reader.method.config, list[ContextCondition]()
    if reading.length_policy == "fixed":
        return found
    for n in spread_lengths(reading.possible_lengths):
        name = f"n = {n}"
        found += [
            ContextCondition(name, reader, reader.with_rule(StopRule("fixed", num_vectors=n))),
            ContextCondition(f"end, {name}", reader, end_tokens=name),
        ]
    if reading.length_policy != "stop_head":
        return found
    for q in QUANTILES:
        found.append(ContextCondition(f"quantile {q:g}", reader, reader.with_rule(StopRule("quantile", quantile=q))))
    found.append(ContextCondition("sampled", reader, reader.with_rule(StopRule("sample"))))
    return [*found, ContextCondition("soft", reader, reader.with_rule(StopRule("soft")))]


@dataclass(frozen=True)
class TailDataset:
    """Tails of held-out documents behind `n` tokens each (contract.Source); with `span` copied from those tokens."""

    tails: DocumentTails
    context_tokens: int
    segment_tokens: int
    excerpt_tokens: int | None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all ids, and of how they are parted."""
        said = {
            "names": self.tails.names,
            "n": self.context_tokens,
            "segment": self.segment_tokens,
            "span": self.excerpt_tokens,
        }
        return sha256(to_canonical_json(said).encode() + self.tails.token_ids.astype("<i4").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.tails.names)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """Some of them."""
        if self.excerpt_tokens is None:
            return self.tails.continuation_batch(rows, self.context_tokens, self.segment_tokens)
        return self.tails.excerpt_batch(rows, self.context_tokens, self.segment_tokens, self.excerpt_tokens)


class CompressionEvalSet(NamedTuple):
    """What is asked of a run under one name, in some ways, so many documents at once."""

    name: str
    source: TrainingData
    conditions: Sequence[ContextCondition]
    batch_size: int
    notes: tuple[str, ...] = ()


def build_eval_sets(run: LoadedRun, split: str, limit: int | None) -> list[CompressionEvalSet]:
    """Documents that a run's recipe holds out: `asked` are test or valid (E1, E2), or excerpt (E1x, of test).

    Raises `BadInput` (66) where there are none.
    """
    recipe, context = run.recipe, run.parts.decoder.config.max_position_embeddings
    begun = load_untrained_method(run) if isinstance(run.method, AutoCompressor) else None
    part: SplitName = "valid" if split == "valid" else "test"
    if recipe.data.source == "recall":
        if split == EXCERPT:
            raise InputError("excerpt: the recall task is no text to take one from; ask for test")
        source = build_data.load_held_out(recipe, run.parts.tokenizer, context, part, limit).source
        task = recipe.data.recall
        C, T = task.segment_tokens * task.num_segments, 2 * task.num_queries
        return [
            CompressionEvalSet(
                part,
                source,
                build_conditions(run, C, T, all_lengths=True, untrained=begun),
                max(BATCH_TOKENS // (C + T), 1),
            )
        ]
    found = build_data.load_held_out(recipe, run.parts.tokenizer, context, part)
    assert isinstance(found.source, DocumentDataset)
    S, source = recipe.data.text.mean_segment_tokens, found.source
    drawn = sample_tails(source.names, source.ids, max(CONTEXT_QUARTERS) * S // 4, S, limit or DEFAULT_DOCUMENTS)
    made = text_conditions(run, drawn, S, EXCERPT_TOKENS if split == EXCERPT else None, begun)
    name = f"{part}-{EXCERPT}" if split == EXCERPT else part
    return [
        CompressionEvalSet(
            f"{name}-{each.context_tokens}", each, own, max(BATCH_TOKENS // (each.context_tokens + S), 1), found.notes
        )
        for each, own in made
    ]


def text_conditions(
    run: LoadedRun,
    tails: DocumentTails,
    segment_tokens: int,
    excerpt_tokens: int | None,
    untrained: AutoCompressor | None,
) -> Iterator[tuple[TailDataset, list[ContextCondition]]]:
    """Each length of context that the run has room for, and its ways: behind one segment all, behind others some."""
    most = run.method.max_segments(segment_tokens) if isinstance(run.method, AutoCompressor) else None
    for quarters in CONTEXT_QUARTERS:
        n = quarters * segment_tokens // 4
        if n < (excerpt_tokens or 1) or (most is not None and -(-n // segment_tokens) >= most):
            continue
        yield (
            TailDataset(tails, n, segment_tokens, excerpt_tokens),
            build_conditions(
                run, n, excerpt_tokens or segment_tokens, all_lengths=n == segment_tokens, untrained=untrained
            ),
        )
