"""The second path of generation held to the first: a slab filled in place against a cache that is a value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.generation import backends as generation_backends
from laconic.generation import static_cache
from laconic.generation.backends import CacheBackend
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.generation.prompt import build_prompt, pad_left, prefill
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder
from tests.conftest import missing, needs
from tests.models.fixtures import VARIANTS, decoder_of, fresh
from tests.tolerances import FLOORS, LEAST_FLOOR, error

pytestmark = pytest.mark.usefixtures("unchecked")
ROWS = [[5, 9, 3, 17, 60, 8, 33], [7], [2, 4, 8, 11, 90, 1], [50, 60, 70]]
STEPS = 12


def prefilled(decoder: Decoder, rows: list[list[int]]) -> KVCache:
    return prefill(decoder, build_prompt(decoder, None, None, rows, None, None), None, 512).state


def walked(path: Any, ids: Tensor) -> Tensor:
    """Hidden states and logits of both paths' steps, [N, B, D + V]."""
    return torch.stack([torch.cat(path.step(column), 1) for column in ids.t()])


def both(
    name: str, rows: list[list[int]], copies: int = static_cache.MAX_COPY_BYTES, steps: int = STEPS
) -> tuple[Tensor, Tensor, float]:
    """What the slab gives, what the value gives, and the float32 floor of the latter."""
    ids = torch.randint(0, 97, (len(rows), steps), generator=torch.Generator().manual_seed(3))
    decoder, wide = decoder_of(name, torch.float32), decoder_of(name)
    with torch.inference_mode():
        got = walked(
            static_cache.StaticCacheDecoder(
                static_cache.fuse_weights(decoder, copies), prefilled(decoder, rows), steps
            ),
            ids,
        )
        asked = walked(CacheBackend(decoder, prefilled(decoder, rows)), ids)
        floor = error(asked, walked(CacheBackend(wide, prefilled(wide, rows)), ids))
    return got, asked, max(floor, LEAST_FLOOR)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS, [ROWS[0], ROWS[0][::-1]]], ids=["one", "padded", "whole"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_slab_is_the_value(name: str, rows: list[list[int]]) -> None:
    got, asked, floor = both(name, rows)
    assert error(got, asked) <= FLOORS * floor
    assert (got[:, :, -97:].argmax(-1) == asked[:, :, -97:].argmax(-1)).all()


@pytest.mark.parametrize("copies", [0, 30_000], ids=["none", "some"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen2"])
def test_modules_in_place_of_copies(name: str, copies: int) -> None:
    got, asked, floor = both(name, ROWS, copies=copies)
    assert error(got, asked) <= FLOORS * floor


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen2", "qwen3"])
def test_the_layout_of_onednn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not static_cache.has_onednn_packing(torch.device("cpu")):
        missing("needs a torch with oneDNN")
    monkeypatch.setattr(static_cache, "MIN_PACKED_NUMEL", 0)
    got, asked, floor = both(name, ROWS)
    assert error(got, asked) <= FLOORS * floor


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, longrope"])
def test_rope_that_changes_with_length_on_the_way(name: str) -> None:
    rows = [[1 + i % 90 for i in range(n)] for n in (124, 60, 3)]
    got, asked, floor = both(name, rows)
    assert error(got, asked) <= FLOORS * floor


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_full_slab_is_made_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_cache, "MIN_NEW_SLOTS", 2)
    got, asked, floor = both(name, ROWS, steps=40)
    assert error(got, asked) <= FLOORS * floor


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
@pytest.mark.parametrize("name", ["llama", "llama, windows", "opt"])
def test_what_is_not_filled_yet_is_never_read(name: str, rows: list[list[int]]) -> None:
    decoder = decoder_of(name, torch.float32)
    ids = torch.randint(0, 97, (len(rows), STEPS), generator=torch.Generator().manual_seed(3))
    found: list[Tensor] = []
    with torch.inference_mode():
        for tail in (0.0, float("nan")):
            made = static_cache.StaticCacheDecoder(static_cache.fuse_weights(decoder), prefilled(decoder, rows), STEPS)
            made.buffer[:, :, :, made.num_filled :] = tail
            found.append(walked(made, ids))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama", "llama, windows", "gpt2"])
def test_take_goes_on_with_some_rows(name: str) -> None:
    decoder = decoder_of(name, torch.float32)
    ids = torch.randint(0, 97, (4, 3), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        one, other = (
            static_cache.StaticCacheDecoder(static_cache.fuse_weights(decoder), prefilled(decoder, ROWS), 6),
            CacheBackend(decoder, prefilled(decoder, ROWS)),
        )
        for path in (one, other):
            walked(path, ids)
            path.select_rows([3, 1])
        assert error(walked(one, ids[[3, 1]]), walked(other, ids[[3, 1]])) <= FLOORS * 1e-6
        assert one.to_cache().valid.equal(other.to_cache().valid)
        assert one.to_cache().positions.equal(other.to_cache().positions)


@pytest.mark.parametrize("name", VARIANTS)
def test_generation_is_the_same_on_both_paths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(name, torch.float32)
    fast = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    monkeypatch.setattr(generation_backends, "plain", lambda decoder: False)
    slow = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    for one, other in zip(fast, slow, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert error(one.last_hidden, other.last_hidden) <= FLOORS * 1e-6
        assert one.state.valid.equal(other.state.valid)
        assert one.state.positions.equal(other.state.positions)
        assert error(torch.stack(one.state.keys), torch.stack(other.state.keys)) <= FLOORS * 1e-6
        assert error(torch.stack(one.state.values), torch.stack(other.state.values)) <= FLOORS * 1e-6


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def changed(what: str) -> Decoder:
    decoder = fresh("llama")
    block: Any = decoder.layers[0]
    if what == "linear":
        block.mlp.up_proj = Doubled(48, 64)
    elif what == "mlp":
        block.mlp = nn.Linear(48, 48)
    elif what == "hook":
        block.self_attn.o_proj.register_forward_hook(lambda module, args, out: 2 * out)
    elif what == "pre hook":
        decoder.layers[1].register_forward_pre_hook(lambda module, args: None)
    elif what == "type":
        block.mlp.up_proj.double()
    elif what == "training":
        decoder.train()
    elif what == "attention":
        decoder.attn_implementation = "eager"
    return decoder


@pytest.mark.parametrize("what", ["linear", "mlp", "hook", "pre hook", "type", "training", "attention"])
def test_what_is_not_plain_goes_the_first_way(what: str) -> None:
    assert static_cache.is_stock_decoder(fresh("llama"))
    assert not static_cache.is_stock_decoder(changed(what))


def test_autocast_goes_the_first_way() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not static_cache.is_stock_decoder(fresh("llama"))


@pytest.mark.parametrize("what", ["linear", "mlp", "hook", "attention"])
def test_a_part_that_was_replaced_is_what_runs(what: str) -> None:
    decoder = changed(what)
    (got,) = generate(decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=5, eos_token_ids=()))
    ids = list(ROWS[0])
    for token in got.token_ids:
        assert int(decoder.logits(decoder(decoder.embed(torch.tensor([ids]))).hidden_states[:, -1]).argmax()) == token
        ids.append(token)


def test_weights_changed_between_two_generations() -> None:
    decoder = fresh("llama")
    before = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    decoder.layers[0].part("q").weight.data.mul_(-3.0)  # which no version counter sees
    after, new = (
        generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=())),
        fresh("llama"),
    )
    with torch.no_grad():
        new.layers[0].part("q").weight.mul_(-3.0)
    assert [g.token_ids for g in after] == [
        g.token_ids for g in generate(new, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    ]
    assert [g.token_ids for g in after] != [g.token_ids for g in before]


def test_float64_and_bfloat16_go_the_second_way_too() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        decoder = fresh("qwen3").to(dtype)
        assert static_cache.is_stock_decoder(decoder)
        found = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
        assert all(g.state.keys[0].dtype == dtype and g.last_hidden.dtype == dtype for g in found)
    wide = decoder_of("qwen3")
    one = generate(wide, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    for row, g in zip(ROWS, one, strict=True):
        ids, live = pad_left([row + g.token_ids])
        logits = wide.logits(wide(wide.embed(ids), attention_mask=live).hidden[0, len(row) - 1 : -1])
        assert logits.float().argmax(-1).tolist() == g.token_ids


def test_an_adapter_is_what_runs() -> None:
    needs("peft")
    from peft import LoraConfig, get_peft_model

    plain = generate(fresh("llama"), input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    adapted: Any = get_peft_model(fresh("llama"), LoraConfig(rank=4, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    adapted.eval()
    assert not static_cache.is_stock_decoder(adapted.base_model.model)
    found = generate(adapted.base_model.model, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    merged = adapted.merge_and_unload().eval()
    assert [g.token_ids for g in found] == [
        g.token_ids for g in generate(merged, input_ids=ROWS, config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    ]
    assert [g.token_ids for g in found] != [g.token_ids for g in plain]
