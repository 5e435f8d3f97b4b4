"""Tiny runs of every method, trained for one update, for tests that load them."""

import json
from pathlib import Path

from laconic.config.recipe import DOCUMENT_METHODS
from tests.conftest import call_cli
from tests.tiny_recipes import TINY_DOCUMENT_RECIPE, TINY_RECIPE

LATENTS = {  # coconut and codi think one latent after the other
    "codi": 'schedule = "sequential"',
    "coconut": """schedule = "sequential"
projection = "none"
[coconut]
latents_per_step = 2
first_stage = 1
max_stage = 1
""",
}


def train_tiny_run(method: str, folder: Path, *overrides: str) -> Path:
    """Train a method for one update in `folder`, and return the run's directory."""
    is_document_method = method in DOCUMENT_METHODS
    if is_document_method:
        rows = [{"text": f"Book {b}. " + "A sentence of a book. " * 12} for b in range(4)]
        (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / f"{method.replace(':', '-')}.toml"
    text = TINY_DOCUMENT_RECIPE if is_document_method else TINY_RECIPE
    recipe.write_text(text.replace("jacobi_iterations = 1", LATENTS.get(method, "jacobi_iterations = 1")))
    out = folder / "runs" / recipe.stem
    assert call_cli("train", recipe, "--out", out, f"method={method}", "train.steps=1", *overrides) == 0
    return out
