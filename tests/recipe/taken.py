"""Run by test_plan.py in a process of its own: prints the bytes that updates of a recipe really take."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment import build_model
from laconic.experiment.dry_run import batch
from laconic.experiment.lengths import foreseen, pieces
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.experiment.methods import build_method
from laconic.experiment.pace import Fixed
from laconic.models.config import DecoderConfig
from laconic.training.ranks import SingleProcess
from laconic.training.step import UpdateIndex, Updater


def updates(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Three updates with random weights, of the widest rows."""
    rows, how = foreseen(recipe, tokenizer, config.max_position_embeddings), recipe.train
    decoder = build_model.build_random_decoder(config, torch.device("cpu")).to(getattr(torch, recipe.model.dtype))
    method = build_method(build_model.build_parts(recipe, decoder, tokenizer, ""), recipe, 1).train()
    updating = Updater(method, how, 3, SingleProcess(), torch.device("cpu"))
    wide = Fixed(batch(rows, pieces(rows.lengths, how.micro_batch_size or how.batch_size), 1.0, 0, 0))
    for step in range(3):
        updating.update(wide, UpdateIndex(step, 0, tuple(range(how.batch_size))))


def main() -> None:
    """NAME FOLDER KEY=VALUE…, as `laconic train` takes them."""
    torch.set_num_threads(1)
    name, folder, *keys = sys.argv[1:]
    recipe, _ = load_recipe(name, [f"model.name={folder}", *keys])
    config, tokenizer = load_config_and_tokenizer(recipe)
    one = replace(
        config,
        num_hidden_layers=1,
        sliding_windows=config.sliding_windows[:1],
        attention_scales=config.attention_scales[:1],
    )
    small = load_recipe(name, [f"model.name={folder}", *keys, "train.batch_size=1", "train.micro_batch_size=1"])[0]
    updates(small, replace(one, vocab_size=tokenizer.vocab_size), tokenizer)  # loads what is loaded once
    before = resident("VmRSS")
    updates(recipe, config, tokenizer)
    sys.stdout.write(f"{resident('VmHWM') - before}\n")


def resident(what: str) -> int:
    """Bytes; not by getrusage, whose peak of a new program begins at the size of the one that started it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


if __name__ == "__main__":
    main()
