"""Encoding of reasoning examples: parts, prefix spaces, number spans; with real tokenizers."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig
from laconic.data.reasoning.dataset import answer_prefix_ids
from laconic.data.reasoning.encode import EncodedExample, ReasoningEncoder, find_eos_token_id
from laconic.data.tokenizer import Tokenizer, load_tokenizer
from laconic.errors import InputError
from tests.conftest import shared_dir
from tests.encoding import encode_example

NAMES = ["gpt2", "gsm-bpe-2048", "gsm-bpe-4096", "stories260k"]
FORMATS = ["pccot", "codi", "coconut", "icot"]
EXAMPLE = ReasoningExample("row-1", "What is 2 + 16, negated?", ("<<2+16=18>>", "<<18*-1=-18>>"), "-18")
ANSWERS = ["18", "-18", "−18", "0.5", ".5", "-3.25", "1,234", "$18", "~7.2", "2/5", "5:45", "1e5"]


@cache
def real(name: str) -> Tokenizer:
    place = "models" if name == "stories260k" else "data/tokenizers"
    return load_tokenizer(shared_dir() / place / name)


def settings(name: str, **values: Any) -> DataConfig:
    eos = None if real(name).eos_token_id is not None else "<|endoftext|>"  # those trained here name none
    chain = "all" if values.get("format") in ("coconut", "icot") else "drop_last"
    return DataConfig.model_validate({"path": "rows.jsonl", "eos_token": eos, "chain_steps": chain, **values})


def words(name: str, ids: tuple[int, ...] | list[int]) -> list[str]:
    return [str(real(name).backend.id_to_token(i)) for i in ids]


@pytest.mark.parametrize(("name", "count"), [("gpt2", 4), ("gsm-bpe-4096", 4), ("gsm-bpe-2048", 5)])
def test_encode_example_lengths(name: str, count: int) -> None:
    assert len(answer_prefix_ids(real(name), settings(name))) == count
    assert all(len(real(name).encode(sign, add_special_tokens=False)) == 1 for sign in ("<<", ">>"))


@pytest.mark.parametrize("name", NAMES)
def test_encode_example_pccot_joins_parts(name: str) -> None:
    tokenizer, encoder = real(name), ReasoningEncoder(real(name), settings(name))
    row = encode_example(EXAMPLE, tokenizer, settings(name, chain_steps="all"))
    eos = find_eos_token_id(tokenizer, settings(name))
    assert list(row.question_ids) == tokenizer.encode(EXAMPLE.question)
    pieces = [encoder.encode_text(step).ids for step in EXAMPLE.steps]
    assert list(row.chain_ids) == pieces[0] + pieces[1]
    assert row.chain_step_index == (0,) * len(pieces[0]) + (1,) * len(pieces[1])
    assert list(row.answer_ids) == [*encoder.encode_text("The answer is:").ids, *encoder.encode_text("-18").ids, eos]
    assert words(name, row.answer_ids)[row.distill_column] == ":"
    assert row.number_span == (row.distill_column + 1, len(row.answer_ids) - 1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_encode_example_marks_the_last_number_of_each_step(name: str, form: str) -> None:
    steps = ("<<48/2=24>>", "<<1,224.5 - 0.5 = 1,224>>", "So there are 3 + 4 = 7 left.", "-12", "nothing here")
    row = encode_example(replace(EXAMPLE, steps=steps), real(name), settings(name, format=form, chain_steps="all"))
    for i, (step, result) in enumerate(zip(steps, ["24", "1,224", "7", "-12", ""], strict=True)):
        columns = [n for n, index in enumerate(row.chain_step_index) if index == i]
        marked = [n for n in columns if row.chain_result_mask[n]]
        assert marked == list(range(marked[0], marked[-1] + 1) if marked else [])
        text = real(name).backend.decode([row.chain_ids[n] for n in marked]).strip(" =<>")
        assert text == result, step


def test_encode_example_does_not_merge_across_parts() -> None:
    """GPT-2 has a token ":-"; in the joined text, the token before the number would contain its sign."""
    gpt2 = real("gpt2")
    row = encode_example(EXAMPLE, gpt2, settings("gpt2"))
    assert ":-" in words("gpt2", gpt2.encode("The answer is:-18"))
    assert words("gpt2", row.answer_ids) == ["The", "Ġanswer", "Ġis", ":", "-", "18", "<|endoftext|>"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("part", ["question", "steps", "answer"])
def test_encode_example_refuses_special_tokens_in_text(form: str, part: str) -> None:
    text = "1 <|endoftext|> 2"
    example = replace(EXAMPLE, **{part: (text, "<<1=1>>") if part == "steps" else text})
    with pytest.raises(InputError, match="row row-1: the text contains a special token"):
        encode_example(example, real("gpt2"), settings("gpt2", format=form))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_encode_example_number_span(name: str, form: str, answer: str) -> None:
    row = encode_example(replace(EXAMPLE, answer=answer), real(name), settings(name, format=form))
    start, end = row.number_span
    digits = answer.lstrip("~$") if form == "pccot" else answer.lstrip("~")
    inner = real(name).backend
    decoded = inner.decode(list(row.answer_ids[start:end]), skip_special_tokens=False).strip()
    before = inner.decode(list(row.answer_ids[:start]), skip_special_tokens=False)
    assert decoded.endswith(digits[-1])
    assert decoded.lstrip("~ ").startswith(answer.lstrip("~")[0])
    assert not any(c.isdigit() for c in before)
    assert row.distill_column == (start - 1 if form in ("pccot", "codi") else -1)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=20)


@given(TEXT.map(lambda t: f"q{t}"), st.lists(TEXT.map(lambda t: f"{t}=1"), max_size=4), TEXT, st.integers(-99, 99))
def test_encode_example_of_any_text(question: str, steps: list[str], before: str, number: int) -> None:
    example = ReasoningExample("any", question, tuple(steps), f"{before} {number}")
    for name in NAMES:
        for form in FORMATS:
            row = encode_example(example, real(name), settings(name, format=form))
            start, end = row.number_span
            assert 0 <= start < end < len(row.answer_ids)
            assert row.distill_column == (start - 1 if form in ("pccot", "codi") else -1)
            assert list(row.chain_step_index) == sorted(row.chain_step_index)
            assert len(row.chain_step_index) == len(row.chain_ids)
            assert row.num_prefix_tokens < len(row.question_ids)


def test_encode_example_codi_distill_column() -> None:
    gpt2 = encode_example(EXAMPLE, real("gpt2"), settings("gpt2", format="codi"))
    assert words("gpt2", gpt2.answer_ids)[gpt2.distill_column : gpt2.distill_column + 2] == [":", "Ġ-"]
    plain = encode_example(replace(EXAMPLE, answer="18"), real("gpt2"), settings("gpt2", format="codi"))
    assert words("gpt2", plain.answer_ids)[plain.distill_column : plain.distill_column + 2] == [":", "Ġ18"]
    ours = encode_example(replace(EXAMPLE, answer="18"), real("gsm-bpe-2048"), settings("gsm-bpe-2048", format="codi"))
    assert words("gsm-bpe-2048", ours.answer_ids)[ours.distill_column : ours.distill_column + 2] == ["Ġ", "1"]


def test_encode_example_codi_separator() -> None:
    config = settings("gpt2", format="codi", chain_steps="all")
    row, eos = encode_example(EXAMPLE, real("gpt2"), config), 50256
    assert list(row.chain_ids) == real("gpt2").encode(" ".join(EXAMPLE.steps), add_special_tokens=False)
    assert words("gpt2", row.chain_ids)[row.chain_step_index.index(1)] == "Ġ<<"
    apart = encode_example(EXAMPLE, real("gpt2"), config.model_copy(update={"separator": "eos"}))
    assert apart.question_ids == (*row.question_ids, eos)
    assert apart.answer_ids == (eos, *row.answer_ids)
    assert apart.distill_column == row.distill_column + 1
    assert answer_prefix_ids(real("gpt2"), config.model_copy(update={"separator": "eos"})) == [eos]
    assert answer_prefix_ids(real("gpt2"), config) == []
    assert answer_prefix_ids(real("gpt2"), settings("gpt2", format="icot")) == [eos]


def test_encode_example_codi_sentences() -> None:
    config = settings("gpt2", format="codi", chain_split="sentences")
    prose = replace(EXAMPLE, steps=("He has 2", "He gets 16", "That is 18"))
    assert real("gpt2").decode(encode_example(prose, real("gpt2"), config).chain_ids) == "He has 2. He gets 16.\n"
    assert encode_example(replace(prose, steps=("That is 18",)), real("gpt2"), config).chain_ids == ()


def test_encode_example_coconut_lines() -> None:
    row = encode_example(EXAMPLE, real("gpt2"), settings("gpt2", format="coconut"))
    assert real("gpt2").decode(row.question_ids) == EXAMPLE.question + "\n"
    assert real("gpt2").decode(row.chain_ids) == "".join(step + "\n" for step in EXAMPLE.steps)
    assert real("gpt2").decode(row.answer_ids) == "### -18"
    assert row.chain_step_index.count(0) + row.chain_step_index.count(1) == len(row.chain_ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [(), ("<<2+16=18>>",), EXAMPLE.steps])
def test_encode_example_icot_is_one_string(name: str, steps: tuple[str, ...]) -> None:
    row = encode_example(replace(EXAMPLE, steps=steps), real(name), settings(name, format="icot"))
    eos = find_eos_token_id(real(name), settings(name))
    text = real(name).backend.id_to_token(eos)
    whole = f" {EXAMPLE.question} {text} {' '.join(steps)} {text} #### -18 {text}"
    assert [*row.question_ids, *row.chain_ids, *row.answer_ids] == real(name).encode(whole)
    assert row.question_ids[-1] == row.answer_ids[0] == row.answer_ids[-1] == eos
    assert eos not in row.chain_ids
    assert set(row.chain_step_index) <= set(range(max(1, len(steps))))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMATS)
def test_encode_example_drop_last(name: str, form: str) -> None:
    for steps, left in [((), 0), (("<<2+16=18>>",), 0), (EXAMPLE.steps, 1), ((*EXAMPLE.steps, "<<1+1=2>>"), 2)]:
        example = replace(EXAMPLE, steps=steps)
        every = encode_example(example, real(name), settings(name, format=form, chain_steps="all"))
        if steps:
            assert every.chain_step_index[-1] == len(steps) - 1
        if form in ("pccot", "codi"):
            row = encode_example(example, real(name), settings(name, format=form))
            assert len(set(row.chain_step_index)) == left
            assert row.chain_ids == every.chain_ids[: len(row.chain_ids)]
            assert (row.question_ids, row.answer_ids, row.distill_column) == (
                every.question_ids,
                every.answer_ids,
                every.distill_column,
            )


def test_encode_text_removes_prefix_space() -> None:
    stories = real("stories260k")
    encoder = ReasoningEncoder(stories, settings("stories260k"))
    assert [stories.backend.id_to_token(i) for i in encoder.encode_text("18").ids] == ["1", "8"]
    assert encoder.prefix_space_id is not None
    assert stories.backend.id_to_token(encoder.prefix_space_id) == "▁"
    assert words("stories260k", encode_example(EXAMPLE, stories, settings("stories260k")).question_ids)[:2] == [
        "<s>",
        "▁",
    ]
    assert all(ReasoningEncoder(real(name), settings(name)).prefix_space_id is None for name in NAMES[:3])


def built(words: list[str], post: str, pair: str = "$A $B") -> Tokenizer:
    """Build a tokenizer of whole words that adds special tokens around a text."""
    special = {"bos_token": "[B]", "eos_token": "[E]", "unk_token": "[U]"}
    inner = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*special.values(), *words])}, unk_token="[U]")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(special.values()))
    inner.post_processor = processors.TemplateProcessing(
        single=post, pair=pair, special_tokens=[("[B]", 0), ("[E]", 1)]
    )
    return Tokenizer(inner, special, None, "")


def test_encode_question_removes_final_special_tokens() -> None:
    tokenizer = built(["how", "many", "The", "answer", "is:", "5"], "[B] $A [E] [E]")
    row = encode_example(ReasoningExample("a", "how many", (), "5"), tokenizer, DataConfig(path="rows.jsonl"))
    assert (row.question_ids, row.num_prefix_tokens) == ((0, 3, 4), 1)
    assert row.answer_ids == (5, 6, 7, 8, 1)


def test_find_prefix_space_ignores_unknown_tokens() -> None:
    """If both probes are unknown, both begin with the same id, which is not a prefix space."""
    tokenizer = built(["The", "answer", "is:", "5"], "[B] $A")
    assert ReasoningEncoder(tokenizer, DataConfig(path="rows.jsonl")).prefix_space_id is None
    row = encode_example(ReasoningExample("a", "what is 5", (), "5"), tokenizer, DataConfig(path="rows.jsonl"))
    assert row.num_unknown == 2


def test_encode_question_refuses_empty_encoding() -> None:
    with pytest.raises(InputError, match=r"row row-1: question ' ': .* encodes it as nothing"):
        encode_example(
            replace(EXAMPLE, question=" "), built(["The", "answer", "is:"], "[B] $A"), DataConfig(path="rows.jsonl")
        )


def test_find_eos_token_id_lists_candidates() -> None:
    with pytest.raises(InputError, match=r"name no eos_token; set data.eos_token to .*<\|endoftext\|>"):
        find_eos_token_id(real("gsm-bpe-2048"), DataConfig(path="rows.jsonl"))
    with pytest.raises(InputError, match=r"data.eos_token '<none>' is not in the vocabulary"):
        find_eos_token_id(real("gsm-bpe-2048"), DataConfig(path="rows.jsonl", eos_token="<none>"))


def test_encode_example_answer_without_number() -> None:
    example = replace(EXAMPLE, answer="True")
    with pytest.raises(InputError, match=r"row row-1: answer 'True' has no number; .*data.answer_type"):
        encode_example(example, real("gpt2"), settings("gpt2"))
    row = encode_example(example, real("gpt2"), settings("gpt2", answer_type="text"))
    assert words("gpt2", row.answer_ids)[row.distill_column : row.number_span[1]] == [":", "True"]


def test_encode_example_of_every_shipped_row(shared: Path) -> None:
    rows = [json.loads(line) for line in (shared / "data/gsm8k-aug/train-subset.jsonl").open()][:400]
    for name in NAMES:
        encoder = ReasoningEncoder(real(name), settings(name))
        encoded: list[EncodedExample] = [
            encoder.encode_example(ReasoningExample(r["id"], r["question"], tuple(r["steps"]), r["answer"]))
            for r in rows
        ]
        assert all(row.distill_column == len(encoder.answer_prompt_ids) - 1 for row in encoded)
        assert all(0 < row.number_span[0] < row.number_span[1] < len(row.answer_ids) for row in encoded)
