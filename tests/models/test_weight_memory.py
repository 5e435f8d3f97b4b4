"""Weights as neighbours in memory: stacking without a copy, and what a loaded checkpoint gains from it."""

from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_model

from laconic.models.checkpoints.weight_memory import HUGE_PAGE_BYTES, WeightMemory, allocate_huge_pages, stack_rows
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


def test_weight_memory_places_tensors_one_behind_another() -> None:
    memory = WeightMemory(2**20)
    a, b = memory.empty((4, 16), torch.float32), memory.empty((3, 16), torch.float32)
    assert b.data_ptr() == a.data_ptr() + a.nbytes
    stacked = stack_rows([a, b])
    assert stacked is not None
    assert stacked.shape == (7, 16)
    stacked.copy_(torch.arange(112.0).view(7, 16))
    assert torch.equal(torch.cat([a, b]), stacked)


def test_stack_rows_keeps_the_memory_of_a_parameter_that_gets_another_one() -> None:
    memory = WeightMemory(2**20)
    a, b = (torch.nn.Parameter(memory.empty((64, 64), torch.float32).fill_(value)) for value in (1.0, 2.0))
    stacked = stack_rows([a, b])
    assert stacked is not None
    del memory
    for p in (a, b):
        p.data = torch.zeros(64, 64)
    assert stacked.mean() == 1.5


def test_weight_memory_holds_empty_tensors() -> None:
    assert WeightMemory(2**10).empty((0, 4), torch.float32).shape == (0, 4)
    assert stack_rows([torch.empty(0, 4)] * 2) is None


def test_weight_memory_aligns_tensors_and_grows() -> None:
    memory = WeightMemory(2**10)
    assert memory.empty((), torch.float32).shape == ()
    odd, aligned = memory.empty((3,), torch.int8), memory.empty((5, 16), torch.bfloat16)
    assert aligned.data_ptr() % 64 == 0
    large = memory.empty((2**12,), torch.int8)  # larger than a block
    for value, tensor in enumerate((large, odd, aligned), 1):
        tensor.fill_(value)
    assert int(large.sum()) == len(large)
    assert odd.tolist() == [2, 2, 2]


def test_allocate_huge_pages_begins_at_one() -> None:
    assert allocate_huge_pages(100).data_ptr() % HUGE_PAGE_BYTES == 0
    assert len(allocate_huge_pages(100)) == 100


def test_allocate_huge_pages_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    assert len(allocate_huge_pages(100)) == 100


def test_stack_rows_of_tensors_that_are_no_neighbours() -> None:
    memory = WeightMemory(2**10)
    a, odd = memory.empty((4, 16), torch.float32), memory.empty((1,), torch.int8)
    c = memory.empty((2, 16), torch.float32)
    assert stack_rows([a, c]) is None
    assert stack_rows([c, a]) is None
    assert stack_rows([a.t()]) is None
    assert stack_rows([torch.ones(2, 3), torch.ones(2, 3)]) is None
    assert odd.nbytes == 1


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_from_pretrained_stacks_layers_of_one_input(family: str, quantize: str | None, tmp_path: Path) -> None:
    Decoder(DecoderConfig.tiny(family, hidden_size=64), seed=1).save_pretrained(tmp_path / "model")
    decoder = Decoder.from_pretrained(tmp_path / "model", quantize="int8" if quantize else None)
    for layer in decoder.layers:
        q, k, v = (cast(torch.Tensor, layer.get_submodule(f"self_attn.{name}_proj").weight) for name in "qkv")
        stacked = stack_rows([q, k, v])
        assert stacked is not None
        assert torch.equal(stacked, torch.cat([q, k, v]))
        assert stacked.data_ptr() == q.data_ptr()


def test_from_pretrained_model_is_saved_and_copied_like_any_other(tmp_path: Path) -> None:
    Decoder(DecoderConfig.tiny("llama", hidden_size=64), seed=1).save_pretrained(tmp_path / "a")
    decoder = Decoder.from_pretrained(tmp_path / "a")
    decoder.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    save_model(decoder, str(tmp_path / "c.safetensors"))  # refuses tensors of one storage, and accelerate drops them
    assert load_file(tmp_path / "c.safetensors").keys() == decoder.state_dict().keys()
    torch.save(decoder.layers[0].get_submodule("self_attn.q_proj").weight, tmp_path / "q.pt")
    assert (tmp_path / "q.pt").stat().st_size < 64 * 64 * 4 + 4096
    decoder.share_memory()
