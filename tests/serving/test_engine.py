"""The engine gives every request what `laconic.generate` gives it alone, whatever else runs."""

from functools import cache
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.experiment.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from laconic.serving.engine import Engine
from laconic.serving.requests import FinishEvent
from tests.serving.receiver import Receiver, submit

pytestmark = pytest.mark.usefixtures("unchecked")
STORIES = Path(laconic.__file__).parent / "checkpoints/stories260k"
TEXTS = ("Once upon a time", "The dog", "Lily and her mom went to the park. They saw a big", "One day, a", "Tom")


@cache
def stories() -> LanguageModel:
    return cast(LanguageModel, laconic.load(STORIES))


CONFIGS = [
    GenerationConfig(max_tokens=9),
    GenerationConfig(max_tokens=12, temperature=0.9, seed=5),
    GenerationConfig(max_tokens=7, temperature=1.3, top_p=0.8, seed=11, min_tokens=3),
    GenerationConfig(max_tokens=14, temperature=0.7, top_k=20, min_p=0.02, repetition_penalty=1.2, seed=2),
    GenerationConfig(max_tokens=20, stop_strings=("the", ".")),
]


@cache
def generate_alone(text: str, config: GenerationConfig) -> laconic.Generation:
    return stories().generate(text, config)[0]


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(TEXTS), st.sampled_from(CONFIGS), st.none() | st.integers(0, 9)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_engine_gives_each_request_what_generate_gives_it_alone(
    arrivals: list[tuple[int, str, GenerationConfig, int | None]], max_batch_size: int, chunk_size: int
) -> None:
    """Requests join after some steps; some are cancelled as many steps later."""
    engine = Engine(stories(), max_batch_size=max_batch_size, prefill_chunk_size=chunk_size)
    receivers = dict[int, Receiver]()
    for step in range(400):
        for i, (delay, text, config, lifetime) in enumerate(arrivals):
            if delay == step:
                ids = tuple(stories().tokenizer.encode(text))
                receivers[i] = submit(engine, ids, config=config)
            if lifetime is not None and delay + lifetime == step and i in receivers:
                engine.cancel(receivers[i].id)
        if not engine.run_once() and step > 6:
            break
    for i, (_, text, config, lifetime) in enumerate(arrivals):
        receiver, alone = receivers[i], generate_alone(text, config)
        if receiver.finish.reason == "cancelled":
            assert lifetime is not None
            assert receiver.token_ids == alone.token_ids[: len(receiver.token_ids)]
            assert alone.text.startswith(receiver.text)
        else:
            assert (receiver.token_ids, receiver.text) == (alone.token_ids, alone.text)
            assert receiver.finish == FinishEvent(alone.stop_reason, alone.num_prompt_tokens, len(alone.token_ids))
            logprobs = [event.logprob.logprob for event in receiver.tokens]
            assert logprobs == pytest.approx(alone.logprobs, abs=1e-3)
    assert engine.stats().num_running == engine.stats().kv_bytes == 0
