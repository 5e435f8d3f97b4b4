"""Compare memories of documents that need no training of the model, at equal numbers of positions and of bytes.

A document is the beginning of a book chapter with four invented facts. Measured on top of each memory: nats per token
on the text that follows, and on passages copied from the document; nats and accuracy of the answers to questions about
the facts. Results are appended to a file, so that a command continues where another ended; `--page` writes the page.

    python benchmarks/kv_memories.py smollm2 TEXTS.jsonl --tokens 512 --documents 8 --results kv.jsonl
    python benchmarks/kv_memories.py smollm2 TEXTS.jsonl --tokens 512 --documents 1 --results kv.jsonl --fit 100
    python benchmarks/kv_memories.py smollm2 TEXTS.jsonl --results kv.jsonl --first-token 4000
    python benchmarks/kv_memories.py smollm2 TEXTS.jsonl --tokens 512 --documents 2 --results kv.jsonl --kvpress
    python benchmarks/kv_memories.py --results kv.jsonl --page docs/kv_memories.md
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from benchmarks.kv_memories_kvpress import load_pipeline_model, select_with_kvpress
from benchmarks.kv_memories_page import write_page
from laconic import Decoder, KVCache, load_tokenizer
from laconic.compression.cartridge import CartridgeConfig, fit_cartridge
from laconic.compression.kv_compress import KVCompressionConfig, compress_document
from laconic.compression.kv_memory import KVMemory
from laconic.compression.kv_selection import DocumentReader
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.cartridge import build_requests
from laconic.experiment.kv_compressor import build_repeat_prompt
from laconic.models.weights import find_checkpoint

FOLLOWING, PASSAGE, PASSAGES, LEAD = 64, 48, 2, 8  # tokens scored after the document, and of each copied passage
DIVISORS = (16, 8, 4)  # the document's tokens per position
METHODS = {
    "kvzip": KVCompressionConfig("kvzip", keep=1.0),
    "kvzip, equal heads": KVCompressionConfig("kvzip", keep=1.0, equal_heads=True),
    "snapkv": KVCompressionConfig("snapkv", keep=1.0),
    "expected": KVCompressionConfig("expected", keep=1.0),
    "window": KVCompressionConfig("window", keep=1.0),
}
FACTS = (
    ("The captain's dog is called {}.", "What is the captain's dog called?", "Bruno Jasper Misty Rufus Daisy Oscar"),
    ("The key is hidden under the {}.", "What is the key hidden under?", "carpet mirror piano stove statue ladder"),
    ("Doctor Marlow was born in {}.", "Where was Doctor Marlow born?", "Lisbon Vienna Dublin Geneva Prague Oslo"),
    ("The new carriage is painted {}.", "What color is the new carriage?", "purple yellow orange silver green white"),
)


class Document(NamedTuple):
    """Ids of a document and of the text that follows it, and questions about its facts.

    A question is a prompt, which begins the answer as a sentence, and the rest of the answer.
    """

    ids: list[int]
    following: list[int]
    questions: list[tuple[list[int], list[int]]]


def iter_documents(path: Path, tokenizer: Tokenizer, tokens: int) -> Iterator[Document]:
    """Yield one document of each book, with facts inserted after sentences that are spread over it."""
    books = set[str]()
    for line in path.open(encoding="utf-8"):
        row = json.loads(line)
        ids = [] if row["book"] in books else tokenizer.encode(row["text"])
        if len(ids) >= tokens + FOLLOWING:
            yield insert_facts(tokenizer, ids, tokens, random.Random(len(books)))
            books.add(row["book"])


def insert_facts(tokenizer: Tokenizer, ids: list[int], tokens: int, source: random.Random) -> Document:
    """Return the document that begins a text: exactly `tokens` ids, the facts among them."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    chosen = [(fact, question, source.choice(values.split())) for fact, question, values in FACTS]
    source.shuffle(chosen)
    inserts = [encode(f" {fact.format(value)}") for fact, _, value in chosen]
    questions = [
        (encode(f"\n\nQuestion: {question}\nAnswer: {fact.partition(' {')[0]}"), encode(f" {value}"))
        for fact, question, value in chosen
    ]
    end = tokens - sum(map(len, inserts))
    document, start = list[int](), 0
    for i, insert in enumerate(inserts):
        stop = (i + 1) * end // (len(inserts) + 1)
        stop = next((n for n in range(stop, end) if tokenizer.decode([ids[n - 1]]).endswith(".")), stop)
        document, start = [*document, *ids[start:stop], *insert], stop
    return Document([*document, *ids[start:end]], ids[end : end + FOLLOWING], questions)


class Probe(NamedTuple):
    """Ids to read after a memory; the last `num_scored` are scored."""

    ids: list[int]
    num_scored: int


@torch.no_grad()
def score_probes(decoder: Decoder, cache: KVCache | None, probes: Sequence[Probe]) -> list[tuple[float, bool]]:
    """Return each probe's nats per scored id, and whether all scored ids are the most likely ones."""
    width = max(len(probe.ids) for probe in probes)
    rows = torch.tensor([[*probe.ids, *[0] * (width - len(probe.ids))] for probe in probes])
    mask = torch.arange(width) < torch.tensor([[len(probe.ids)] for probe in probes])
    states = cache and cache.repeat_rows(len(probes))
    hidden = decoder(decoder.embed(rows), states, attention_mask=mask).hidden_states
    scores = list[tuple[float, bool]]()
    for row, probe in zip(hidden, probes, strict=True):
        logits = decoder.logits(row[len(probe.ids) - probe.num_scored - 1 : len(probe.ids) - 1])
        target = torch.tensor(probe.ids[-probe.num_scored :])
        scores.append((float(F.cross_entropy(logits, target)), bool((logits.argmax(-1) == target).all())))
    return scores


def measure_cache(decoder: Decoder, cache: KVCache | None, document: Document) -> dict[str, float]:
    """Return the nats per token of the continuation, copied passages and answers, and the share of right answers."""
    starts = [(2 * i + 1) * (len(document.ids) - PASSAGE) // (2 * PASSAGES) for i in range(PASSAGES)]
    lead = document.following[:LEAD]  # a passage does not continue the document
    copies = [Probe([*lead, *document.ids[s - LEAD : s + PASSAGE]], PASSAGE) for s in starts]
    following = Probe(document.following, len(document.following) - 1)
    texts = [nats for nats, _ in score_probes(decoder, cache, [following, *copies])]
    answers = score_probes(decoder, cache, [Probe([*q, *a], len(a)) for q, a in document.questions])
    return {
        "following": texts[0],
        "copied": sum(texts[1:]) / PASSAGES,
        "answer": sum(nats for nats, _ in answers) / len(answers),
        "right": sum(right for _, right in answers) / len(answers),
    }


def describe_cache(cache: KVCache | None, positions: float) -> dict[str, float]:
    """Return the size of a memory: positions per head, their bytes of keys and values, and the bytes of the cache."""
    if cache is None:
        return {"positions": 0, "bytes": 0, "cache_bytes": 0}
    layers, kv_heads, head_size = cache.shape_summary
    per_position = 2 * layers * kv_heads * head_size * cache.keys[0].element_size()
    return {"positions": positions, "bytes": positions * per_position, "cache_bytes": cache.S * per_position}


def measure_document(decoder: Decoder, tokenizer: Tokenizer, document: Document) -> Iterator[dict[str, Any]]:
    """Yield the results of the baselines and of the training-free memories on a document."""
    N, reader = len(document.ids), DocumentReader(decoder)
    special = len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))

    def read(ids: list[int]) -> KVCache | None:
        with torch.no_grad():
            return reader.read(torch.tensor([ids])) if ids else None

    texts = {("no context", 0): document.ids[:special], ("full text", 1): document.ids}
    texts |= {("last tokens", d): [*document.ids[:special], *document.ids[special - N // d :]] for d in DIVISORS}
    for (method, divisor), ids in texts.items():
        cache = read(ids)
        measured = describe_cache(cache, len(ids)) | measure_cache(decoder, cache, document)
        yield {"method": method, "divisor": divisor, **measured}
    for method, config in METHODS.items():
        start = time.process_time()
        ranked = compress_document(decoder, document.ids, config, build_repeat_prompt(tokenizer)).memory
        seconds = time.process_time() - start
        for divisor in DIVISORS:
            measured = measure_memory(decoder, ranked.keep_top_slots(N // divisor), document)
            yield {"method": method, "divisor": divisor, "seconds": seconds, **measured}


def measure_memory(decoder: Decoder, memory: KVMemory, document: Document) -> dict[str, float]:
    """Return the size of a memory, and what is measured on top of it."""
    cache = memory.to_cache()
    return describe_cache(cache, float(memory.num_slots[0])) | measure_cache(decoder, cache, document)


def measure_kvpress(model: Any, decoder: Decoder, document: Document) -> Iterator[dict[str, Any]]:
    """Yield the results of kvpress's selections; see `select_with_kvpress`."""
    for divisor in DIVISORS:
        for method, cache in select_with_kvpress(model, document.ids, divisor).items():
            measured = describe_cache(cache, cache.S) | measure_cache(decoder, cache, document)
            yield {"method": method, "divisor": divisor, **measured}


def fit_document(
    decoder: Decoder, tokenizer: Tokenizer, document: Document, divisor: int, config: CartridgeConfig
) -> dict[str, Any]:
    """Return the results of a cartridge that begins as the selection by kvzip with equal heads."""
    start = time.process_time()
    selection = KVCompressionConfig("kvzip", slots=len(document.ids) // divisor, equal_heads=True)
    memory = compress_document(decoder, document.ids, selection, build_repeat_prompt(tokenizer)).memory
    fit = fit_cartridge(
        decoder,
        memory,
        document.ids,
        config,
        requests=build_requests(tokenizer, chat=False),
        on_progress=lambda label, done, total, loss: print(label, done, total, loss, file=sys.stderr, flush=True),
    )
    measured = measure_memory(decoder, fit.memory, document)
    seconds = time.process_time() - start
    sizes = {"steps": config.steps, "rows": config.num_rows, "max_tokens": config.max_tokens, "best": fit.best_step}
    return {"method": "fit", "divisor": divisor, "seconds": seconds, **sizes, **measured}


@torch.no_grad()
def time_first_token(decoder: Decoder, document: Document, divisor: int) -> dict[str, Any]:
    """Return the seconds of processor time to the first token of an answer, from the text and from a memory of it.

    The memory holds the last positions of the cache; the choice of positions does not change the time.
    """
    prompt, start = torch.tensor([document.questions[0][0]]), time.process_time()
    cache = DocumentReader(decoder).read(torch.tensor([document.ids]))
    decoder.logits(decoder(decoder.embed(prompt), cache).hidden_states[:, -1]).argmax()
    text = time.process_time() - start
    memory = KVMemory.from_cache(cache).keep_top_slots(len(document.ids) // divisor)
    start = time.process_time()
    decoder.logits(decoder(decoder.embed(prompt), memory.to_cache()).hidden_states[:, -1]).argmax()
    return {"method": "first token", "divisor": divisor, "text": text, "memory": time.process_time() - start}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and append to the results, or write the page."""
    parser = argparse.ArgumentParser(description="compare memories of documents on a model")
    parser.add_argument("model", nargs="?", help="folder or name of a model")
    parser.add_argument("texts", nargs="?", type=Path, help="JSONL with the fields book and text")
    parser.add_argument("--results", type=Path, required=True, help="JSONL file that results are appended to")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--fit", type=int, metavar="STEPS", help="only fit cartridges, at 16 tokens per position")
    parser.add_argument("--fit-tokens", type=int, default=32, help="longest row of self-study")
    parser.add_argument("--first-token", type=int, metavar="TOKENS", help="only time the first token after a document")
    parser.add_argument("--kvpress", action="store_true", help="only measure kvpress, which must be installed")
    parser.add_argument("--page", type=Path, help="write the page and its plot")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(options.page, [json.loads(line) for line in options.results.open(encoding="utf-8")])
        return
    folder = find_checkpoint(options.model)
    decoder, tokenizer = Decoder.from_pretrained(folder), load_tokenizer(folder)
    tokens = options.first_token or options.tokens
    stored = options.results.read_text(encoding="utf-8") if options.results.exists() else ""
    peer = load_pipeline_model(folder) if options.kvpress else None
    finished = {(r["document"], r["tokens"], r["method"]) for r in map(json.loads, stored.splitlines())}
    for i, document in zip(range(options.documents), iter_documents(options.texts, tokenizer, tokens), strict=False):
        if options.first_token:
            rows = iter([time_first_token(decoder, document, 8)])
        elif options.fit:
            config = CartridgeConfig(options.fit, num_rows=64, max_tokens=options.fit_tokens)
            rows = iter([fit_document(decoder, tokenizer, document, 16, config)])
        elif options.kvpress:
            rows = measure_kvpress(peer, decoder, document)
        elif (i, tokens, "window") in finished:
            continue
        else:
            rows = iter(list(measure_document(decoder, tokenizer, document)))
        for row in rows:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"document": i, "tokens": tokens, "model": folder.name, **row}) + "\n")
        if options.first_token:
            break


if __name__ == "__main__":
    main()
