"""Strings of formal languages; what each symbol predicts is the word for the set of symbols that may follow it.

The six are those of Bhattamishra et al. (arXiv:2009.11264) that Irie et al. (arXiv:2310.16076) compare recurrent models
on; (aa)* and (abab)* hold the empty string, a^n b^n and a^n b^n c^n begin with n = 1. Made when asked for.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.config.synthetic import LENGTH_PERIODS, FormalLanguage, FormalLanguagesConfig
from laconic.data.synthetic.base import SPECIAL_TOKENS, SyntheticDataset, build_word_tokenizer
from laconic.data.tokenizer import Tokenizer
from laconic.rng import uniform

END_MARK = "."  # in the name of a set: the string may end here
SYMBOL_SETS = ("ab", "ab.", "a", "b", "c", "a.", ".", "([.", "([)", "([]", "([)]")
VOCABULARY = [*SPECIAL_TOKENS.values(), *"abc()[]", *(f"{{{each}}}" for each in SYMBOL_SETS)]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
CLOSING_BRACKET = {"(": ")", "[": "]"}
LENGTH_KEY, SYMBOL_KEY = range(2)  # what is drawn


def build_languages_tokenizer() -> Tokenizer:
    """21 words: seven symbols, {ab.} and the like for sets, and the special ones; words are parted by spaces."""
    return build_word_tokenizer(VOCABULARY)


def generate_string(language: FormalLanguage, draws: Sequence[float]) -> str:
    """One of as many symbols as draws in [0, 1): parity's are coins but for the last, brackets as `brackets` has it."""
    n = len(draws)
    if language == "parity":
        coins = "".join("ab"[int(2 * draw)] for draw in draws[:-1])
        return coins + "ab"[coins.count("b") % 2]
    if language == "shuffle2":
        return generate_brackets(draws)
    word = {"aa": "a", "abab": "ab"}.get(language)
    if word is not None:
        return word * (n // len(word))
    return "".join(symbol * (n // LENGTH_PERIODS[language]) for symbol in "abc"[: LENGTH_PERIODS[language]])


def generate_brackets(draws: Sequence[float]) -> str:
    """Two kinds of brackets, each balanced by itself: of those that may follow and leave room to close, any alike."""
    said, depth = "", {"(": 0, "[": 0}
    for t, draw in enumerate(draws):
        room = len(draws) - t > sum(depth.values())
        able = [symbol for symbol in depth if room] + [CLOSING_BRACKET[symbol] for symbol in depth if depth[symbol]]
        said += able[int(draw * len(able))]
        depth = update_depths(depth, said[-1])
    return said


def update_depths(depth: Mapping[str, int], symbol: str) -> dict[str, int]:
    """How many brackets of each kind are open once another symbol has come."""
    return {open: depth[open] + (symbol == open) - (symbol == CLOSING_BRACKET[open]) for open in CLOSING_BRACKET}


def next_symbol_sets(language: FormalLanguage, said: str) -> list[str]:
    """The set of what may follow, one of SETS, before the first symbol of a string of the language and after each."""
    n, k = len(said), len(said) // LENGTH_PERIODS[language]
    if language == "parity":
        return ["ab" if said[:t].count("b") % 2 else "ab." for t in range(n + 1)]
    if language == "aa":
        return ["a" if t % 2 else "a." for t in range(n + 1)]
    if language == "abab":
        return [("a.", "b", "a", "b")[t % 4] for t in range(n + 1)]
    if language == "anbn":
        return ["a", *["ab"] * k, *["b"] * (k - 1), END_MARK]
    if language == "anbncn":
        return ["a", *["ab"] * k, *["b"] * (k - 1), *["c"] * k, END_MARK]
    depth, found = {"(": 0, "[": 0}, ["([."]
    for symbol in said:
        depth = update_depths(depth, symbol)
        found.append("([" + ("".join(CLOSING_BRACKET[open] for open, n in depth.items() if n) or END_MARK))
    return found


class FormalLanguageDataset(SyntheticDataset[FormalLanguagesConfig]):
    """The first `count` strings of a part (contract.Source), a row <bos> and a string, with a label at each of both.

    Parts are drawn apart; where a language has one string of a length, as (aa)* has, they hold the same ones.
    """

    vocabulary = VOCABULARY

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return self.config.possible_lengths[-1] + 1

    def generate_strings(self, rows: Sequence[int]) -> list[str]:
        """Those of some places, without what begins a row."""
        index, lengths = np.asarray(rows, dtype=np.int64), self.config.possible_lengths
        picked = (uniform(self.seed, LENGTH_KEY, index) * len(lengths)).astype(np.int64)
        draws = uniform(self.seed, SYMBOL_KEY, index[:, None], np.arange(lengths[-1])).tolist()
        return [generate_string(self.config.language, draws[b][: lengths[i]]) for b, i in enumerate(picked.tolist())]

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The strings of some places on a grid as wide as the longest of them."""
        found = self.generate_strings(rows)
        text = np.full((len(found), max(map(len, found)) + 1), TOKEN_IDS["<bos>"], dtype=np.int64)
        labels = np.full(text.shape, IGNORE_INDEX, dtype=np.int64)
        for b, said in enumerate(found):
            text[b, 1 : len(said) + 1] = [TOKEN_IDS[symbol] for symbol in said]
            labels[b, : len(said) + 1] = [
                TOKEN_IDS[f"{{{each}}}"] for each in next_symbol_sets(self.config.language, said)
            ]
        live = torch.from_numpy(labels != IGNORE_INDEX)
        return DocumentBatch(
            torch.from_numpy(text), live, live.clone(), (text.shape[1],), torch.as_tensor(rows, dtype=torch.long),
            tuple(f"{self.config.language}-{self.part}-{i:06d}" for i in rows), epoch, step,
            labels=torch.from_numpy(labels),
        )  # fmt: skip
