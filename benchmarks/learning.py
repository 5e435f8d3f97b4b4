"""Read books with SmolLM2 while it learns, beside dynamic evaluation: `python benchmarks/learning.py`.

Every token is scored before anything learns from it. Prints one Markdown table per book. Dynamic evaluation
(Krause et al., arXiv:1709.07432): score a segment, then take one gradient step on its loss.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from benchmarks.measure import CORPUS, describe_machine
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.lora.lora import add_adapter
from laconic.experiment.text_models.read_into_state import clear_attention_if_full
from laconic.models.cache import KVCache
from laconic.models.checkpoints.named_models import NAMED_MODELS
from laconic.nested.hope.model import Hope
from laconic.nested.state import FastWeightState

MODEL = NAMED_MODELS["smollm2"].folder()
TEXTS = CORPUS / "data" / "text" / "standard-ebooks.jsonl"
BOOKS = ("bram-stoker_dracula", "joseph-conrad_lord-jim")  # the test split; settings were chosen on VALIDATION_BOOK
VALIDATION_BOOK = "jane-austen_emma"
OTHER_BOOK = "charles-dickens_great-expectations"  # of the training split, for LoRA
BUCKETS = (1024, 2048, 4096, 8192, 16384)
PIECE = 512  # tokens read at once without learning
LORA_RANK = 16
CHARACTERS_PER_TOKEN = 6  # more than any book has


class Reading(NamedTuple):
    """Nats of every token of a text, and the CPU seconds of reading it."""

    nats: Tensor
    seconds: float


OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def load_book(tokenizer: Tokenizer, book: str, num_tokens: int) -> Tensor:
    """Return the first ids of a book, one more than `num_tokens`, [1, T + 1]."""
    text = ""
    with TEXTS.open(encoding="utf-8") as lines:
        for section in map(json.loads, lines):
            if section["book"] == book and len(text) < CHARACTERS_PER_TOKEN * num_tokens:
                text += section["text"] + "\n\n"
    ids = tokenizer.encode(text)[: num_tokens + 1]
    if len(ids) <= num_tokens:
        raise SystemExit(f"--book {book}: {TEXTS} has {len(ids)} tokens of it; lower --tokens")
    return torch.tensor([ids])


def spans(num_tokens: int, size: int) -> Iterator[slice]:
    """Yield consecutive spans of at most `size` tokens."""
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def compute_nats(decoder: laconic.Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every target."""
    return F.cross_entropy(decoder.logits(hidden)[0], targets[0], reduction="none")


def read_span(
    decoder: laconic.Decoder, ids: Tensor, span: slice, cache: KVCache | None, window: int
) -> tuple[Tensor, KVCache]:
    """Read a span after a cache, which is emptied if it would exceed the window; return the nats and the new cache."""
    if cache is not None and cache.S + span.stop - span.start > window:
        cache = None
    output = decoder(decoder.embed(ids[:, span]), cache)
    targets = ids[:, span.start + 1 : span.stop + 1]
    return compute_nats(decoder, output.hidden_states, targets), output.cache.detach()


@torch.no_grad()
def read_with_fixed_weights(decoder: laconic.Decoder, ids: Tensor, window: int) -> Reading:
    """Read with fixed weights."""
    nats, cache = list[Tensor](), None
    start = time.process_time()
    for span in spans(ids.shape[1] - 1, min(PIECE, window)):
        span_nats, cache = read_span(decoder, ids, span, cache, window)
        nats.append(span_nats)
    return Reading(torch.cat(nats), time.process_time() - start)


@torch.no_grad()
def read_with_levels(model: Hope, ids: Tensor, window: int) -> Reading:
    """Read with levels that learn, as `laconic compress --learn` does."""
    nats, state = list[Tensor](), model.initial_state(1)
    start = time.process_time()
    for span in spans(ids.shape[1] - 1, min(PIECE, window)):
        state = clear_attention_if_full(model, state, span.stop - span.start, window)
        output = model.read_tokens(ids[:, span], state)
        nats.append(compute_nats(model, output.hidden_states, ids[:, span.start + 1 : span.stop + 1]))
        state = cast(FastWeightState, output.cache)
    return Reading(torch.cat(nats), time.process_time() - start)


def evaluate_dynamically(
    decoder: laconic.Decoder, ids: Tensor, window: int, chunk: int, build_optimizer: OptimizerFactory
) -> Reading:
    """Read with a gradient step of the trainable weights after every chunk."""
    weights = [p for p in decoder.parameters() if p.requires_grad]
    optimizer = build_optimizer(weights)
    nats, cache = list[Tensor](), None
    start = time.process_time()
    for span in spans(ids.shape[1] - 1, chunk):
        span_nats, cache = read_span(decoder, ids, span, cache, window)
        span_nats.mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        nats.append(span_nats.detach())
    return Reading(torch.cat(nats), time.process_time() - start)


def load_decoder(trainable: str) -> laconic.Decoder:
    """Load SmolLM2 with all weights trainable, those of the MLPs, a LoRA adapter, or none."""
    decoder = laconic.Decoder.from_pretrained(MODEL, dtype=torch.float32)
    for name, p in decoder.named_parameters():
        p.requires_grad_(trainable == "all" or (trainable == "mlp" and ".mlp." in name))
    if trainable == "lora":
        from peft import LoraConfig

        torch.manual_seed(0)
        add_adapter(decoder, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear"))
    return decoder


def load_levels() -> Hope:
    """Load SmolLM2 with the default levels on its MLPs."""
    return laconic.NestedTextModel.from_pretrained(MODEL, dtype=torch.float32).model


def adapt_to_other_book(ids: Tensor, window: int, chunk: int, build_optimizer: OptimizerFactory) -> Reading:
    """Train a LoRA adapter on as many tokens of another book, then read with fixed weights; count the time of both."""
    decoder = load_decoder("lora")
    other = load_book(laconic.load_tokenizer(MODEL), OTHER_BOOK, ids.shape[1] - 1)
    training = evaluate_dynamically(decoder, other, window, chunk, build_optimizer)
    reading = read_with_fixed_weights(decoder, ids, window)
    return reading._replace(seconds=reading.seconds + training.seconds)


def build_methods(ids: Tensor, full: int, short: int) -> dict[str, Callable[[], Reading]]:
    """Return the ways to read a book; `full` and `short` are windows of attention."""

    def still(window: int) -> Callable[[], Reading]:
        return lambda: read_with_fixed_weights(load_decoder("none"), ids, window)

    def dynamic(trainable: str, window: int, chunk: int, build: OptimizerFactory) -> Callable[[], Reading]:
        return lambda: evaluate_dynamically(load_decoder(trainable), ids, window, chunk, build)

    sgd, adam = torch.optim.SGD, torch.optim.Adam
    return {
        "still": still(full),
        "levels": lambda: read_with_levels(load_levels(), ids, full),
        "sgd-mlp": dynamic("mlp", full, 64, partial(sgd, lr=0.01)),
        "adam-mlp": dynamic("mlp", full, 128, partial(adam, lr=1e-4)),
        "adam-all": dynamic("all", full, 128, partial(adam, lr=3e-5)),
        "adam-lora": dynamic("lora", full, 64, partial(adam, lr=1e-3)),
        "lora-other-book": lambda: adapt_to_other_book(ids, full, 64, partial(adam, lr=1e-3)),
        "still-short": still(short),
        "levels-short": lambda: read_with_levels(load_levels(), ids, short),
    }


DESCRIPTIONS = {
    "still": "without learning",
    "levels": "levels on the MLPs (`--learn`), chunks of 64",
    "sgd-mlp": "dynamic evaluation, SGD 0.01 on the MLPs, chunks of 64",
    "adam-mlp": "dynamic evaluation, Adam 1e-4 on the MLPs, chunks of 128",
    "adam-all": "dynamic evaluation, Adam 3e-5 on all weights, chunks of 128",
    "adam-lora": f"dynamic evaluation, Adam 1e-3 on LoRA of rank {LORA_RANK}, chunks of 64",
    "lora-other-book": f"LoRA of rank {LORA_RANK} trained on as much of Great Expectations, then without learning",
    "still-short": "without learning, short window",
    "levels-short": "levels, short window",
}


def bucket_means(nats: Tensor) -> Iterator[tuple[str, float]]:
    """Yield the mean nats by position in the text."""
    edges = [0, *(edge for edge in BUCKETS if edge < len(nats)), len(nats)]
    for low, high in pairwise(edges):
        yield f"{low:,}–{high:,}", nats[low:high].mean().item()


def compare(book: str, ids: Tensor, names: Sequence[str], full: int, short: int) -> None:
    """Print the table of a book, row by row."""
    methods, first = build_methods(ids, full, short), None
    print(f"\n{book}, {ids.shape[1] - 1:,} tokens, window {full:,}, short window {short:,}\n")
    for name in names:
        reading = methods[name]()
        means = dict(bucket_means(reading.nats))
        if first is None:
            first = reading
            columns = ["reading", "CPU s", "nats per token", f"gain over {names[0]}", *means]
            print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
        gain = (first.nats.mean() - reading.nats.mean()).item()
        cells = [f"{reading.seconds:.0f}", f"{reading.nats.mean():.3f}", f"{gain:+.3f}"]
        cells += [f"{mean:.3f}" for mean in means.values()]
        print("| " + " | ".join([DESCRIPTIONS[name], *cells]) + " |", flush=True)


def main() -> None:
    """Read the books that the command line names."""
    parser = argparse.ArgumentParser(description="Read books with SmolLM2 while it learns.")
    parser.add_argument("--book", nargs="+", default=BOOKS, metavar="NAME", help=f"books of {TEXTS.name}")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each book (default 8192)")
    parser.add_argument("--window", type=int, default=8192, help="tokens that attention sees (default 8192)")
    parser.add_argument("--short-window", type=int, default=1024, help="a short window (default 1024)")
    parser.add_argument("--only", nargs="+", choices=DESCRIPTIONS, default=list(DESCRIPTIONS), metavar="METHOD")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"`python benchmarks/learning.py {' '.join(sys.argv[1:])}` · 1 thread · {describe_machine()}")
    tokenizer = laconic.load_tokenizer(MODEL)
    for book in options.book:
        ids = load_book(tokenizer, book, options.tokens)
        compare(book, ids, options.only, options.window, options.short_window)


if __name__ == "__main__":
    main()
