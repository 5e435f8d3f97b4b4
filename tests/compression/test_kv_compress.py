"""compress_kv: what is kept, windows of long documents, the size found by measurement, and refusals."""

from typing import Any, get_args

import pytest
import torch

from laconic import Decoder, DecoderConfig, GenerationConfig, KVCompressionConfig, compress_kv, generate
from laconic.compression.kv import compress as kv_compress
from laconic.compression.kv import selection as kv_selection
from laconic.compression.kv.compress import compress_document, compute_window_tokens
from laconic.compression.kv.config import KVMethod
from laconic.compression.kv.loss import build_loss_probes, measure_document_loss
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.selection import RepeatPrompt
from laconic.errors import InputError, UsageError
from tests import tolerances

PROMPT = RepeatPrompt((1, 2), (3, 4), (5,))
METHODS = get_args(KVMethod)


def make_decoder(family: str = "llama", **changes: Any) -> Decoder:
    return Decoder(DecoderConfig.tiny(family, **changes)).eval()


def document(length: int, seed: int = 0) -> list[int]:
    return torch.randint(6, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_compress_kv_keeping_everything_continues_as_the_text(method: KVMethod) -> None:
    decoder, ids = make_decoder(), document(40)
    memory = compress_kv(decoder, ids, KVCompressionConfig(method, keep=1.0))
    assert memory.M == 40
    config = GenerationConfig(max_tokens=6, eos_token_ids=())
    after = generate(decoder, input_ids=[[9, 8]], state=memory.to_cache(), config=config)[0]
    whole = generate(decoder, input_ids=[[*ids, 9, 8]], config=config)[0]
    assert after.token_ids == whole.token_ids
    torch.testing.assert_close(torch.tensor(after.logprobs), torch.tensor(whole.logprobs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_compress_kv_keeps_sinks_and_as_many_slots_as_asked(method: KVMethod) -> None:
    memory = compress_kv(make_decoder(), document(60), KVCompressionConfig(method, slots=20), repeat_prompt=PROMPT)
    assert memory.num_slots.tolist() == [20]
    assert memory.has_equal_heads == (method != "kvzip")
    assert memory.num_tokens.tolist() == [60]
    for positions in memory.split_heads(memory.positions):
        assert positions[:4].tolist() == [0, 1, 2, 3]
        assert positions.tolist() == sorted(set(positions.tolist()))


def test_compress_kv_of_smaller_sizes_are_nested() -> None:
    decoder, ids = make_decoder(), document(50)
    large, small = (compress_kv(decoder, ids, KVCompressionConfig("kvzip", slots=n)) for n in (30, 12))
    heads = (m.split_heads(m.positions) for m in (large, small))
    assert all(set(few.tolist()) <= set(many.tolist()) for many, few in zip(*heads, strict=True))
    assert large.keep_top_slots(12).is_equal(small)


@pytest.mark.parametrize("num_tokens", [100, 300, 50, 7])
def test_kv_compression_config_keeps_as_many_slots_as_the_decimal_share(num_tokens: int) -> None:
    """In floating point, 100 · 0.29 is 28.999999999999996."""
    for percent in range(1, 101):
        expected = max(1, num_tokens * percent // 100)
        assert KVCompressionConfig(keep=percent / 100).num_slots(num_tokens) == expected, percent
    assert KVCompressionConfig(keep=1 / 3).num_slots(9) == 3


@pytest.mark.parametrize(("num_tokens", "expected"), [(7, 7), (100, 64), (512, 64), (520, 65), (8000, 1000)])
def test_kv_compression_config_keeps_enough_of_a_short_document_by_default(num_tokens: int, expected: int) -> None:
    assert KVCompressionConfig().num_slots(num_tokens) == expected


def test_compress_kv_window_is_the_text_without_its_middle() -> None:
    """StreamingLLM: sinks and newest tokens, at their own positions."""
    memory = compress_kv(make_decoder(), document(30), KVCompressionConfig("window", slots=10))
    assert memory.split_heads(memory.positions)[3].tolist() == [0, 1, 2, 3, 24, 25, 26, 27, 28, 29]


def test_compress_kv_random_depends_on_the_seed() -> None:
    decoder, ids = make_decoder(), document(30)
    one, again, two = (compress_kv(decoder, ids, KVCompressionConfig("random", slots=9, seed=s)) for s in (1, 1, 2))
    assert one.is_equal(again)
    assert not torch.equal(one.positions, two.positions)


@pytest.mark.parametrize("method", ["h2o", "expected", "kvzip"])
def test_compress_kv_does_not_depend_on_the_pieces_it_reads(method: KVMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, ids = make_decoder().double(), document(40)
    config = KVCompressionConfig(method, slots=15)
    expected = compress_kv(decoder, ids, config, repeat_prompt=PROMPT)
    monkeypatch.setattr(kv_selection, "READ_TOKENS", 7)
    actual = compress_kv(decoder, ids, config, repeat_prompt=PROMPT)
    assert torch.equal(actual.positions, expected.positions)


def test_compress_document_reads_long_documents_in_windows() -> None:
    decoder, ids = make_decoder(), document(300)
    result = compress_document(decoder, ids, KVCompressionConfig("snapkv", slots=60), PROMPT)
    assert result.windows == [100, 100, 100]
    assert result.memory.num_tokens.tolist() == [60]
    assert result.positions == 300
    first = compress_kv(decoder, ids[:100], KVCompressionConfig("snapkv", slots=20))
    parts = [compress_kv(decoder, ids[i : i + 100], KVCompressionConfig("snapkv", slots=20)) for i in (0, 100, 200)]
    joined = KVMemory.concat_documents(decoder.config, *(part.renumber_slots(decoder.config) for part in parts))
    assert torch.equal(joined.positions, result.memory.positions)
    torch.testing.assert_close(result.memory.to_cache().crop(20).values[1], first.to_cache().values[1])
    torch.testing.assert_close(torch.stack(joined.keys), torch.stack(result.memory.keys))


@pytest.mark.parametrize("method", get_args(KVMethod))
def test_compress_document_shows_progress_up_to_all_positions(method: KVMethod) -> None:
    steps = list[tuple[int, int]]()
    config = KVCompressionConfig(method, slots=60)
    result = compress_document(
        make_decoder(), document(300), config, PROMPT, 3, lambda name, done, total: steps.append((done, total))
    )
    assert len(result.windows) > 1
    assert {total for _, total in steps} == {steps[-1][0]} == {result.positions}


def test_compress_document_progress_does_not_count_what_is_measured() -> None:
    steps = list[tuple[int, int]]()
    result = compress_document(
        make_decoder(),
        document(300),
        KVCompressionConfig(max_loss=0.5),
        PROMPT,
        on_progress=lambda name, done, total: steps.append((done, total)) if total else None,
    )
    assert {total for _, total in steps} == {steps[-1][0]}, "windows that are still to be read are left"
    assert result.positions > steps[-1][0]


def test_compress_kv_refuses_what_cannot_be_joined_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object) -> None:
        raise AssertionError("the document was read")

    monkeypatch.setattr(kv_compress, "rank_document", read)
    with pytest.raises(
        UsageError, match=r"300 slots, more than the context of 128; keep at most 128 slots, a share of 0\.426"
    ):
        compress_kv(make_decoder(), document(300), KVCompressionConfig("snapkv", keep=1.0))
    decoder = make_decoder("gpt2")  # each document can be repeated within the table of positions, or is refused
    for config in (KVCompressionConfig(), KVCompressionConfig("snapkv", max_loss=0.1)):
        with pytest.raises(UsageError, match=r"learned positions .* at most \d+ tokens, which is") as error:
            compress_kv(decoder, document(100), config, repeat_prompt=PROMPT)
        longest = int(str(error.value).split("at most ")[1].split()[0])
        with pytest.raises(AssertionError, match="was read"):
            compress_kv(decoder, document(longest), config, repeat_prompt=PROMPT)
    with pytest.raises(AssertionError, match="was read"):
        compress_kv(make_decoder(), document(300), KVCompressionConfig("snapkv", keep=0.426))


def test_renumbered_slots_equal_reading_the_first_tokens() -> None:
    """The first layer's keys do not depend on the text before, so that moved keys are those of a shorter text."""
    decoder, ids = make_decoder(), document(20)
    memory = compress_kv(decoder, ids, KVCompressionConfig("window", slots=8)).renumber_slots(decoder.config)
    shorter = decoder(decoder.embed(torch.tensor([ids[:4] + ids[-4:]]))).cache
    torch.testing.assert_close(memory.to_cache().keys[0], shorter.keys[0], rtol=0, atol=tolerances.FLOAT32)
    assert memory.num_tokens.tolist() == [8]


def test_compress_document_max_loss_finds_the_smallest_memory() -> None:
    decoder, ids = make_decoder(), document(50)
    result = compress_document(decoder, ids, KVCompressionConfig("knorm", max_loss=0.002), PROMPT)
    losses = result.measured["windows"][0]
    assert losses["memory"]["mean"] - losses["full"]["mean"] <= 0.002
    tried = {trial["slots"]: trial["loss"] for trial in losses["trials"]}
    assert tried[result.memory.M] == losses["memory"]["mean"]
    assert all(loss - losses["full"]["mean"] > 0.002 for slots, loss in tried.items() if slots < result.memory.M)
    whole = compress_kv(decoder, ids, KVCompressionConfig("knorm", keep=1.0))
    probes = build_loss_probes(decoder, whole.to_cache(), torch.tensor([ids]), PROMPT)
    measured = measure_document_loss(decoder, whole.to_cache(), probes)
    assert measured.mean == pytest.approx(losses["full"]["mean"], abs=1e-6)
    with torch.no_grad():
        expected = [0.0, 0.0]
        for row, mask, scored in zip(probes.ids, probes.attention_mask, probes.scored, strict=True):
            text = row[mask].tolist()
            log_p = decoder.logits(decoder(decoder.embed(torch.tensor([ids + text]))).hidden_states)[0].log_softmax(-1)
            for t in range(len(text) - int(scored.sum()), len(text)):
                expected[0] -= float(log_p[len(ids) + t - 1, text[t]])
                expected[1] += 1
    assert measured.mean == pytest.approx(expected[0] / expected[1], abs=1e-4)


def test_compress_document_max_loss_of_the_longest_document_of_a_table_of_positions() -> None:
    decoder, config = make_decoder("gpt2"), KVCompressionConfig("snapkv", max_loss=0.1)
    longest = compute_window_tokens(decoder, "snapkv", PROMPT, measures_loss=True)
    assert compress_kv(decoder, document(longest), config, repeat_prompt=PROMPT).num_tokens.tolist() == [longest]


def test_compress_document_max_loss_that_no_smaller_memory_reaches_keeps_everything() -> None:
    decoder = make_decoder()
    for p in decoder.parameters():
        p.data.mul_(4)
    result = compress_document(decoder, document(50), KVCompressionConfig("random", max_loss=0.0), PROMPT)
    losses = result.measured["windows"][0]
    assert losses["memory"]["mean"] <= losses["full"]["mean"]


def test_compress_document_max_loss_of_many_windows_leaves_room_for_a_prompt() -> None:
    decoder = make_decoder()
    for p in decoder.parameters():
        p.data.mul_(4)
    context = decoder.config.max_position_embeddings
    result = compress_document(
        decoder, document(2 * context), KVCompressionConfig("random", max_loss=0.0), RepeatPrompt()
    )
    assert len(result.windows) == 5
    assert 0.7 * context < result.memory.M <= 0.75 * context
    for losses in result.measured["windows"]:
        assert losses["trials"][-1]["loss"] == losses["memory"]["mean"] > losses["full"]["mean"]
    config = GenerationConfig(max_tokens=2, eos_token_ids=())
    assert generate(decoder, input_ids=[[5, 6]], state=result.memory.to_cache(), config=config)[0].token_ids


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": 0.5, "slots": 3}, "only one"),
        ({"keep": 0.0}, "share of the tokens"),
        ({"keep": 1.5}, "share of the tokens"),
        ({"slots": 0}, "1 or more"),
        ({"max_loss": -0.1}, "0 or more"),
        ({"num_sinks": -1}, "0 or more"),
        ({"keep": "0.5"}, "keep: give a number, not str"),
        ({"max_loss": "0.1"}, "max_loss: give a number, not str"),
        ({"slots": 10.5}, "slots: give an integer, not float"),
        ({"num_sinks": None}, "num_sinks: give an integer, not NoneType"),
        ({"seed": "a"}, "seed: give an integer, not str"),
        ({"keep": True}, "keep: give a number, not bool"),
        ({"slots": True}, "slots: give a number, not bool"),
        ({"seed": False}, "seed: give a number, not bool"),
        ({"equal_heads": "no"}, "equal_heads: give True or False, not str"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_kv_compression_config_refuses_sizes_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        KVCompressionConfig(**options)


def test_compress_kv_refuses_documents_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        compress_kv(make_decoder(), [])
    with pytest.raises(InputError, match="outside the vocabulary"):
        compress_kv(make_decoder(), [5, 97])
    with pytest.raises(UsageError, match="attend to the last 8 only"):
        compress_kv(make_decoder("mistral", sliding_windows=(8, 8)), document(9))


@pytest.mark.usefixtures("unchecked")
def test_compress_kv_takes_ids_of_one_document_and_a_config() -> None:
    decoder, ids, config = make_decoder(), document(9), KVCompressionConfig("window", slots=3)
    assert compress_kv(decoder, torch.tensor(ids), config).is_equal(compress_kv(decoder, ids, config))
    invalid: Any
    for invalid in ([ids], torch.tensor([ids])):
        with pytest.raises(UsageError, match="has a list where an integer is expected"):
            compress_kv(decoder, invalid, config)
    invalid = "snapkv"
    with pytest.raises(UsageError, match=r"config: give laconic.KVCompressionConfig\(.*, not str$"):
        compress_kv(decoder, ids, invalid)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_compress_kv_of_a_few_tokens(method: KVMethod, length: int) -> None:
    memory = compress_kv(make_decoder(), document(length), KVCompressionConfig(method, slots=3), repeat_prompt=PROMPT)
    assert memory.num_slots.tolist() == [min(3, length)]


@pytest.mark.usefixtures("unchecked")
def test_config_refuses_an_unknown_method() -> None:
    with pytest.raises(UsageError, match="method 'kvzpi' is unknown; use one of 'kvzip', 'snapkv', 'rkv'"):
        KVCompressionConfig("kvzpi", keep=0.5)  # type: ignore[arg-type]
