"""`laconic.generate` on a model that learns while it reads: rows alone as together, what teaches, what it leaves."""

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
from tests.models.fixtures import fresh
from tests.nested.helpers import near

pytestmark = pytest.mark.usefixtures("unchecked")
V = 257


def hope(seed: int = 1) -> Hope:
    own = CMSOptions(inner_objective="associative", inner_lr=0.5)
    made = (
        Hope(laconic.HopeConfig.attention_free(V, 8, 2, chunk_sizes=(2, 4), num_heads=2, cms=own), seed).double().eval()
    )
    with torch.no_grad():
        for n, p in enumerate(made.parameters()):
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(n)).double())
    return made


def attending() -> HopeAttention:
    own = CMSOptions(inner_lr=0.5, max_update_ratio=0.0)
    return HopeAttention.from_decoder(fresh("llama").double(), (2, 4), options=own)


def ids_of(*lengths: int, vocab: int = 97) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


def floats(state: Any) -> list[Tensor]:
    """What is learned; caches aside, whose slots may stand elsewhere."""
    return [
        x.double() for name, x in values.named_tensors(state) if "cache" not in name and not name.startswith("open")
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_rows_together_are_rows_alone_and_the_state_has_read_all(which: int) -> None:
    model, rows = (hope(), attending())[which], ids_of(6, 3, 5)
    both = generate(
        model,
        input_ids=rows,
        config=GenerationConfig(
            max_tokens=4, eos_token_ids=(), prefill_chunk_size=2, update_on_prompt=True, update_on_output=True
        ),
    )
    for ids, together in zip(rows, both, strict=True):
        (alone,) = generate(
            model,
            input_ids=[ids],
            config=GenerationConfig(max_tokens=4, eos_token_ids=(), update_on_prompt=True, update_on_output=True),
        )
        assert together.token_ids == alone.token_ids
        assert together.passes == (3, 0, 0, 4)
        seen = model.read_tokens(torch.tensor([ids + alone.token_ids]))
        assert isinstance(together.state, FastWeightState)
        assert int(together.state.position) == len(ids) + 4
        near(floats(alone.state), floats(seen.cache))
        moved = [level.moved for layer in together.state.layers for level in cast(Any, layer.cms).levels]
        assert any(x.dense.any() if hasattr(x, "dense") else x.any() for part in moved for x in part.values())
    again = model.read_tokens(torch.tensor([[1, 2, 3, 4, 5]]), both[0].state)  # in which a gradient may be asked of it
    again.hidden_states.sum().backward()


def test_what_teaches_unless_it_is_said() -> None:
    """Without attention a text is seen by what is learned of it; with attention nothing is, unless asked."""
    for model in (hope(), attending()):
        ids, sees = ids_of(6), isinstance(model, HopeAttention)
        found = generate(model, input_ids=ids, config=GenerationConfig(max_tokens=3, eos_token_ids=()))[0]
        asked = generate(
            model,
            input_ids=ids,
            config=GenerationConfig(
                max_tokens=3, eos_token_ids=(), update_on_prompt=not sees, update_on_output=not sees
            ),
        )[0]
        assert found.logprobs == asked.logprobs
        other = generate(
            model,
            input_ids=ids,
            config=GenerationConfig(max_tokens=3, eos_token_ids=(), update_on_prompt=sees, update_on_output=sees),
        )[0]
        assert found.logprobs != other.logprobs
        assert values.states_equal(found.state, asked.state)
        still = generate(
            model,
            input_ids=ids,
            config=GenerationConfig(max_tokens=3, eos_token_ids=(), update_on_prompt=False, update_on_output=False),
        )[0].state
        start = model.initial_state(1)
        assert isinstance(still, FastWeightState)
        assert int(still.position) == 9
        for layer, before in zip(still.layers, start.layers, strict=True):
            assert values.states_equal((layer.memory, layer.cms), (before.memory, before.cms))


def test_a_state_goes_on_and_is_not_changed() -> None:
    model, (first, second) = hope(), ids_of(5, 4)
    one = generate(model, input_ids=[first], config=GenerationConfig(max_tokens=2, eos_token_ids=()))[0]
    before = values.map_tensors(cast(FastWeightState, one.state), torch.clone)
    two = generate(model, input_ids=[second], state=one.state, config=GenerationConfig(max_tokens=2, eos_token_ids=()))[
        0
    ]
    whole = generate(
        model, input_ids=[first + one.token_ids + second], config=GenerationConfig(max_tokens=2, eos_token_ids=())
    )[0]
    assert two.token_ids == whole.token_ids
    assert values.states_equal(one.state, before)
    empty = generate(
        model, input_ids=[first], config=GenerationConfig(max_tokens=2, eos_token_ids=(), return_state=False)
    )[0]
    assert values.states_equal(empty.state, model.initial_state(1))
    assert empty.passes.answer == 1


def test_texts_stop_strings_and_draws_are_those_of_every_decoder() -> None:
    model, tokenizer, heard = hope(), build_byte_tokenizer(), []
    prompts = ["Once", "Twice upon"]
    found = laconic.generate(
        model,
        tokenizer,
        prompts,
        config=laconic.GenerationConfig(
            max_tokens=6, temperature=1.0, seed=[1, 2], on_token=lambda *x: heard.append(x)
        ),
    )
    assert [each.text for each in found] == ["".join(x[2] for x in heard if x[0] == row) for row in range(2)]
    again = laconic.generate(
        model, tokenizer, prompts[1:], config=laconic.GenerationConfig(max_tokens=6, temperature=1.0, seed=2)
    )
    assert again[0].token_ids == found[1].token_ids
    vectors = generate(
        model,
        inputs_embeds=model.embed(torch.tensor(ids_of(4))),
        config=GenerationConfig(max_tokens=2, eos_token_ids=()),
    )
    assert (
        vectors[0].token_ids
        == generate(model, input_ids=ids_of(4), config=GenerationConfig(max_tokens=2, eos_token_ids=()))[0].token_ids
    )


def test_what_belongs_to_one_kind_of_model_is_refused_by_the_other() -> None:
    model, decoder, ids = hope(), fresh("llama"), ids_of(3)
    cache = generate(decoder, input_ids=ids, config=GenerationConfig(max_tokens=1))[0].state
    state = generate(model, input_ids=ids, config=GenerationConfig(max_tokens=1))[0].state
    with pytest.raises(UsageError, match="state holds a cache, the model keeps fast weights; give one of its own"):
        generate(model, input_ids=ids, state=cache, config=GenerationConfig(max_tokens=1))
    with pytest.raises(UsageError, match="state holds fast weights, the model keeps a cache; give one of its own"):
        generate(decoder, input_ids=ids, state=state, config=GenerationConfig(max_tokens=1))
    with pytest.raises(UsageError, match="learn: a llama decoder has no fast weights; give a Hope, or leave it out"):
        generate(decoder, input_ids=ids, config=GenerationConfig(max_tokens=1, update_on_prompt=True))
    with pytest.raises(
        UsageError, match="start: a model that learns while it reads counts its own positions; leave it out"
    ):
        generate(model, input_ids=ids, first_positions=torch.tensor([0]), config=GenerationConfig(max_tokens=1))
    with pytest.raises(UsageError, match="2 prompts on a state of 1 rows; take or join its rows"):
        generate(model, input_ids=ids * 2, state=state, config=GenerationConfig(max_tokens=1))
