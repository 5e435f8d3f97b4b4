"""Law of state: continuing from the state of a result equals continuing from its text."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import UsageError
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.generation.state import DecodeState
from tests.generation.test_backends import hope
from tests.generation.test_generate import Letters
from tests.models.fixtures import FAMILIES, decoder_of

pytestmark = pytest.mark.usefixtures("unchecked")
ids = st.integers(1, 90)
rows = st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1, max_size=3)
STOPS: dict[str, dict[str, Any]] = {
    "length": {"eos_token_ids": ()},
    "eos": {"eos_token_ids": tuple(range(0, 96, 7))},
    "stop": {"eos_token_ids": (), "stop_strings": ("a", "E", "5", "Z", "!")},
    "cancelled": {"eos_token_ids": (), "on_token": lambda row, token, text, logprob: token % 5 == row},
}


def state_of(generations: list[Generation]) -> DecodeState:
    states = [g.state for g in generations]
    assert all(isinstance(state, DecodeState) for state in states)
    return DecodeState.concat_rows(*states)  # pyright: ignore[reportArgumentType]


@pytest.mark.medium
@settings(max_examples=40)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(sorted(STOPS)),
    rows,
    st.lists(st.lists(ids, max_size=4), min_size=3, max_size=3),
    st.integers(1, 6),
)
def test_state_continues_like_the_text(
    family: str, stop: str, prompts: list[list[int]], turns: list[list[int]], max_tokens: int
) -> None:
    decoder, turns = decoder_of(family), turns[: len(prompts)]
    config = GenerationConfig(max_tokens=max_tokens, **STOPS[stop])
    first = generate(decoder, Letters(), input_ids=prompts, config=config)
    history = [prompt + g.token_ids + turn for prompt, g, turn in zip(prompts, first, turns, strict=True)]
    expected = generate(decoder, Letters(), input_ids=history, config=config)
    continued = generate(decoder, Letters(), input_ids=turns, state=state_of(first), config=config)
    assert [g.token_ids for g in continued] == [g.token_ids for g in expected]
    assert [g.stop_reason for g in continued] == [g.stop_reason for g in expected]
    for g, other, prompt, turn, before in zip(continued, expected, prompts, turns, first, strict=True):
        torch.testing.assert_close(g.logprobs, other.logprobs, rtol=1e-9, atol=1e-9)
        length = len(prompt) + len(before.token_ids) + len(turn) + len(g.token_ids)
        assert isinstance(g.state, DecodeState)
        assert int(g.state.cache.valid.sum()) + 1 == length
        assert int(g.state.cache.positions.max()) + 2 == length


def test_state_takes_embeddings_after_the_unread_id() -> None:
    decoder, prompts = decoder_of("gpt2"), [[3, 4, 5], [6]]
    config = GenerationConfig(max_tokens=3, eos_token_ids=())
    first = generate(decoder, input_ids=prompts, config=config)
    turns = torch.tensor([[7, 8], [9, 10]])
    expected = generate(decoder, input_ids=turns, state=state_of(first), config=config)
    vectors = generate(decoder, inputs_embeds=decoder.embed(turns), state=state_of(first), config=config)
    assert [g.token_ids for g in vectors] == [g.token_ids for g in expected]


def test_state_of_fast_weights_continues_like_the_ids() -> None:
    model, ids_after = hope(), [[7, 8]]
    config = GenerationConfig(max_tokens=5, eos_token_ids=(), update_on_prompt=True, update_on_output=True)
    first = generate(model, input_ids=[[3, 4, 5]], config=config)[0]
    continued = generate(model, input_ids=ids_after, state=first.state, config=config)[0]
    whole = generate(model, input_ids=[[3, 4, 5, *first.token_ids, 7, 8]], config=config)[0]
    assert continued.token_ids == whole.token_ids


def test_state_texts_are_encoded_without_special_tokens() -> None:
    class WithBos(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [95] * add_special_tokens + super().encode(text)

    decoder, config = decoder_of("llama"), GenerationConfig(max_tokens=4, eos_token_ids=())
    first = generate(decoder, WithBos(), ["Hi"], config=config)[0]
    continued = generate(decoder, WithBos(), [" and"], state=first.state, config=config)[0]
    ids_of_text = [*WithBos().encode("Hi"), *first.token_ids, *Letters().encode(" and")]
    assert continued.token_ids == generate(decoder, input_ids=[ids_of_text], config=config)[0].token_ids
    assert generate(decoder, WithBos(), [""], state=first.state, config=config)[0].token_ids  # go on without a text


def test_state_rows_are_forked_and_counted() -> None:
    decoder, config = decoder_of("llama"), GenerationConfig(max_tokens=4, eos_token_ids=())
    state = state_of(generate(decoder, input_ids=[[3, 4]], config=config))
    forks = generate(decoder, input_ids=[[5], [6]], state=state.select_rows([0, 0]), config=config)
    singles = [generate(decoder, input_ids=[[i]], state=state, config=config)[0] for i in (5, 6)]
    assert [g.token_ids for g in forks] == [g.token_ids for g in singles]
    assert state.select_rows([True]).cache.is_equal(state.cache)
    assert repr(state) == "DecodeState(B=1, S=6, 1 unread)"
    with pytest.raises(UsageError, match="2 prompts on a state of 1 rows"):
        generate(decoder, input_ids=[[5], [6]], state=state, config=config)


def test_generations_states_and_caches_are_compared_by_identity() -> None:
    decoder, config = decoder_of("llama"), GenerationConfig(max_tokens=2, eos_token_ids=())
    one, other = (generate(decoder, input_ids=[[1, 17]], config=config)[0] for _ in range(2))
    states = state_of([one]), state_of([other])
    for mine, theirs in ((one, other), states, (states[0].cache, states[1].cache)):
        assert mine != theirs
        assert len({mine, theirs}) == 2
    assert states[0].cache.is_equal(states[1].cache)


def test_generation_repr_is_one_short_line() -> None:
    config = GenerationConfig(max_tokens=4, eos_token_ids=())
    generation = generate(decoder_of("llama"), Letters(), ["Hi" * 40], config=config)[0]
    assert repr(generation) == f"Generation({generation.text!r}, 4 tokens, length, S=84)"
    assert "<td>length</td>" in generation._repr_html_()


def test_generate_reports_chunks_and_rows_as_they_end() -> None:
    calls: list[Any] = []
    config = GenerationConfig(
        max_tokens=9,
        eos_token_ids=(),
        prefill_chunk_size=4,
        on_prefill=lambda *args: calls.append(args),
        on_token=lambda row, *rest: row == 1,
        on_finish=lambda row, generation: calls.append((row, generation.stop_reason, generation.num_prompt_tokens)),
    )
    generate(decoder_of("llama"), input_ids=[[1] * 10, [2] * 3], config=config)
    assert calls == [(0, 10), (4, 10), (8, 10), (10, 10), (1, "cancelled", 3), (0, "length", 10)]


def test_generate_reads_more_at_once_on_an_empty_cache_unless_followed() -> None:
    calls: list[Any] = []
    decoder, prompt = decoder_of("llama"), [1 + i % 90 for i in range(29)]
    config = GenerationConfig(max_tokens=9, eos_token_ids=(), prefill_chunk_size=3)
    (generation,) = generate(decoder, input_ids=[prompt], config=config)
    assert generation.passes.prompt == 3
    config = replace(config, on_prefill=lambda *args: calls.append(args))
    (followed,) = generate(decoder, input_ids=[prompt], config=config)
    assert calls == [(done, 29) for done in (*range(0, 29, 3), 29)]
    assert generation.token_ids == followed.token_ids
    (whole,) = generate(decoder, input_ids=[prompt], config=GenerationConfig(max_tokens=9, eos_token_ids=()))
    assert generation.token_ids == whole.token_ids
    assert whole.passes.prompt == 1
