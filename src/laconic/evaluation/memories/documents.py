"""Documents that are compressed, and what is scored after them: continuation, copied passages, needles, questions."""

import random
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from laconic.config.data import TextConfig
from laconic.console import pluralize
from laconic.data.documents.load import read_documents
from laconic.data.tokenizer import Tokenizer
from laconic.errors import InputError
from laconic.evaluation.context_questions import ContextQuestion, load_questions
from laconic.evaluation.suite import CHARACTERS_PER_TOKEN

CONTINUATION_TOKENS = 64  # scored after the document
PASSAGE_TOKENS, NUM_PASSAGES = 48, 2  # scored of each copied passage
LEAST_TOKENS = 2 * PASSAGE_TOKENS + CONTINUATION_TOKENS  # of a text
LEAD_TOKENS = 8  # of the continuation, and of a passage, that precede a copied passage
NEEDLES = (
    ("The captain's dog is called {}.", "What is the captain's dog called?", "Bruno Jasper Misty Rufus Daisy Oscar"),
    ("The key is hidden under the {}.", "What is the key hidden under?", "carpet mirror piano stove statue ladder"),
    ("Doctor Marlow was born in {}.", "Where was Doctor Marlow born?", "Lisbon Vienna Dublin Geneva Prague Oslo"),
    ("The new carriage is painted {}.", "What color is the new carriage?", "purple yellow orange silver green white"),
)


class Probe(NamedTuple):
    """Ids to read after a document; the last `num_scored` are scored."""

    ids: list[int]
    num_scored: int


class ProbedDocument(NamedTuple):
    """Ids of a document, the probes of each task, and the number of questions whose answer it does not have."""

    name: str
    ids: list[int]
    probes: dict[str, list[Probe]]
    num_left_out: int


def load_texts(documents: str | None, questions: Sequence[ContextQuestion]) -> dict[str, str]:
    """Return texts by name: of a file whose rows of one book form a text, and the contexts of questions."""
    loaded = [] if documents is None else read_documents(documents, TextConfig(document_field=None))[0]
    texts = {document.name: document.text for document in loaded}
    missing = next((q.context for q in questions if q.is_document_name and q.context not in texts), None)
    if missing is not None:
        known = ", ".join(islice(texts, 3)) or "none, without --documents"
        raise InputError(f"question about document {missing}: there is no such document; there are {known}")
    return texts | {q.context: q.context for q in questions if not q.is_document_name}


def load_probed_documents(
    tokenizer: Tokenizer, documents: str | None, questions: str | None, num_tokens: int, limit: int | None
) -> tuple[list[ProbedDocument], tuple[str, ...]]:
    """Load the first documents of `laconic evaluate --tasks memories` that are long enough, cut to `num_tokens`.

    Without a file of documents, they are the contexts of the questions. If none is long enough, those that questions
    are about are loaded, with questions alone. Notes say what was left out.
    """
    rows = [] if questions is None else load_questions(questions)
    whole, short = list[ProbedDocument](), list[ProbedDocument]()
    for i, (name, text) in enumerate(load_texts(documents, rows).items(), 1):
        about = [row for row in rows if row.context == name]
        document = probe_text(tokenizer, f"text {i}" if name == text else name, text, num_tokens, about)
        (whole if "continuation" in document.probes else short).append(document)
        if len(whole) == limit:
            break
    loaded = whole or [document for document in short if document.probes][:limit]
    if not loaded:
        raise InputError(
            f"the texts, cut to {num_tokens:,} tokens (--tokens), are too short: needles, {NUM_PASSAGES} copied "
            f"passages and a continuation take more than {LEAST_TOKENS} tokens, and no question can be answered; give "
            "longer texts or a larger --tokens, or --questions about these texts"
        )
    notes = list[str]()
    if not whole:
        needed = f"texts of {LEAST_TOKENS} tokens or more"
        notes.append(f"questions alone: needles, copied passages and a continuation need {needed}")
    elif short:
        notes.append(f"skipped {pluralize(len(short), 'document')} of fewer than {LEAST_TOKENS} tokens")
    if num_left_out := sum(document.num_left_out for document in whole or short):
        left_out = pluralize(num_left_out, "question")
        notes.append(f"left out {left_out} whose answer is not in the document, cut to {num_tokens:,} tokens")
    return loaded, tuple(notes)


def build_needles(tokenizer: Tokenizer, name: str) -> tuple[list[tuple[str, str, str]], list[list[int]]]:
    """Return the needles of a document, fact, question and value, and the ids of their sentences."""
    source = random.Random(name)
    needles = [(fact, question, source.choice(values.split())) for fact, question, values in NEEDLES]
    source.shuffle(needles)
    return needles, [encode(tokenizer, f" {fact.format(value)}") for fact, _, value in needles]


def probe_text(
    tokenizer: Tokenizer, name: str, text: str, num_tokens: int, questions: Sequence[ContextQuestion]
) -> ProbedDocument:
    """Return the document that begins a text, with needles inserted after sentences that are spread over it.

    If the text, or `num_tokens`, is too short for needles and passages, it has the questions alone.
    """
    ids = tokenizer.encode(text[: (num_tokens + CONTINUATION_TOKENS) * CHARACTERS_PER_TOKEN])
    needles, inserts = build_needles(tokenizer, name)
    end = min(num_tokens, len(ids) - CONTINUATION_TOKENS + sum(map(len, inserts))) - sum(map(len, inserts))
    document = ids[:num_tokens]
    probes: dict[str, list[Probe]] = {}
    if end >= 2 * PASSAGE_TOKENS:
        continuation = ids[end : end + CONTINUATION_TOKENS]
        document = insert_ids(tokenizer, ids[:end], inserts)
        starts = [(2 * i + 1) * (len(document) - PASSAGE_TOKENS) // (2 * NUM_PASSAGES) for i in range(NUM_PASSAGES)]
        lead = continuation[:LEAD_TOKENS]  # a passage does not continue the document
        passages = [[*lead, *document[start - LEAD_TOKENS : start + PASSAGE_TOKENS]] for start in starts]
        probes = {
            "continuation": [Probe(continuation, len(continuation) - 1)],
            "passages": [Probe(passage, PASSAGE_TOKENS) for passage in passages],
            "needles": [
                ask_question(tokenizer, question, fact.partition(" {")[0], value) for fact, question, value in needles
            ],
        }
    read = tokenizer.decode(document)
    about = [
        ask_question(tokenizer, q.question, q.answer_prefix, q.answers[0])
        for q in questions
        if q.answers[0].strip() in read
    ]
    return ProbedDocument(name, document, probes | ({"questions": about} if about else {}), len(questions) - len(about))


def insert_ids(tokenizer: Tokenizer, ids: Sequence[int], inserts: Sequence[Sequence[int]]) -> list[int]:
    """Insert ids after sentences that are spread evenly over a text."""
    document = list[int]()
    start = 0
    for i, insert in enumerate(inserts):
        stop = (i + 1) * len(ids) // (len(inserts) + 1)
        stop = next((n for n in range(stop, len(ids)) if tokenizer.decode([ids[n - 1]]).endswith(".")), stop)
        document = [*document, *ids[start:stop], *insert]
        start = stop
    return [*document, *ids[start:]]


def ask_question(tokenizer: Tokenizer, question: str, answer_prefix: str, answer: str) -> Probe:
    """Return a question whose answer is scored after its prefix."""
    prefix = f" {answer_prefix.strip()}" if answer_prefix.strip() else ""
    prompt = f"\n\nQuestion: {question}\nAnswer:{prefix}"
    before, whole = (encode(tokenizer, text) for text in (prompt, f"{prompt} {answer.strip()}"))
    common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    return Probe(whole, len(whole) - common)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
