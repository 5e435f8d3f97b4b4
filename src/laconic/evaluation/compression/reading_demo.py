"""Questions about a chapter: with its text, with a KV memory of an eighth of its positions, and without (`demo read`).

The chapter is "The Falling Star" of *The War of the Worlds* by H. G. Wells (1898, public domain; text of the Standard
Ebooks edition, CC0), in `falling_star.txt`. Each way to give it to the model is a condition. All answers are greedy.
"""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.compression.kv.config import KVCompressionConfig
from laconic.compression.kv.loss import build_loss_probes, measure_document_loss
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import DocumentReader
from laconic.console import ProgressFn
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.evaluation.report.page import PageDetails, PageSection, build_facts_table, render_page
from laconic.evaluation.tables import Column, Table, build_table
from laconic.experiment.from_recipe.cost import format_bytes, kv_bytes_per_position
from laconic.experiment.text_models.kv_compressor import (
    build_repeat_prompt,
    compress_text,
    encode_document,
    load_kv_memories,
)
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.experiment.text_models.prompts import PromptRow
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

CHAPTER_FILE = Path(__file__).with_name("falling_star.txt")
CONFIG = KVCompressionConfig("kvzip", keep=0.125)
MAX_ANSWER_TOKENS = 32
CHAT_QUESTION = "Answer this question about the text in a few words: {}"
PLAIN_QUESTION = "\n\nQuestion: {}\nAnswer:"
LEAD = (
    "A model answers questions about a chapter: without the text, with the full text, with a memory that keeps an "
    "eighth of the chapter's keys and values, and with the last eighth of its tokens."
)


class ChapterQuestion(NamedTuple):
    """A question, and the words that a right answer contains."""

    text: str
    answer: str

    def is_right(self, reply: str) -> bool:
        return re.search(rf"\b{re.escape(self.answer)}\b", reply, re.IGNORECASE) is not None


# Of about twenty questions that were tried, SmolLM2-135M answers these and few others right with the full text.
QUESTIONS = (
    ChapterQuestion("What is the name of the man who found the cylinder?", "Ogilvy"),
    ChapterQuestion("On which common did the meteorite fall?", "Horsell"),
    ChapterQuestion("Where did Henderson go to telegraph the news?", "railway station"),
)


class ReadingResult(NamedTuple):
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


class ReadingComparison(NamedTuple):
    """All conditions: no text, full text, memory, last part of the text; and what is common to them.

    Tokens are those of the chapter with the opening of the user message. `largest_head` is the number of slots of the
    KV head of the memory that keeps most.
    """

    questions: tuple[ChapterQuestion, ...]
    rows: tuple[ReadingResult, ...]
    tokens: int
    compression_seconds: float
    largest_head: int


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

    With a chat template, chapter and question form one user message.
    """
    chat = tokenizer.chat_template is not None
    ids, prefix = encode_document(tokenizer, chapter, chat)
    context = decoder.config.max_position_embeddings
    needed = len(ids) + 64 + MAX_ANSWER_TOKENS
    if needed > context:
        raise UsageError(
            f"the chapter has {len(ids):,} tokens, with a question and an answer {needed:,}; this model has a context "
            f"of {context:,}; choose another --model"
        )
    memory_path.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    compressed = compress_text(
        decoder, tokenizer, chapter, CONFIG, name=memory_path.stem, chat=chat, on_progress=on_progress
    )
    memory = compressed.memory
    memory.save(memory_path)
    seconds = time.perf_counter() - start
    form = CHAT_QUESTION if chat else PLAIN_QUESTION
    rows = [PromptRow(question.text, form.format(question.text)) for question in questions]
    prompts = [list(row) for row in LanguageModel(decoder, tokenizer).prepare(rows, memory).ids]
    document = torch.tensor([ids], device=decoder.device)
    conditions = build_conditions(decoder, tokenizer, document, prefix, memory, memory_path)
    with torch.no_grad():
        full = conditions[1].read()
        results: list[ReadingResult] = []
        probes = build_loss_probes(decoder, full, document, build_repeat_prompt(tokenizer), prefix)
        for i, condition in enumerate(conditions):
            on_progress(condition.name, i, len(conditions))
            replies = [answer_prompt(decoder, tokenizer, condition, prompt) for prompt in prompts]
            answers, first_tokens = zip(*replies, strict=True)
            correct = tuple(question.is_right(answer) for question, answer in zip(questions, answers, strict=True))
            loss = measure_document_loss(decoder, condition.read(), probes).repeat
            sizes = condition.positions, condition.num_bytes
            results.append(ReadingResult(condition.name, answers, correct, *sizes, first_tokens, loss))
    return ReadingComparison(tuple(questions), tuple(results), len(ids), seconds, memory.M)


def build_conditions(
    decoder: Decoder,
    tokenizer: Tokenizer,
    document: Int[Tensor, "1 N"],
    prefix: int,
    memory: KVMemory,
    memory_path: Path,
) -> list[Condition]:
    """Return the conditions; `prefix` tokens of a document open the user message, and every condition has them."""
    N = document.shape[1]
    reader = DocumentReader(decoder)
    opening = max(1, prefix)  # a model without a chat template begins with the first token
    recent = max(1, CONFIG.num_slots(N) - opening)
    last = torch.cat([document[:, :opening], document[:, N - recent :]], 1)
    position_bytes = kv_bytes_per_position(decoder.config, memory.keys[0].dtype)

    def load_memory() -> KVCache:
        return load_kv_memories([memory_path], decoder, tokenizer).to_cache()

    def text(name: str, ids: Int[Tensor, "1 n"]) -> Condition:
        return Condition(name, lambda: reader.read(ids), ids.shape[1], ids.shape[1] * position_bytes)

    stored = Condition("memory of an eighth", load_memory, float(memory.num_slots[0]), memory_path.stat().st_size)
    none = text("no text", document[:, :opening])
    last_part = text("last eighth of the text", last)
    return [none, text("full text", document), stored, last_part]


def answer_prompt(decoder: Decoder, tokenizer: Tokenizer, condition: Condition, prompt: list[int]) -> tuple[str, float]:
    """Answer a question from a cache that is read or loaded again; return the seconds to the first token too."""
    times: list[float] = []

    def record_time(row: int, token: int, text: str, logprob: float) -> None:
        times.append(time.perf_counter())

    config = GenerationConfig(max_tokens=MAX_ANSWER_TOKENS, return_state=False, on_token=record_time)
    start = time.perf_counter()
    reply = generate(decoder, tokenizer, input_ids=[prompt], state=condition.read(), config=config)[0]
    return " ".join((reply.text or "").split()), (times[0] if times else time.perf_counter()) - start


COST_COLUMNS = (
    Column("chapter", lambda row: row.name, is_text=True),
    Column("right answers", lambda row: f"{sum(row.correct)} of {len(row.correct)}"),
    Column("nats per token", lambda row: f"{row.loss:.2f}"),
    Column("positions", lambda row: f"{row.positions:,.0f}"),
    Column("bytes", lambda row: format_bytes(row.num_bytes)),
    Column("first token", lambda row: f"{median(row.first_token_seconds):.2f} s"),
)


def build_answers_table(comparison: ReadingComparison, index: int) -> Table:
    question = comparison.questions[index]
    columns: list[Column] = [
        Column("chapter", lambda row: row.name, is_text=True),
        Column("right", lambda row: "yes" if row.correct[index] else "no", is_text=True),
        Column("answer", lambda row: row.answers[index] or "–", is_text=True),
    ]
    return build_table(columns, comparison.rows, f"{question.text} ({question.answer})")


def build_sections(comparison: ReadingComparison) -> list[PageSection]:
    notes = [
        "An answer is right if it contains the words in parentheses. Three questions say little about a model, and "
        "SmolLM2-135M is small: of about twenty questions that were tried with the full text, it answered few right, "
        "and these are among them.",
        "nats per token: loss on four passages of the chapter that the model is asked to repeat. KVzip, which chose "
        "the memory, ranks keys by how much the model attends to them while it repeats the chapter.",
        f"positions: per KV head, on average, with the opening of the message. Heads of the memory differ in size: the "
        f"largest keeps {comparison.largest_head:,}. A memory in use takes as many bytes as its keys and values in the "
        "file.",
        "bytes: keys and values of the text, or the file of the memory.",
        f"first token: median; the text is read or the memory loaded each time. Writing the memory took "
        f"{comparison.compression_seconds:.1f} s, once.",
    ]
    answers = [build_answers_table(comparison, i) for i in range(len(comparison.questions))]
    return [
        PageSection("Results", [build_table(COST_COLUMNS, comparison.rows), *notes]),
        PageSection("Answers", answers),
    ]


def render_reading_page(
    comparison: ReadingComparison, title: str, chapter: str, facts: Sequence[tuple[str, str]]
) -> str:
    """Return the HTML page; `facts` are names and values of the run: model, threads, time."""
    sections = [
        *build_sections(comparison),
        PageSection("Run", [build_facts_table(facts)]),
        PageSection("Chapter", [PageDetails(title, chapter.strip().split("\n\n"))]),
    ]
    return render_page("Reading a chapter with an eighth of its memory", sections, [LEAD])
