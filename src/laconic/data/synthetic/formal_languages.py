"""Formal languages: each symbol predicts the set of symbols that may follow.

The six languages are those of Bhattamishra et al. (arXiv:2009.11264) on which Irie et al. (arXiv:2310.16076) compare
recurrent models. (aa)* and (abab)* contain the empty string; a^n b^n and a^n b^n c^n begin with n = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.config.synthetic import LENGTH_PERIODS, FormalLanguage, FormalLanguagesConfig
from laconic.data.synthetic.base import SPECIAL_TOKENS, SyntheticDataset
from laconic.rng import uniform

END_MARK = "."  # in the name of a set: the string may end here
SYMBOL_SETS = ("ab", "ab.", "a", "b", "c", "a.", ".", "([.", "([)", "([]", "([)]")
VOCABULARY = [*SPECIAL_TOKENS.values(), *"abc()[]", *(f"{{{symbols}}}" for symbols in SYMBOL_SETS)]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
CLOSING_BRACKET = {"(": ")", "[": "]"}
LENGTH_KEY, SYMBOL_KEY = range(2)  # purposes of random numbers


def generate_string(language: FormalLanguage, draws: Sequence[float]) -> str:
    """Return a string with as many symbols as there are random numbers in [0, 1)."""
    n = len(draws)
    if language == "parity":  # random symbols, the last of which makes the number of b even
        symbols = "".join("ab"[int(2 * draw)] for draw in draws[:-1])
        return symbols + "ab"[symbols.count("b") % 2]
    if language == "shuffle2":
        return generate_brackets(draws)
    if language == "aa":
        return "a" * n
    if language == "abab":
        return "ab" * (n // 2)
    num_symbols = LENGTH_PERIODS[language]  # of anbn and anbncn
    return "".join(symbol * (n // num_symbols) for symbol in "abc"[:num_symbols])


def generate_brackets(draws: Sequence[float]) -> str:
    """Return two kinds of brackets, each balanced on its own; every symbol is uniform among the possible ones."""
    string = ""
    depth = {"(": 0, "[": 0}
    for t, draw in enumerate(draws):
        can_open = len(draws) - t > sum(depth.values())
        candidates = [symbol for symbol in depth if can_open]
        candidates += [CLOSING_BRACKET[symbol] for symbol in depth if depth[symbol]]
        string += candidates[int(draw * len(candidates))]
        depth = update_depths(depth, string[-1])
    return string


def update_depths(depth: Mapping[str, int], symbol: str) -> dict[str, int]:
    return {
        bracket: depth[bracket] + (symbol == bracket) - (symbol == CLOSING_BRACKET[bracket])
        for bracket in CLOSING_BRACKET
    }


def next_symbol_sets(language: FormalLanguage, string: str) -> list[str]:
    """Return the set of symbols that may follow, one of `SYMBOL_SETS`, before the first symbol and after each."""
    n = len(string)
    k = len(string) // LENGTH_PERIODS[language]
    if language == "parity":
        return ["ab" if string[:t].count("b") % 2 else "ab." for t in range(n + 1)]
    if language == "aa":
        return ["a" if t % 2 else "a." for t in range(n + 1)]
    if language == "abab":
        cycle = ("a.", "b", "a", "b")
        return [cycle[t % 4] for t in range(n + 1)]
    if language == "anbn":
        return ["a", *["ab"] * k, *["b"] * (k - 1), END_MARK]
    if language == "anbncn":
        return ["a", *["ab"] * k, *["b"] * (k - 1), *["c"] * k, END_MARK]
    depth = {"(": 0, "[": 0}
    sets = ["([."]
    for symbol in string:
        depth = update_depths(depth, symbol)
        closing = "".join(CLOSING_BRACKET[bracket] for bracket, count in depth.items() if count)
        sets.append("([" + (closing or END_MARK))
    return sets


class FormalLanguageDataset(SyntheticDataset):
    """Rows of <bos> and a string, with a label at each token (batches.TrainingData).

    The splits have different random numbers, but a language with only one string of each length, such as (aa)*, has
    the same strings in all of them.
    """

    vocabulary = VOCABULARY
    config: FormalLanguagesConfig

    def generate_strings(self, rows: Sequence[int]) -> list[str]:
        index = np.asarray(rows, dtype=np.int64)
        lengths = self.config.possible_lengths
        length_index = (uniform(self.seed, LENGTH_KEY, index) * len(lengths)).astype(np.int64).tolist()
        draws = uniform(self.seed, SYMBOL_KEY, index[:, None], np.arange(lengths[-1])).tolist()
        return [generate_string(self.config.language, draws[b][: lengths[i]]) for b, i in enumerate(length_index)]

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        strings = self.generate_strings(rows)
        input_ids = np.full((len(strings), max(map(len, strings)) + 1), TOKEN_IDS["<bos>"], dtype=np.int64)
        labels = np.full(input_ids.shape, IGNORE_INDEX, dtype=np.int64)
        for b, string in enumerate(strings):
            n = len(string) + 1
            input_ids[b, 1:n] = [TOKEN_IDS[symbol] for symbol in string]
            labels[b, :n] = [TOKEN_IDS[f"{{{symbols}}}"] for symbols in next_symbol_sets(self.config.language, string)]
        batch = self.build_batch(
            self.config.language, input_ids, labels != IGNORE_INDEX, np.asarray(rows, dtype=np.int64), epoch, step
        )
        return replace(batch, attention_mask=batch.loss_mask.clone(), labels=torch.from_numpy(labels))
