"""generate: parity with transformers and llama2.c; rows, seeds, prompts, states, stop conditions, streaming, errors."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import laconic
from laconic.batches import PassCounts
from laconic.batches.padding import pad_rows
from laconic.compression.kv.memory import KVMemory
from laconic.errors import InputError, NonFiniteError, UsageError
from laconic.generation import backends as generation_backends
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.generation.state import DecodeState
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.conftest import needs, shared_dir
from tests.models.fixtures import FAMILIES, decoder_of, fresh, noise
from tests.tolerances import FLOORS, error

ROWS = [[5, 9, 3, 17, 60, 8, 33], [7], [2, 4, 8, 11, 90, 1], [50, 60, 70]]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.7},
    "hot": {"temperature": 1.5, "seed": [1, 2, 3, 4]},
    "all": {
        "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "seed": [9, 8, 7, 6],
    },
}  # fmt: skip


def continue_ids(decoder: Decoder, rows: Sequence[Sequence[int]], **options: Any) -> list[Generation]:
    """Continue ids; without `eos_token_ids` among the options, those of the configuration end a row."""
    return generate(decoder, input_ids=rows, config=GenerationConfig(**options))


def free(decoder: Decoder, rows: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> list[Generation]:
    """Continue ids without any end-of-sequence id."""
    return continue_ids(decoder, rows, max_tokens=max_tokens, eos_token_ids=(), **options)


def ids_of(generations: list[Generation]) -> list[list[int]]:
    return [g.token_ids for g in generations]


def cache_of(generation: Generation) -> KVCache:
    assert isinstance(generation.state, DecodeState)
    return generation.state.cache


class Letters:
    """A tokenizer whose id i is the byte 32 + i."""

    vocab_size = 97

    def encode(self, text: str) -> list[int]:
        return [b - 32 for b in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(32 + i for i in ids if i < 96).decode(errors="replace")


class Bytes(Letters):
    """A tokenizer whose ids are bytes, so that a character can be split between ids."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def scripted(text: bytes) -> Decoder:
    """Return a decoder that generates `text`: OPT without attention and MLP, whose positions encode the next byte."""
    config = DecoderConfig.tiny("opt", vocab_size=256, hidden_size=256, head_dim=64, tie_word_embeddings=False)
    decoder = Decoder(config)
    with torch.no_grad():
        for p in decoder.parameters():
            p.zero_()
        decoder.get_parameter("model.decoder.final_layer_norm.weight").fill_(1.0)
        decoder.get_parameter("lm_head.weight").copy_(torch.eye(256))
        positions = decoder.get_parameter("model.decoder.embed_positions.weight")
        for p, byte in enumerate(text):
            positions[p + 2, byte] = 1.0
    return decoder.eval()


# --- parity


@pytest.mark.medium
def test_generate_equals_llama2c_character_for_character() -> None:
    folder = shared_dir() / "models" / "stories260k"
    decoder, tokenizer = laconic.Decoder.from_pretrained(folder), laconic.load_tokenizer(folder)
    lines = (folder / "greedy-llama2c.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    for line in map(json.loads, lines):
        ids = tokenizer.encode(line["prompt"])
        assert ids[0] == 1
        config = GenerationConfig(max_tokens=201 - len(ids), eos_token_ids=1)
        (generation,) = generate(decoder, tokenizer, [line["prompt"]], config=config)
        assert tokenizer.decode(ids + [i for i in generation.token_ids if i != 1]) == line["greedy_200"]
        assert line["prompt"] + generation.text == line["greedy_200"]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_transformers(family: str, tmp_path: Path) -> None:
    needs("transformers")
    from transformers import AutoModelForCausalLM

    decoder = fresh(family)
    decoder.save_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for row in ROWS:
        ids = torch.tensor([row])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert ids_of(free(decoder, [row], 16)) == [expected[0, len(row) :].tolist()]
    ids = torch.tensor(ROWS[:1])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=1.3, **options)
    assert ids_of(free(decoder, ROWS[:1], 16, repetition_penalty=1.3)) == [expected[0, 7:].tolist()]


# --- rows, seeds, purity


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_batch_equals_its_rows(family: str, options: dict[str, Any]) -> None:
    decoder = decoder_of(family, torch.float32)
    batch = continue_ids(decoder, ROWS, max_tokens=10, **options)
    for b, row in enumerate(ROWS):
        row_options = {**options, "seed": options.get("seed", [0] * 4)[b]}
        (single,) = continue_ids(decoder, [row], max_tokens=10, **row_options)
        assert batch[b].token_ids == single.token_ids
        assert batch[b].stop_reason == single.stop_reason
        assert batch[b].passes == single.passes
        assert error(batch[b].last_hidden, single.last_hidden) <= FLOORS * 1e-6
        assert cache_of(batch[b]).positions.equal(cache_of(single).positions)


def test_generate_seed_belongs_to_its_row() -> None:
    decoder = decoder_of("llama", torch.float32)
    seeds = [3, 1, 4, 1]
    one = free(decoder, [ROWS[0]] * 4, 20, temperature=1.0, seed=seeds)
    other = free(decoder, [ROWS[0]] * 4, 20, temperature=1.0, seed=seeds[::-1])
    assert ids_of(one) == ids_of(other)[::-1]
    assert one[1].token_ids == one[3].token_ids
    assert len({tuple(g.token_ids) for g in one}) == 3
    assert ids_of(free(decoder, [ROWS[0]] * 2, 20, temperature=1.0, seed=4)) == [one[2].token_ids] * 2


def test_generate_does_not_depend_on_earlier_calls() -> None:
    used = fresh("llama")
    continue_ids(used, [[9, 8, 7, 6, 5]], max_tokens=20, temperature=1.0)
    (after,), (new,) = (continue_ids(d, ROWS[:1], max_tokens=20) for d in (used, fresh("llama")))
    assert after.token_ids == new.token_ids
    assert after.logprobs == new.logprobs
    assert cache_of(after).is_equal(cache_of(new))
    assert torch.equal(after.last_hidden, new.last_hidden)


def test_generate_does_not_modify_its_inputs() -> None:
    decoder = fresh("qwen3")
    embeds = decoder.embed(torch.tensor([ROWS[0]])).detach()
    cache = decoder(embeds).cache.detach()
    tensors = [*decoder.parameters(), embeds, *cache.tensors().values()]
    before = [(t._version, t.clone()) for t in tensors]
    generate(decoder, inputs_embeds=embeds, state=cache, config=GenerationConfig(max_tokens=5))
    assert all(t._version == version and t.equal(copy) for t, (version, copy) in zip(tensors, before, strict=True))


# --- prompts and states


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_prompt_forms_are_equivalent(family: str) -> None:
    decoder = decoder_of(family, torch.float32)
    expected = continue_ids(decoder, ROWS, max_tokens=7)
    ids, mask = pad_rows(ROWS, 13, pad_left=True)
    assert mask.sum(1).tolist() == [7, 1, 6, 3]
    assert ids[1].tolist() == [13] * 6 + [7]
    right = torch.tensor([row + [0] * (7 - len(row)) for row in ROWS])
    right_mask = torch.arange(7) < mask.sum(1, keepdim=True)
    prompts: list[tuple[dict[str, Any], int]] = [
        ({"input_ids": ROWS}, 3),
        ({"input_ids": ROWS}, 1),
        ({"input_ids": ids, "attention_mask": mask}, 512),
        ({"input_ids": ids, "attention_mask": mask.long()}, 512),  # as transformers' tokenizers return it
        ({"input_ids": right, "attention_mask": right_mask}, 512),
        ({"inputs_embeds": decoder.embed(ids), "attention_mask": mask}, 512),
        ({"inputs_embeds": decoder.embed(right), "attention_mask": right_mask}, 512),
        ({"inputs_embeds": decoder.embed(right), "attention_mask": right_mask}, 2),
    ]
    for prompt, chunk in prompts:
        actual = generate(decoder, **prompt, config=GenerationConfig(max_tokens=7, prefill_chunk_size=chunk))
        assert ids_of(actual) == ids_of(expected)
        for one, other in zip(actual, expected, strict=True):
            assert cache_of(one).positions.equal(cache_of(other).positions)
            assert one.passes.prompt == -(-7 // chunk)
    full = torch.tensor([ROWS[0], ROWS[0][::-1]])
    from_tensor = generate(decoder, input_ids=full, config=GenerationConfig(max_tokens=9))
    assert ids_of(from_tensor) == ids_of(continue_ids(decoder, full.tolist(), max_tokens=9))


@pytest.mark.filterwarnings("ignore:position 128 exceeds")
@pytest.mark.parametrize(("kind", "original"), [("dynamic", 128), ("longrope", 64)])
def test_generate_length_dependent_rope_needs_no_equal_chunks(kind: str, original: int) -> None:
    """Other rows, chunk sizes and callbacks do not change a row, on an empty cache and after a state."""
    decoder = decoder_of(f"llama, {kind}")
    assert decoder.config.rope is not None
    assert original in (decoder.config.rope.max_position_embeddings, decoder.config.rope.pretrained_positions)
    long, short = [1 + i * 7 % 90 for i in range(original + 23)], ROWS[0]
    (alone,), (short_alone,) = free(decoder, [long], 12), free(decoder, [short], 12)
    for options in ({}, {"prefill_chunk_size": 16}, {"prefill_chunk_size": 16, "on_prefill": lambda *args: None}):
        assert ids_of(free(decoder, [long], 12, **options)) == [alone.token_ids]
        batch = free(decoder, [short, long], 12, **options)
        assert ids_of(batch) == [short_alone.token_ids, alone.token_ids]
        assert [g.passes.prompt for g in batch] == [1, 1]
    cache = decoder(decoder.embed(torch.tensor([long[:20]]))).cache
    config = GenerationConfig(max_tokens=12, eos_token_ids=())
    (expected,) = generate(decoder, input_ids=[long], state=cache, config=config)
    config = replace(config, prefill_chunk_size=16)
    batch = generate(decoder, input_ids=[short, long], state=cache.repeat_rows(2), config=config)
    assert batch[1].token_ids == expected.token_ids
    (within,) = free(decoder, [long[:original]], 1, prefill_chunk_size=16, on_prefill=lambda *args: None)
    assert within.passes.prompt == original // 16


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_continues_from_a_state(family: str) -> None:
    decoder = decoder_of(family, torch.float32)
    (whole,) = free(decoder, ROWS[:1], 20)
    (first,) = free(decoder, ROWS[:1], 8)
    config = GenerationConfig(max_tokens=12, eos_token_ids=())
    (second,) = generate(decoder, input_ids=[[]], state=first.state, config=config)
    assert first.token_ids + second.token_ids == whole.token_ids
    assert cache_of(second).positions.equal(cache_of(whole).positions)
    question = decoder(decoder.embed(torch.tensor([ROWS[0]]))).cache
    config = GenerationConfig(max_tokens=9, eos_token_ids=())
    forked = generate(decoder, input_ids=ROWS, state=question.repeat_rows(4), config=config)
    expected = [free(decoder, [ROWS[0] + row], 9)[0] for row in ROWS]
    assert ids_of(forked) == ids_of(expected)
    for one, other in zip(forked, expected, strict=True):
        assert cache_of(one).positions.equal(cache_of(other).positions)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 512])
def test_generate_first_positions_may_leave_a_gap(family: str, chunk: int) -> None:
    """Equal to full passes at the same positions, with rows of different lengths and gaps."""
    decoder, gaps = decoder_of(family), torch.tensor([3, 0, 5])
    cache = decoder(noise(3, 3, 4, 48)).cache
    config = GenerationConfig(max_tokens=3, eos_token_ids=(), return_state=False, prefill_chunk_size=chunk)
    generations = generate(decoder, input_ids=ROWS[:3], state=cache, first_positions=4 + gaps, config=config)
    for b, row in enumerate(ROWS[:3]):
        for t, token in enumerate(generations[b].token_ids):
            ids = torch.tensor([row + generations[b].token_ids[:t]])
            positions = 4 + int(gaps[b]) + torch.arange(ids.shape[1])[None]
            output = decoder(decoder.embed(ids), cache.select_rows([b]), position_ids=positions)
            assert int(decoder.logits(output.hidden_states[0, -1]).argmax()) == token


def test_generate_keeps_invalid_slots_of_a_state() -> None:
    decoder = decoder_of("llama", torch.float32)
    cache = decoder(decoder.embed(torch.tensor([ROWS[0]]))).cache
    valid = torch.tensor([[True, False, True, True, False, True, True]])
    config = GenerationConfig(max_tokens=3, eos_token_ids=())
    (generation,) = generate(decoder, input_ids=[[4, 4]], state=cache.with_valid(valid), config=config)
    assert cache_of(generation).valid.tolist() == [valid[0].tolist() + [True] * 4]
    assert cache_of(generation).positions[0].tolist() == list(range(11))


def test_generate_results_can_be_used_in_autograd() -> None:
    decoder = fresh("llama")
    (generation,) = free(decoder, ROWS[:1], 4)
    assert not generation.last_hidden.is_inference()
    assert not any(t.is_inference() for t in cache_of(generation).tensors().values())
    output = decoder(generation.last_hidden[None, None].requires_grad_(), cache_of(generation))
    output.hidden_states.sum().backward()
    assert torch.equal(decoder.logits(generation.last_hidden).argmax(), torch.tensor(generation.token_ids[-1]))


def test_generate_without_returning_states() -> None:
    decoder = decoder_of("llama", torch.float32)
    full, bare = (continue_ids(decoder, ROWS, max_tokens=5, return_state=flag) for flag in (True, False))
    assert ids_of(full) == ids_of(bare)
    with pytest.raises(UsageError, match="return_state=False"):
        _ = bare[0].state


def test_generate_accepts_no_rows_and_a_single_text() -> None:
    decoder = decoder_of("llama", torch.float32)
    assert continue_ids(decoder, [], max_tokens=3) == []
    config = GenerationConfig(max_tokens=3)
    one, other = (generate(decoder, Letters(), prompts, config=config) for prompts in ("ab", ["ab"]))
    assert ids_of(one) == ids_of(other)


# --- stop conditions


def test_generate_stops_at_eos_and_drops_finished_rows() -> None:
    decoder = decoder_of("llama", torch.float32)
    unstopped = free(decoder, ROWS, 30)
    assert {g.stop_reason for g in unstopped} == {"length"}
    assert {len(g.token_ids) for g in unstopped} == {30}
    eos = tuple({g.token_ids[n] for g, n in zip(unstopped[:3], (2, 4, 6), strict=True)})
    stopped = continue_ids(decoder, ROWS, max_tokens=30, eos_token_ids=eos)
    for row, one, whole in zip(ROWS, stopped, unstopped, strict=True):
        n = next((n for n, i in enumerate(whole.token_ids) if i in eos), 29) + 1
        assert one.token_ids == whole.token_ids[:n]
        assert one.stop_reason == ("eos" if one.token_ids[-1] in eos else "length")
        assert one.logprobs == pytest.approx(whole.logprobs[:n], abs=1e-4)
        assert one.passes == PassCounts(1, 0, 0, n - 1)
        assert one.passes.total == n
        assert cache_of(one).valid.shape == (1, len(row) + n - 1)
    first_eos = unstopped[0].token_ids[2]
    (single,) = continue_ids(decoder, ROWS[:1], max_tokens=30, eos_token_ids=first_eos)
    assert single.token_ids == unstopped[0].token_ids[: unstopped[0].token_ids.index(first_eos) + 1]


def test_generate_stops_at_a_later_eos() -> None:
    decoder = decoder_of("llama", torch.float32)
    unstopped = free(decoder, ROWS, 30)
    eos = tuple({g.token_ids[n] for g in unstopped for n in (2, 4)})
    for count in (1, 2, 3):
        stopped = continue_ids(decoder, ROWS, max_tokens=30, eos_token_ids=eos, eos_count=count)
        for one, whole in zip(stopped, unstopped, strict=True):
            ends = [n for n, i in enumerate(whole.token_ids) if i in eos]
            is_stopped = len(ends) >= count
            assert one.token_ids == (whole.token_ids[: ends[count - 1] + 1] if is_stopped else whole.token_ids)
            assert one.stop_reason == ("eos" if is_stopped else "length")
    config = GenerationConfig(max_tokens=9, eos_token_ids=2, eos_count=2)
    (generation,) = generate(scripted(b"ab\x02cd\x02e"), Bytes(), input_ids=[[9]], config=config)
    assert generation.text == "ab\x02cd"  # an earlier eos is part of the text


@pytest.mark.parametrize("options", [{}, {"temperature": 3.0}, {"min_tokens": 3}])
def test_generate_never_takes_suppressed_ids(options: dict[str, Any]) -> None:
    decoder = decoder_of("llama", torch.float32)
    unrestricted = continue_ids(decoder, ROWS, max_tokens=12, **options)
    suppressed = {i for g in unrestricted for i in g.token_ids[:2]}
    actual = continue_ids(decoder, ROWS, max_tokens=12, suppress_token_ids=sorted(suppressed), **options)
    assert not suppressed.intersection(i for g in actual for i in g.token_ids)


def test_generate_shrinks_the_batch_below_half(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("llama", torch.float32)
    widths: list[int] = []
    step = generation_backends.StaticCacheDecoder.step
    monkeypatch.setattr(
        generation_backends.StaticCacheDecoder, "step", lambda self, ids: widths.append(len(ids)) or step(self, ids)
    )
    options = {"max_tokens": 12, "temperature": 1.0, "seed": [1, 2, 3, 4], "repetition_penalty": 1.1}
    unstopped = continue_ids(decoder, ROWS, eos_token_ids=(), **options)
    assert widths == [4] * 11
    eos = {g.token_ids[1] for g in unstopped[:3]} - set(unstopped[3].token_ids)
    assert len(eos) == 3
    widths.clear()
    stopped = continue_ids(decoder, ROWS, eos_token_ids=tuple(eos), **options)
    assert widths == [4] + [1] * 10
    assert stopped[3].token_ids == unstopped[3].token_ids
    assert [len(g.token_ids) for g in stopped] == [2, 2, 2, 12]


def test_generate_uses_the_eos_of_the_configuration() -> None:
    decoder = scripted(b"ab\x02cd")
    assert continue_ids(decoder, [[9]], max_tokens=5)[0].token_ids == [*b"ab", 2]
    assert free(decoder, [[9]], 5)[0].token_ids == [*b"ab\x02cd"]


def test_generate_takes_no_eos_before_min_tokens() -> None:
    decoder = decoder_of("llama", torch.float32)
    (unstopped,) = free(decoder, ROWS[:1], 20)
    eos = unstopped.token_ids[:1]
    (delayed,) = continue_ids(decoder, ROWS[:1], max_tokens=20, min_tokens=5, eos_token_ids=eos)
    assert eos[0] not in delayed.token_ids[:5]
    assert len(delayed.token_ids) >= 5
    (immediate,) = continue_ids(decoder, ROWS[:1], max_tokens=20, eos_token_ids=eos)
    assert immediate.token_ids == eos


# --- text


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("wor", "hello ", 9),
        ("o", "hell", 5),
        (("zzz", "lo w"), "hel", 7),
        (("world", "ell"), "h", 4),
        ("d!", "hello worl", 12),
        ("d!?", "hello world!", 12),
        ("é", "hello world!", 12),
        ("h", "", 1),
    ],
)
def test_generate_stop_strings(stop: Any, text: str, tokens: int) -> None:
    pieces: list[str] = []
    config = GenerationConfig(
        max_tokens=12,
        stop_strings=stop,
        eos_token_ids=(),
        on_token=lambda row, token, text, logprob: pieces.append(text),
    )
    (generation,) = generate(scripted(b"hello world!"), Bytes(), ["x"], config=config)
    assert generation.text == text == "".join(pieces)
    assert len(generation.token_ids) == tokens == len(pieces)
    assert generation.stop_reason == ("length" if text == "hello world!" else "stop")


def test_generate_streams_whole_characters() -> None:
    text = "aé日😀b"
    calls: list[tuple[int, int, str, float]] = []
    config = GenerationConfig(
        max_tokens=len(text.encode()), eos_token_ids=(), on_token=lambda *arguments: calls.append(arguments)
    )
    (generation,) = generate(scripted(text.encode()), Bytes(), ["x"], config=config)
    assert [piece for _, _, piece, _ in calls] == ["a", "", "é", "", "", "日", "", "", "", "😀", "b"]
    assert generation.text == text
    assert [token for _, token, _, _ in calls] == generation.token_ids
    assert [logprob for *_, logprob in calls] == generation.logprobs
    config = GenerationConfig(max_tokens=2, eos_token_ids=())
    (truncated,) = generate(scripted(text.encode()), Bytes(), ["x"], config=config)
    assert truncated.text == "a\ufffd"


def test_generate_streams_pending_text_at_eos() -> None:
    pieces: list[str] = []
    config = GenerationConfig(max_tokens=9, stop_strings="cd", on_token=lambda *arguments: pieces.append(arguments[2]))
    (generation,) = generate(scripted(b"abc\x02"), Bytes(), ["x"], config=config)
    assert pieces == ["a", "b", "", "c"]
    assert (generation.text, generation.token_ids, generation.stop_reason) == ("abc", [*b"abc", 2], "eos")


def test_generate_completes_a_character_of_the_prompt() -> None:
    config = GenerationConfig(max_tokens=2, eos_token_ids=())
    (generation,) = generate(scripted(b"\xa9!"), Bytes(), input_ids=[[0xC3]], config=config)
    assert generation.text == "é!"


def test_generate_streams_of_a_batch_concatenate_to_the_texts() -> None:
    folder = shared_dir() / "models" / "stories260k"
    decoder, tokenizer = laconic.Decoder.from_pretrained(folder), laconic.load_tokenizer(folder)
    prompts = ["Once upon a time", "Lily", ""]
    calls: list[list[Any]] = [[], [], []]
    config = GenerationConfig(
        max_tokens=60,
        temperature=1.2,
        seed=[1, 2, 3],
        stop_strings=["She", "\n"],
        on_token=lambda row, *arguments: calls[row].append(arguments),
    )
    generations = generate(decoder, tokenizer, prompts, config=config)
    for prompt, one, pieces in zip(prompts, generations, calls, strict=True):
        assert "".join(piece for _, piece, _ in pieces) == one.text
        assert [token for token, _, _ in pieces] == one.token_ids
        whole = tokenizer.decode(tokenizer.encode(prompt) + one.token_ids)[len(prompt) :]
        assert whole.startswith(one.text)
        assert ("She" in whole or "\n" in whole) == (one.stop_reason == "stop")


def test_generate_without_a_tokenizer_has_no_text() -> None:
    calls: list[Any] = []
    (generation,) = continue_ids(scripted(b"ab"), [[1]], max_tokens=2, on_token=lambda *args: calls.append(args))
    assert generation.text == ""
    assert [arguments[1:3] for arguments in calls] == [(97, ""), (98, "")]


def test_generate_logprobs_are_of_the_unfiltered_distribution() -> None:
    decoder = decoder_of("llama", torch.float32)
    for options in OPTIONS.values():
        (generation,) = continue_ids(decoder, ROWS[:1], max_tokens=6, **{**options, "seed": 5})
        ids = torch.tensor([ROWS[0] + generation.token_ids])
        logits = decoder.logits(decoder(decoder.embed(ids)).hidden_states)[0, 6:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        assert generation.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


# --- lengths


def test_generate_uses_learned_positions_to_the_last() -> None:
    decoder = decoder_of("gpt2", torch.float32)
    row = [3] * 100
    assert len(free(decoder, [row, [5]], 28)[0].token_ids) == 28
    with pytest.raises(UsageError, match="shorten by 1"):
        continue_ids(decoder, [[5], row], max_tokens=29)
    cache = decoder(decoder.embed(torch.tensor([row]))).cache
    with pytest.raises(UsageError, match="shorten by 1,073"):
        generate(decoder, input_ids=[[5]], state=cache, config=GenerationConfig(max_tokens=1100))


def test_generate_beyond_the_rope_positions_warns_once() -> None:
    decoder = decoder_of("llama", torch.float32)
    for prompt, new in ((120, 30), (130, 9)):
        with pytest.warns(UserWarning, match="position 128") as caught:
            assert len(free(decoder, [[3] * prompt], new)[0].token_ids) == new
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free(decoder, [[3] * 120], 9)  # the ninth id is not read


# --- errors


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2},
        {"repetition_penalty": 0}, {"max_tokens": 0}, {"max_tokens": 1.5}, {"min_tokens": 4}, {"prefill_chunk_size": 0},
        {"eos_count": 0}, {"stop_strings": ["a", ""]}, {"top_k": 5.0}, {"seed": None}, {"seed": 2**64},
        {"eos_token_ids": "</s>"}, {"suppress_token_ids": [1.5]}, {"temperature": None}, {"top_p": "0.5"},
        {"stop_strings": None}, {"stop_strings": [3]}, {"on_token": 3},
    ],
    ids=str,
)  # fmt: skip
def test_generation_config_refuses_values_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        GenerationConfig(**{"max_tokens": 3, **options})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": "a"}, "need a tokenizer"),
        ({"seed": [1, 2]}, "seed has 2 entries for 1 rows"),
        ({"eos_token_ids": 1000}, "eos_token_ids=1000"),
        ({"eos_token_ids": np.int64(1000)}, "eos_token_ids=1000"),
        ({"suppress_token_ids": [5, 97]}, "suppress_token_ids=97"),
    ],
)
def test_generate_refuses_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        continue_ids(decoder_of("llama", torch.float32), [[1]], max_tokens=3, **options)


HALF_EMPTY = torch.tensor([[True] * 3, [False] * 3])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "no prompt given"),
        ({"prompts": ["a"], "input_ids": [[1]]}, "prompts and input_ids given"),
        ({"prompts": ["a"]}, "need a tokenizer"),
        ({"input_ids": [[1], []]}, "row 1 of the prompt has no token"),
        ({"inputs_embeds": torch.zeros(2, 3, 48), "attention_mask": HALF_EMPTY}, "row 1 of the prompt has no token"),
        ({"input_ids": [1, 2, 3]}, "one list per row"),
        ({"input_ids": torch.tensor([1, 2, 3])}, "one list per row"),
        ({"input_ids": torch.ones(1, 1)}, "pass embeddings as inputs_embeds"),
        ({"input_ids": torch.ones(1, 1).long(), "attention_mask": torch.full((1, 1), 2)}, "booleans, or integers 0"),
        ({"input_ids": torch.ones(1, 1).long(), "attention_mask": torch.ones(1, 1)}, "booleans, or integers 0"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2).bool()}, r"\[1, 2\]"),
        ({"input_ids": [[1]], "attention_mask": torch.ones(1, 1).bool()}, "needs a tensor"),
        ({"input_ids": [[1], [1, 2.5]]}, r"input_ids\[1\] has a float where an integer is expected"),
        ({"input_ids": [["a"]]}, r"input_ids\[0\] has a str"),
        ({"input_ids": [[1], [0, 1, 700, 900]]}, r"\[1, 2\] = 700 is outside the vocabulary"),
        ({"input_ids": [[-1]]}, r"\[0, 0\] = -1"),
        ({"tokenizer": Letters(), "prompts": ["a", "b", ""]}, "prompt 2 is empty"),
        ({"tokenizer": Bytes(), "prompts": ["a"]}, "256 ids, the model 97"),
        ({"tokenizer": [[1, 2]]}, r"tokenizer: .*generate\(decoder, input_ids=\[\[1, 2\]\], config=…\)"),
        ({"inputs_embeds": torch.zeros(1, 2, 64)}, "inputs_embeds"),
        ({"inputs_embeds": torch.zeros(3, 48)}, "inputs_embeds"),
    ],
)
def test_generate_refuses_invalid_prompts(prompt: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, InputError, ValueError), match=message):
        generate(decoder_of("llama", torch.float32), **prompt, config=GenerationConfig(max_tokens=3))


@pytest.mark.usefixtures("unchecked")
def test_generate_refuses_states_of_another_shape() -> None:
    decoder = decoder_of("llama", torch.float32)
    cache = decoder(decoder.embed(torch.tensor([[1], [2]]))).cache
    with pytest.raises(UsageError, match="3 prompts on a state of 2 rows"):
        generate(decoder, input_ids=[[1], [2], [3]], state=cache)
    other = decoder_of("gpt2", torch.float32)(torch.ones(1, 1, 48)).cache
    with pytest.raises(UsageError, match="KV heads"):
        generate(decoder, input_ids=[[1]], state=other)


@pytest.mark.usefixtures("unchecked")
def test_generate_refuses_configs_and_states_of_another_type() -> None:
    decoder, one = decoder_of("llama", torch.float32), GenerationConfig(max_tokens=1)
    state: Any = generate(decoder, input_ids=[[1]], config=one)[0].state
    invalid: Any
    for invalid in ({"max_tokens": 5}, 5):
        with pytest.raises(UsageError, match=rf"GenerationConfig\(.*, not {type(invalid).__name__}$"):
            generate(decoder, input_ids=[[1]], config=invalid)
    for invalid in ([state], KVMemory.from_cache(state.cache)):
        with pytest.raises(UsageError, match=rf"concat_rows, a KVMemory has to_cache\), not {type(invalid).__name__}$"):
            generate(decoder, input_ids=[[1]], state=invalid)
    wide, half = (replace(state, cache=state.cache.to(dtype=dtype)) for dtype in (torch.float64, torch.bfloat16))
    with pytest.raises(UsageError, match=r"float64, the model torch\.float32; convert its KVCache: cache\.to\(dtype="):
        generate(decoder, input_ids=[[1]], state=wide)
    assert generate(decoder, input_ids=[[1]], state=half, config=one)[0].token_ids


def test_generate_refuses_nan_logits() -> None:
    decoder = fresh("llama")
    with torch.no_grad():
        decoder.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="row 0, token 0"):
        continue_ids(decoder, [[1]], max_tokens=2)
