"""Questions about a chapter: with its text, with a KV memory of an eighth of its positions, and without (`demo read`).

The chapter is "The Falling Star" of *The War of the Worlds* by H. G. Wells (1898, public domain; text of the Standard
Ebooks edition, CC0), in `falling_star.txt`. Each way to give it to the model is a condition. All answers are greedy.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.compression.kv.compress import KVCompressionConfig
from laconic.compression.kv.loss import LossProbes, build_loss_probes, measure_document_loss
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import DocumentReader
from laconic.console import ProgressFn
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.from_recipe.cost import kv_bytes_per_position
from laconic.experiment.text_models.kv_compressor import (
    build_repeat_prompt,
    compress_text,
    encode_document,
    encode_prompt,
    load_kv_memories,
)
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

CHAPTER_FILE = Path(__file__).with_name("falling_star.txt")
CONFIG = KVCompressionConfig("kvzip", keep=0.125)
MAX_ANSWER_TOKENS = 32
CHAT_QUESTION = "Answer this question about the text in a few words: {}"
PLAIN_QUESTION = "\n\nQuestion: {}\nAnswer:"


class ChapterQuestion(NamedTuple):
    """A question, and the words that a right answer contains."""

    text: str
    answer: str

    def is_right(self, reply: str) -> bool:
        """Return whether a reply contains the answer, in upper or lower case."""
        return re.search(rf"\b{re.escape(self.answer)}\b", reply, re.IGNORECASE) is not None


# Of about twenty questions that were tried, SmolLM2-135M answers these and few others right with the full text.
QUESTIONS = (
    ChapterQuestion("What is the name of the man who found the cylinder?", "Ogilvy"),
    ChapterQuestion("On which common did the meteorite fall?", "Horsell"),
    ChapterQuestion("Where did Henderson go to telegraph the news?", "railway station"),
)


@dataclass(frozen=True)
class ReadingResult:
    """Answers and cost of one condition.

    `positions` are those of the chapter that the model attends to, per KV head; `num_bytes` is the size of their keys
    and values, and of a memory that of its file. The time to the first token of a reply includes reading the text, or
    loading the memory, and reading the question. The loss is in nats per token, on passages that the model is asked to
    repeat.
    """

    name: str
    answers: tuple[str, ...]
    correct: tuple[bool, ...]
    positions: float
    num_bytes: int
    first_token_seconds: tuple[float, ...]
    loss: float


@dataclass(frozen=True)
class ReadingComparison:
    """All conditions: no text, full text, memory, last part of the text; and what is common to them.

    Tokens are those of the chapter with the opening of the user message. `largest_head` is the number of slots of the
    KV head of the memory that keeps most.
    """

    questions: tuple[ChapterQuestion, ...]
    results: tuple[ReadingResult, ...]
    num_tokens: int
    compression_seconds: float
    largest_head: int

    def to_json(self) -> dict[str, Any]:
        shared = {"tokens": self.num_tokens, "largest_head": self.largest_head}
        return shared | {
            "compression_seconds": round(self.compression_seconds, 3),
            "questions": [question._asdict() for question in self.questions],
            "rows": [vars(result) for result in self.results],
        }


class Condition(NamedTuple):
    """A way to give the chapter to the model: a function that returns its KV cache, and that cache's size."""

    name: str
    read: Callable[[], KVCache]
    positions: float
    num_bytes: int


def compare_reading(
    decoder: Decoder,
    tokenizer: Tokenizer,
    chapter: str,
    questions: Sequence[ChapterQuestion],
    memory_path: Path,
    on_progress: ProgressFn = lambda name, done, total: None,
) -> ReadingComparison:
    """Compress a chapter into a memory file, and answer questions about it under every condition.

    With a chat template, chapter and question form one user message. `on_progress` is called at the beginning of steps.
    """
    chat = tokenizer.chat_template is not None
    ids, prefix = encode_document(tokenizer, chapter, chat)
    context, needed = decoder.config.max_position_embeddings, len(ids) + 64 + MAX_ANSWER_TOKENS
    if needed > context:
        raise UsageError(
            f"the chapter has {len(ids):,} tokens, with a question and an answer {needed:,}; this model has a context "
            f"of {context:,}; choose another --model"
        )
    memory_path.parent.mkdir(parents=True, exist_ok=True)
    numbers, total = count(1), 2 + 4 * (len(questions) + 1)

    def begin(step: str) -> None:
        """Report the next step; no time left is estimated, since steps differ too much."""
        on_progress(f"step {next(numbers)} of {total}: {step}", 0, 0)

    begin("compressing the chapter")
    start = time.perf_counter()
    memory = compress_text(
        decoder, tokenizer, chapter, CONFIG, name=memory_path.stem, chat=chat, on_progress=on_progress
    ).memory
    memory.save(memory_path)
    seconds = time.perf_counter() - start
    form = CHAT_QUESTION if chat else PLAIN_QUESTION
    prompts = [encode_prompt(tokenizer, memory, form.format(question.text)) for question in questions]
    device = decoder.token_embedding.weight.device
    document = torch.tensor([ids], device=device)
    reader = DocumentReader(decoder)
    conditions = build_conditions(reader, tokenizer, document, prefix, memory, memory_path)
    begin("choosing passages to repeat")
    with torch.no_grad():
        full = reader.read(document)
        probes = build_loss_probes(decoder, full, document, build_repeat_prompt(tokenizer), prefix)
        results = [
            run_condition(decoder, tokenizer, condition, list(zip(questions, prompts, strict=True)), probes, begin)
            for condition in conditions
        ]
    return ReadingComparison(tuple(questions), tuple(results), len(ids), seconds, memory.M)


def build_conditions(
    reader: DocumentReader,
    tokenizer: Tokenizer,
    document: Int[Tensor, "1 N"],
    prefix: int,
    memory: KVMemory,
    memory_path: Path,
) -> list[Condition]:
    """Return the conditions; `prefix` tokens of a document open the user message, and every condition has them."""
    N, decoder = document.shape[1], reader.decoder
    opening = max(1, prefix)  # a model without a chat template begins with the first token
    recent = max(1, CONFIG.num_slots(N) - opening)
    last = torch.cat([document[:, :opening], document[:, N - recent :]], 1)
    position_bytes = kv_bytes_per_position(decoder.config, memory.keys[0].dtype)

    def load_memory() -> KVCache:
        return load_kv_memories([memory_path], decoder, tokenizer).to_cache()

    def text(name: str, ids: Int[Tensor, "1 n"]) -> Condition:
        return Condition(name, lambda: reader.read(ids), ids.shape[1], ids.shape[1] * position_bytes)

    stored = Condition("memory of an eighth", load_memory, float(memory.num_slots[0]), memory_path.stat().st_size)
    none, last_part = text("no text", document[:, :opening]), text("last eighth of the text", last)
    return [none, text("full text", document), stored, last_part]


def run_condition(
    decoder: Decoder,
    tokenizer: Tokenizer,
    condition: Condition,
    questions: Sequence[tuple[ChapterQuestion, list[int]]],
    probes: LossProbes,
    begin: Callable[[str], None],
) -> ReadingResult:
    """Answer every question, each from a cache that is read or loaded again, and measure the loss."""
    answers, seconds = list[str](), list[float]()
    for index, (_, prompt) in enumerate(questions, 1):
        begin(f"{condition.name}, question {index}")
        times = list[float]()

        def record_time(row: int, token: int, text: str, logprob: float, times: list[float] = times) -> None:
            times.append(time.perf_counter())

        config = GenerationConfig(max_tokens=MAX_ANSWER_TOKENS, return_state=False, on_token=record_time)
        start = time.perf_counter()
        reply = generate(decoder, tokenizer, input_ids=[prompt], state=condition.read(), config=config)[0]
        seconds.append((times[0] if times else time.perf_counter()) - start)
        answers.append(" ".join((reply.text or "").split()))
    begin(f"{condition.name}, loss")
    loss = measure_document_loss(decoder, condition.read(), probes).repeat
    correct = tuple(question.is_right(answer) for (question, _), answer in zip(questions, answers, strict=True))
    size = condition.positions, condition.num_bytes
    return ReadingResult(condition.name, tuple(answers), correct, *size, tuple(seconds), loss)
