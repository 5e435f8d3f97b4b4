"""Prompts that begin like an earlier sequence take its keys and values, and get the same texts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.data.tokenizer import build_byte_tokenizer
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from laconic.models.config import RopeConfig
from laconic.serving.engine import Engine, QueueFullError
from laconic.serving.prefix_cache import MIN_SHARED_TOKENS, PrefixCache
from laconic.serving.ragged import CacheRow
from laconic.serving.requests import PromptEvent
from tests.serving.receiver import Receiver, run_to_end, submit

pytestmark = pytest.mark.usefixtures("unchecked")
CONFIG = GenerationConfig(max_tokens=6, eos_token_ids=())
IDS = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def build_model(family: str = "llama", **options: Any) -> LanguageModel:
    config = laconic.DecoderConfig.tiny(family, vocab_size=257, **options)
    return LanguageModel(laconic.Decoder(config, seed=3).eval(), build_byte_tokenizer())


class CountingEngine(Engine):
    """An engine with a prefix cache that counts the positions it reads."""

    def __init__(self, model: LanguageModel, prefix_cache_bytes: int = 2**24, **options: Any) -> None:
        super().__init__(model, prefix_cache_bytes=prefix_cache_bytes, **options)
        self.num_positions = 0

    def forward(self, step_inputs: Sequence[Any]) -> Sequence[Tensor | Exception]:
        self.num_positions += sum(len(inputs) for _, inputs in step_inputs)
        return super().forward(step_inputs)


def run(engine: CountingEngine, ids: Sequence[int], **request: Any) -> tuple[Receiver, int]:
    """Run one request to its end; return its events and the number of positions that were read."""
    before = engine.num_positions
    receiver = submit(engine, ids, config=CONFIG, **request)
    run_to_end(engine)
    return receiver, engine.num_positions - before


def num_cached(receiver: Receiver) -> int:
    return next(event for event in receiver.events if isinstance(event, PromptEvent)).num_cached


def generate_alone(model: LanguageModel, ids: Sequence[int]) -> list[int]:
    return laconic.generate(model.decoder, input_ids=[list(ids)], config=CONFIG)[0].token_ids


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("gpt2", {}), ("qwen3", {}), ("llama", {"sliding_windows": (8, None)})],
)
def test_prompt_that_continues_an_earlier_sequence_gets_the_same_tokens(family: str, options: dict[str, Any]) -> None:
    model = build_model(family, **options)
    engine = CountingEngine(model)
    first, _ = run(engine, IDS[:30])
    conversation = [*IDS[:30], *first.token_ids, *IDS[30:40]]  # the next turn of a chat
    second, num_read = run(engine, conversation)
    assert num_cached(second) == 30 + CONFIG.max_tokens - 1  # the last token of the answer was not read
    assert num_read == len(conversation) - num_cached(second) + CONFIG.max_tokens - 1
    other, _ = run(engine, [*IDS[:20], *IDS[50:60]])
    assert num_cached(other) == 20
    again, _ = run(engine, conversation)
    assert num_cached(again) == len(conversation) - 1
    for receiver, ids in ((second, conversation), (other, [*IDS[:20], *IDS[50:60]]), (again, conversation)):
        assert receiver.token_ids == generate_alone(model, ids)


def test_sequences_with_the_same_prompt_read_it_once() -> None:
    model = build_model()
    engine = CountingEngine(model, prefill_chunk_size=7)
    receivers = [submit(engine, IDS[:40], config=CONFIG) for _ in range(3)]
    run_to_end(engine)
    assert [num_cached(receiver) for receiver in receivers] == [0, 39, 39]
    assert engine.num_positions == 40 + 2 + 3 * (CONFIG.max_tokens - 1)
    assert {tuple(receiver.token_ids) for receiver in receivers} == {tuple(generate_alone(model, IDS[:40]))}
    assert receivers[1].steps == receivers[2].steps  # both begin once the first has read the prompt


def test_sequence_whose_twin_is_cancelled_goes_on_with_what_was_read() -> None:
    model = build_model()
    engine = CountingEngine(model, prefill_chunk_size=10)
    first = submit(engine, IDS, config=CONFIG)
    second = submit(engine, IDS, config=CONFIG)
    engine.run_once()
    engine.run_once()
    engine.cancel(first.id)
    run_to_end(engine)
    assert first.finish.reason == "cancelled"
    assert num_cached(second) == 20
    assert second.token_ids == generate_alone(model, IDS)


def test_failed_step_frees_the_keys_and_the_next_request_reads_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model()
    engine = CountingEngine(model)
    run(engine, IDS[:30])
    with monkeypatch.context() as patch:
        patch.setattr(engine.served.executor, "forward", raise_out_of_memory)
        failed, _ = run(engine, IDS)
    assert isinstance(failed.events[-1], RuntimeError)
    assert not engine.served.prefix_cache.entries
    receiver, _ = run(engine, IDS)
    assert num_cached(receiver) == 0
    assert receiver.token_ids == generate_alone(model, IDS)


def raise_out_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_sequence_that_cannot_be_added_to_the_cache_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model()
    engine = CountingEngine(model)
    monkeypatch.setattr(PrefixCache, "add", raise_out_of_memory)
    receiver, _ = run(engine, IDS)
    assert receiver.finish.reason == "length"
    assert receiver.token_ids == generate_alone(model, IDS)


def test_requests_that_need_all_positions_or_continue_a_state_share_nothing() -> None:
    model = build_model()
    engine = CountingEngine(model)
    run(engine, IDS)
    scored, _ = run(engine, IDS, with_prompt_logprobs=True)
    state = laconic.KVCache.empty(model.decoder.config, 1, torch.float32, torch.device("cpu"))
    state = model.decoder(model.decoder.embed(torch.tensor([IDS[:3]])), state).cache
    continued, _ = run(engine, IDS, state=state)
    short, _ = run(engine, IDS[:MIN_SHARED_TOKENS])
    assert [num_cached(x) for x in (scored, continued, short)] == [0, 0, 0]
    assert continued.token_ids == generate_alone(model, [*IDS[:3], *IDS])
    events = [event for event in scored.events if isinstance(event, PromptEvent)]
    assert len(events[0].logprobs) == len(IDS)


def test_keys_that_depend_on_the_length_are_not_shared() -> None:
    model = build_model(rope=RopeConfig(kind="dynamic", factor=2.0), max_position_embeddings=32)
    engine = CountingEngine(model)
    run(engine, IDS[:20])
    long, _ = run(engine, IDS[:50])  # all keys of a text beyond 32 positions have other frequencies
    after_long, _ = run(engine, IDS[:25])
    assert num_cached(long) == 0
    assert num_cached(after_long) == 20
    assert long.token_ids == generate_alone(model, IDS[:50])
    assert after_long.token_ids == generate_alone(model, IDS[:25])


def test_engine_without_a_prefix_cache_reads_everything() -> None:
    engine = CountingEngine(build_model(), prefix_cache_bytes=0)
    run(engine, IDS)
    receiver, num_read = run(engine, IDS)
    assert (num_cached(receiver), num_read) == (0, len(IDS) + CONFIG.max_tokens - 1)


def test_copies_of_a_prompt_for_which_the_batch_has_room_do_not_count_as_waiting() -> None:
    engine = CountingEngine(build_model(), max_batch_size=4, max_queue=1)
    receivers = [submit(engine, IDS, config=CONFIG)]
    engine.run_once()
    receivers += [submit(engine, IDS, config=CONFIG) for _ in range(4)]  # wait until the first has read the prompt
    with pytest.raises(QueueFullError, match="4 sequences are waiting"):
        submit(engine, IDS[:20], config=CONFIG)
    run_to_end(engine)
    assert [num_cached(receiver) for receiver in receivers] == [0, *[len(IDS) - 1] * 4]


def fill_row(model: LanguageModel, num_tokens: int) -> CacheRow:
    row = CacheRow(model.decoder, None, None, num_tokens)
    row.num_filled = num_tokens
    return row


def test_prefix_cache_keeps_the_entries_used_last_within_its_bytes() -> None:
    model = build_model()
    bytes_per_token = fill_row(model, 1).num_bytes
    cache = PrefixCache(80 * bytes_per_token)
    first, second, third = ([start] * 40 for start in (1, 2, 3))
    cache.add(first, fill_row(model, 40))
    cache.add(second, fill_row(model, 40))
    assert cache.find(first)[1] == 40  # now used last
    cache.add(third, fill_row(model, 40))
    assert [cache.find(ids)[1] for ids in (first, second, third)] == [40, 0, 40]
    cache.add([4] * 90, fill_row(model, 90))  # larger than the cache
    assert [cache.find(ids)[1] for ids in (first, third, [4] * 90)] == [40, 40, 0]


def test_prefix_cache_replaces_an_entry_by_its_continuation() -> None:
    model = build_model()
    cache = PrefixCache(2**24)
    cache.add(IDS, fill_row(model, 30))
    cache.add(IDS, fill_row(model, 50))
    cache.add(IDS, fill_row(model, 40))  # contained in what is there
    assert [len(entry.token_ids) for entry in cache.entries] == [50]
