"""Digits task against its rule in loops; disjoint splits; batches equal the encoded text."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laconic.batches import ReasoningExample
from laconic.config.data import DataConfig, DigitsConfig, SplitName
from laconic.data.reasoning.dataset import answer_prefix_ids, collate
from laconic.data.reasoning.read_examples import most_common_answer
from laconic.data.synthetic.digits import (
    VOCABULARY,
    DigitsDataset,
    build_digits_tokenizer,
    generate_problems,
)
from laconic.data.tokenizer import load_tokenizer
from laconic.errors import InputError
from laconic.interfaces import TrainingData
from tests.encoding import encode_example

PARTS: tuple[SplitName, ...] = ("test", "valid", "train")
STYLES: list[dict[str, Any]] = [
    {"chain_style": "results"},
    {"chain_style": "equations"},
    {"chain_style": "equations", "step_end": ""},
    {"chain_style": "brackets"},
    {"chain_style": "bracket_tokens"},
]


def generate(seed: int, n: int, config: DigitsConfig, part: SplitName = "train") -> list[ReasoningExample]:
    config = config.model_copy(update={f"{part}_rows": n})
    return DigitsDataset(seed, config, part).generate_examples(n)


def solve(question: str) -> list[int]:
    """Return the result of every step of a question like `3 + 4 * 2 =`, worked out from left to right."""
    words = question.removesuffix(" =").split()
    running, chain = int(words[0]), []
    for sign, digit in zip(words[1::2], words[2::2], strict=True):
        running = {"+": running + int(digit), "-": running - int(digit), "*": running * int(digit)}[sign] % 10
        chain.append(running)
    return chain


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_generate_examples_are_correct(k: int) -> None:
    for example in generate(3, 20, DigitsConfig(num_operations=k)):
        results = solve(example.question)
        assert example.steps == tuple(map(str, results))
        assert example.answer == str(results[-1])


def test_generate_examples_in_every_style() -> None:
    results, steps, bare, brackets, marks = (
        generate(0, 5, DigitsConfig(num_operations=3, **style)) for style in STYLES
    )
    for r, s, b, w, m in zip(results, steps, bare, brackets, marks, strict=True):
        before = [r.question[0], *r.steps]
        words = r.question.split()
        expected_steps = [f"{before[j]}{words[2 * j + 1]}{words[2 * j + 2]}={r.steps[j]}" for j in range(3)]
        assert s.steps == tuple(f"{step};" for step in expected_steps)
        assert b.steps == tuple(expected_steps)
        assert w.steps == tuple(f"<<{step}>>" for step in expected_steps)
        assert m.steps == tuple(f"< < {step} > >" for step in r.steps)
        assert r.question == s.question == b.question == w.question


def test_generate_examples_is_a_function_of_the_seed() -> None:
    first = generate(7, 30, DigitsConfig())
    assert first == generate(7, 30, DigitsConfig())
    assert first[:10] == generate(7, 10, DigitsConfig())
    assert {e.question for e in first}.isdisjoint(e.question for e in generate(8, 30, DigitsConfig()))
    # Golden: the order of problems is part of what a run is bound to.
    assert [e.question for e in generate(0, 2, DigitsConfig())] == [
        "8 * 1 * 5 - 9 * 5 =",
        "3 + 7 - 6 * 9 + 0 =",
    ]
    assert DigitsDataset(0, DigitsConfig()).fingerprint != DigitsDataset(1, DigitsConfig()).fingerprint
    assert DigitsDataset(0, DigitsConfig()).fingerprint == DigitsDataset(0, DigitsConfig()).fingerprint


@pytest.mark.medium
def test_digits_dataset_terse_fraction() -> None:
    """A whole step is terse or not, so that no row is padded; terse questions end with a colon."""
    source = DigitsDataset(0, DigitsConfig(num_operations=3, chain_style="bracket_tokens", results_only_fraction=0.4))
    lengths = [source.batch(range(4), 0, step).chain_ids.shape[1] for step in range(200)]
    assert set(lengths) == {3, 15}
    assert 0.3 < lengths.count(3) / 200 < 0.5
    terse, whole = (source.batch(range(4), 0, lengths.index(n)) for n in (3, 15))
    assert (terse.question_ids[:, -1] == VOCABULARY.index(":")).all()
    assert torch.equal(terse.question_ids[:, :-1], whole.question_ids)
    assert torch.equal(terse.chain_ids, whole.chain_ids[:, 2::5])
    assert DigitsDataset(0, source.config, "valid").batch(range(4), 0, lengths.index(3)).chain_ids.shape[1] == 15


def test_digits_dataset_all_terse() -> None:
    task = DigitsConfig(num_operations=3, chain_style="bracket_tokens", results_only_fraction=1.0)
    config = DataConfig(source="digits", format="digits", chain_steps="all")
    example = generate(0, 1, task, "valid")[0]
    assert example.question.endswith("= :")
    assert example.steps == generate(0, 1, DigitsConfig(num_operations=3), "valid")[0].steps
    batch = DigitsDataset(0, task, "valid").batch([0], 0, 0)
    read = encode_example(example, build_digits_tokenizer(), config)
    assert (batch.question_ids[0].tolist(), batch.chain_ids[0].tolist()) == (
        list(read.question_ids),
        list(read.chain_ids),
    )


def test_generate_problems_splits_are_disjoint() -> None:
    sizes = {"test": 900, "valid": 900, "train": 7200}  # of 9,000 problems of two operations
    seen = [
        {e.question for e in generate(seed, sizes[part], DigitsConfig(num_operations=2), part)}
        for seed, part in enumerate(PARTS)
    ]
    assert [len(s) for s in seen] == list(sizes.values())
    assert len(set.union(*seen)) == 9000


def test_generate_problems_refuses_rows_beyond_the_split() -> None:
    with pytest.raises(InputError, match=r"test row 900: 2 operations give only 900 problems"):
        generate(0, 901, DigitsConfig(num_operations=2), "test")
    with pytest.raises(InputError, match=r"2 operations give only 7,200 problems"):
        DigitsDataset(0, DigitsConfig(num_operations=2))


def test_generate_problems_is_uniform() -> None:
    problems = generate_problems(0, 4, np.arange(20_000))
    for column in problems.digits.T:
        assert np.bincount(column, minlength=10) / 20_000 == pytest.approx(np.full(10, 0.1), abs=0.01)
    for column in problems.operators.T:
        assert np.bincount(column, minlength=3) / 20_000 == pytest.approx(np.full(3, 1 / 3), abs=0.015)


def test_most_common_answer_of_digits() -> None:
    answer, share = most_common_answer(generate(0, 4000, DigitsConfig()))
    assert answer == "0"
    assert 0.15 < share < 0.21  # about 18 %, because of *


@pytest.mark.parametrize("style", [*STYLES, {"num_operations": 6, "min_operations": 2, "train_rows": 36_000}])
@pytest.mark.parametrize("chain", ["all", "drop_last"])
def test_digits_dataset_batch_equals_encoded_text(style: dict[str, Any], chain: str) -> None:
    task = DigitsConfig(**{"num_operations": 3} | style)
    config = DataConfig.model_validate({"source": "digits", "format": "digits", "digits": task, "chain_steps": chain})
    tokenizer = build_digits_tokenizer()
    source = DigitsDataset(5, task, "valid", drop_last_step=chain == "drop_last")
    assert isinstance(source, TrainingData)
    assert len(source) == task.valid_rows
    text = source.generate_examples(1000)
    for rows in ([3, 0, 999], [7, 0, 4, 3, 998], [5, 10]):
        problems = source.batch(rows, 2, 40)
        expected = collate([encode_example(text[i], tokenizer, config) for i in rows], rows, 2, 40)
        for field in fields(problems):
            ours, theirs = getattr(problems, field.name), getattr(expected, field.name)
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, field.name
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None), field.name


def test_digits_dataset_of_several_numbers_of_operations() -> None:
    task = DigitsConfig(num_operations=6, min_operations=2, train_rows=36_000)
    text = generate(5, 1000, task, "valid")
    assert [len(example.steps) for example in text[:7]] == [2, 3, 4, 5, 6, 2, 3]
    assert all(example.steps == tuple(map(str, solve(example.question))) for example in text[:50])
    with pytest.raises(InputError, match="2 operations give only 7,200 problems"):
        DigitsDataset(5, task.model_copy(update={"train_rows": 36_001}))


def test_digits_dataset_drop_last_of_one_step() -> None:
    batch = DigitsDataset(0, DigitsConfig(num_operations=1, train_rows=200), drop_last_step=True).batch([0, 1], 0, 0)
    assert batch.chain_ids.shape == batch.chain_step_index.shape == (2, 0)
    assert batch.question_target.tolist() == [VOCABULARY.index("ans")] * 2


def test_build_digits_tokenizer_save(tmp_path: Path) -> None:
    tokenizer = build_digits_tokenizer()
    assert tokenizer.vocab_size == len(VOCABULARY) == 24
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint == build_digits_tokenizer().fingerprint
    assert (again.bos_token_id, again.eos_token_id, again.special_tokens) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.special_tokens,
    )
    for text in ("3 + 4 * 2 - 5 =", "3+5=8;8*2=6;", "<<3+4=7>>", "ans", "7"):
        assert again.encode(text) == tokenizer.encode(text)
    assert [VOCABULARY[i] for i in tokenizer.encode("<<3+4=7>>")] == ["<bos>", "<<", "3", "+", "4", "=", "7", ">>"]
    assert tokenizer.decode([tokenizer.encode("7")[-1], VOCABULARY.index("<eos>")]) == "7"


def test_build_digits_tokenizer_takes_ids_from_its_vocabulary() -> None:
    words = ["<unk>", "<eos>", "<bos>", "7"]
    assert build_digits_tokenizer(words).encode("7") == [2, 3]


def test_digits_distill_column_and_prompt() -> None:
    config = DataConfig(source="digits", format="digits", chain_steps="all")
    row = encode_example(generate(0, 1, DigitsConfig())[0], build_digits_tokenizer(), config)
    assert VOCABULARY[row.answer_ids[row.distill_column]] == "ans"
    assert answer_prefix_ids(build_digits_tokenizer(), config) == [VOCABULARY.index("ans")]


def test_digits_tokenizer_refuses_unknown_answer() -> None:
    config = DataConfig(source="digits", format="digits", chain_steps="all")
    example = generate(0, 1, DigitsConfig())[0]
    with pytest.raises(InputError, match="the tokenizer cannot encode a part of the answer"):
        encode_example(replace(example, answer="x7"), build_digits_tokenizer(), config)
    with pytest.raises(InputError, match=r"the tokenizer cannot encode 'The answer is:'"):
        encode_example(example, build_digits_tokenizer(), DataConfig(path="rows.jsonl"))
