"""The engine gives every request what `laconic.generate` gives it alone, whatever else runs."""

import itertools
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import laconic
from laconic.errors import NonFiniteError
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from laconic.serving import sequence
from laconic.serving.engine import Engine, EngineClosedError, QueueFullError
from laconic.serving.requests import EngineRequest, FinishEvent, PromptEvent
from laconic.serving.sequence import RunningSequence
from tests.serving.receiver import Receiver, run_to_end, submit

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


@pytest.mark.medium
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
            assert receiver.finish == FinishEvent(alone.stop_reason)
            logprobs = [event.logprob.logprob for event in receiver.tokens]
            assert logprobs == pytest.approx(alone.logprobs, abs=1e-3)
    assert engine.stats().num_running == engine.stats().kv_bytes == 0


def encode(text: str) -> list[int]:
    return stories().tokenizer.encode(text)


def test_engine_reads_a_long_prompt_between_the_tokens_of_running_rows() -> None:
    engine = Engine(stories(), prefill_chunk_size=16)
    running = submit(engine, encode("Once"), config=GenerationConfig(max_tokens=60, eos_token_ids=()))
    engine.run_once()
    ids = [1, *torch.randint(3, 500, (240,), generator=torch.Generator().manual_seed(0)).tolist()]
    config = GenerationConfig(max_tokens=5, eos_token_ids=())
    long = submit(engine, ids, config=config)
    run_to_end(engine)
    gaps = [after - before for before, after in itertools.pairwise(running.steps[1:-1])]
    assert set(gaps) == {1}, "a token of the running row in every step"
    assert long.steps[0] >= 241 // 16
    assert running.steps[-1] > long.steps[0]
    alone = laconic.generate(stories().decoder, stories().tokenizer, input_ids=[ids], config=config)[0]
    assert long.token_ids == alone.token_ids


@pytest.mark.medium
@pytest.mark.parametrize(("num_rows", "slowness"), [(1, 1), (4, 3), (15, 1), (15, 3)])
def test_engine_reads_a_long_prompt_in_steps_of_less_than_200_ms(
    num_rows: int, slowness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fast and slow machines, by a clock that runs with the work; positions cost more, the more precede them."""
    engine, seconds, steps = Engine(stories()), [0.0], list[float]()
    monkeypatch.setattr("laconic.serving.engine.time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    forward, step = engine.forward, engine.step

    def forward_and_count(segments: Sequence[tuple[RunningSequence, Tensor]]) -> Sequence[Tensor | Exception]:
        prefill = sum(len(inputs) * (1 + s.num_read / 200) for s, inputs in segments if s.next_id is None)
        seconds[0] += slowness * (0.02 + 0.002 * num_rows + 0.002 * prefill)
        return forward(segments)

    def measure_step() -> None:
        start = seconds[0]
        step()
        steps.append(seconds[0] - start)

    monkeypatch.setattr(engine, "forward", forward_and_count)
    monkeypatch.setattr(engine, "step", measure_step)
    config = GenerationConfig(max_tokens=400, eos_token_ids=())
    for _ in range(num_rows):
        submit(engine, encode("Once"), config=config)
    for _ in range(4):
        engine.run_once()
    long, start = submit(engine, [1] * 200, config=GenerationConfig(max_tokens=2)), len(steps)
    while not long.events:
        engine.run_once()
    assert max(steps[start:]) <= 0.2
    total = sum(steps[start:])
    assert total <= 6 * slowness * 0.002 * 200 * 1.5, "a sixth of the time is for the prompt at least"


def test_engine_shares_a_step_between_prompts() -> None:
    """A short prompt does not wait for a long one that came first."""
    engine = Engine(stories(), prefill_chunk_size=16)
    long = submit(engine, [1, *range(3, 203)], config=GenerationConfig(max_tokens=3))
    engine.run_once()
    short = submit(engine, encode("The dog"), config=GenerationConfig(max_tokens=3))
    run_to_end(engine)
    assert short.steps[-1] < long.steps[0]


def test_engine_cancel_takes_effect_before_the_next_step() -> None:
    engine = Engine(stories(), max_batch_size=2)
    config = GenerationConfig(max_tokens=50, eos_token_ids=())
    first, second, waiting = (submit(engine, encode(text), config=config) for text in TEXTS[:3])
    for _ in range(4):
        engine.run_once()
    before = engine.stats()
    assert (before.num_running, before.num_waiting) == (2, 1)
    assert before.kv_bytes > 0
    engine.cancel(first.id)
    engine.cancel(12345)
    engine.run_once()
    assert first.finish == FinishEvent("cancelled")
    assert engine.stats().num_waiting == 0
    engine.cancel(waiting.id)
    run_to_end(engine)
    assert waiting.finish.reason == "cancelled"
    assert second.token_ids == generate_alone(TEXTS[1], config).token_ids
    engine.cancel(second.id)
    assert engine.run_once()
    assert second.finish.reason == "length", "a finished request cannot be cancelled"


def wait_until_idle(engine: Engine) -> None:
    """Wait until all requests have ended."""
    with engine.changed:
        assert engine.changed.wait_for(lambda: not engine.waiting and not engine.stats().num_running, 60)


def test_engine_thread_serves_and_closes() -> None:
    engine = Engine(stories(), max_batch_size=1, max_queue=1)
    config = GenerationConfig(max_tokens=5, eos_token_ids=())
    first, second = (submit(engine, encode(text), config=config) for text in TEXTS[:2])
    with pytest.raises(QueueFullError, match="2 sequences are waiting"):
        submit(engine, encode("Tom"), config=config)
    engine.start()
    wait_until_idle(engine)
    assert first.token_ids == generate_alone(TEXTS[0], config).token_ids
    assert second.token_ids == generate_alone(TEXTS[1], config).token_ids
    stats = engine.stats()
    assert (stats.num_running, stats.kv_bytes) == (0, 0)
    engine.close()
    assert not engine.thread.is_alive()
    with pytest.raises(EngineClosedError):
        submit(engine, encode("Tom"), config=config)


def test_engine_close_cancels_what_runs_and_waits() -> None:
    engine, started = Engine(stories(), max_batch_size=1), threading.Event()
    events = list[object]()
    request = EngineRequest(tuple(encode("Once")), config=GenerationConfig(max_tokens=400, eos_token_ids=()))

    def receive(event: object) -> None:
        events.append(event)
        started.set()

    engine.submit(request, receive)
    waiting = submit(engine, encode("Tom"))
    engine.start()
    assert started.wait(60)
    engine.close()
    assert isinstance(events[-1], FinishEvent)
    assert (events[-1].reason, waiting.finish.reason) == ("cancelled", "cancelled")


def test_engine_row_that_is_not_finite_fails_alone() -> None:
    engine = Engine(stories())
    cache = stories().decoder(stories().decoder.embed(torch.tensor([encode("Once upon")]))).cache
    broken = cache.map_tensors(lambda x: x * float("nan") if x.is_floating_point() else x)
    config = GenerationConfig(max_tokens=8)
    bad = submit(engine, [5, 6], state=broken, config=config)
    good = submit(engine, encode(TEXTS[0]), config=config)
    run_to_end(engine)
    assert isinstance(bad.events[-1], NonFiniteError)
    assert good.token_ids == generate_alone(TEXTS[0], config).token_ids
    assert engine.stats().kv_bytes == 0


def test_engine_drops_a_request_whose_receiver_fails() -> None:
    engine = Engine(stories())

    def fail(event: object) -> None:
        raise RuntimeError("event loop is closed")

    engine.submit(EngineRequest(tuple(encode("Once")), config=GenerationConfig(max_tokens=50)), fail)
    good = submit(engine, encode(TEXTS[0]), config=CONFIGS[0])
    engine.run_once()
    assert engine.stats().num_running == 1
    run_to_end(engine)
    assert good.token_ids == generate_alone(TEXTS[0], CONFIGS[0]).token_ids


def test_engine_log_probabilities_of_prompt_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "LOGPROB_ROWS", 3)
    engine = Engine(stories(), prefill_chunk_size=5)
    ids = encode(TEXTS[2])
    receiver = submit(engine, ids, config=GenerationConfig(max_tokens=4), num_top_logprobs=3, with_prompt_logprobs=True)
    run_to_end(engine)
    decoder, whole = stories().decoder, [*ids, *receiver.token_ids]
    with torch.no_grad():
        expected = decoder.logits(decoder(decoder.embed(torch.tensor([whole]))).hidden_states[0]).log_softmax(-1)
    (prompt,) = [event for event in receiver.events if isinstance(event, PromptEvent)]
    assert receiver.events[0] is prompt
    scored = [*prompt.logprobs, *(event.logprob for event in receiver.tokens)]
    assert [entry.token_id for entry in scored] == whole
    assert (scored[0].logprob, scored[0].top) == (None, ())
    for t, entry in enumerate(scored[1:]):
        values, top = expected[t].topk(3)
        assert entry.logprob == pytest.approx(float(expected[t, entry.token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == top.tolist()
        assert [p for _, p in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("place", ["forward", "logits"])
def test_engine_thread_survives_errors(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as too little memory: the requests of the step fail, later ones do not."""
    engine = Engine(stories())
    work, is_broken = getattr(engine.served.executor, place), [True]

    def fail_once(*inputs: Any) -> Any:
        if is_broken.pop() if is_broken else False:
            raise RuntimeError("out of memory")
        return work(*inputs)

    monkeypatch.setattr(engine.served.executor, place, fail_once)
    bad = submit(engine, encode("Once"))
    engine.start()
    with engine.changed:
        assert engine.changed.wait_for(lambda: engine.stats().num_running == 0 < len(bad.events), 60)
    assert isinstance(bad.events[-1], RuntimeError)
    assert bad.events[-1].args == ("out of memory",)
    good = submit(engine, encode(TEXTS[0]), config=CONFIGS[0])
    wait_until_idle(engine)
    assert good.token_ids == generate_alone(TEXTS[0], CONFIGS[0]).token_ids
    engine.close()
