"""The digits task over documents: answers follow from document and question, batches equal the encoded text."""

from dataclasses import fields, replace

import pytest
import torch
from pydantic import ValidationError

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, DigitsConfig
from laconic.data.reasoning.dataset import collate
from laconic.data.synthetic.digit_documents import (
    DOCUMENT_VOCABULARY,
    NAMES,
    DigitDocumentsDataset,
    build_digit_documents_tokenizer,
)
from laconic.data.synthetic.digits import VOCABULARY, DigitsDataset
from laconic.interfaces import TrainingData
from tests.encoding import encode_example

TASK = DigitsConfig(num_operations=3, chain_style="equations", document_tokens=60)
DATA = DataConfig(source="digits", format="digits", chain_steps="all", digits=TASK)


def read_answer(example: ReasoningExample) -> int:
    """Look the names of a question up in its document and compute, by loops."""
    assert example.document is not None
    facts = {word[0]: int(word[1]) for word in example.document.split() if word[1:].isdigit()}
    terms = example.question.removesuffix(" =").split()
    running = facts[terms[0]]
    for sign, name in zip(terms[1::2], terms[2::2], strict=True):
        running = {"+": running + facts[name], "-": running - facts[name], "*": running * facts[name]}[sign] % 10
    return running


def test_answers_follow_from_the_document() -> None:
    examples = DigitDocumentsDataset(3, TASK).generate_examples(200)
    assert all(str(read_answer(example)) == example.answer for example in examples)
    assert {len((example.document or "").split()) for example in examples} == {60}
    names = [tuple(word for word in example.question.split() if word in NAMES) for example in examples]
    assert all(len(set(row)) == 4 for row in names)
    assert len({name for row in names for name in row}) == len(NAMES), "every name occurs"
    first = [(example.document or "").split() for example in examples]
    slots = {[word[:1] for word in words].index(row[0]) for words, row in zip(first, names, strict=True)}
    assert len(slots) > 20, "facts are in random places"


@pytest.mark.parametrize("style", ["results", "equations", "bracket_tokens", "lookups"])
def test_batches_equal_the_encoded_text(style: str) -> None:
    task = TASK.model_copy(update={"chain_style": style})
    data, tokenizer = DATA.model_copy(update={"digits": task}), build_digit_documents_tokenizer()
    source = DigitDocumentsDataset(0, task, "valid")
    assert isinstance(source, TrainingData)
    examples = source.generate_examples(8)
    encoded = collate([encode_example(example, tokenizer, data) for example in examples], range(8))
    batch = source.batch(range(8), 0, 0)
    for field in fields(batch):
        ours, text = getattr(batch, field.name), getattr(encoded, field.name)
        assert torch.equal(ours, text) if isinstance(ours, torch.Tensor) else ours == text, field.name
    assert source.batch([5], 0, 0).document_ids is not None
    assert torch.equal(batch.select_rows([5]).document_ids, source.batch([5], 0, 0).document_ids)  # type: ignore[arg-type]


def test_problems_and_first_words_are_those_of_the_digits_task() -> None:
    plain = replace(DigitsDataset(0, TASK, "test").batch(range(50), 0, 0))
    batch = DigitDocumentsDataset(0, TASK, "test").batch(range(50), 0, 0)
    for part in ("chain_ids", "answer_ids", "answer_targets"):
        assert torch.equal(getattr(plain, part), getattr(batch, part))
    assert torch.equal(plain.question_ids[:, 2::2], batch.question_ids[:, 2::2]), "operators"
    assert DOCUMENT_VOCABULARY[: len(VOCABULARY)] == tuple(VOCABULARY)
    assert DigitDocumentsDataset(0, TASK).fingerprint != DigitsDataset(0, TASK).fingerprint


def test_document_tokens_must_hold_the_facts() -> None:
    with pytest.raises(ValidationError, match="document_tokens 3: too few for the 4 facts"):
        DigitsConfig(num_operations=3, document_tokens=3)
