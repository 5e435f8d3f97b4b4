"""Batches of documents and compressors for the laws of reading: drawn ids, segments, dead columns anywhere."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.memory import SummaryMemory
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig, StopHeadConfig
from tests.core.readings import fresh, noise

EOS, V = 2, 97


def documents(
    lengths: Sequence[Sequence[int]] = ((5, 4, 5, 3), (4, 5, 2, 0)), *, pads: int = 0,
    windows: tuple[int, int] = (3, 1), **more: Any,
) -> DocumentBatch:  # fmt: skip
    """Rows of segments of so many tokens; `pads` dead columns more than needed stand left, inside and right."""
    text, live = [], []
    for b, row in enumerate(lengths):
        drawn = torch.Generator().manual_seed(b)
        ids = [torch.randint(3, V, (n,), generator=drawn) for n in row]
        found = [spread(ids[i], max(r[i] for r in lengths) + pads, 7 * b + i) for i in range(len(row))]
        text.append(torch.cat([x for x, _ in found]))
        live.append(torch.cat([x for _, x in found]))
    ends = torch.tensor([max(r[i] for r in lengths) + pads for i in range(len(lengths[0]))]).cumsum(0)
    alive, names = torch.stack(live), tuple(f"row {b}" for b in range(len(lengths)))
    cuts, index = tuple(ends.tolist()), torch.arange(len(lengths))
    return DocumentBatch(torch.stack(text), alive, alive.clone(), cuts, index, names, windows=windows, **more)


def spread(ids: Tensor, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids in as many columns of `width` of them, in order; what is dead holds any id."""
    at = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[: len(ids)].sort().values
    text, live = torch.full((width,), 11), torch.zeros(width, dtype=torch.bool)
    text[at], live[at] = ids, True
    return text, live


def compressor(
    name: str = "llama", halting: dict[str, Any] | None = None, *, steps: int = 10, word: int | None = None,
    sizes: dict[str, Any] | None = None, **reading: Any,
) -> AutoCompressor:  # fmt: skip
    """A compressor in float64 whose every parameter matters, with K = 3 unless `reading` says else; `word` is bos."""
    how = CompressionConfig(**({"max_vectors": 3} | reading))
    head = None if halting is None else StopHeadConfig(**halting)
    decoder = fresh(name, **(sizes or {})).double()
    summaries = SummaryParameters(decoder, how, head, eos_token_id=EOS)
    with torch.no_grad():
        for i, p in enumerate(summaries.parameters()):
            p.add_(noise(i, *p.shape) * 0.3)
    return AutoCompressor(decoder, summaries, how, head, total_steps=steps, seed=1, bos_token_id=word).eval()


def some(cells: Sequence[Any], every: int) -> list[Any]:
    """Each `every`th of the cells for the default run; the others are slow ones, beside tests of the same law."""
    return [cell if i % every == 0 else pytest.param(cell, marks=pytest.mark.slow) for i, cell in enumerate(cells)]


def gradients(method: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter; zeros where none flows."""
    named = dict(method.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def whole(method: AutoCompressor, batch: DocumentBatch) -> tuple[Tensor, dict[str, Tensor], SummaryMemory | None]:
    """Loss and gradients of a batch, window by window as the loop runs them, and the memory handed on last."""
    batch, state = replace(batch, loss_denominators=method.loss_denominators(batch)), None
    loss, found, kept = torch.zeros((), dtype=torch.float64), dict[str, Tensor](), None
    for piece in batch.sequential_parts:
        step = method(piece, state)
        for name, g in gradients(method, step.loss).items():
            found[name] = found.get(name, torch.zeros_like(g)) + g
        loss = loss + step.loss.detach()
        state = None if step.state is None else step.state.detach()
        kept = state or kept
    return loss, found, kept
