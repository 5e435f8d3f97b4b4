"""Compare the methods of KV cache selection on chapters of books, with any model.

For every method and document: nats per token on what follows the document, and on passages copied from it; the share of
what the whole document gains over nothing; the time against reading the document once; and the keys and values in use.

    python benchmarks/kv_selection.py MODEL TEXTS.jsonl --tokens 1024 --documents 4 --keep 0.125
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F

from laconic import Decoder, KVCache, load_tokenizer
from laconic.compression.kv.compress import compress_document
from laconic.compression.kv.config import KVCompressionConfig, KVMethod
from laconic.compression.kv.selection import DocumentReader
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.text_models.kv_compressor import build_repeat_prompt

FOLLOWING, PASSAGE, PASSAGES = 256, 64, 4


def iter_documents(path: Path, tokenizer: Tokenizer, tokens: int) -> Iterator[list[int]]:
    """Yield one document of each book, with the tokens that follow it."""
    books = set[str]()
    for line in path.open(encoding="utf-8"):
        row = json.loads(line)
        if row["book"] in books:
            continue
        ids = tokenizer.encode(row["text"])
        if len(ids) >= tokens + FOLLOWING:
            books.add(row["book"])
            yield ids[: tokens + FOLLOWING]


@torch.no_grad()
def measure_nats(decoder: Decoder, cache: KVCache | None, ids: Sequence[int], context: int) -> float:
    """Return the mean loss of `ids` from token `context` on, read on top of a cache."""
    rows = torch.tensor([ids])
    hidden = decoder(decoder.embed(rows), cache).hidden_states[:, context - 1 : -1]
    return float(F.cross_entropy(decoder.logits(hidden)[0], rows[0, context:]))


def evaluate_cache(decoder: Decoder, cache: KVCache | None, document: list[int], following: list[int]) -> list[float]:
    """Return the loss on what follows, and the mean loss on copied passages after 8 tokens that lead into each."""
    starts = torch.linspace(16, len(document) - PASSAGE, PASSAGES).long().tolist()
    lead = following[:8]  # the copy is not the continuation of the document
    copies = [measure_nats(decoder, cache, lead + document[s - 8 : s + PASSAGE], 16) for s in starts]
    return [measure_nats(decoder, cache, following, 1), sum(copies) / len(copies)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="compare methods of KV cache selection")
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--keep", type=float, default=0.125)
    parser.add_argument("--methods", nargs="+", default=get_args(KVMethod))
    arguments = parser.parse_args()
    decoder, tokenizer = Decoder.from_pretrained(arguments.model), load_tokenizer(arguments.model)
    prompt = build_repeat_prompt(tokenizer)
    results: dict[str, list[list[float]]] = {}
    documents = iter_documents(arguments.texts, tokenizer, arguments.tokens)
    for _, ids in zip(range(arguments.documents), documents, strict=False):
        document, following = ids[: arguments.tokens], ids[arguments.tokens :]
        start = time.perf_counter()
        with torch.no_grad():
            full = DocumentReader(decoder).read(torch.tensor([document]))
        forward = time.perf_counter() - start
        results.setdefault("nothing", []).append([*evaluate_cache(decoder, None, document, following), 0.0, 0.0])
        losses = evaluate_cache(decoder, full, document, following)
        results.setdefault("whole document", []).append([*losses, 1.0, full.kv_bytes / 1e6])
        for method in arguments.methods:
            config, start = KVCompressionConfig(method, keep=arguments.keep), time.perf_counter()
            cache = compress_document(decoder, document, config, prompt).memory.to_cache()
            seconds = time.perf_counter() - start
            losses = evaluate_cache(decoder, cache, document, following)
            results.setdefault(method, []).append([*losses, seconds / forward, cache.kv_bytes / 1e6])
    means = {name: torch.tensor(rows).mean(0) for name, rows in results.items()}
    gain = means["nothing"] - means["whole document"]
    print(f"{arguments.documents} documents of {arguments.tokens:,} tokens, {arguments.keep:g} kept")
    print("| method | following | share | copied | share | time / forward pass | MB in use |")
    print("|---|---|---|---|---|---|---|")
    for name, (following, copied, passes, size) in means.items():
        shares = (means["nothing"] - means[name]) / gain
        losses = f"{following:.3f} | {shares[0]:.0%} | {copied:.3f} | {shares[1]:.0%}"
        print(f"| {name} | {losses} | {passes:.2f} | {size:.2f} |")


if __name__ == "__main__":
    main()
