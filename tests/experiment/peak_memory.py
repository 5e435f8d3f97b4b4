"""Run by test_dry_run.py in a process of its own: print the bytes that updates of a recipe really take."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.from_recipe import build_model
from laconic.experiment.from_recipe.fake_update import with_num_layers
from laconic.experiment.from_recipe.methods import build_method
from laconic.experiment.from_recipe.sample_rows import count_row_tokens, sample_training_rows
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.models.config import DecoderConfig
from laconic.training.random_state import get_random_state
from laconic.training.ranks import Ranks
from laconic.training.row_order import UpdateIndex
from laconic.training.step import Updater


class OneBatch:
    """The same batch whichever rows are asked for."""

    fingerprint = ""

    def __init__(self, batch: Any) -> None:
        self.fixed = batch

    def __len__(self) -> int:
        return self.fixed.B

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Any:
        return self.fixed.select_rows(range(len(rows)))


def run_updates(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Run three updates of the widest rows with random weights."""
    train, source = recipe.train, sample_training_rows(recipe, tokenizer, config.max_position_embeddings).source
    decoder = build_model.build_random_decoder(config, torch.device("cpu")).to(getattr(torch, recipe.model.dtype))
    method = build_method(build_model.build_parts(recipe, decoder, tokenizer, ""), recipe, 1).train()
    updater = Updater(method, train, 3, Ranks(), torch.device("cpu"))
    lengths = np.stack(list(count_row_tokens(source).values())).sum(0)
    longest = lengths.argsort()[-(train.micro_batch_size or train.batch_size) :]
    data = OneBatch(source.batch(longest.tolist(), 0, 0))
    for step in range(3):
        updater.update(data, UpdateIndex(step, 0, tuple(range(train.batch_size))), get_random_state())


def main() -> None:
    """NAME FOLDER KEY=VALUE…, as `laconic train` takes them."""
    torch.set_num_threads(1)
    name, folder, *keys = sys.argv[1:]
    recipe, _ = load_recipe(name, [f"model.name={folder}", *keys])
    config, tokenizer = load_config_and_tokenizer(recipe)
    small = load_recipe(name, [f"model.name={folder}", *keys, "train.batch_size=1", "train.micro_batch_size=1"])[0]
    small, shallow = with_num_layers(small, config, 1)
    run_updates(small, replace(shallow, vocab_size=tokenizer.vocab_size), tokenizer)  # loads what is loaded once
    before = read_status("VmRSS")
    run_updates(recipe, config, tokenizer)
    sys.stdout.write(f"{read_status('VmHWM') - before}\n")


def read_status(name: str) -> int:
    """Return bytes from /proc; getrusage's peak begins at the size of the parent process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


if __name__ == "__main__":
    main()
