"""Formal languages against an oracle that only knows which strings belong to them."""

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch

from laconic.batches import IGNORE_INDEX
from laconic.config.synthetic import LENGTH_PERIODS, FormalLanguage, FormalLanguagesConfig
from laconic.data.synthetic.formal_languages import (
    SYMBOL_SETS,
    TOKEN_IDS,
    VOCABULARY,
    FormalLanguageDataset,
    next_symbol_sets,
)
from laconic.data.tokenizer import load_tokenizer
from laconic.interfaces import TrainingData
from tests.oracles import formal_languages as oracle

LANGUAGES: tuple[FormalLanguage, ...] = get_args(FormalLanguage)
LONGEST = {"anbncn": 9, "shuffle2": 8}  # longest strings that the oracle tries; there are 4^8 of brackets


@pytest.mark.parametrize("language", LANGUAGES)
def test_next_symbol_sets_matches_enumeration_oracle(language: FormalLanguage) -> None:
    longest = LONGEST.get(language, 10)
    members = [s for n in range(longest + 1) for s in oracle.strings(language, n)]
    # A prefix of a short string can be completed within `longest` symbols, so the oracle knows what may follow it.
    short_members = [s for s in members if len(s) <= longest // 2 - 1]
    assert len(short_members) > 0
    for member in short_members:
        symbol_sets = [frozenset(symbols) for symbols in next_symbol_sets(language, member)]
        assert symbol_sets == [oracle.follows(members, member[:t]) for t in range(len(member) + 1)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_next_symbol_sets_of_longer_strings(language: FormalLanguage) -> None:
    for string in FormalLanguageDataset(
        0, FormalLanguagesConfig(language=language, min_length=51, max_length=100)
    ).generate_strings(range(30)):
        symbol_sets = next_symbol_sets(language, string)
        assert len(symbol_sets) == len(string) + 1
        assert all(symbol in symbols for symbol, symbols in zip((*string, "."), symbol_sets, strict=True))
        ends = [t for t in range(len(string) + 1) if oracle.belongs(language, string[:t])]
        assert [t for t, symbols in enumerate(symbol_sets) if "." in symbols] == ends


@pytest.mark.parametrize("language", LANGUAGES)
def test_generate_strings_belong_and_lengths_are_uniform(language: FormalLanguage) -> None:
    task = FormalLanguagesConfig(language=language, min_length=2, max_length=16)
    strings = FormalLanguageDataset(1, task).generate_strings(range(600))
    assert all(oracle.belongs(language, string) for string in strings)
    counts = Counter(map(len, strings))
    assert set(counts) == {n for n in range(2, 17) if n % LENGTH_PERIODS[language] == 0}
    fair = 600 / len(counts)
    assert all(abs(n - fair) < 5 * fair**0.5 for n in counts.values())


@pytest.mark.parametrize("language", ["parity", "shuffle2"])
def test_generate_string_reaches_every_string(language: FormalLanguage) -> None:
    strings = set(
        FormalLanguageDataset(2, FormalLanguagesConfig(language=language, min_length=4, max_length=4)).generate_strings(
            range(2000)
        )
    )
    assert strings == set(oracle.strings(language, 4))


def test_formal_language_batch() -> None:
    source = FormalLanguageDataset(3, FormalLanguagesConfig(min_length=2, max_length=12), "valid")
    assert isinstance(source, TrainingData)
    batch, strings = source.batch([4, 9, 1], 2, 7), source.generate_strings([4, 9, 1])
    assert (batch.epoch, batch.step, batch.document_ids[0]) == (2, 7, "parity-valid-000004")
    for b, string in enumerate(strings):
        n = len(string) + 1
        assert [VOCABULARY[i] for i in batch.input_ids[b, :n].tolist()] == ["<bos>", *string]
        assert batch.attention_mask[b].tolist() == [t < n for t in range(batch.input_ids.shape[1])]
        symbol_sets = [VOCABULARY[i] for i in batch.targets[b, :n].tolist()]
        assert symbol_sets == [f"{{{symbols}}}" for symbols in next_symbol_sets("parity", string)]
        assert bool((batch.targets[b, n:] == IGNORE_INDEX).all())
    (piece,) = batch.sequential_parts
    assert piece.targets.equal(batch.targets)
    assert source.max_length == 13


def test_formal_language_splits_and_seeds_differ() -> None:
    task = FormalLanguagesConfig(min_length=40, max_length=50)
    sources = [FormalLanguageDataset(seed, task, part) for seed in (0, 1) for part in ("train", "valid", "test")]
    assert [len(source) for source in sources[:3]] == [100_000, 500, 1000]
    assert len({string for source in sources for string in source.generate_strings(range(50))}) == 300
    assert len({source.fingerprint for source in sources}) == 6
    assert len(FormalLanguageDataset(0, task, "test", 7)) == 7


def test_build_languages_tokenizer(tmp_path: Path) -> None:
    tokenizer = FormalLanguageDataset.build_tokenizer()
    assert tokenizer.vocab_size == len(VOCABULARY) == 21
    assert tokenizer.encode("( [ {([)} a {ab.}") == [TOKEN_IDS[w] for w in ("(", "[", "{([)}", "a", "{ab.}")]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    used: set[str] = set()
    for language in LANGUAGES:
        config = FormalLanguagesConfig(language=language, min_length=2, max_length=24)
        for string in FormalLanguageDataset(0, config).generate_strings(range(200)):
            used |= set(next_symbol_sets(language, string))
    assert used == set(SYMBOL_SETS)


def test_formal_languages_config_refuses_impossible_lengths() -> None:
    with pytest.raises(ValueError, match="max_length: no string of abab has 5 to 7 symbols"):
        FormalLanguagesConfig(language="abab", min_length=5, max_length=7)
    assert FormalLanguagesConfig(language="anbncn", min_length=2, max_length=10).possible_lengths == (3, 6, 9)


def test_formal_language_targets_are_labels() -> None:
    batch = FormalLanguageDataset(0, FormalLanguagesConfig(language="aa", min_length=2, max_length=6)).batch(
        range(8), 0, 0
    )
    assert not bool(torch.isin(batch.targets, batch.input_ids).any())
