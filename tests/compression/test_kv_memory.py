"""KV memories: the cache they stand in for, top slots, batches, documents side by side, and files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laconic import Decoder, DecoderConfig, KVCache
from laconic.compression.kv.memory import KVMemory
from laconic.compression.kv.memory_file import KVMemoryMetadata
from laconic.compression.memory_file import SourceDocument
from laconic.errors import CorruptArtifactError, UsageError
from laconic.storage import atomic
from tests import tolerances
from tests.compression.test_memory import make_memory

FILE = "book.safetensors"


def make_decoder(family: str = "llama") -> Decoder:
    return Decoder(DecoderConfig.tiny(family)).eval()


@torch.no_grad()
def read(decoder: Decoder, ids: list[int], cache: KVCache | None = None) -> KVCache:
    return decoder(decoder.embed(torch.tensor([ids])), cache).cache


@torch.no_grad()
def logits_after(decoder: Decoder, cache: KVCache | None, ids: list[int]) -> torch.Tensor:
    rows = 1 if cache is None else cache.B
    return decoder.logits(decoder(decoder.embed(torch.tensor([ids]).expand(rows, -1)), cache).hidden_states)


def make_metadata(decoder: Decoder, **changes: Any) -> KVMemoryMetadata:
    config = decoder.config
    document = SourceDocument("book", "d" * 64, 9, (9,))
    metadata = KVMemoryMetadata(
        laconic="0", model=decoder.fingerprint, family=config.family, layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads, head_size=config.head_dim, vocab=config.vocab_size, tokenizer="t" * 64,
        method="window", created="2026-01-01T00:00:00+00:00", documents=((document,),),
    )  # fmt: skip
    return replace(metadata, **changes)


def shuffle_ranks(memory: KVMemory) -> KVMemory:
    generator = torch.Generator().manual_seed(3)
    ranks = [torch.rand(len(head), generator=generator).argsort() for head in memory.split_heads(memory.ranks)]
    return replace(memory, ranks=torch.cat(ranks))


IDS, NEXT = [1, 5, 9, 2, 8, 4, 4, 7, 3], [6, 2, 11]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_kv_memory_of_a_whole_cache_continues_as_the_text(family: str) -> None:
    decoder = make_decoder(family)
    cache = read(decoder, IDS)
    memory = KVMemory.from_cache(cache)
    assert memory.to_cache().is_equal(cache)
    assert torch.equal(logits_after(decoder, memory.to_cache(), NEXT), logits_after(decoder, cache, NEXT))


def test_kv_memory_keep_top_slots_selects_by_rank_in_each_head() -> None:
    decoder = make_decoder()
    whole = shuffle_ranks(KVMemory.from_cache(read(decoder, IDS)))
    memory = whole.keep_top_slots(4)
    assert memory.M == 4
    heads = [
        m.split_heads(x)
        for m in (whole, memory)
        for x in (m.positions, m.ranks, torch.cat(m.keys), torch.cat(m.values))
    ]
    assert len({tuple(positions.tolist()) for positions in heads[4]}) > 1
    for positions, ranks, keys, values, *selected in zip(*heads, strict=True):
        best = ranks.argsort()[:4].sort().values
        assert all(torch.equal(x[best], y) for x, y in zip((positions, ranks, keys, values), selected, strict=True))
    assert memory.keep_top_slots(2).is_equal(whole.keep_top_slots(2))
    assert whole.keep_top_slots(99).is_equal(whole)
    with pytest.raises(UsageError, match="0 slots"):
        memory.keep_top_slots(0)


def test_kv_memory_to_cache_continues_at_the_position_after_the_document() -> None:
    decoder = make_decoder()
    memory = shuffle_ranks(KVMemory.from_cache(read(decoder, IDS))).keep_top_slots(3)
    with torch.no_grad():
        cache = decoder(decoder.embed(torch.tensor([NEXT])), memory.to_cache()).cache
    assert cache.positions[0, 3:].tolist() == [9, 10, 11]


def test_kv_memory_concat_rows_gives_each_document_its_own_result() -> None:
    decoder = make_decoder()
    memories = [shuffle_ranks(KVMemory.from_cache(read(decoder, ids))) for ids in (IDS, IDS[:5], IDS[::-1])]
    memories[2] = memories[2].keep_top_slots(4)
    batch = KVMemory.concat_rows(*memories)
    assert batch.num_slots.tolist() == [9, 5, 4]
    joint = logits_after(decoder, batch.to_cache(), NEXT)
    for row, memory in enumerate(memories):
        alone = logits_after(decoder, memory.to_cache(), NEXT)[0]
        torch.testing.assert_close(joint[row], alone, rtol=0, atol=tolerances.FLOAT32)
    top = batch.keep_top_slots(4)
    assert top.num_slots.tolist() == [4, 4, 4]
    for row, memory in enumerate(memories):
        assert top.select_rows([row]).is_equal(memory.keep_top_slots(4))


def test_kv_memory_concat_documents_equals_reading_the_second_at_later_positions() -> None:
    decoder, second = make_decoder(), [7, 7, 2, 30]
    with torch.no_grad():
        shifted = decoder(decoder.embed(torch.tensor([second])), position_ids=torch.arange(9, 13)[None]).cache
    expected = read(decoder, IDS).append(shifted)
    parts = [KVMemory.from_cache(read(decoder, ids)) for ids in (IDS, second)]
    memory = KVMemory.concat_documents(decoder.config, *parts)
    assert memory.num_tokens.tolist() == [13]
    actual = memory.to_cache()
    assert torch.equal(actual.positions, expected.positions)
    for mine, theirs in zip(actual.keys + actual.values, expected.keys + expected.values, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerances.FLOAT32)
    half = memory.keep_top_slots(6)
    assert {int((head < 9).sum()) for head in half.split_heads(half.positions)} == {4}  # each document keeps its share
    other = make_decoder("gpt2")
    parts = [KVMemory.from_cache(read(other, ids)) for ids in (IDS, second)]
    with pytest.raises(UsageError, match="gpt2 with learned positions"):
        KVMemory.concat_documents(other.config, *parts)


def test_kv_memory_file_round_trip(tmp_path: Path) -> None:
    decoder = make_decoder()
    metadata = make_metadata(decoder, measured={"loss": 1.5}, settings={"keep": 0.5}, chat=True)
    memory = shuffle_ranks(KVMemory.from_cache(read(decoder, IDS), metadata)).keep_top_slots(4)
    memory.save(tmp_path / FILE)
    assert KVMemory.load(tmp_path / FILE, metadata).is_equal(memory)
    assert f"<td>{len(IDS)}</td><td>4</td></tr>" in memory._repr_html_()
    memory.to(dtype=torch.bfloat16).save(tmp_path / FILE)
    loaded = KVMemory.load(tmp_path / FILE)
    assert loaded.metadata is not None
    assert (loaded.metadata.dtype, loaded.keys[0].dtype) == ("bfloat16", torch.bfloat16)
    with pytest.raises(UsageError, match="names its model"):
        replace(memory, metadata=None).save(tmp_path / FILE)


@pytest.mark.parametrize(("changes", "match"), [({"model": "0" * 64}, "0000…00"), ({"tokenizer": "9" * 64}, "9999…99")])
def test_kv_memory_load_refuses_another_model(tmp_path: Path, changes: dict[str, str], match: str) -> None:
    decoder = make_decoder()
    KVMemory.from_cache(read(decoder, IDS), make_metadata(decoder)).save(tmp_path / FILE)
    with pytest.raises(CorruptArtifactError, match=match):
        KVMemory.load(tmp_path / FILE, make_metadata(decoder, **changes))


def rewrite(path: Path, tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a memory file again with other tensors (None removes one) and metadata, and a digest that fits."""
    old, data = atomic.load_artifact(path, "kv-memory")
    new = {name: t.clone() for name, t in (old | tensors).items() if t is not None}
    atomic.save_artifact(path, new, "kv-memory", data | metadata)


DAMAGES: list[tuple[str, dict[str, Any]]] = [
    ("keys.0", {"keys.0": torch.zeros(1, 2, 3, 4)}),
    ("values.1", {"values.1": None}),
    ("positions", {"positions": torch.full((36,), 9, dtype=torch.int32)}),
    ("positions", {"num_tokens": torch.tensor([0])}),
    ("slots", {"slots": torch.tensor([[[9, -9]], [[9, 9]]])}),
    ("keys.0", {"slots": torch.tensor([[[8, 9]], [[9, 10]]])}),
    ("not finite", {"keys.1": torch.full((18, 16), float("nan"))}),
]


@pytest.mark.parametrize(("match", "change"), DAMAGES)
def test_kv_memory_load_refuses_inconsistent_tensors(
    tmp_path: Path, match: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder()
    memory = KVMemory.from_cache(read(decoder, IDS), make_metadata(decoder))
    memory.save(tmp_path / FILE)
    with monkeypatch.context() as patched:
        patched.setattr(atomic, "check_finite", lambda name, tensor: None)
        rewrite(tmp_path / FILE, change, {})
    with pytest.raises(CorruptArtifactError, match=match):
        KVMemory.load(tmp_path / FILE)


@pytest.mark.parametrize(("field", "value"), [("chat", "yes"), ("settings", 3), ("documents", [3])])
def test_kv_memory_load_refuses_malformed_metadata(tmp_path: Path, field: str, value: Any) -> None:
    decoder = make_decoder()
    memory = KVMemory.from_cache(read(decoder, IDS), make_metadata(decoder))
    memory.save(tmp_path / FILE)
    rewrite(tmp_path / FILE, {}, {field: value})
    with pytest.raises(CorruptArtifactError, match=field):
        KVMemory.load(tmp_path / FILE)


def test_kv_memory_repr_names_the_tokens_of_a_text_in_windows() -> None:
    decoder = make_decoder()
    document = SourceDocument("book", "d" * 64, 1234, (617, 617))
    memory = KVMemory.from_cache(read(decoder, IDS), make_metadata(decoder, documents=((document,),)))
    assert repr(memory) == "KVMemory([1234] tokens in [9.0] slots per head, 2 layers, 2 KV heads)"
    assert "<td>1,234</td>" in memory._repr_html_()
    unknown = make_metadata(decoder, documents=((),))  # as of a cartridge of peft
    for metadata in (None, unknown):
        assert "[9] tokens" in repr(replace(memory, metadata=metadata))


def test_kv_memory_concat_refuses_other_models() -> None:
    decoder = make_decoder()
    cache = read(decoder, IDS)
    mine = KVMemory.from_cache(cache, make_metadata(decoder))
    theirs = KVMemory.from_cache(cache, make_metadata(decoder, model="0" * 64))
    with pytest.raises(CorruptArtifactError, match="differ in model"):
        KVMemory.concat_rows(mine, theirs)
    with pytest.raises(UsageError, match="use memories of one model"):
        KVMemory.concat_rows(mine, KVMemory.from_cache(read(make_decoder("gpt2"), IDS), mine.metadata))
    joined = KVMemory.concat_documents(decoder.config, mine, mine)
    assert joined.metadata is not None
    assert [document.first for document in joined.metadata.documents[0]] == [0, 1]


@pytest.mark.usefixtures("unchecked")
def test_kv_memory_concat_says_which_arguments_it_takes() -> None:
    decoder = make_decoder()
    memory: Any = KVMemory.from_cache(read(decoder, IDS))
    with pytest.raises(UsageError, match=r"as in concat_documents\(decoder.config, \*memories\), not KVMemory"):
        KVMemory.concat_documents(memory, memory)
    for concat in (KVMemory.concat_rows, lambda memories: KVMemory.concat_documents(decoder.config, memories)):
        with pytest.raises(UsageError, match=r"one by one, or \*memories, not list"):
            concat([memory, memory])


def test_kv_memory_keep_top_slots_leaves_no_measurement_of_the_larger_memory() -> None:
    decoder = make_decoder()
    measured = {"windows": [{"max_loss": 0.1}]}
    metadata = make_metadata(decoder, measured=measured, settings={"keep": 0.5, "num_sinks": 4})
    whole = KVMemory.from_cache(read(decoder, IDS), metadata)
    small = whole.keep_top_slots(4).metadata
    assert small is not None
    assert (small.measured, small.settings) == ({}, {"num_sinks": 4, "slots": 4})
    assert whole.keep_top_slots(9).metadata == metadata  # nothing is dropped
    limited = replace(whole, metadata=replace(metadata, settings={"max_loss": 0.1})).keep_top_slots(2).metadata
    assert limited is not None
    assert limited.settings == {"slots": 2}


def make_either(kind: str, **changes: Any) -> Any:
    """Build a memory of one text, of keys and values or of summary vectors, with metadata."""
    if kind == "summaries":
        memory = make_memory([[1, 2]], with_metadata=True)
        assert memory.metadata is not None
        return replace(memory, metadata=replace(memory.metadata, **changes))
    decoder = make_decoder()
    return KVMemory.from_cache(read(decoder, IDS), make_metadata(decoder, **changes))


@pytest.mark.parametrize(("kind", "model"), [("kv", "model"), ("summaries", "writer")])
def test_memories_are_compared_by_identity_and_equal_by_content(kind: str, model: str) -> None:
    memory, later = make_either(kind), make_either(kind, created="2027-01-01T00:00:00+00:00", laconic="9")
    assert memory != later
    assert len({memory, later, memory}) == 2
    assert memory.is_equal(later)
    assert not memory.is_equal(make_either(kind, **{model: "e" * 64}))
    assert not memory.is_equal(memory.to(torch.bfloat16))
    assert not memory.is_equal(memory.select_rows([0, 0]))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "keep"), [("kv", "keep_top_slots"), ("summaries", "keep_top_vectors")])
def test_memories_refuse_arguments_of_other_types(tmp_path: Path, kind: str, keep: str) -> None:
    memory = make_either(kind)
    assert memory.to("cpu").is_equal(memory)
    assert memory.select_rows(torch.tensor([0, 0])).B == 2
    for mask in ([True], np.array([True]), torch.tensor([True])):
        assert memory.select_rows(mask).is_equal(memory)
    for rows in (1, [0.0], [True, False], [False], [], "0", [[0], [0, 0]], torch.tensor(0)):
        with pytest.raises(UsageError, match="give a list of at least one row number"):
            memory.select_rows(rows)
    for num in ("5", 2.5, True, None):
        with pytest.raises(UsageError, match=r"cannot keep .*; give an integer, [01] or more"):
            getattr(memory, keep)(num)
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, "bfloat16"):
        with pytest.raises(UsageError, match=r"dtype .*: a memory holds floating-point numbers"):
            memory.to(dtype=dtype)
    with pytest.raises(UsageError, match="device cuda:99 is not available"):
        memory.to("cuda:99")
    with pytest.raises(UsageError, match="is a folder; give the name of a file"):
        memory.save(tmp_path)
