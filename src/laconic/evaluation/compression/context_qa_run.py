"""Run context question answering and in-context classification with a compressor."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from laconic import rng
from laconic.batches.padding import pad_rows
from laconic.compression.memory import SummaryMemory
from laconic.compression.segment import build_memory_prompt, read_segment
from laconic.console import pluralize
from laconic.data.strict_jsonl import read_rows
from laconic.errors import InputError
from laconic.evaluation.compression.context_qa_data import ContextQuestion, load_context_questions
from laconic.evaluation.labelled_texts import LabelledText, load_labelled_texts, normalise_text, order_demonstrations
from laconic.evaluation.results_store import EvalItem, EvalJob
from laconic.evaluation.suite import EvalRequest, describe_evaluation
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.text_models.compressor import TextCompressor, as_compressor
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate

DEFAULT_LABEL_ROWS = 100  # texts to label, for validation and for testing each
MAX_DEMO_SEGMENTS = 3
TEXT_DEMO_TOKENS = (150, 750)  # lengths of demonstrations as text, those of the paper
NUM_ORDERS = 5  # orders of demonstrations
NULL_INPUT = "N/A"  # replaces the text, for calibration
LABEL_BATCH_SIZE = 64


def build_file_job(request: EvalRequest, run: LoadedRun, file: Path) -> EvalJob:
    """Return the evaluation of a run on a file of context questions or labelled texts."""
    if not file.is_file():
        raise InputError(f"--tasks {file}: no such file; give a file of rows, or a held-out set such as test")
    compressor, kind = as_compressor(run), detect_kind(file)
    variant = {"kind": kind}
    if kind == "answers":
        questions = load_context_questions(file)[: request.limit]
        job = ContextQA(compressor, questions)
        num_items, batch_size, order = len(questions), 1, job.order
    else:
        rows = load_labelled_texts(file)
        job = ICLClassification(compressor, *split_demonstrations(rows, request.limit or DEFAULT_LABEL_ROWS))
        num_items, batch_size, order = len(job.items), 8, None
    key = {"data": sha256(file.read_bytes()).hexdigest()}
    metadata = describe_evaluation(run, "context_qa", file.stem, limit=request.limit, variant=variant, key=key)
    return EvalJob(metadata, num_items, lambda indices: [[job.run_item(i)] for i in indices], batch_size, order)


def detect_kind(file: Path) -> str:
    """Detect from the first row whether a file has context questions ("answers") or labelled texts ("labels")."""
    return read_rows(file, lambda row, name: "answers" if "context" in row else "labels", max_rows=1)[0][0]


@dataclass
class ContextQA:
    """Answers questions about contexts."""

    compressor: TextCompressor
    questions: Sequence[ContextQuestion]

    @cached_property
    def context_index(self) -> list[int]:
        contexts = {context: n for n, context in enumerate(dict.fromkeys(row.context for row in self.questions))}
        return [contexts[row.context] for row in self.questions]

    @property
    def order(self) -> list[int]:
        """The questions grouped by context, so that each context is compressed once."""
        return sorted(range(len(self.questions)), key=lambda i: self.context_index[i])

    def run_item(self, i: int) -> EvalItem:
        """Answer a question without context, after vectors, after as many last tokens, and after the whole text."""
        row = self.questions[i]
        prompt, max_tokens = f"{row.question}\n{row.answer_prefix}", row.max_new_tokens
        memory = self.compress_context(row.context)
        context = self.compressor.tokenizer.encode(f"{row.context}\n", add_special_tokens=False)
        n = int(memory.num_vectors[0])
        (compressed,) = self.compressor.generate([prompt], GenerationConfig(max_tokens=max_tokens), memory=memory)
        outputs = [
            ("none", self.generate_after_ids([], prompt, max_tokens), 0),
            ("compressed", compressed.text, n),
            ("truncated", self.generate_after_ids(context[-n:], prompt, max_tokens), min(n, len(context))),
            ("full", self.generate_after_ids(context, prompt, max_tokens), len(context)),
        ]
        question = {"task": row.task, "question": row.question, "answers": list(row.answers)}
        shared = {"context": self.context_index[i], **question}
        written = [(name, {"output": text, "context_size": n}) for name, text, n in outputs if text is not None]
        return EvalItem(str(i), {name: shared | output for name, output in written})

    @cached_property
    def compress_context(self) -> Callable[[str], SummaryMemory]:
        """A function that compresses a text; its last result is cached."""
        return lru_cache(maxsize=1)(lambda text: self.compressor.compress([text]))

    def generate_after_ids(self, context_ids: Sequence[int], prompt: str, max_tokens: int) -> str | None:
        """Generate after context ids and a prompt, as `TextCompressor.generate` does; None if they do not fit.

        Special ids that the tokenizer puts before a prompt precede the context.
        """
        compressor, tokenizer = self.compressor, self.compressor.tokenizer
        ids = [*tokenizer.encode(""), *context_ids, *tokenizer.encode(prompt, add_special_tokens=False)]
        if context_ids and len(ids) + max_tokens > compressor.decoder.config.max_position_embeddings:
            return None
        config = GenerationConfig(max_tokens=max_tokens, eos_token_ids=compressor.stop_token_ids)
        with compressor.reading_mode():
            (output,) = generate(compressor.decoder, compressor.tokenizer, input_ids=[ids], config=config)
        return output.text


@dataclass(frozen=True)
class ICLItem:
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

    @property
    def size(self) -> int:
        """Number of vectors and tokens."""
        return int(self.memory.num_vectors[0]) + len(self.ids)


@dataclass
class ICLClassification:
    """Scores the labels of texts, which are given by split, after demonstrations."""

    compressor: TextCompressor
    demonstrations: Sequence[LabelledText]
    test_rows: Mapping[str, Sequence[LabelledText]]

    @cached_property
    def labels(self) -> list[str]:
        return sorted({row.label for rows in (self.demonstrations, *self.test_rows.values()) for row in rows})

    @cached_property
    def label_ids(self) -> list[list[int]]:
        return [self.encode(f" {label}") for label in self.labels]

    @cached_property
    def items(self) -> list[ICLItem]:
        """Every text after every order of demonstrations, grouped by order."""
        return [
            ICLItem(split, seed, balanced, row)
            for balanced in (False, True)
            for seed in range(NUM_ORDERS)
            for split, rows in self.test_rows.items()
            for row in rows
        ]

    @cached_property
    def contexts_for_order(self) -> Callable[[int, bool], list[tuple[DemonstrationContext, list[float]]]]:
        """A function for the contexts of an order, with the labels' nats after an empty input; the last are cached."""
        null_ids = self.encode(label_prompt(NULL_INPUT))
        return lru_cache(maxsize=1)(
            lambda seed, balanced: [(x, self.label_nlls(x, null_ids)) for x in self.build_contexts(seed, balanced)]
        )

    def build_contexts(self, seed: int, balanced: bool) -> list[DemonstrationContext]:
        """Build the contexts of an order of demonstrations.

        These are: no demonstrations; vectors of one, two and three segments, as many last tokens of them, and their
        whole text; and text of the paper's lengths. Texts and segments that do not fit the model are left out.
        """
        order, method = order_demonstrations(self.demonstrations, seed, balanced=balanced), self.compressor.method
        demos = [self.encode(f"{label_prompt(row.text)} {row.label}\n\n") for row in order]
        segment_tokens = self.compressor.segment_tokens
        segments = pack_rows(demos, segment_tokens, MAX_DEMO_SEGMENTS)[: method.max_segments(segment_tokens)]
        if not segments:
            raise InputError(f"no demonstration has {segment_tokens} tokens or fewer; use a run with longer segments")
        none = memory = method.segment_model.empty_memory(1)
        contexts, text = [DemonstrationContext("zero-shot", none, [])], list[int]()
        for k, segment in enumerate(segments, 1):
            memory = method.compress(self.to_tensor([segment]), None, memory)
            method.segment_model.check_fits(memory, self.max_prompt_tokens, compresses=False)
            text, n, name = [*text, *segment], int(memory.num_vectors[0]), pluralize(k, "segment")
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

    @cached_property
    def max_prompt_tokens(self) -> int:
        """Number of tokens of the longest prompt with the longest label."""
        rows = [row for rows in self.test_rows.values() for row in rows]
        longest = max(len(self.encode(label_prompt(row.text))) for row in rows)
        return longest + max(map(len, self.label_ids))

    def run_item(self, i: int) -> EvalItem:
        """Score every label of a text under every condition, with and without the text."""
        item = self.items[i]
        prompt_ids = self.encode(label_prompt(item.row.text))
        shared = {name: getattr(item, name) for name in ("split", "order_seed", "balanced")}
        shared |= {"label": self.labels.index(item.row.label), "label_tokens": [len(ids) for ids in self.label_ids]}
        conditions: dict[str, dict[str, Any]] = {}
        for context, null_nll in self.contexts_for_order(item.order_seed, item.balanced):
            metrics = {"label_nll": self.label_nlls(context, prompt_ids), "null_nll": null_nll}
            conditions[context.condition] = shared | metrics | {"context_size": context.size}
        return EvalItem(str(i), conditions)

    @torch.inference_mode()
    def label_nlls(self, context: DemonstrationContext, prompt_ids: Sequence[int]) -> list[float]:
        """Compute the summed nats of each label after a context and a prompt, which is run once."""
        model, decoder = self.compressor.method.segment_model, self.compressor.decoder
        input_ids = self.to_tensor([[*context.ids, *prompt_ids]])
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        memory, bos_token_id = context.memory, model.bos_token_id
        prompt_positions = build_memory_prompt(decoder, model.config, memory, bos_token_id, mask).position_ids
        nlls: list[float] = []
        with self.compressor.reading_mode():
            embeds = decoder.embed(input_ids)
            output = read_segment(decoder, model.config, memory, embeds, mask, bos_token_id)
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
        return torch.tensor(rows, device=self.compressor.decoder.token_embedding.weight.device)


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


def split_demonstrations(
    rows: Sequence[LabelledText], limit: int
) -> tuple[list[LabelledText], dict[str, list[LabelledText]]]:
    """Split texts into demonstrations, and `limit` texts to label for validation and for testing.

    A split that no row names is taken from the training rows. Demonstrations whose text is to be labelled are left out.
    """

    def sample(split: str, limit: int | None = None) -> list[LabelledText]:
        named = [row for row in rows if (row.split or "train") == split]
        return [named[i] for i in rng.permutation(len(named), 0, limit=limit)]

    train = sample("train")
    n = min(limit, len(train) // 3)
    test_rows: dict[str, list[LabelledText]] = {}
    for split in ("valid", "test"):
        test_rows[split] = sample(split, limit)
        if not test_rows[split]:
            test_rows[split], train = train[:n], train[n:]
    held_out = {normalise_text(row.text) for some in test_rows.values() for row in some}
    train = [row for row in train if normalise_text(row.text) not in held_out]
    counts = [len(train), *map(len, test_rows.values())]
    if not all(counts):
        raise InputError(
            f"{len(rows)} rows give {counts[0]} demonstrations, {counts[1]} texts for validation and {counts[2]} for "
            "testing; give more rows, or other splits"
        )
    return train, test_rows
