"""Batches of the laws: drawn ids on a grid, chains of any length, a distillation token, pads where they may stand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.batches import IGNORE_INDEX, ReasoningBatch
from laconic.config.methods import DistillationConfig, KVDistillationConfig, KVSelectionConfig
from laconic.latent.kava import Kava
from laconic.latent.thoughts import LatentThoughts
from laconic.models.decoder import Decoder
from tests.core.readings import fresh

EOS = 2
SIZES = ((5, 6, 4), (3, 3, 3), (4, 0, 5))  # live tokens of question, chain and answer, row by row


def followers(row: Sequence[tuple[list[int], list[bool]]]) -> list[list[int]]:
    """What each token of a row's parts predicts: the next live token in their order."""
    ids = [i for part, live in row for i, alive in zip(part, live, strict=True) if alive]
    following = iter([*ids[1:], IGNORE_INDEX])
    return [[next(following) if alive else IGNORE_INDEX for alive in live] for _, live in row]


def padded(ids: Sequence[Tensor], width: int, left: bool) -> tuple[Tensor, Tensor]:
    """Rows of ids on a grid, and which are live; the pad is the eos."""
    out, live = torch.full((len(ids), width), EOS), torch.zeros(len(ids), width).bool()
    for b, row in enumerate(ids):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        out[b, at], live[b, at] = row, True
    return out, live


def reasoning(
    sizes: Sequence[tuple[int, int, int]] = SIZES, *, seed: int = 0, pads: int = 0, V: int = 97
) -> ReasoningBatch:
    """Rows of (question, chain, answer) tokens, `pads` columns more than needed in every part; the answer's number
    begins at its third token, if it has one, and each row draws its ids by its own size and place."""
    parts: list[list[Tensor]] = [[], [], []]
    for b, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(1000 * seed + b)
        for part, n in zip(parts, size, strict=True):
            part.append(torch.randint(3, V, (n,), generator=generator))
        parts[2][b][-1:] = EOS
    widths = [max(len(row) for row in part) + pads for part in parts]
    grids = [padded(part, width, left=n == 0) for n, (part, width) in enumerate(zip(parts, widths, strict=True))]
    rows = [followers([(ids[b].tolist(), live[b].tolist()) for ids, live in grids]) for b in range(len(sizes))]
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


def trained(name: str, *, M: int = 4, rounds: int | None = 2, **settings: object) -> tuple[Decoder, LatentThoughts]:
    """A decoder in float64 whose every weight matters, with thoughts; both to be trained."""
    decoder = fresh(name).double()
    mode = "sequential" if rounds is None else "jacobi"
    thoughts = LatentThoughts(
        decoder, num_latents=M, num_iterations=rounds, schedule=mode, control_init="normal", **settings
    )  # type: ignore[arg-type]
    with torch.no_grad():
        thoughts.vectors.mul_(10)
    return decoder, thoughts.double()


def kava(
    name: str = "llama", *, M: int = 4, rounds: int | None = 2, seed: int = 0, distillation: dict | None = None,
    selection: dict | None = None, **kv_distillation: object,
) -> Kava:  # fmt: skip
    """KaVa with the defaults of its settings, some of them changed."""
    decoder, thoughts = trained(name, M=M, rounds=rounds)
    how, keep = DistillationConfig(**(distillation or {})), KVSelectionConfig(**(selection or {}))
    return Kava(decoder, thoughts, how, keep, KVDistillationConfig(**kv_distillation), seed=seed)  # type: ignore[arg-type]


def gradients(method: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter; zeros where none flows."""
    named = dict(method.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}
