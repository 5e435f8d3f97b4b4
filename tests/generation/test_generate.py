"""Generation against transformers, against llama2.c, and against its own laws: rows, seeds, stops, passes, states."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.batches import PassCounts
from laconic.errors import InputError, NonFiniteError, UsageError
from laconic.generation import backends as generation_backends
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.generation.prompt import pad_left
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from tests.conftest import needs, shared_dir
from tests.models.fixtures import FAMILIES, decoder_of, fresh
from tests.tolerances import FLOORS, error

ROWS = [[5, 9, 3, 17, 60, 8, 33], [7], [2, 4, 8, 11, 90, 1], [50, 60, 70]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.7},
    "hot": {"temperature": 1.5, "seed": [1, 2, 3, 4]},
    "all": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "seed": [9, 8, 7, 6],
    },
}


def ids_of(found: list[Generation]) -> list[list[int]]:
    return [g.token_ids for g in found]


class Letters:
    """A tokenizer whose id i is the byte 32 + i."""

    vocab_size = 97

    def encode(self, text: str) -> list[int]:
        return [b - 32 for b in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(32 + i for i in ids if i < 96).decode(errors="replace")


class Bytes(Letters):
    """Ids are bytes, so that a character may be cut between ids."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def scripted(text: bytes) -> Decoder:
    """A decoder that says `text` by heart: OPT without attention and MLP, whose places are what comes next."""
    config = DecoderConfig.tiny("opt", vocab_size=256, hidden_size=256, head_dim=64, tie_word_embeddings=False)
    decoder = Decoder(config)
    with torch.no_grad():
        for p in decoder.parameters():
            p.zero_()
        decoder.get_parameter("model.decoder.final_layer_norm.weight").fill_(1.0)
        decoder.get_parameter("lm_head.weight").copy_(torch.eye(256))
        places = decoder.get_parameter("model.decoder.embed_positions.weight")
        for p, byte in enumerate(text):
            places[p + 2, byte] = 1.0
    return decoder.eval()


# --- against others


def test_llama2c_says_the_same_character_for_character() -> None:
    folder = shared_dir() / "models" / "stories260k"
    decoder, tokenizer = laconic.Decoder.from_pretrained(folder), laconic.load_tokenizer(folder)
    lines = (folder / "greedy-llama2c.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    for line in map(json.loads, lines):
        ids = tokenizer.encode(line["prompt"])
        assert ids[0] == 1
        (found,) = generate(
            decoder, tokenizer, [line["prompt"]], config=GenerationConfig(max_tokens=201 - len(ids), eos_token_ids=1)
        )
        kept = [i for i in found.token_ids if i != 1]
        assert tokenizer.decode(ids + kept) == line["greedy_200"]
        assert line["prompt"] + found.text == line["greedy_200"]


def theirs(decoder: Decoder, folder: Path) -> Any:
    needs("transformers")
    from transformers import AutoModelForCausalLM

    decoder.save_pretrained(folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    decoder = fresh(family)
    model = theirs(decoder, tmp_path)
    for row in ROWS:
        asked = model.generate(
            torch.tensor([row]), attention_mask=torch.ones(1, len(row)), max_new_tokens=16, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert ids_of(generate(decoder, input_ids=[row], config=GenerationConfig(max_tokens=16, eos_token_ids=()))) == [
            asked[0, len(row) :].tolist()
        ]
    asked = model.generate(
        torch.tensor([ROWS[0]]), attention_mask=torch.ones(1, 7), max_new_tokens=16, do_sample=False,
        eos_token_id=None, pad_token_id=0, repetition_penalty=1.3,
    )  # fmt: skip
    got = generate(
        decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=16, eos_token_ids=(), repetition_penalty=1.3)
    )
    assert ids_of(got) == [asked[0, 7:].tolist()]


# --- rows, seeds, repetition


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_its_rows(family: str, settings: dict[str, Any]) -> None:
    decoder = decoder_of(family, torch.float32)
    together = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=10, **settings))
    for b, row in enumerate(ROWS):
        own = {**settings, "seed": settings.get("seed", [0] * 4)[b]}
        (alone,) = generate(decoder, input_ids=[row], config=GenerationConfig(max_tokens=10, **own))
        assert together[b].token_ids == alone.token_ids
        assert together[b].stop_reason == alone.stop_reason
        assert together[b].passes == alone.passes
        assert error(together[b].last_hidden, alone.last_hidden) <= FLOORS * 1e-6
        assert together[b].state.positions.equal(alone.state.positions)


def test_a_seed_is_the_rows_own_wherever_it_stands() -> None:
    decoder = decoder_of("llama", torch.float32)
    seeds = [3, 1, 4, 1]
    one = generate(
        decoder,
        input_ids=[ROWS[0]] * 4,
        config=GenerationConfig(max_tokens=20, eos_token_ids=(), temperature=1.0, seed=seeds),
    )
    other = generate(
        decoder,
        input_ids=[ROWS[0]] * 4,
        config=GenerationConfig(max_tokens=20, eos_token_ids=(), temperature=1.0, seed=seeds[::-1]),
    )
    assert ids_of(one) == ids_of(other)[::-1]
    assert one[1].token_ids == one[3].token_ids
    assert len({tuple(g.token_ids) for g in one}) == 3
    same = generate(
        decoder,
        input_ids=[ROWS[0]] * 2,
        config=GenerationConfig(max_tokens=20, eos_token_ids=(), temperature=1.0, seed=4),
    )
    assert ids_of(same) == [one[2].token_ids] * 2


def test_a_then_b_is_b() -> None:
    used = fresh("llama")
    generate(used, input_ids=[[9, 8, 7, 6, 5]], config=GenerationConfig(max_tokens=20, temperature=1.0))
    after, new = (
        generate(used, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=20)),
        generate(fresh("llama"), input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=20)),
    )
    assert after[0].token_ids == new[0].token_ids
    assert after[0].logprobs == new[0].logprobs
    assert after[0].state.equal(new[0].state)
    assert torch.equal(after[0].last_hidden, new[0].last_hidden)


def test_nothing_given_is_changed() -> None:
    decoder = fresh("qwen3")
    vectors = decoder.embed(torch.tensor([ROWS[0]])).detach()
    state = decoder(vectors).cache.detach()
    tensors = [*decoder.parameters(), vectors, *state.tensors().values()]
    before = [(t._version, t.clone()) for t in tensors]
    generate(decoder, inputs_embeds=vectors, state=state, config=GenerationConfig(max_tokens=5))
    assert all(t._version == version and t.equal(copy) for t, (version, copy) in zip(tensors, before, strict=True))


# --- what a row starts from


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_vectors_and_tensors_are_the_same_prompt(family: str) -> None:
    decoder = decoder_of(family, torch.float32)
    asked = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=7))
    ids, live = pad_left(ROWS, 13)
    assert live.sum(1).tolist() == [7, 1, 6, 3]
    assert ids[1].tolist() == [13] * 6 + [7]
    right = torch.tensor([row + [0] * (7 - len(row)) for row in ROWS])
    right_live = torch.arange(7) < live.sum(1, keepdim=True)
    prompts: list[dict[str, Any]] = [
        {"ids": ROWS, "chunk": 3},
        {"ids": ROWS, "chunk": 1},
        {"ids": ids, "live": live},
        {"ids": right, "live": right_live},
        {"vectors": decoder.embed(ids), "live": live},
        {"vectors": decoder.embed(right), "live": right_live},
        {"vectors": decoder.embed(right), "live": right_live, "chunk": 2},
    ]
    for prompt in prompts:
        found = generate(decoder, config=GenerationConfig(max_tokens=7, **prompt))
        assert ids_of(found) == ids_of(asked)
        for one, other in zip(found, asked, strict=True):
            assert one.state.positions.equal(other.state.positions)
            assert one.passes.prompt == -(-7 // prompt.get("chunk", 512))
    whole = torch.tensor([ROWS[0], ROWS[0][::-1]])
    assert ids_of(generate(decoder, input_ids=whole, config=GenerationConfig(max_tokens=9))) == ids_of(
        generate(decoder, input_ids=whole.tolist(), config=GenerationConfig(max_tokens=9))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_is_gone_on_from(family: str) -> None:
    decoder = decoder_of(family, torch.float32)
    (whole,) = generate(decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    (first,) = generate(decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=8, eos_token_ids=()))
    (second,) = generate(
        decoder,
        input_ids=[first.token_ids[-1:]],
        state=first.state,
        config=GenerationConfig(max_tokens=12, eos_token_ids=()),
    )
    assert first.token_ids + second.token_ids == whole.token_ids
    assert second.state.positions.equal(whole.state.positions)
    question = decoder(decoder.embed(torch.tensor([ROWS[0]]))).cache
    forked = generate(
        decoder, input_ids=ROWS, state=question.fork(4), config=GenerationConfig(max_tokens=9, eos_token_ids=())
    )
    asked = [
        generate(decoder, input_ids=[ROWS[0] + row], config=GenerationConfig(max_tokens=9, eos_token_ids=()))[0]
        for row in ROWS
    ]
    assert ids_of(forked) == ids_of(asked)
    for one, other in zip(forked, asked, strict=True):
        assert one.state.positions.equal(other.state.positions)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 512])
def test_a_prompt_may_begin_farther_on_than_what_is_held(family: str, chunk: int) -> None:
    """Against full passes at the same positions: rows of their own length, padded left, behind a gap of their own."""
    decoder, gaps = decoder_of(family), torch.tensor([3, 0, 5])
    vectors = torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    state = decoder(vectors).cache
    found = generate(
        decoder,
        input_ids=ROWS[:3],
        state=state,
        first_positions=4 + gaps,
        config=GenerationConfig(max_tokens=3, eos_token_ids=(), return_state=False, prefill_chunk_size=chunk),
    )
    for b, row in enumerate(ROWS[:3]):
        for t, token in enumerate(found[b].token_ids):
            ids = torch.tensor([row + found[b].token_ids[:t]])
            positions = 4 + int(gaps[b]) + torch.arange(ids.shape[1])[None]
            seen = decoder(decoder.embed(ids), state.take([b]), position_ids=positions)
            assert int(decoder.logits(seen.hidden[0, -1]).argmax()) == token


def test_dead_slots_of_a_state_stay_where_they_are() -> None:
    decoder = decoder_of("llama", torch.float32)
    state = decoder(decoder.embed(torch.tensor([ROWS[0]]))).cache
    live = torch.tensor([[True, False, True, True, False, True, True]])
    (found,) = generate(
        decoder,
        input_ids=[[4, 4]],
        state=state.with_valid(live),
        config=GenerationConfig(max_tokens=3, eos_token_ids=()),
    )
    assert found.state.valid.tolist() == [live[0].tolist() + [True] * 4]
    assert found.state.positions[0].tolist() == list(range(11))


def test_state_and_hidden_may_be_learned_from() -> None:
    decoder = fresh("llama")
    (found,) = generate(decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=4, eos_token_ids=()))
    assert not found.last_hidden.is_inference()
    assert not any(t.is_inference() for t in found.state.tensors().values())
    seen = decoder(found.last_hidden[None, None].requires_grad_(), found.state)
    seen.hidden.sum().backward()
    assert torch.equal(decoder.logits(found.last_hidden).argmax(), torch.tensor(found.token_ids[-1]))


def test_states_need_not_be_kept() -> None:
    decoder = decoder_of("llama", torch.float32)
    kept, bare = (
        generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=5, return_state=keep))
        for keep in (True, False)
    )
    assert ids_of(kept) == ids_of(bare)
    assert {(g.state.B, g.state.S) for g in bare} == {(1, 0)}
    assert decoder(torch.zeros(1, 2, 48), bare[0].state).cache.S == 2


def test_no_rows_no_generations() -> None:
    assert generate(decoder_of("llama", torch.float32), input_ids=[], config=GenerationConfig(max_tokens=3)) == []


# --- how a row ends


def test_eos_stops_and_rows_leave() -> None:
    decoder = decoder_of("llama", torch.float32)
    free = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=30, eos_token_ids=()))
    assert {g.stop_reason for g in free} == {"length"}
    assert {len(g.token_ids) for g in free} == {30}
    ends = tuple({g.token_ids[n] for g, n in zip(free[:3], (2, 4, 6), strict=True)})
    stopped = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=30, eos_token_ids=ends))
    for row, one, whole in zip(ROWS, stopped, free, strict=True):
        n = next((n for n, i in enumerate(whole.token_ids) if i in ends), 29) + 1
        assert one.token_ids == whole.token_ids[:n]
        assert one.stop_reason == ("eos" if one.token_ids[-1] in ends else "length")
        assert one.logprobs == pytest.approx(whole.logprobs[:n], abs=1e-4)
        assert one.passes == PassCounts(1, 0, 0, n - 1)
        assert one.passes.total == n
        assert one.decoder_calls == 1 + max(len(g.token_ids) for g in stopped) - 1
        assert one.state.valid.shape == (1, len(row) + n - 1)
    (single,) = generate(
        decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=30, eos_token_ids=free[0].token_ids[2])
    )
    assert single.token_ids == free[0].token_ids[: free[0].token_ids.index(free[0].token_ids[2]) + 1]


def test_a_row_may_end_with_a_later_eos() -> None:
    decoder = decoder_of("llama", torch.float32)
    free = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=30, eos_token_ids=()))
    ends = tuple({g.token_ids[n] for g in free for n in (2, 4)})
    for count in (1, 2, 3):
        for one, whole in zip(
            generate(
                decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=30, eos_token_ids=ends, eos_count=count)
            ),
            free,
            strict=True,
        ):
            at = [n for n, i in enumerate(whole.token_ids) if i in ends]
            assert one.token_ids == (whole.token_ids[: at[count - 1] + 1] if len(at) >= count else whole.token_ids)
            assert one.stop_reason == ("eos" if len(at) >= count else "length")


def test_an_eos_that_ends_nothing_is_text() -> None:
    said = scripted(b"ab\x02cd\x02e")
    (got,) = generate(
        said, Bytes(), input_ids=[[9]], config=GenerationConfig(max_tokens=9, eos_token_ids=2, eos_count=2)
    )
    assert got.text == "ab\x02cd"


@pytest.mark.parametrize("settings", [{}, {"temperature": 3.0}, {"min_tokens": 3}])
def test_what_is_banned_is_never_taken(settings: dict[str, Any]) -> None:
    decoder = decoder_of("llama", torch.float32)
    free = generate(decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=12, **settings))
    banned = {i for g in free for i in g.token_ids[:2]}
    got = generate(
        decoder, input_ids=ROWS, config=GenerationConfig(max_tokens=12, suppress_token_ids=sorted(banned), **settings)
    )
    assert not banned.intersection(i for g in got for i in g.token_ids)


def test_the_batch_shrinks_when_fewer_than_half_are_running(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("llama", torch.float32)
    widths: list[int] = []
    step = generation_backends.StaticCacheDecoder.step
    monkeypatch.setattr(
        generation_backends.StaticCacheDecoder, "step", lambda self, ids: widths.append(len(ids)) or step(self, ids)
    )
    free = generate(
        decoder,
        input_ids=ROWS,
        config=GenerationConfig(
            max_tokens=12, eos_token_ids=(), temperature=1.0, seed=[1, 2, 3, 4], repetition_penalty=1.1
        ),
    )
    assert widths == [4] * 11
    ends = {g.token_ids[1] for g in free[:3]} - set(free[3].token_ids)
    assert len(ends) == 3
    widths.clear()
    found = generate(
        decoder,
        input_ids=ROWS,
        config=GenerationConfig(
            max_tokens=12, eos_token_ids=tuple(ends), temperature=1.0, seed=[1, 2, 3, 4], repetition_penalty=1.1
        ),
    )
    assert widths == [4] + [1] * 10
    assert found[3].token_ids == free[3].token_ids
    assert [len(g.token_ids) for g in found] == [2, 2, 2, 12]


def test_the_config_names_the_eos() -> None:
    said = scripted(b"ab\x02cd")
    assert generate(said, input_ids=[[9]], config=GenerationConfig(max_tokens=5))[0].token_ids == [*b"ab", 2]
    assert generate(said, input_ids=[[9]], config=GenerationConfig(max_tokens=5, eos_token_ids=()))[0].token_ids == [
        *b"ab\x02cd"
    ]


def test_min_tokens_holds_eos_back() -> None:
    decoder = decoder_of("llama", torch.float32)
    (free,) = generate(decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=20, eos_token_ids=()))
    (held,) = generate(
        decoder,
        input_ids=[ROWS[0]],
        config=GenerationConfig(max_tokens=20, min_tokens=5, eos_token_ids=free.token_ids[:1]),
    )
    assert free.token_ids[0] not in held.token_ids[:5]
    assert len(held.token_ids) >= 5
    (not_held,) = generate(
        decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=20, eos_token_ids=free.token_ids[:1])
    )
    assert not_held.token_ids == free.token_ids[:1]


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
def test_stop_strings(stop: Any, text: str, tokens: int) -> None:
    heard: list[str] = []
    (found,) = generate(scripted(b"hello world!"), Bytes(), ["x"], config=GenerationConfig(max_tokens=12, stop_strings=stop, eos_token_ids=(), on_token=lambda row, token, piece, logprob: heard.append(piece)))  # fmt: skip
    assert found.text == text == "".join(heard)
    assert len(found.token_ids) == tokens == len(heard)
    assert found.stop_reason == ("length" if text == "hello world!" else "stop")


def test_streaming_waits_for_whole_characters() -> None:
    text = "aé日😀b"
    heard: list[tuple[int, int, str, float]] = []
    (found,) = generate(scripted(text.encode()), Bytes(), ["x"], config=GenerationConfig(max_tokens=len(text.encode()), eos_token_ids=(), on_token=lambda *what: heard.append(what)))  # fmt: skip
    assert [piece for _, _, piece, _ in heard] == ["a", "", "é", "", "", "日", "", "", "", "😀", "b"]
    assert found.text == text
    assert [token for _, token, _, _ in heard] == found.token_ids
    assert [logprob for *_, logprob in heard] == found.logprobs
    (cut,) = generate(scripted(text.encode()), Bytes(), ["x"], config=GenerationConfig(max_tokens=2, eos_token_ids=()))
    assert cut.text == "a\ufffd"


def test_an_eos_ends_what_was_waiting() -> None:
    heard: list[str] = []
    (found,) = generate(
        scripted(b"abc\x02"),
        Bytes(),
        ["x"],
        config=GenerationConfig(max_tokens=9, stop_strings="cd", on_token=lambda *what: heard.append(what[2])),
    )
    assert heard == ["a", "b", "", "c"]
    assert (found.text, found.token_ids, found.stop_reason) == ("abc", [*b"abc", 2], "eos")


def test_a_character_cut_between_prompt_and_continuation() -> None:
    (found,) = generate(
        scripted(b"\xa9!"), Bytes(), input_ids=[[0xC3]], config=GenerationConfig(max_tokens=2, eos_token_ids=())
    )
    assert found.text == "é!"


def test_streams_of_a_batch_add_up() -> None:
    folder = shared_dir() / "models" / "stories260k"
    decoder, tokenizer = laconic.Decoder.from_pretrained(folder), laconic.load_tokenizer(folder)
    prompts = ["Once upon a time", "Lily", ""]
    heard: list[list[Any]] = [[], [], []]
    found = generate(decoder, tokenizer, prompts, config=GenerationConfig(max_tokens=60, temperature=1.2, seed=[1, 2, 3], stop_strings=["She", "\n"], on_token=lambda row, *what: heard[row].append(what)))  # fmt: skip
    for prompt, one, pieces in zip(prompts, found, heard, strict=True):
        assert "".join(piece for _, piece, _ in pieces) == one.text
        assert [token for token, _, _ in pieces] == one.token_ids
        whole = tokenizer.decode(tokenizer.encode(prompt) + one.token_ids)[len(prompt) :]
        assert whole.startswith(one.text)
        assert ("She" in whole or "\n" in whole) == (one.stop_reason == "stop")


def test_text_needs_a_tokenizer_and_ids_do_not() -> None:
    heard: list[Any] = []
    (found,) = generate(
        scripted(b"ab"),
        input_ids=[[1]],
        config=GenerationConfig(max_tokens=2, on_token=lambda *what: heard.append(what)),
    )
    assert found.text == ""
    assert [what[1:3] for what in heard] == [(97, ""), (98, "")]


def test_log_probabilities_are_of_the_unfiltered_distribution() -> None:
    decoder = decoder_of("llama", torch.float32)
    for settings in SETTINGS.values():
        (found,) = generate(
            decoder, input_ids=[ROWS[0]], config=GenerationConfig(max_tokens=6, **{**settings, "seed": 5})
        )
        ids = torch.tensor([ROWS[0] + found.token_ids])
        logits = decoder.logits(decoder(decoder.embed(ids)).hidden_states)[0, 6:-1]
        asked = logits.log_softmax(-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        assert found.logprobs == pytest.approx(asked.tolist(), abs=1e-4)


# --- lengths


def test_the_last_position_of_a_table_is_used_and_no_more() -> None:
    decoder = decoder_of("gpt2", torch.float32)
    row = [3] * 100
    assert (
        len(
            generate(decoder, input_ids=[row, [5]], config=GenerationConfig(max_tokens=28, eos_token_ids=()))[
                0
            ].token_ids
        )
        == 28
    )
    with pytest.raises(UsageError, match=r"^prompt 100 \+ max_tokens 29 > 128 positions of gpt2; shorten by 1$"):
        generate(decoder, input_ids=[[5], row], config=GenerationConfig(max_tokens=29))
    state = decoder(decoder.embed(torch.tensor([row]))).cache
    with pytest.raises(UsageError, match=r"^prompt 101 \+ max_tokens 1,100 > 128 positions of gpt2; shorten by 1,073$"):
        generate(decoder, input_ids=[[5]], state=state, config=GenerationConfig(max_tokens=1100))


def test_rope_goes_on_beyond_its_positions_with_one_warning() -> None:
    decoder = decoder_of("llama", torch.float32)
    with pytest.warns(UserWarning, match="position 128 ≥ 128 of llama") as told:
        assert (
            len(
                generate(decoder, input_ids=[[3] * 120], config=GenerationConfig(max_tokens=30, eos_token_ids=()))[
                    0
                ].token_ids
            )
            == 30
        )
    assert len(told) == 1
    with pytest.warns(UserWarning, match="position 128 ≥ 128 of llama") as told:
        generate(decoder, input_ids=[[3] * 130], config=GenerationConfig(max_tokens=9, eos_token_ids=()))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(
            decoder, input_ids=[[3] * 120], config=GenerationConfig(max_tokens=9, eos_token_ids=())
        )  # the ninth is not read


# --- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature −1: must be ≥ 0"),
        ({"temperature": float("nan")}, "temperature nan: must be ≥ 0"),
        ({"top_p": 0}, "top_p 0: must be in (0, 1]"),
        ({"top_p": 1.5}, "top_p 1.5: must be in (0, 1]"),
        ({"top_k": -2}, "top_k −2: must be ≥ 0"),
        ({"min_p": 2}, "min_p 2: must be in [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty 0: must be > 0"),
        ({"max_tokens": 0}, "max_tokens 0: must be ≥ 1"),
        ({"min_tokens": 4}, "min_tokens 4: must be in [0, max_tokens 3]"),
        ({"chunk": 0}, "chunk 0: must be ≥ 1"),
        ({"stop": ["a", ""]}, "stop: an empty string stops everything; leave it out"),
        ({"stop": "a"}, "stop strings given without a tokenizer; give one, or eos ids"),
        ({"seed": [1, 2]}, "seed has 2 entries, there are 1 rows; give one each or one for all"),
        ({"ids": None}, "no prompt given; give one of prompts, ids and vectors"),
        ({"prompts": ["a"]}, "prompts and ids given; give one of prompts, ids and vectors"),
        ({"ids": None, "prompts": ["a"]}, "prompts given without a tokenizer; give one, or ids"),
        ({"ids": [[1], []]}, "row 1 has no live position"),
        ({"live": torch.ones(1, 1).long()}, "live is int64; give booleans, mask.bool() say"),
        ({"ids": torch.ones(1, 1)}, "ids are float32; did you mean vectors=?"),
        ({"eos": 1000}, "eos 1000: must be in [0, vocabulary 97)"),
        ({"banned": [5, 97]}, "banned 97: must be in [0, vocabulary 97)"),
        ({"eos_count": 0}, "eos_count 0: must be ≥ 1"),
        ({"live": torch.ones(1, 1).bool()}, "live given with ids, whose padding is made here; give live with vectors"),
        ({"ids": None, "vectors": torch.zeros(2, 3, 48), "live": torch.tensor([[True] * 3, [False] * 3])},
         "row 1 has no live position"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as told:
        generate(decoder_of("llama", torch.float32), **{"ids": [[1]], "max_tokens": 3, **settings})
    assert str(told.value) == message


def test_an_empty_prompt() -> None:
    message = "^prompt 2 is empty and the tokenizer adds no first token; give text, ids or vectors$"
    with pytest.raises(UsageError, match=message):
        generate(decoder_of("llama", torch.float32), Letters(), ["a", "b", ""], config=GenerationConfig(max_tokens=3))


def test_a_prompt_that_is_one_text() -> None:
    decoder = decoder_of("llama", torch.float32)
    assert ids_of(generate(decoder, Letters(), "ab", config=GenerationConfig(max_tokens=3))) == ids_of(
        generate(decoder, Letters(), ["ab"], config=GenerationConfig(max_tokens=3))
    )


def test_ids_that_are_no_words() -> None:
    with pytest.raises(InputError, match=r"^ids\[1, 2\] = 700, vocabulary 97$"):
        generate(
            decoder_of("llama", torch.float32), input_ids=[[1], [0, 1, 700, 900]], config=GenerationConfig(max_tokens=3)
        )
    with pytest.raises(InputError, match=r"^ids\[0, 0\] = -1, vocabulary 97$"):
        generate(decoder_of("llama", torch.float32), input_ids=[[-1]], config=GenerationConfig(max_tokens=3))


def test_a_tokenizer_of_another_model() -> None:
    message = "^tokenizer has 256 ids, model has 97 rows; grow the model or take its own tokenizer$"
    with pytest.raises(InputError, match=message):
        generate(decoder_of("llama", torch.float32), Bytes(), ["a"], config=GenerationConfig(max_tokens=3))


def test_states_and_vectors_of_another_shape() -> None:
    decoder = decoder_of("llama", torch.float32)
    state = decoder(decoder.embed(torch.tensor([[1], [2]]))).cache
    with pytest.raises(ValueError, match="state has 2 rows, vectors 3"):
        generate(decoder, input_ids=[[1], [2], [3]], state=state, config=GenerationConfig(max_tokens=2))
    with pytest.raises(ValueError, match="state has 2 layers of 4 heads × 12, decoder 2 of 2 × 16"):
        generate(
            decoder,
            input_ids=[[1]],
            state=decoder_of("gpt2", torch.float32)(torch.ones(1, 1, 48)).cache,
            config=GenerationConfig(max_tokens=2),
        )
    with pytest.raises(ValueError, match="vectors have width 64, decoder 48"):
        generate(decoder, inputs_embeds=torch.zeros(1, 2, 64), config=GenerationConfig(max_tokens=2))


def test_logits_that_are_no_numbers() -> None:
    decoder = fresh("llama")
    with torch.no_grad():
        decoder.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"^row 0, token 0: logits are not finite; check the weights$"):
        generate(decoder, input_ids=[[1]], config=GenerationConfig(max_tokens=2))
