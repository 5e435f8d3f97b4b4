"""The table and the plot of docs/kv_memories.md from stored results, and the time to the first token after a document.

laconic evaluate smollm2 --tasks memories --documents BOOKS.jsonl --questions examples/book_questions.jsonl --limit 6
python benchmarks/kv_memories.py smollm2 --plot docs/kv_memories.svg
python benchmarks/kv_memories.py smollm2 --first-token BOOKS.jsonl
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from laconic import Decoder, load_tokenizer
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import DocumentReader
from laconic.evaluation.checkpoints import find_results
from laconic.evaluation.memories.documents import load_probed_documents
from laconic.evaluation.memories.report import PLOT_SIZE, build_comparison_table, compare_results, draw_comparison
from laconic.evaluation.memories.suite import MemorySuite
from laconic.evaluation.report.plots import STYLE_SHEET
from laconic.evaluation.suite import load_results
from laconic.evaluation.tables import Table
from laconic.models.checkpoints.weights import find_checkpoint

LONG_TOKENS, DIVISOR = 4000, 8  # of the document whose first token is timed, and its tokens per position


def format_markdown(table: Table) -> str:
    """Return a table in Markdown."""
    rule = ["---"] * table.num_text_columns + ["--:"] * (len(table.header) - table.num_text_columns)
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (table.header, rule, *table.rows))


def write_results(model: str, plot: Path) -> None:
    """Print the table of a model's stored results in Markdown, and write its plot."""
    from matplotlib import style
    from matplotlib.figure import Figure

    comparison = compare_results(load_results(MemorySuite(), list(map(str, find_results(model))))["memories"])[-1]
    print(f"{comparison.title}\n\n{format_markdown(build_comparison_table(comparison))}")
    with style.context(str(STYLE_SHEET)):
        figure = Figure(figsize=PLOT_SIZE, layout="constrained")
        draw_comparison(figure, comparison)
        figure.savefig(plot, facecolor="white", metadata={"Date": None})


@torch.no_grad()
def time_first_token(model: str, documents: str) -> None:
    """Print the seconds of processor time to the first token of an answer, from the text and from a memory of it.

    The memory holds the last positions of the cache; the choice of positions does not change the time.
    """
    folder = find_checkpoint(model)
    decoder, tokenizer = Decoder.from_pretrained(folder), load_tokenizer(folder)
    (document,) = load_probed_documents(tokenizer, documents, None, LONG_TOKENS, 1).documents
    prompt, start = torch.tensor([document.probes["needles"][0].ids]), time.process_time()
    cache = DocumentReader(decoder).read(torch.tensor([document.ids]))
    decoder.logits(decoder(decoder.embed(prompt), cache).hidden_states[:, -1]).argmax()
    text = time.process_time() - start
    memory = KVMemory.from_cache(cache).keep_top_slots(len(document.ids) // DIVISOR)
    start = time.process_time()
    decoder.logits(decoder(decoder.embed(prompt), memory.to_cache()).hidden_states[:, -1]).argmax()
    print(f"{len(document.ids)} tokens: {text:.2f} s from the text, {time.process_time() - start:.2f} s at {DIVISOR}x")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table and the plot, or time the first token."""
    parser = argparse.ArgumentParser(description="results on memories of documents")
    parser.add_argument("model", help="folder or name of a model")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    parser.add_argument("--first-token", metavar="FILE", help="file of texts")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        write_results(options.model, options.plot)
    if options.first_token is not None:
        time_first_token(options.model, options.first_token)


if __name__ == "__main__":
    main()
