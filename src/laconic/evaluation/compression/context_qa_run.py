"""A reader asked: questions about contexts (E4), and labels behind demonstrations (E3); a line of JSON for each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic import rng
from laconic.compression import segment as compression_segment
from laconic.compression.memory import SummaryMemory
from laconic.data.reasoning.dataset import pad_rows
from laconic.errors import InputError
from laconic.evaluation.compression.context_qa_data import ContextQuestion, group_by_context
from laconic.evaluation.compression.icl_data import LabelledText, order_demonstrations
from laconic.experiment.compressor import TextCompressor
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.storage.strict_json import to_canonical_json

MAX_DEMO_SEGMENTS = 3  # segments of demonstrations, at most
TEXT_DEMO_TOKENS = (150, 750)  # tokens of demonstrations as text
NUM_ORDERS = 5  # orders of demonstrations
NULL_INPUT = "N/A"  # in place of a prompt's input, for calibration
LABEL_BATCH_SIZE = 64  # options read at once


@dataclass
class ContextQA:
    """Questions about contexts; with `aware` a question stands before its context when that is compressed.

    Questions about one context stand together, so that it is compressed once.
    """

    compressor: TextCompressor
    questions: Sequence[ContextQuestion]
    query_aware: bool
    cached_memory: tuple[str, SummaryMemory] | None = None

    @cached_property
    def item_order(self) -> list[tuple[int, int]]:
        """The place of each question, and the number of its context."""
        return [(i, n) for n, places in enumerate(group_by_context(self.questions).values()) for i in places]

    def run_items(self, indices: range) -> list[str]:
        """What is said without context, behind vectors, behind as many last tokens, and behind all where it fits."""
        return [to_canonical_json(self.run_item(*self.item_order[i])) + "\n" for i in indices]

    def run_item(self, i: int, number: int) -> dict[str, Any]:
        """One question; `held` are the vectors, or tokens of context, that stood before it."""
        row = self.questions[i]
        asked = f"{row.question}\n{row.answer_prefix}"
        memory = self.compress_context(f"{row.question}\n{row.context}" if self.query_aware else row.context)
        context, n = (
            self.compressor.tokenizer.encode(f"{row.context}\n", add_special_tokens=False),
            int(memory.num_vectors[0]),
        )
        (behind,) = self.compressor.generate([asked], memory, config=GenerationConfig(max_tokens=row.max_new_tokens))
        found = [
            ("none", self.generate_after_ids([], asked, row.max_new_tokens), 0),
            ("compressed", behind.text, n),
            ("truncated", self.generate_after_ids(context[-n:], asked, row.max_new_tokens), min(n, len(context))),
            ("full", self.generate_after_ids(context, asked, row.max_new_tokens), len(context)),
        ]
        ways = [{"way": way, "said": said, "held": held} for way, said, held in found if said is not None]
        return {"id": i, "context": number, "task": row.task, "answers": row.answers, "ways": ways}

    def compress_context(self, text: str) -> SummaryMemory:
        """The vectors of a text; of one that was just asked about the same."""
        if self.cached_memory is None or self.cached_memory[0] != text:
            self.cached_memory = (text, self.compressor.compress([text]))
        return self.cached_memory[1]

    def generate_after_ids(self, context_ids: Sequence[int], prompt: str, max_tokens: int) -> str | None:
        """What is said behind ids of a text, as `Reader.generate` says it; None where the model has no room for them.

        Special ids that a tokenizer puts before a prompt come first.
        """
        reader = self.compressor
        own, bare = reader.tokenizer.encode(prompt), reader.tokenizer.encode(prompt, add_special_tokens=False)
        ids = [*own[: len(own) - len(bare)], *context_ids, *bare]
        if context_ids and len(ids) + max_tokens > reader.decoder.config.max_position_embeddings:
            return None
        with reader.reading_mode():
            (found,) = generate(
                reader.decoder,
                reader.tokenizer,
                input_ids=[ids],
                config=GenerationConfig(eos_token_ids=reader.stop_token_ids, max_tokens=max_tokens),
            )
        return found.text


@dataclass(frozen=True)
class ICLItem:
    """A row to be labelled, behind demonstrations in the order of a seed."""

    split: str
    seed: int
    balanced: bool
    row: LabelledText


class DemonstrationContext(NamedTuple):
    """What stands before a prompt: vectors, and ids of text."""

    condition: str
    memory: SummaryMemory
    ids: list[int]

    @property
    def size(self) -> int:
        """Vectors and tokens."""
        return int(self.memory.num_vectors[0]) + len(self.ids)


@dataclass(frozen=True)
class ICLClassification:
    """Rows to be labelled, and those that are demonstrations; the same rows for every run."""

    compressor: TextCompressor
    demonstrations: Sequence[LabelledText]
    test_rows: Mapping[str, Sequence[LabelledText]]

    @cached_property
    def labels(self) -> list[str]:
        """All labels."""
        return sorted({row.label for rows in (self.demonstrations, *self.test_rows.values()) for row in rows})

    @cached_property
    def label_ids(self) -> list[list[int]]:
        """Each label as ids."""
        return [self.encode(f" {option}") for option in self.labels]

    @cached_property
    def items(self) -> list[ICLItem]:
        """Every row behind every order of demonstrations; those of an order stand together."""
        return [
            ICLItem(part, seed, balanced, row)
            for balanced in (False, True)
            for seed in range(NUM_ORDERS)
            for part, rows in self.test_rows.items()
            for row in rows
        ]

    @cached_property
    def cached_contexts(self) -> dict[tuple[int, bool], list[tuple[DemonstrationContext, list[float]]]]:
        """Of the last order of demonstrations: what stands before a prompt, and nats of each label without inputs."""
        return {}

    def contexts_for_order(self, seed: int, balanced: bool) -> list[tuple[DemonstrationContext, list[float]]]:
        """The ways of an order of demonstrations, each with nats of every label behind a prompt without inputs."""
        key = (seed, balanced)
        if key not in self.cached_contexts:
            self.cached_contexts.clear()
            nothing = self.encode(label_prompt(NULL_INPUT))
            self.cached_contexts[key] = [
                (shots, self.label_nlls(shots, nothing)) for shots in self.build_contexts(seed, balanced)
            ]
        return self.cached_contexts[key]

    def build_contexts(self, seed: int, balanced: bool) -> list[DemonstrationContext]:
        """No demonstrations; vectors of 1, 2, 3 segments of them, as many last tokens of those, and all their text.

        Then the plain text of the paper's lengths; texts that the model has no room for are left out.
        """
        order, method = order_demonstrations(self.demonstrations, seed, balanced=balanced), self.compressor.method
        texts = pack_rows(
            (self.encode(f"{label_prompt(row.text)} {row.label}\n\n") for row in order),
            self.compressor.segment_tokens,
            MAX_DEMO_SEGMENTS,
        )
        none = memory = method.segment_model.empty_memory(1)
        found, before = [DemonstrationContext("zero-shot", none, [])], list[int]()
        for k, text in enumerate(texts, 1):
            memory = method.compress(self.to_tensor([text]), None, memory)
            method.segment_model.check_fits(memory, self.max_prompt_tokens, compresses=False)
            before, n, named = [*before, *text], int(memory.num_vectors[0]), f"{k} segment{'s' * (k > 1)}"
            found += [
                DemonstrationContext(f"vectors of {named}", memory, []),
                DemonstrationContext(f"last tokens of {named}", none, before[-n:]),
            ]
            found += [DemonstrationContext(f"text of {named}", none, before)]
        for n in TEXT_DEMO_TOKENS:
            ids = pack_rows((self.encode(f"{label_prompt(row.text)} {row.label}\n\n") for row in order), n, 1)[0]
            found.append(DemonstrationContext(f"text of {n} tokens", none, ids))
        room = (
            self.compressor.decoder.config.max_position_embeddings
            - self.max_prompt_tokens
            - method.segment_model.prefix_length
        )
        return [shots for shots in found if len(shots.ids) <= room]

    @cached_property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt with the longest label."""
        rows = [row for rows in self.test_rows.values() for row in rows]
        return max(len(self.encode(label_prompt(row.text))) for row in rows) + max(map(len, self.label_ids))

    def run_items(self, indices: range) -> list[str]:
        """Nats of every label of some rows, in every way, and without the row's text."""
        return [to_canonical_json(self.run_item(self.items[i], i)) + "\n" for i in indices]

    def run_item(self, item: ICLItem, i: int) -> dict[str, Any]:
        """One row."""
        asked = self.encode(label_prompt(item.row.text))
        ways = [
            {"way": shots.condition, "nats": self.label_nlls(shots, asked), "without": without, "held": shots.size}
            for shots, without in self.contexts_for_order(item.seed, item.balanced)
        ]
        return {
            "id": i, "part": item.split, "seed": item.seed, "balanced": item.balanced, "ways": ways,
            "tokens": [len(end) for end in self.label_ids], "label": self.labels.index(item.row.label),
        }  # fmt: skip

    @torch.inference_mode()
    def label_nlls(self, context: DemonstrationContext, prompt_ids: Sequence[int]) -> list[float]:
        """Summed nats of each label behind a prompt, which is read once."""
        unit, decoder, text = (
            self.compressor.method.segment_model,
            self.compressor.decoder,
            self.to_tensor([[*context.ids, *prompt_ids]]),
        )
        live, found = torch.ones_like(text, dtype=torch.bool), list[float]()
        at = compression_segment.build_memory_prompt(
            decoder, unit.config, context.memory, unit.bos_token_id, live
        ).position_ids
        with self.compressor.reading_mode():
            seen = compression_segment.read_segment(
                decoder, unit.config, context.memory, decoder.embed(text), live, None, unit.bos_token_id
            )
            for i in range(0, len(self.label_ids), LABEL_BATCH_SIZE):
                ids, live = (x.to(text.device) for x in pad_rows(self.label_ids[i : i + LABEL_BATCH_SIZE]))
                n, T = ids.shape
                places = None if at is None else (at[:, -1:] + 1 + torch.arange(T, device=ids.device)).expand(n, -1)
                after = decoder(decoder.embed(ids), seen.cache.repeat_rows(n), live=live, positions=places).hidden
                states = torch.cat([seen.text_states[:, -1:].expand(n, -1, -1), after[:, :-1]], 1)
                each = decoder.logits(states).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
                found += (-each.masked_fill(~live, 0.0).double().sum(1)).tolist()
        return [round(x, 6) for x in found]

    def encode(self, text: str) -> list[int]:
        """A text as ids, none of them special."""
        return self.compressor.tokenizer.encode(text, add_special_tokens=False)

    def to_tensor(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Rows of one length."""
        return torch.tensor(rows, device=self.compressor.decoder.token_embedding.weight.device)


def label_prompt(text: str) -> str:
    """What is asked of a text."""
    return f"{text}\nlabel:"


def pack_rows(rows: Iterable[list[int]], max_tokens: int, max_segments: int) -> list[list[int]]:
    """Whole rows, as many as fit, in segments of at most `size` ids, `most` of them; no more rows are taken than that.

    Raises `BadInput` (66) where not one row fits.
    """
    found: list[list[int]] = [[]]
    for row in rows:
        if len(row) > max_tokens:
            continue
        if len(found[-1]) + len(row) > max_tokens:
            if len(found) == max_segments:
                break
            found.append([])
        found[-1] = found[-1] + row
    if not found[0]:
        raise InputError(f"demonstrations: none has {max_tokens} tokens or fewer; take a run of longer segments")
    return found


def split_demonstrations(
    rows: Sequence[LabelledText], limit: int
) -> tuple[list[LabelledText], dict[str, list[LabelledText]]]:
    """Demonstrations, and `rows` that are asked as valid and as test, drawn from all over, the same ones every time.

    What a file names no rows for is taken out of those for training.
    """
    train = sample_rows([row for row in rows if row.split in ("train", None)], len(rows))
    n = min(limit, len(train) // 3)
    asked: dict[str, list[LabelledText]] = {}
    for part in ("valid", "test"):
        own = [row for row in rows if row.split == part]
        asked[part] = sample_rows(own, limit) if own else train[:n]
        train = train if own else train[n:]
    return train, asked


def sample_rows(rows: Sequence[LabelledText], limit: int) -> list[LabelledText]:
    """Some of the rows, from all over, the same ones every time."""
    places = rng.permuted_index(0, 0, np.arange(min(limit, len(rows))), len(rows))
    return [rows[i] for i in places.tolist()]
