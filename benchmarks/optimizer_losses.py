"""Train a small decoder on bytes of books with M3, Muon and AdamW for equal time.

`python benchmarks/optimizer_losses.py` prints a Markdown table of nats per byte on two held-out books. Learning rates
of matrices are chosen on another book with another seed. Embeddings, head and norms are updated by AdamW at one
learning rate throughout.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import CORPUS, describe_machine
from laconic import M3, Decoder, DecoderConfig

TEXTS = CORPUS / "data" / "text" / "standard-ebooks.jsonl"
TEST_BOOKS = ("bram-stoker_dracula", "joseph-conrad_lord-jim")
VALIDATION_BOOK = "jane-austen_emma"
ROWS, LENGTH, TEST_WINDOWS = 16, 128, 160
ADAM_LR = 1e-2
LEARNING_RATES = {
    "M3": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "M3, alpha 0": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "torch.optim.Muon": (5e-3, 1e-2, 2e-2, 4e-2),
    "AdamW": (1e-3, 3e-3, 1e-2, 2e-2),
}
Optimizers = list[torch.optim.Optimizer]


def read_books() -> dict[str, Tensor]:
    """Return the bytes of every book, its rows joined."""
    books: dict[str, list[str]] = {}
    with TEXTS.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            books.setdefault(row["book"], []).append(row["text"])
    return {name: torch.tensor(list("\n".join(parts).encode())) for name, parts in books.items()}


def build_decoder(width: int, seed: int) -> Decoder:
    """Return a Llama on bytes with random weights."""
    config = DecoderConfig.tiny(
        "llama", vocab_size=256, hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=3 * width, max_position_embeddings=LENGTH, initializer_range=0.02,
    )  # fmt: skip
    return Decoder(config, seed=seed)


def build_optimizers(name: str, decoder: Decoder, lr: float) -> Optimizers:
    """Return the optimizers that together update every parameter."""
    groups = {group["rule"]: [p for _, p in group["params"]] for group in M3.build_param_groups(decoder)}
    if name == "AdamW":
        return [torch.optim.AdamW(decoder.parameters(), lr=lr, weight_decay=0.0)]
    others = torch.optim.AdamW(groups["adamw"], lr=ADAM_LR, weight_decay=0.0)
    if name == "torch.optim.Muon":
        return [torch.optim.Muon(groups["m3"], lr=lr, weight_decay=0.0), others]
    return [M3(groups["m3"], lr=lr, alpha=0.0 if name == "M3, alpha 0" else None), others]


def draw_batches(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield batches of windows, the same for every optimizer."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(text) - LENGTH - 1, (ROWS, 1), generator=generator)
        yield text[start + torch.arange(LENGTH + 1)]


def mean_nats(decoder: Decoder, windows: Tensor) -> Tensor:
    """Return the mean loss of windows in nats per byte."""
    logits = decoder.logits(decoder(decoder.embed(windows[:, :-1])).hidden_states)
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(
    name: str, lr: float, steps: int, text: Tensor, *, width: int, seed: int, until: int | None = None
) -> tuple[Decoder, float]:
    """Train with a cosine schedule over `steps`; return the decoder and the CPU seconds per step."""
    decoder = build_decoder(width, seed)
    optimizers = build_optimizers(name, decoder, lr)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            o, lambda n: min(1.0, (n + 1) / 6) * 0.5 * (1 + math.cos(math.pi * n / steps))
        )
        for o in optimizers
    ]
    begin, count = time.process_time(), steps if until is None else until
    for _, batch in zip(range(count), draw_batches(text, seed), strict=False):
        loss = mean_nats(decoder, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    return decoder, (time.process_time() - begin) / count


@torch.no_grad()
def evaluate(decoder: Decoder, text: Tensor) -> float:
    """Return nats per byte over the first windows of a book."""
    windows = text[: TEST_WINDOWS * LENGTH].unfold(0, LENGTH, LENGTH)
    return mean([mean_nats(decoder, part).item() for part in windows.split(ROWS)])


def count_steps(steps: int, text: Tensor, width: int, probe: int = 20) -> dict[str, int]:
    """Return how many steps each optimizer makes while Muon makes `steps`, from CPU time of interleaved probes."""
    seconds: dict[str, list[float]] = {name: [] for name in LEARNING_RATES}
    for n in range(3):
        for name, rates in LEARNING_RATES.items():
            seconds[name].append(train(name, rates[0], steps, text, width=width, seed=n, until=probe)[1])
    muon = min(seconds["torch.optim.Muon"])
    return {name: round(steps * muon / min(times)) for name, times in seconds.items()}


def main() -> None:
    """Choose the learning rates, train every seed, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of torch.optim.Muon")
    parser.add_argument("--width", type=int, default=128, help="width of the decoder")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    books = read_books()
    excluded = {*TEST_BOOKS, VALIDATION_BOOK}
    text = torch.cat([part for name, part in books.items() if name not in excluded])
    steps = count_steps(args.steps, text, args.width)
    print(f"width {args.width}, {args.seeds} seeds, {describe_machine()}\n")
    print("| optimizer | steps | learning rate (validation by rate) | test, nats per byte, by seed | mean ± sd |")
    print("| --- | --- | --- | --- | --- |")
    for name, rates in LEARNING_RATES.items():
        by_rate = {
            lr: evaluate(
                train(name, lr, steps[name], text, width=args.width, seed=args.seeds)[0], books[VALIDATION_BOOK]
            )
            for lr in rates
        }
        best = min(by_rate, key=lambda lr: by_rate[lr])
        losses = [
            mean([
                evaluate(decoder, books[book])
                for decoder in [train(name, best, steps[name], text, width=args.width, seed=seed)[0]]
                for book in TEST_BOOKS
            ])
            for seed in range(args.seeds)
        ]  # fmt: skip
        rates_text = ", ".join(f"{lr:g}: {value:.3f}" for lr, value in by_rate.items())
        spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
        print(
            f"| {name} | {steps[name]} | {best:g} ({rates_text}) | {' · '.join(f'{x:.3f}' for x in losses)} "
            f"| {mean(losses):.3f}{spread} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
