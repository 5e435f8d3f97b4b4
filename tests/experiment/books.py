"""The smallest recipe of a nested model and the four short books it is trained on."""

import json
from pathlib import Path

BOOKS_RECIPE = """method = "hope"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 8
num_hidden_layers = 1
[mixer]
num_heads = 1
head_dim = 8
[cms]
chunk_sizes = [4, 8]
inner_objective = "associative"
[data]
source = "text"
path = "books.jsonl"
text = { row_tokens = 16, segment_tokens = 8 }
[train]
trainable = "full"
steps = 1
batch_size = 2
"""


def write_books(folder: Path) -> None:
    """Write books.jsonl, a text as book.txt and the recipe books.toml into `folder`."""
    rows = [{"book": f"b{b}", "text": f"Book {b}. " + "It stands here. " * 14} for b in range(4)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "book.txt").write_text("It stands here. " * 14)
    (folder / "books.toml").write_text(BOOKS_RECIPE)
