"""StaticCacheDecoder equals decoding with the decoder on an immutable KV cache."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.batches.padding import pad_rows
from laconic.generation import backends as generation_backends
from laconic.generation import static_cache
from laconic.generation.backends import CacheBackend
from laconic.generation.prompt import build_prompt, prefill
from laconic.generation.static_cache import StaticCacheDecoder
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.conftest import missing, needs
from tests.generation.test_generate import free, ids_of
from tests.models.fixtures import VARIANTS, decoder_of, fresh
from tests.models.test_kv_prefix import LENGTHS, NUM_TOKENS, row_cache
from tests.tolerances import FLOORS, LEAST_FLOOR, error

pytestmark = pytest.mark.usefixtures("unchecked")
ROWS = [[5, 9, 3, 17, 60, 8, 33], [7], [2, 4, 8, 11, 90, 1], [50, 60, 70]]
STEPS = 12


def prefill_cache(decoder: Decoder, rows: list[list[int]]) -> KVCache:
    return prefill(decoder, build_prompt(decoder, input_ids=rows), None, 512)[1]


def run_steps(backend: Any, ids: Tensor) -> Tensor:
    """Return hidden states and logits of the steps of a backend, [N, B, D + V]."""
    return torch.stack([torch.cat(backend.step(column), 1) for column in ids.t()])


def build_static(decoder: Decoder, cache: KVCache, steps: int = STEPS, **options: int) -> StaticCacheDecoder:
    return StaticCacheDecoder(static_cache.fuse_weights(decoder, **options), cache, steps)


def check_equal(
    name: str, rows: list[list[int]], copies: int = static_cache.MAX_COPY_BYTES, steps: int = STEPS
) -> None:
    """Check that the static cache gives what the decoder gives, up to the float32 floor of the latter."""
    ids = torch.randint(0, 97, (len(rows), steps), generator=torch.Generator().manual_seed(3))
    decoder, float64 = decoder_of(name, torch.float32), decoder_of(name)
    with torch.inference_mode():
        actual = run_steps(build_static(decoder, prefill_cache(decoder, rows), steps, max_copy_bytes=copies), ids)
        expected = run_steps(CacheBackend(decoder, prefill_cache(decoder, rows)), ids)
        floor = error(expected, run_steps(CacheBackend(float64, prefill_cache(float64, rows)), ids))
    assert error(actual, expected) <= FLOORS * max(floor, LEAST_FLOOR)
    assert (actual[:, :, -97:].argmax(-1) == expected[:, :, -97:].argmax(-1)).all()


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS, [ROWS[0], ROWS[0][::-1]]], ids=["one", "padded", "whole"])
@pytest.mark.parametrize("name", VARIANTS)
def test_static_cache_equals_the_decoder(name: str, rows: list[list[int]]) -> None:
    check_equal(name, rows)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("name", ["llama", "llama, windows"])
def test_static_cache_after_a_kv_prefix(name: str, num_rows: int) -> None:
    ids = torch.randint(0, 97, (num_rows, STEPS), generator=torch.Generator().manual_seed(3))
    decoder = decoder_of(name)
    with torch.inference_mode():
        prefixes = KVCache.concat_rows(*(row_cache(LENGTHS[i % 3], NUM_TOKENS[i % 3], i) for i in range(num_rows)))
        cache = prefill(decoder, build_prompt(decoder, input_ids=ROWS[:num_rows]), prefixes, 512)[1]
        static = build_static(decoder, cache)
        expected = CacheBackend(decoder, cache)
        torch.testing.assert_close(run_steps(static, ids), run_steps(expected, ids))
        assert static.to_cache().prefix is expected.to_cache().prefix is cache.prefix


@pytest.mark.parametrize("copies", [0, 30_000], ids=["none", "some"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen2"])
def test_static_cache_with_weights_in_place(name: str, copies: int) -> None:
    check_equal(name, ROWS, copies=copies)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen2", "qwen3", "smollm3"])
def test_static_cache_with_packed_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not static_cache.has_onednn_packing(torch.device("cpu")):
        missing("needs a torch with oneDNN")
    monkeypatch.setattr(static_cache, "MIN_PACKED_NUMEL", 0)
    monkeypatch.setattr(static_cache, "MIN_PACKED_ROWS", 1)
    check_equal(name, ROWS)


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope"])
def test_static_cache_with_length_dependent_rope(name: str) -> None:
    rows = [[1 + i % 90 for i in range(n)] for n in (124, 60, 3)]
    check_equal(name, rows)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_static_cache_grows_when_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_cache, "MIN_NEW_SLOTS", 2)
    check_equal(name, ROWS, steps=40)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
@pytest.mark.parametrize("name", ["llama", "llama, windows", "opt"])
def test_static_cache_never_reads_unfilled_slots(name: str, rows: list[list[int]]) -> None:
    decoder = decoder_of(name, torch.float32)
    ids = torch.randint(0, 97, (len(rows), STEPS), generator=torch.Generator().manual_seed(3))
    outputs: list[Tensor] = []
    with torch.inference_mode():
        for tail in (0.0, float("nan")):
            static = build_static(decoder, prefill_cache(decoder, rows))
            static.buffer[:, :, :, static.num_filled :] = tail
            outputs.append(run_steps(static, ids))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["llama", "llama, windows", "gpt2"])
def test_static_cache_select_rows(name: str) -> None:
    decoder = decoder_of(name, torch.float32)
    ids = torch.randint(0, 97, (4, 3), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        one = build_static(decoder, prefill_cache(decoder, ROWS), 6)
        other = CacheBackend(decoder, prefill_cache(decoder, ROWS))
        for backend in (one, other):
            run_steps(backend, ids)
            backend.select_rows([3, 1])
        assert error(run_steps(one, ids[[3, 1]]), run_steps(other, ids[[3, 1]])) <= FLOORS * 1e-6
        assert one.to_cache().valid.equal(other.to_cache().valid)
        assert one.to_cache().positions.equal(other.to_cache().positions)


@pytest.mark.parametrize("name", VARIANTS)
def test_generate_is_equal_with_both_backends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(name, torch.float32)
    fast = free(decoder, ROWS, 20)
    monkeypatch.setattr(generation_backends, "is_stock_decoder", lambda decoder: False)
    slow = free(decoder, ROWS, 20)
    for one, other in zip(fast, slow, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert error(one.last_hidden, other.last_hidden) <= FLOORS * 1e-6
        assert one.state.cache.valid.equal(other.state.cache.valid)
        assert one.state.cache.positions.equal(other.state.cache.positions)
        assert error(torch.stack(one.state.cache.keys), torch.stack(other.state.cache.keys)) <= FLOORS * 1e-6
        assert error(torch.stack(one.state.cache.values), torch.stack(other.state.cache.values)) <= FLOORS * 1e-6


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def modified_decoder(change: str) -> Decoder:
    decoder = fresh("llama")
    block: Any = decoder.layers[0]
    if change == "linear":
        block.mlp.up_proj = Doubled(48, 64)
    elif change == "mlp":
        block.mlp = nn.Linear(48, 48)
    elif change == "hook":
        block.self_attn.o_proj.register_forward_hook(lambda module, args, out: 2 * out)
    elif change == "pre hook":
        decoder.layers[1].register_forward_pre_hook(lambda module, args: None)
    elif change == "type":
        block.mlp.up_proj.double()
    elif change == "training":
        decoder.train()
    elif change == "attention":
        decoder.attn_implementation = "eager"
    return decoder


@pytest.mark.parametrize("change", ["linear", "mlp", "hook", "pre hook", "type", "training", "attention"])
def test_modified_decoder_is_not_stock(change: str) -> None:
    assert static_cache.is_stock_decoder(fresh("llama"))
    assert not static_cache.is_stock_decoder(modified_decoder(change))


def test_decoder_under_autocast_is_not_stock() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not static_cache.is_stock_decoder(fresh("llama"))


@pytest.mark.parametrize("change", ["linear", "mlp", "hook", "attention"])
def test_generate_runs_replaced_modules(change: str) -> None:
    decoder = modified_decoder(change)
    (actual,) = free(decoder, ROWS[:1], 5)
    ids = list(ROWS[0])
    for token in actual.token_ids:
        assert int(decoder.logits(decoder(decoder.embed(torch.tensor([ids]))).hidden_states[:, -1]).argmax()) == token
        ids.append(token)


def test_generate_sees_weights_changed_between_calls() -> None:
    decoder = fresh("llama")
    before = free(decoder, ROWS, 20)
    decoder.layers[0].submodule("q").weight.data.mul_(-3.0)  # not seen by version counters
    after, new = free(decoder, ROWS, 20), fresh("llama")
    with torch.no_grad():
        new.layers[0].submodule("q").weight.mul_(-3.0)
    assert ids_of(after) == ids_of(free(new, ROWS, 20)) != ids_of(before)


def test_static_cache_in_float64_and_bfloat16() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        decoder = fresh("qwen3").to(dtype)
        assert static_cache.is_stock_decoder(decoder)
        outputs = free(decoder, ROWS, 20)
        assert all(g.state.cache.keys[0].dtype == dtype and g.last_hidden.dtype == dtype for g in outputs)
    float64 = decoder_of("qwen3")
    one = free(float64, ROWS, 20)
    for row, g in zip(ROWS, one, strict=True):
        ids, mask = pad_rows([row + g.token_ids])
        logits = float64.logits(float64(float64.embed(ids), attention_mask=mask).hidden_states[0, len(row) - 1 : -1])
        assert logits.float().argmax(-1).tolist() == g.token_ids


def test_generate_runs_peft_adapters() -> None:
    needs("peft")
    from peft import LoraConfig, get_peft_model

    base = free(fresh("llama"), ROWS, 20)
    adapted: Any = get_peft_model(fresh("llama"), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    adapted.eval()
    assert not static_cache.is_stock_decoder(adapted.base_model.model)
    outputs = free(adapted.base_model.model, ROWS, 20)
    assert ids_of(outputs) == ids_of(free(adapted.merge_and_unload().eval(), ROWS, 20)) != ids_of(base)
