"""Needle in a haystack: contents of an item, scored tokens, alignment of batches."""

from typing import Any, cast

import numpy as np
import pytest

from laconic.batches import DocumentBatch
from laconic.data.synthetic.needle_in_haystack import FILLER, NEEDLE_KINDS, NeedleDataset, NeedleKind
from laconic.data.tokenizer import Tokenizer, build_byte_tokenizer
from laconic.errors import InputError
from laconic.interfaces import TrainingData

BOOK = "".join(f"This is sentence {i} of a book. " for i in range(400))
BYTES = build_byte_tokenizer()
BOOKS = (np.array(BYTES.encode(BOOK, add_special_tokens=False), dtype=np.int32),)


def build_dataset(**options: Any) -> NeedleDataset:
    return NeedleDataset(
        BYTES, **({"books": BOOKS, "lengths": (500,), "items_per_cell": 2, "depths": (0.0, 0.5, 1.0)} | options)
    )


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


@pytest.mark.parametrize("kind", NEEDLE_KINDS)
def test_needle_item_contains_its_facts(kind: NeedleKind) -> None:
    source = build_dataset(kinds=(kind,), lengths=(500, 700))
    for row in range(len(source)):
        prompt, answer_ids, scored = source.build_item(row)
        length, _, depth = source.cells[row // 2]
        assert len(prompt) + len(answer_ids) == length
        text, answer = decode(prompt), decode(answer_ids)
        facts = source.draw_facts(row, kind, depth)
        targets = [fact for fact in facts if fact.is_target]
        assert all(fact.to_sentence() in text for fact in facts)
        places = [text.index(fact.to_sentence()) for fact in facts]
        assert places == sorted(places)
        assert answer == ",".join(f" {fact.value}" for fact in targets)
        assert [decode([id]) for id, score in zip(answer_ids, scored, strict=True) if not score] == [","] * (
            len(targets) - 1
        )
        assert len({fact.value for fact in facts}) == len(facts) == (4 if kind in ("MK", "MV", "MQ") else 1)
        assert len(targets) == (4 if kind in ("MV", "MQ") else 1)
        assert len({fact.key for fact in facts}) == (4 if kind in ("MK", "MQ") else 1)
        assert all(text.rstrip().endswith(("is", "are")) and fact.key in text[-200:] for fact in targets)
        room = (
            length
            - len(answer_ids)
            - len(text[text.rindex(" What ") :])
            - sum(len(fact.to_sentence()) for fact in facts)
        )
        hay = text[: text.rindex(" What ")]
        for fact in facts:
            hay = hay.replace(fact.to_sentence(), "")
        assert len(hay) == room
        assert hay in (FILLER * 20 if kind == "S-1" else BOOK + BOOK)
        at = [
            text.index(fact.to_sentence()) - sum(len(other.to_sentence()) for other in facts[:i])
            for i, fact in enumerate(facts)
        ]
        assert any(place == round(depth * room) and facts[i].is_target for i, place in enumerate(at))


def test_needle_batch_aligns_prompt_ends() -> None:
    source = build_dataset()
    assert isinstance(source, TrainingData)
    rows = [0, 20, 35]
    batch = cast(DocumentBatch, source.batch(rows, 0, 0))
    C = batch.segment_ends[0]
    for b, row in enumerate(rows):
        prompt, answer_ids, scored = source.build_item(row)
        at = batch.attention_mask[b].nonzero()[:, 0]
        assert batch.input_ids[b, at].tolist() == prompt + answer_ids
        assert (int(at[0]), int(at[-1])) == (C - len(prompt), C + len(answer_ids) - 1)
        assert batch.loss_mask[b, C : C + len(answer_ids)].tolist() == scored
        assert not batch.loss_mask[b, :C].any()
        assert batch.document_ids[b] == source.item_name(row)
    assert batch.document_ids == ("S-1@500@0#0", "MK@500@0.5#0", "MQ@500@1#1")
    assert (len(source), source.max_length) == (36, 500)


def test_needle_items_depend_on_seed_and_book() -> None:
    one, two = build_dataset(), build_dataset(seed=1)
    assert one.build_item(7) == build_dataset().build_item(7) != two.build_item(7)
    prints = {
        dataset.fingerprint
        for dataset in (one, two, build_dataset(books=(BOOKS[0][1:],)), build_dataset(items_per_cell=3))
    }
    assert len(prints) == 4


def test_needle_refuses_missing_room_or_book() -> None:
    with pytest.raises(InputError, match="needle: length 200 leaves no haystack"):
        build_dataset(lengths=(200,))
    options: dict[str, Any] = {"kinds": ("S-1",), "depths": (0.5,), "items_per_cell": 20}
    needs = [500 - (item.room - 1) for item in map(build_dataset(**options).encode_item, range(20))]
    assert needs[0] < max(needs)
    assert len(build_dataset(lengths=(max(needs),), **options)) == 20
    with pytest.raises(InputError, match=f"leaves no haystack; an item of S-1 needs {max(needs)} tokens"):
        build_dataset(lengths=(max(needs) - 1,), **options)  # the first item fits
    with pytest.raises(InputError, match="needle: all kinds but S-1 need a book"):
        build_dataset(books=())
    assert len(build_dataset(books=(), kinds=("S-1",))) == 6


def test_needle_item_begins_with_bos() -> None:
    import tokenizers
    from tokenizers import processors

    inner = tokenizers.Tokenizer.from_str(BYTES.backend.to_str())
    inner.add_special_tokens(["<bos>"])
    begin = inner.token_to_id("<bos>")
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", begin)])
    source = NeedleDataset(
        Tokenizer(inner, {"bos_token": "<bos>"}, None, "x"), kinds=("S-1",), lengths=(300,), items_per_cell=1
    )
    prompt, answer_ids, _ = source.build_item(0)
    assert prompt[0] == begin
    assert begin not in prompt[1:]
    assert len(prompt) + len(answer_ids) == 300
