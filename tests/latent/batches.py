"""Random batches of questions, chains and answers, and small float64 models with latents."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.latent import codi, rkv
from laconic.latent.kava import Kava
from laconic.latent.rkv import LayerSelection
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder
from tests.models.fixtures import fresh

EOS = 2
SIZES = ((5, 6, 4), (3, 3, 3), (4, 0, 5))  # tokens of question, chain and answer in each row


def next_tokens(row: Sequence[tuple[list[int], list[bool]]]) -> list[list[int]]:
    """What each token of a row's parts predicts: the next token in order."""
    ids = [i for part, mask in row for i, valid in zip(part, mask, strict=True) if valid]
    following = iter([*ids[1:], IGNORE_INDEX])
    return [[next(following) if valid else IGNORE_INDEX for valid in mask] for _, mask in row]


def pad_rows(ids: Sequence[Tensor], width: int, left: bool) -> tuple[Tensor, Tensor]:
    """Pad rows of ids with the eos; return them with their mask."""
    out, mask = torch.full((len(ids), width), EOS), torch.zeros(len(ids), width).bool()
    for b, row in enumerate(ids):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        out[b, columns], mask[b, columns] = row, True
    return out, mask


def reasoning_batch(
    sizes: Sequence[tuple[int, int, int]] = SIZES, *, seed: int = 0, pads: int = 0, V: int = 97
) -> ReasoningBatch:
    """Rows of (question, chain, answer) tokens with `pads` more columns than needed in every part.

    The answer's number begins at its third token; each row's ids depend on its index and sizes only.
    """
    parts: list[list[Tensor]] = [[], [], []]
    for b, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(1000 * seed + b)
        for part, n in zip(parts, size, strict=True):
            part.append(torch.randint(3, V, (n,), generator=generator))
        parts[2][b][-1:] = EOS
    widths = [max(len(row) for row in part) + pads for part in parts]
    grids = [pad_rows(part, width, left=n == 0) for n, (part, width) in enumerate(zip(parts, widths, strict=True))]
    rows = [next_tokens([(ids[b].tolist(), mask[b].tolist()) for ids, mask in grids]) for b in range(len(sizes))]
    question, chain, answer = (
        torch.tensor([row[n] for row in rows], dtype=torch.long).reshape(len(rows), -1) for n in range(3)
    )
    columns = torch.arange(widths[2])
    lengths = torch.tensor([size[2] for size in sizes])
    return ReasoningBatch(
        *grids[0],
        *grids[1],
        (torch.arange(widths[1]) // 2).expand(len(sizes), -1).clone(),
        *grids[2],
        question[:, -1],
        chain,
        answer,
        torch.where(lengths > 2, 1, -1),
        (columns >= 2) & (columns < lengths[:, None] - 1),
        torch.arange(len(sizes)) + 10 * seed,
    )


def build_latent_model(
    family: str, *, num_latents: int = 4, num_iterations: int | None = 2, **config: Any
) -> tuple[Decoder, LatentThoughts]:
    """A trainable float64 decoder with latents, all of whose weights matter."""
    decoder = fresh(family).double()
    schedule = "sequential" if num_iterations is None else "jacobi"
    latent_thoughts = LatentThoughts(
        decoder,
        num_latents=num_latents,
        num_iterations=num_iterations,
        schedule=schedule,
        control_init="normal",
        **config,
    )
    with torch.no_grad():
        latent_thoughts.vectors.mul_(10)
    return decoder, latent_thoughts.double()


def build_kava(
    family: str = "llama",
    *,
    num_latents: int = 4,
    num_iterations: int | None = 2,
    seed: int = 0,
    distillation: dict[str, Any] | None = None,
    selection: dict[str, Any] | None = None,
    **kv_distillation: Any,
) -> Kava:
    """KaVa with default configuration, except for what is given."""
    decoder, latent_thoughts = build_latent_model(family, num_latents=num_latents, num_iterations=num_iterations)
    configs = DistillationConfig(**(distillation or {})), KVSelectionConfig(**(selection or {}))
    return Kava(decoder, latent_thoughts, *configs, KVDistillationConfig(**kv_distillation), seed=seed)


def gradients(method: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter; zeros where none flows."""
    named = dict(method.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), grads, strict=True)}


def select_in_all_layers(method: Kava, batch: ReasoningBatch) -> list[LayerSelection]:
    """Return what the teacher's pass over a batch provides for distillation, in every layer, with all scores."""
    decoder, M, key_space = method.decoder, method.latent_thoughts.num_latents, method.kv_config.key_space
    with torch.no_grad():
        question = codi.read_question(decoder, batch).cache
        teacher = codi.read_chain(decoder, batch, question, ("q_rot", "k"))
        return [
            rkv.select_tokens(decoder, batch, teacher, l, method.selection_config, M, method.seed, key_space, True)
            for l in range(decoder.config.num_hidden_layers)
        ]
