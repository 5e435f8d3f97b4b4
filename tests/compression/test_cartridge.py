"""Cartridges: the loss against an oracle, training lowers it and leaves the model alone, peft reads and writes them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laconic.compression.distillation import distillation_loss
from laconic.compression.kv.cartridge import CartridgeConfig, fit_cartridge
from laconic.compression.kv.cartridge_file import load_cartridge, save_cartridge
from laconic.compression.kv.compress import compress_kv
from laconic.compression.kv.config import KVCompressionConfig
from laconic.compression.self_study import QUOTED_TOKENS, Requests, build_study_batch, write_study_rows
from laconic.errors import BusyError, CorruptArtifactError, InputError, UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.conftest import needs

DOCUMENT = torch.randint(5, 90, (48,), generator=torch.Generator().manual_seed(1)).tolist()
REQUESTS = Requests(((), (7, 8, 9)))
SMALL = CartridgeConfig(steps=30, num_rows=48, max_tokens=8, batch_size=21, learning_rate=0.05)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder(replace(DecoderConfig.tiny("llama"), initializer_range=0.2))
    return decoder.eval()


def compress(decoder: Decoder, slots: int = 6):  # type: ignore[no-untyped-def]
    return compress_kv(decoder, DOCUMENT, KVCompressionConfig("window", slots=slots))


def test_distillation_loss_equals_its_definition() -> None:
    teacher, student = torch.randn(2, 3, 7, dtype=torch.float64)
    expected = 0.0
    for a, b in zip(teacher.tolist(), student.tolist(), strict=True):
        za, zb = sum(map(math.exp, a)), sum(map(math.exp, b))
        expected += sum(math.exp(x) / za * (x - math.log(za) - y + math.log(zb)) for x, y in zip(a, b, strict=True))
    assert abs(float(distillation_loss(student, teacher).mean()) - expected / 3) < 1e-12
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distillation_loss(x, teacher).mean(), student)


def test_study_batch_teacher_reads_the_rows_after_the_document(decoder: Decoder) -> None:
    cache = decoder(decoder.embed(torch.tensor([DOCUMENT]))).cache
    rows = write_study_rows(decoder, cache, DOCUMENT, REQUESTS, num_rows=8, max_tokens=5, seed=3)
    assert [row.num_prompt for row in rows] == [0, 8, 8, 3, 0, 3, 0, 3]
    assert rows == write_study_rows(decoder, cache, DOCUMENT, REQUESTS, num_rows=8, max_tokens=5, seed=3)
    assert rows[2].ids == tuple(DOCUMENT[-13:])  # the last passage, after the tokens that its request quotes
    batch = build_study_batch(decoder, cache, rows)
    teacher = iter(batch.teacher)
    for row in rows:
        alone = decoder(decoder.embed(torch.tensor([[*DOCUMENT, *row.ids]]))).hidden_states[0, len(DOCUMENT) :]
        for position in range(max(row.num_prompt, 1) - 1, len(row.ids) - 1):
            torch.testing.assert_close(next(teacher), alone[position], atol=2e-5, rtol=1e-4)
    assert next(teacher, None) is None


def test_requests_build_quote_spreads_passages_over_the_document() -> None:
    requests, document = Requests(quote=((1, 2), (3,))), list(range(100, 100 + 2 * QUOTED_TOKENS))
    passages = [requests.build_quote(document, (7,), share) for share in (0.0, 0.5, 1.0)]
    starts = (0, QUOTED_TOKENS // 2, QUOTED_TOKENS)
    assert passages == [[1, 2, *document[start : start + QUOTED_TOKENS], 3] for start in starts]
    assert requests.build_quote(document, (), 0.5) == [], "a continuation follows the document"


@pytest.mark.medium
def test_fit_cartridge_lowers_the_held_out_loss(decoder: Decoder) -> None:
    before = decoder.fingerprint
    memory = compress(decoder)
    fit = fit_cartridge(decoder, memory, DOCUMENT, SMALL, requests=REQUESTS)
    assert fit.held_out_losses[fit.best_step] == min(fit.held_out_losses.values()) < 0.9 * fit.held_out_losses[0]
    assert (fit.memory.M, fit.memory.num_tokens.tolist()) == (6, [6])
    start = memory.renumber_slots(decoder.config)
    pairs = zip(
        fit.memory.split_heads(torch.cat(fit.memory.keys)), start.split_heads(torch.cat(start.keys)), strict=True
    )
    assert all(torch.equal(a[:1], b[:1]) and not torch.equal(a, b) for a, b in pairs)
    assert decoder.fingerprint == before
    assert all(p.requires_grad and p.grad is None for p in decoder.parameters())
    again = fit_cartridge(decoder, memory, DOCUMENT, SMALL, requests=REQUESTS)
    assert again.memory.is_equal(fit.memory)


def test_fit_cartridge_trains_heads_with_different_numbers_of_slots(decoder: Decoder, tmp_path: Path) -> None:
    memory = compress_kv(decoder, DOCUMENT, KVCompressionConfig("kvzip", slots=6, num_sinks=1))
    assert not memory.has_equal_heads
    fit = fit_cartridge(decoder, memory, DOCUMENT, SMALL, requests=REQUESTS)
    assert fit.held_out_losses[fit.best_step] < 0.9 * fit.held_out_losses[0]
    assert torch.equal(fit.memory.slots, memory.slots)
    assert torch.equal(fit.memory.positions, memory.positions), "keys keep their rotation"
    assert fit.memory.num_tokens.tolist() == [len(DOCUMENT)]
    for kind in ("keys", "values"):
        heads = (m.split_heads(torch.cat(getattr(m, kind))) for m in (fit.memory, memory))
        for fitted, selected in zip(*heads, strict=True):
            assert torch.equal(fitted[:1], selected[:1]), "the first slot of every head is frozen"
            assert bool((fitted[1:] != selected[1:]).any(1).all())
    with pytest.raises(UsageError, match="heads have equally many slots"):
        save_cartridge(fit.memory, tmp_path / "x")


def test_fit_cartridge_refuses_what_it_cannot_fit_before_it_writes_rows(decoder: Decoder) -> None:
    memory = compress(decoder)
    with pytest.raises(UsageError, match="2 documents"):
        fit_cartridge(decoder, memory.select_rows([0, 0]), DOCUMENT, SMALL)
    with pytest.raises(UsageError, match=r"^a text of .* a row of self-study after it exceed the context .*at most"):
        fit_cartridge(decoder, memory, DOCUMENT * 100, SMALL)
    with pytest.raises(UsageError, match="num_rows 3: give 16 or more"):
        CartridgeConfig(num_rows=3)
    table = Decoder(DecoderConfig.tiny("gpt2", max_position_embeddings=512))
    with pytest.raises(UsageError, match=r"gpt2 with learned positions cannot be moved .*; fit a memory by kvzip"):
        fit_cartridge(table, compress(table), DOCUMENT, on_progress=lambda *step: pytest.fail("found out late"))


def test_cartridge_in_peft_equals_memory(decoder: Decoder, tmp_path: Path) -> None:
    needs("peft")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    decoder.save_pretrained(tmp_path / "base")
    memory = fit_cartridge(decoder, compress(decoder), DOCUMENT, replace(SMALL, steps=1), requests=REQUESTS).memory
    save_cartridge(memory, tmp_path / "cartridge", str(tmp_path / "base"))
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), tmp_path / "cartridge"
    ).eval()
    ids = torch.tensor([[5, 17, 42]])
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        ours = decoder.logits(decoder(decoder.embed(ids), memory.to_cache()).hidden_states)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(str(tmp_path / "peft"))
    back = load_cartridge(tmp_path / "peft", decoder)
    assert all(
        torch.equal(a, b) for a, b in zip((*back.keys, *back.values), (*memory.keys, *memory.values), strict=True)
    )
    assert back.num_tokens.tolist() == [memory.M]


def test_cartridge_files_are_checked(decoder: Decoder, tmp_path: Path) -> None:
    memory = compress(decoder)
    with pytest.raises(UsageError, match="cannot be a peft cartridge"):
        save_cartridge(memory, tmp_path / "x", "base")
    memory = memory.renumber_slots(decoder.config)
    save_cartridge(memory, tmp_path / "x", "base")
    with pytest.raises(BusyError):
        save_cartridge(memory, tmp_path / "x", "base")
    with pytest.raises(InputError, match="expected \\[slots"):
        load_cartridge(tmp_path / "x", Decoder(DecoderConfig.tiny("gpt2")))
    weights = tmp_path / "x" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptArtifactError, match="was changed"):
        load_cartridge(tmp_path / "x", decoder)
    (tmp_path / "x" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(InputError, match="no peft cartridge"):
        load_cartridge(tmp_path / "x", decoder)
