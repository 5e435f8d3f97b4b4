"""`laconic.generate` on a model that learns while it reads: rows alone as together, what teaches, what it leaves."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import laconic
from laconic.core import state as values
from laconic.core.errors import Usage
from laconic.core.generate import generate
from laconic.core.state import State
from laconic.data.tokens import byte_tokenizer
from laconic.methods import cms_shape
from laconic.methods.hope_model import Hope, HopeAttention
from tests.core.readings import fresh
from tests.methods.learned import near

pytestmark = pytest.mark.usefixtures("unchecked")
V = 257


def hope(seed: int = 1) -> Hope:
    own = cms_shape.Options(inner="associative", eta=0.5)
    made = Hope(laconic.HopeConfig.of(V, 8, 2, chunks=(2, 4), heads=2, cms=own), seed).double().eval()
    with torch.no_grad():
        for n, p in enumerate(made.parameters()):
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(n)).double())
    return made


def attending() -> HopeAttention:
    own = cms_shape.Options(eta=0.5, clip=0.0)
    return HopeAttention.stack(fresh("llama").double(), (2, 4), cms=own)


def ids_of(*lengths: int, vocab: int = 97) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


def floats(state: Any) -> list[Tensor]:
    """What is learned; caches aside, whose slots may stand elsewhere."""
    return [x.double() for name, x in values.named(state) if "cache" not in name and not name.startswith("open")]


@pytest.mark.parametrize("which", [0, 1])
def test_rows_together_are_rows_alone_and_the_state_has_read_all(which: int) -> None:
    model, rows = (hope(), attending())[which], ids_of(6, 3, 5)
    both = generate(model, ids=rows, max_tokens=4, eos=(), chunk=2, learn=True, learn_answer=True)
    for ids, together in zip(rows, both, strict=True):
        (alone,) = generate(model, ids=[ids], max_tokens=4, eos=(), learn=True, learn_answer=True)
        assert together.ids == alone.ids
        assert together.passes == (3, 0, 0, 4)
        seen = model.advance(torch.tensor([ids + alone.ids]))
        assert isinstance(together.state, State)
        assert int(together.state.position) == len(ids) + 4
        near(floats(alone.state), floats(seen.state))
        moved = [level.moved for layer in together.state.layers for level in cast(Any, layer.cms).levels]
        assert any(x.dense.any() if hasattr(x, "dense") else x.any() for part in moved for x in part.values())
    again = model.advance(torch.tensor([[1, 2, 3, 4, 5]]), both[0].state)  # in which a gradient may be asked of it
    again.hidden.sum().backward()


def test_what_teaches_unless_it_is_said() -> None:
    """Without attention a text is seen by what is learned of it; with attention nothing is, unless asked."""
    for model in (hope(), attending()):
        ids, sees = ids_of(6), isinstance(model, HopeAttention)
        found = generate(model, ids=ids, max_tokens=3, eos=())[0]
        asked = generate(model, ids=ids, max_tokens=3, eos=(), learn=not sees, learn_answer=not sees)[0]
        assert found.logprobs == asked.logprobs
        other = generate(model, ids=ids, max_tokens=3, eos=(), learn=sees, learn_answer=sees)[0]
        assert found.logprobs != other.logprobs
        assert values.equal(found.state, asked.state)
        still = generate(model, ids=ids, max_tokens=3, eos=(), learn=False, learn_answer=False)[0].state
        start = model.start(1)
        assert isinstance(still, State)
        assert int(still.position) == 9
        for layer, before in zip(still.layers, start.layers, strict=True):
            assert values.equal((layer.memory, layer.cms), (before.memory, before.cms))


def test_a_state_goes_on_and_is_not_changed() -> None:
    model, (first, second) = hope(), ids_of(5, 4)
    one = generate(model, ids=[first], max_tokens=2, eos=())[0]
    before = values.mapped(cast(State, one.state), torch.clone)
    two = generate(model, ids=[second], state=one.state, max_tokens=2, eos=())[0]
    whole = generate(model, ids=[first + one.ids + second], max_tokens=2, eos=())[0]
    assert two.ids == whole.ids
    assert values.equal(one.state, before)
    empty = generate(model, ids=[first], max_tokens=2, eos=(), keep_state=False)[0]
    assert values.equal(empty.state, model.start(1))
    assert empty.passes.answer == 1


def test_texts_stop_strings_and_draws_are_those_of_every_decoder() -> None:
    model, tokenizer, heard = hope(), byte_tokenizer(), []
    prompts = ["Once", "Twice upon"]
    found = laconic.generate(
        model, tokenizer, prompts, max_tokens=6, temperature=1.0, seed=[1, 2], on_token=lambda *x: heard.append(x)
    )
    assert [each.text for each in found] == ["".join(x[2] for x in heard if x[0] == row) for row in range(2)]
    again = laconic.generate(model, tokenizer, prompts[1:], max_tokens=6, temperature=1.0, seed=2)
    assert again[0].ids == found[1].ids
    vectors = generate(model, vectors=model.embed(torch.tensor(ids_of(4))), max_tokens=2, eos=())
    assert vectors[0].ids == generate(model, ids=ids_of(4), max_tokens=2, eos=())[0].ids


def test_what_belongs_to_one_kind_of_model_is_refused_by_the_other() -> None:
    model, decoder, ids = hope(), fresh("llama"), ids_of(3)
    cache = generate(decoder, ids=ids, max_tokens=1)[0].state
    state = generate(model, ids=ids, max_tokens=1)[0].state
    with pytest.raises(Usage, match="state holds a cache, the model keeps fast weights; give one of its own"):
        generate(model, ids=ids, state=cache, max_tokens=1)
    with pytest.raises(Usage, match="state holds fast weights, the model keeps a cache; give one of its own"):
        generate(decoder, ids=ids, state=state, max_tokens=1)
    with pytest.raises(Usage, match="learn: a llama decoder has no fast weights; give a Hope, or leave it out"):
        generate(decoder, ids=ids, max_tokens=1, learn=True)
    with pytest.raises(Usage, match="start: a model that learns while it reads counts its own positions; leave it out"):
        generate(model, ids=ids, max_tokens=1, start=torch.tensor([0]))
    with pytest.raises(Usage, match="2 prompts on a state of 1 rows; take or join its rows"):
        generate(model, ids=ids * 2, state=state, max_tokens=1)
