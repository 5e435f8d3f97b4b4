"""Reasoning runs with random weights, built in memory: nothing is trained, but latents change the answers."""

from pathlib import Path

import torch

from laconic.config.load import load_recipe
from laconic.experiment.from_recipe.build_model import ModelParts, build_latents
from laconic.experiment.from_recipe.methods import build_method
from laconic.experiment.load_run import LoadedRun, load_initial_model

RECIPE = """method = "{method}"
[model]
{model}
{latents}
[data]
{data}
[train]
steps = 1
batch_size = 2
"""
TINY_MODEL = """family = "{family}"
tokenizer = "{tokenizer}"
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 2
head_init_std = 0.3
tie_word_embeddings = {tied}
"""
DIGITS = 'source = "digits"\nformat = "digits"\nchain_steps = "all"'
JACOBI = '[latents]\nnum_latents = {M}\njacobi_iterations = {T}\nprojection = "{projection}"\n'
SEQUENTIAL = '[latents]\nnum_latents = {M}\nschedule = "sequential"\n'
TEXTS = 'source = "file"\npath = "rows.jsonl"\nformat = "pccot"'  # the rows are not read
LATENTS = {
    "kava": JACOBI,
    "pccot": JACOBI,
    "codi": SEQUENTIAL + 'projection = "codi"\nprojection_width = 40\n',
    "coconut": SEQUENTIAL + 'projection = "none"\n[coconut]\nlatents_per_step = 1\nmax_stage = {M}\nfirst_stage = 1\n',
}


def build_reasoning_run(
    method: str,
    folder: Path,
    *,
    family: str = "llama",
    M: int = 3,
    T: int = 2,
    tied: bool = False,
    model: str = "",
    data: str = DIGITS,
    seed: int = 1,
    projection: str = "pccot",
    vocabulary: str = "digits",
) -> LoadedRun:
    """Return a run of a method whose control vectors and projection are random and large enough to matter."""
    text = RECIPE.format(
        method=method,
        model=model or TINY_MODEL.format(family=family, tied=str(tied).lower(), tokenizer=vocabulary),
        latents=LATENTS.get(method, "").format(M=M, T=T, projection=projection),
        data=data,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(f"seed = {seed}\n{text}")
    recipe, _ = load_recipe(folder / "recipe.toml")
    decoder, tokenizer, _ = load_initial_model(recipe, torch.device("cpu"))
    latents = build_latents(decoder, tokenizer, recipe)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in decoder.named_parameters() if not model else ():
            if name.startswith(decoder.weight_names.layers) and p.ndim == 2:
                p.mul_(3.0)  # so that answers do not fall into loops
        if latents is not None:
            scale = decoder.token_embedding.weight.std()
            for name, p in latents.named_parameters():
                p.add_(torch.randn(p.shape, generator=generator) * (scale if name == "vectors" else 0.3))
    parts = ModelParts(decoder, tokenizer, latents, None, decoder.fingerprint)
    return LoadedRun(folder, recipe, 0, parts, build_method(parts, recipe, 1).eval())
