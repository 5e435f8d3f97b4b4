"""Distillation from the model that reads the text (VL30), and summary vectors that begin as the last tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.distillation import distillation_loss
from laconic.compression.segment_model import SegmentModel
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.config.recipe import ModelConfig
from laconic.experiment.from_recipe.build_model import resolve_summary_init
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.models.decoder import Decoder
from tests.compression.documents import compressor, distilled_compressor, documents, run_step, short_books
from tests.models.fixtures import assert_close, fresh, noise
from tests.oracles.compare import agree
from tests.oracles.summaries import MISREAD, ORACLE, divergence
from tests.training.toy_runs import run_training, runs_equal, toy_config

LAST: dict[str, Any] = {"summary_init": "last_tokens"}
CONSTANT_LR: dict[str, Any] = {"lr_schedule": "constant", "warmup_ratio": 0.0}


@pytest.mark.equation("halting", "VL30")
def test_distillation_loss() -> None:
    q, p = 2 * noise(1, 4, 5), 2 * noise(2, 4, 5)
    agree(distillation_loss, ORACLE["VL30"], MISREAD["VL30"], q, p, 1.7)
    assert gradcheck(lambda q: distillation_loss(q, p, 1.7), q.requires_grad_())
    p.requires_grad_()
    assert torch.autograd.grad(distillation_loss(q, p).sum(), [q, p], allow_unused=True)[1] is None


@contextmanager
def scaled_norm(method: nn.Module) -> Iterator[None]:
    """Stand in for an adapter that is switched off: double the final norm."""
    norm = next(p for n, p in method.named_parameters() if n.endswith("norm.weight") and "layers" not in n)
    norm.data *= 2
    try:
        yield
    finally:
        norm.data /= 2


@pytest.mark.equation("halting", "VL30")
@pytest.mark.parametrize("windows", [(2, 0), (3, 1)])
def test_distillation_step(windows: tuple[int, int]) -> None:
    """The teacher reads each window's text, row by row without padding; the first segment of a window has no KL."""
    plain, weight, tau = compressor(), 0.7, 1.5
    config = plain.config.model_copy(update={"distillation_weight": weight, "distillation_temperature": tau})
    plain.summaries.config = config
    method = AutoCompressor(
        plain.decoder, plain.summaries, config, total_steps=10, seed=1, base_model_context=lambda: scaled_norm(method)
    ).eval()
    batch, state = documents(pads=1, windows=windows), None
    batch = replace(batch, loss_denominators=method.loss_denominators(batch))
    total, kl = torch.zeros((), dtype=torch.float64), 0.0
    for part in batch.sequential_parts:
        step = method(part, state)
        expected = sum_row_divergences(method, part, state, tau)
        total = total + (step.loss - weight * expected / batch.loss_denominators["scored"]).detach()
        kl += float(step.metrics["kl"])
        state = None if step.state is None else step.state.detach()
    loss_without_distillation = run_step(compressor(), documents(pads=1, windows=windows))[0]
    assert_close(total, loss_without_distillation)
    assert kl > 0


def sum_row_divergences(method: AutoCompressor, part: Any, state: Any, tau: float) -> Tensor:
    """Sum the divergences of the rows of a window, with each row's own forward passes."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(part.B):
        row, memory = part.select_rows([b]), None if state is None else state.select_rows([b])
        text = row.input_ids[row.attention_mask][None]
        with torch.no_grad(), scaled_norm(method):
            states = method.decoder(method.decoder.embed(text)).hidden_states[0]
            teacher = method.decoder.logits(states)
        start = 0
        for i, columns in enumerate(row.segment_slices):
            real = row.attention_mask[0, columns]
            ids, targets = row.input_ids[:, columns][:, real], row.targets[0, columns][real]
            if not len(targets):
                continue
            student = method.decoder.logits(method.read_text(ids, None, memory))[0]
            is_scored = targets != -100
            if i:
                total = total + divergence(student, teacher[start : start + len(targets)], tau)[is_scored].sum()
            memory = method.compress(ids, None, memory)
            start += len(targets)
    return total


def test_first_segment_takes_the_teachers_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapter_scope "write" nothing differs but rounding, and each first segment is read once less."""
    plain, results, calls = compressor(**LAST), [], 0
    config = plain.config.model_copy(update={"distillation_weight": 0.7, "adapter_scope": "write"})
    plain.summaries.config = config
    method = AutoCompressor(
        plain.decoder, plain.summaries, config, total_steps=10, base_model_context=lambda: scaled_norm(method)
    )
    read = SegmentModel.read_segment

    def count(self: SegmentModel, *args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return read(self, *args)

    monkeypatch.setattr(SegmentModel, "read_segment", count)
    for takes_teacher in (True, False):
        if not takes_teacher:
            monkeypatch.setattr(SegmentModel, "is_read_like_teacher", lambda *_: False)
        calls = 0
        loss, grads, _ = run_step(method, documents())
        results.append((loss, grads["summaries.residual"], calls))
    (loss, grad, num_reads), (expected_loss, expected_grad, expected_reads) = results
    assert_close(loss, expected_loss)
    assert_close(grad, expected_grad)
    assert grad.any()
    assert num_reads < expected_reads


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_untrained_memory_reads_as_the_last_tokens(name: str) -> None:
    """After any number of segments, the text is read as after the last tokens of each (all tokens of a shorter one)."""
    decoder, config = fresh(name).double(), CompressionConfig(max_vectors=3, **LAST)
    method = AutoCompressor(decoder, SummaryParameters(decoder, config, eos_token_id=None), config, total_steps=1)
    generator, memory, prefix = torch.Generator().manual_seed(0), None, torch.zeros(1, 0, dtype=torch.long)
    text = torch.randint(3, 97, (1, 6), generator=generator)
    for tokens in (5, 2, 7):
        ids = torch.randint(3, 97, (1, tokens), generator=generator)
        memory = method.compress(ids, None, memory)
        prefix = torch.cat([prefix, ids[:, -3:]], 1)
        expected = decoder(decoder.embed(torch.cat([prefix, text], 1))).hidden_states[:, prefix.shape[1] :]
        assert_close(method.read_text(text, None, memory), expected)


@pytest.mark.medium
def test_untrained_memory_harms_less_than_raw_states(shared: Path) -> None:
    """On stories by a pretrained Llama, raw hidden states cost nats, and last tokens save some."""
    decoder, saved = Decoder.from_pretrained(shared / "models" / "stories260k"), {}
    sampling = GenerationConfig(max_tokens=96, temperature=1.0, eos_token_ids=())
    ids = torch.tensor([story.token_ids for story in generate(decoder, input_ids=[[1]] * 16, config=sampling)])
    text, after = ids.split([64, 32], 1)
    mask = torch.ones_like(after, dtype=torch.bool)
    for start in ("eos", "last_tokens"):
        config = CompressionConfig(max_vectors=8, summary_init=start)  # type: ignore[arg-type]
        method = AutoCompressor(decoder, SummaryParameters(decoder, config, eos_token_id=2), config, total_steps=1)
        change = method.nll(after, mask, mask) - method.nll(after, mask, mask, method.compress(text))
        saved[start] = float(change.mean()) / (after.shape[1] - 1)  # nats per predicted token
    assert saved["eos"] < -0.1
    assert saved["last_tokens"] > 0.2


def test_resolve_summary_init() -> None:
    """A checkpoint's vectors begin as the last tokens where they can; all others, and explicit keys, as the paper's."""
    checkpoint, new = ModelConfig(name="smollm2"), ModelConfig(family="llama", tokenizer="bytes")
    plain, pooled = CompressionConfig(), CompressionConfig(summary="pool")
    resolved = [
        resolve_summary_init(*pair).summary_init for pair in ((plain, checkpoint), (pooled, checkpoint), (plain, new))
    ]
    assert resolved == ["last_tokens", "eos", "eos"]
    assert resolve_summary_init(CompressionConfig(summary_init="normal"), checkpoint).summary_init == "normal"


def test_untrained_vectors_get_a_gradient() -> None:
    """The map learns at step 0, the summary tokens once it is not zero; the teacher's reading has no gradient."""
    method = compressor(**LAST, distillation_weight=1.0)
    with torch.no_grad():
        for p in method.summaries.parameters():
            p.zero_()
    _, grads, _ = run_step(method, documents())
    assert grads["summaries.residual"].any()
    assert not grads["summaries.tokens"].any()
    with torch.no_grad():
        assert method.summaries.residual is not None
        method.summaries.residual.add_(0.1 * noise(1, *method.summaries.residual.shape))
    assert run_step(method, documents())[1]["summaries.tokens"].any()


WITH_LORA = pytest.mark.parametrize("with_lora", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.mark.medium
@WITH_LORA
def test_distillation_resumes_bit_for_bit(tmp_path: Path, with_lora: bool) -> None:
    for name, stops in (("cut", (2, 4)), ("whole", (4,))):
        for steps in stops:
            config = toy_config(batch_size=2, micro_batch_size=1, steps=steps, save_every=2, **CONSTANT_LR)
            _, method = run_training(
                tmp_path / name, config, method=distilled_compressor(with_lora), data=short_books()
            )
            assert all(bool(p.any()) for n, p in method.named_parameters() if "lora_B" in n)
    assert runs_equal(tmp_path / "whole", tmp_path / "cut", 4)
