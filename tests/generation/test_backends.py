"""generate with a model that has fast weights: rows are independent, when they are updated, and the returned state."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import laconic
from laconic.config.nested import CMSOptions
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.errors import UsageError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate
from laconic.nested import state as values
from laconic.nested.hope.model import Hope, HopeAttention
from laconic.nested.state import FastWeightState
from tests.generation.test_generate import free
from tests.models.fixtures import fresh
from tests.nested.helpers import assert_close, states_equal

pytestmark = pytest.mark.usefixtures("unchecked")
V = 257


OPTIONS = CMSOptions(inner_objective="associative", inner_lr=0.5)


def hope(seed: int = 1, chunk_sizes: tuple[int, ...] = (2, 4), options: CMSOptions = OPTIONS) -> Hope:
    model = (
        Hope(laconic.HopeConfig.attention_free(V, 8, 2, chunk_sizes=chunk_sizes, num_heads=2, cms=options), seed)
        .double()
        .eval()
    )
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(n)).double())
    return model


def attending() -> HopeAttention:
    options = CMSOptions(inner_lr=0.5, max_update_ratio=0.0)
    return HopeAttention.from_decoder(fresh("llama").double(), (2, 4), options=options)


def ids_of(*lengths: int, vocab: int = 97) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


def fast_weights(state: Any) -> list[Tensor]:
    """Return the fast weights; KV caches are excluded, because their slots may be in other places."""
    return [
        x.double() for name, x in values.named_tensors(state) if "cache" not in name and not name.startswith("open")
    ]


LEARN: dict[str, Any] = {"update_on_prompt": True, "update_on_output": True}


@pytest.mark.medium
@pytest.mark.parametrize("index", [0, 1])
def test_generate_with_fast_weights_equals_single_rows(index: int) -> None:
    model, rows = (hope(), attending())[index], ids_of(6, 3, 5)
    batch = free(model, rows, 4, prefill_chunk_size=2, **LEARN)
    for ids, result in zip(rows, batch, strict=True):
        (single,) = free(model, [ids], 4, **LEARN)
        assert result.token_ids == single.token_ids
        assert result.passes == (3, 0, 0, 4)
        output = model.read_tokens(torch.tensor([ids + single.token_ids]))
        assert isinstance(result.state, FastWeightState)
        assert int(result.state.position) == len(ids) + 4
        assert_close(fast_weights(single.state), fast_weights(output.cache))
        changes = [level.change for layer in result.state.layers for level in cast(Any, layer.cms).levels]
        assert any(x.dense.any() if hasattr(x, "dense") else x.any() for change in changes for x in change.values())
    continued = model.read_tokens(torch.tensor([[1, 2, 3, 4, 5]]), batch[0].state)
    continued.hidden_states.sum().backward()


def test_generate_goes_on_when_the_fast_weights_of_a_finished_row_overflow() -> None:
    options = CMSOptions(inner_objective="associative", inner_lr=1e37, max_update_ratio=0.0)
    model = hope(chunk_sizes=(4,), options=options).float()
    rows, once = [[5, 7, 9], [11], [23]], GenerationConfig(max_tokens=1, return_state=False)
    ends = generate(model, input_ids=rows[:1], config=once)[0].token_ids
    config = GenerationConfig(max_tokens=3, eos_token_ids=ends, return_state=False)
    alone = [generate(model, input_ids=[row], config=config)[0] for row in rows]
    together = generate(model, input_ids=rows, config=config)
    assert [x.stop_reason for x in alone] == ["eos", "length", "length"]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]


def test_generate_updates_fast_weights_only_without_attention_by_default() -> None:
    """Without attention a model conditions on a text only by learning it; with attention it does not learn."""
    for model in (hope(), attending()):
        ids, learns = ids_of(6), not isinstance(model, HopeAttention)
        default = free(model, ids, 3)[0]
        explicit = free(model, ids, 3, update_on_prompt=learns, update_on_output=learns)[0]
        assert default.logprobs == explicit.logprobs
        other = free(model, ids, 3, update_on_prompt=not learns, update_on_output=not learns)[0]
        assert default.logprobs != other.logprobs
        assert states_equal(default.state, explicit.state)
        frozen = free(model, ids, 3, update_on_prompt=False, update_on_output=False)[0].state
        assert isinstance(frozen, FastWeightState)
        assert int(frozen.position) == 9
        for layer, before in zip(frozen.layers, model.initial_state(1).layers, strict=True):
            assert states_equal((layer.memory, layer.cms), (before.memory, before.cms))


def test_generate_continues_from_a_fast_weight_state_without_changing_it() -> None:
    model, (first, second), config = hope(), ids_of(5, 4), GenerationConfig(max_tokens=2, eos_token_ids=())
    one = generate(model, input_ids=[first], config=config)[0]
    before = values.map_tensors(cast(FastWeightState, one.state), torch.clone)
    two = generate(model, input_ids=[second], state=one.state, config=config)[0]
    assert two.token_ids == generate(model, input_ids=[first + one.token_ids + second], config=config)[0].token_ids
    assert states_equal(one.state, before)
    empty = free(model, [first], 2, return_state=False)[0]
    assert empty.final_state is None
    assert empty.passes.answer == 1


@pytest.mark.medium
def test_generate_with_fast_weights_streams_and_samples_like_any_decoder() -> None:
    model, tokenizer, calls = hope(), build_byte_tokenizer(), []
    prompts, options = ["Once", "Twice upon"], {"max_tokens": 6, "temperature": 1.0}
    config = GenerationConfig(**options, seed=[1, 2], on_token=lambda *x: calls.append(x))
    default = generate(model, tokenizer, prompts, config=config)
    assert [result.text for result in default] == ["".join(x[2] for x in calls if x[0] == row) for row in range(2)]
    alone = generate(model, tokenizer, prompts[1:], config=GenerationConfig(**options, seed=2))
    assert alone[0].token_ids == default[1].token_ids
    config = GenerationConfig(max_tokens=2, eos_token_ids=())
    vectors = generate(model, inputs_embeds=model.embed(torch.tensor(ids_of(4))), config=config)
    assert vectors[0].token_ids == generate(model, input_ids=ids_of(4), config=config)[0].token_ids


def test_generate_refuses_states_and_options_of_the_other_kind_of_model() -> None:
    model, decoder, ids, one = hope(), fresh("llama"), ids_of(3), GenerationConfig(max_tokens=1)
    cache = generate(decoder, input_ids=ids, config=one)[0].state
    state = generate(model, input_ids=ids, config=one)[0].state
    with pytest.raises(UsageError, match="state is a KV cache"):
        generate(model, input_ids=ids, state=cache, config=one)
    with pytest.raises(UsageError, match="state is fast weights"):
        generate(decoder, input_ids=ids, state=state, config=one)
    for option in ("update_on_prompt", "update_on_output"):
        with pytest.raises(UsageError, match=f"{option}: a llama decoder has no fast weights"):
            generate(decoder, input_ids=ids, config=GenerationConfig(max_tokens=1, **{option: True}))
    with pytest.raises(UsageError, match="counts its own positions"):
        generate(model, input_ids=ids, first_positions=torch.tensor([0]), config=one)
    with pytest.raises(UsageError, match="2 prompts on a state of 1 rows"):
        generate(model, input_ids=ids * 2, state=state, config=one)
