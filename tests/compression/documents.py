"""Document batches and compressors for tests: random ids, segments, and padding anywhere."""

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
from laconic.config.data import TextConfig
from laconic.config.methods import CompressionConfig, StopHeadConfig
from laconic.config.recipe import LoraConfig
from laconic.data.documents.dataset import DocumentDataset, tokenize_documents
from laconic.data.documents.load import Document
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.experiment.from_recipe.build_model import add_lora
from tests.models.fixtures import fresh, noise

EOS, V = 2, 97


def documents(
    lengths: Sequence[Sequence[int]] = ((5, 4, 5, 3), (4, 5, 2, 0)),
    *,
    pads: int = 0,
    windows: tuple[int, int] = (3, 1),
    **fields: Any,
) -> DocumentBatch:
    """Rows of segments of these lengths, with `pads` more padding columns per segment than needed, at random places."""
    ids, masks = [], []
    widths = [max(row[i] for row in lengths) + pads for i in range(len(lengths[0]))]
    for b, row in enumerate(lengths):
        generator = torch.Generator().manual_seed(b)
        segments = [torch.randint(3, V, (n,), generator=generator) for n in row]
        padded = [pad_randomly(segment, widths[i], 7 * b + i) for i, segment in enumerate(segments)]
        ids.append(torch.cat([x for x, _ in padded]))
        masks.append(torch.cat([x for _, x in padded]))
    mask, names = torch.stack(masks), tuple(f"row {b}" for b in range(len(lengths)))
    ends = tuple(torch.tensor(widths).cumsum(0).tolist())
    index = torch.arange(len(lengths))
    return DocumentBatch(torch.stack(ids), mask, mask.clone(), ends, index, names, windows=windows, **fields)


def pad_randomly(ids: Tensor, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Put ids in order into random columns of `width`; the others hold an arbitrary id."""
    columns = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[: len(ids)].sort().values
    padded, mask = torch.full((width,), 11), torch.zeros(width, dtype=torch.bool)
    padded[columns], mask[columns] = ids, True
    return padded, mask


def compressor(
    name: str = "llama",
    stop_head: dict[str, Any] | None = None,
    *,
    total_steps: int = 10,
    bos_token_id: int | None = None,
    sizes: dict[str, Any] | None = None,
    **settings: Any,
) -> AutoCompressor:
    """A compressor in float64 whose every parameter matters, with K = 3 unless `settings` say otherwise."""
    config = CompressionConfig(**({"max_vectors": 3} | settings))
    head = None if stop_head is None else StopHeadConfig(**stop_head)
    decoder = fresh(name, **(sizes or {})).double()
    summaries = SummaryParameters(decoder, config, head, eos_token_id=EOS)
    with torch.no_grad():
        for i, p in enumerate(summaries.parameters()):
            p.add_(noise(i, *p.shape) * 0.3)
    method = AutoCompressor(
        decoder, summaries, config, head, total_steps=total_steps, seed=1, bos_token_id=bos_token_id
    )
    return method.eval()


def distilled_compressor(with_lora: bool) -> AutoCompressor:
    """A compressor that is distilled from its base model, or from itself without LoRA."""
    config = CompressionConfig(max_vectors=3, summary_init="last_tokens", distillation_weight=0.5)
    decoder = fresh("llama", vocab_size=257)
    summaries = SummaryParameters(decoder, config, eos_token_id=2)
    if not with_lora:
        return AutoCompressor(decoder, summaries, config, total_steps=4)
    decoder.requires_grad_(False)
    adapter = add_lora(decoder, LoraConfig(rank=2, alpha=4, dropout=0.0), 0)
    return AutoCompressor(decoder, summaries, config, total_steps=4, base_model_context=adapter.disable_adapter)


def short_books(*, pad_to_row_tokens: bool = False) -> DocumentDataset:
    """Rows of four segments, some of which end early."""
    texts = [Document(str(i), (chr(97 + i) * n,)) for i, n in enumerate((40, 22, 33, 21))]
    text = TextConfig(
        row_tokens=40, segment_tokens=10, segment_lengths="fixed", segments_per_window=2, segment_overlap=0
    )
    return DocumentDataset(
        texts, tokenize_documents(texts, build_byte_tokenizer()), text, 0, 100, pad_to_row_tokens=pad_to_row_tokens
    )


def some(cells: Sequence[Any], every: int) -> list[Any]:
    """Mark all but each `every`-th cell as slow; the others run by default."""
    return [cell if i % every == 0 else pytest.param(cell, marks=pytest.mark.slow) for i, cell in enumerate(cells)]


def gradients(method: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter; zeros where none flows."""
    named = dict(method.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), grads, strict=True)}


def run_step(method: AutoCompressor, batch: DocumentBatch) -> tuple[Tensor, dict[str, Tensor], SummaryMemory | None]:
    """Loss and gradients of a batch, window by window as in the training loop, and the last memory handed on."""
    batch, state = replace(batch, loss_denominators=method.loss_denominators(batch)), None
    loss, grads, memory = torch.zeros((), dtype=torch.float64), dict[str, Tensor](), None
    for part in batch.sequential_parts:
        step = method(part, state)
        for name, g in gradients(method, step.loss).items():
            grads[name] = grads.get(name, torch.zeros_like(g)) + g
        loss = loss + step.loss.detach()
        state = None if step.state is None else step.state.detach()
        memory = state or memory
    return loss, grads, memory
