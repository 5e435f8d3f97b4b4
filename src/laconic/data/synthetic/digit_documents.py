"""The digits task over a document: a question names digits that stand somewhere in a document, among fillers.

A document of N tokens has a fact for each digit of the question. A fact is one token, a name and its digit, as in fact
recall. Each of k+1 equal stretches has one fact at a random place, in random order; all other tokens are fillers:
`of to c7 at by a3 …`, with the question `a + c =`.
The problems, and their division into test, validation and training, are those of `data.synthetic.digits`.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from laconic.config.data import SplitName
from laconic.data.synthetic.base import IntArray
from laconic.data.synthetic.digits import (
    TOKEN_IDS,
    VOCABULARY,
    WORD_PATTERN,
    DigitChains,
    DigitProblems,
    DigitsDataset,
    build_digits_tokenizer,
)
from laconic.data.tokenizer import Tokenizer
from laconic.rng import uniform

NAMES = tuple("abcdefghijklmnop")
FILLERS = ("and", "of", "to", "in", "on", "at", "by", "as")
FACTS = tuple(f"{name}{digit}" for name in NAMES for digit in range(10))
DOCUMENT_VOCABULARY = (*VOCABULARY, *NAMES, *FILLERS, *FACTS)
FIRST_NAME, FIRST_FILLER, FIRST_FACT = (DOCUMENT_VOCABULARY.index(words[0]) for words in (NAMES, FILLERS, FACTS))
NAME_KEY, ORDER_KEY, PLACE_KEY, FILLER_KEY = range(2, 6)  # purposes of random numbers; `digits` has the earlier ones


def build_digit_documents_tokenizer() -> Tokenizer:
    """Build the tokenizer: that of the digits task with names a to p, eight fillers, and facts a0 to p9."""
    return build_digits_tokenizer(DOCUMENT_VOCABULARY, f"[a-p][0-9]|{WORD_PATTERN}")


class DigitDocumentsDataset(DigitsDataset):
    """Questions about documents as batches of ids (batches.TrainingData); arguments are those of `DigitsDataset`."""

    vocabulary = DOCUMENT_VOCABULARY

    def draw(self, key: int, k: int, rows: IntArray, count: int) -> NDArray[np.float64]:
        """Draw numbers [n, count] that depend on the purpose `key`, seed, split, k and row only."""
        return uniform(self.seed, key, get_args(SplitName).index(self.part), k, rows[:, None], np.arange(count))

    def get_problems(self, k: int, rows: IntArray) -> DigitProblems:
        """Return some problems with k operations, and a name for each digit."""
        order = self.draw(NAME_KEY, k, rows, len(NAMES)).argsort(1)
        return super().get_problems(k, rows)._replace(names=FIRST_NAME + order[:, : k + 1])

    def question_ids(self, problems: DigitProblems, terse: bool) -> IntArray:
        """Return bos, the names and operators, =, and : if the chain is to be terse."""
        assert problems.names is not None
        ids = super().question_ids(problems, terse)
        ids[:, 1 : 2 * problems.operators.shape[1] + 2 : 2] = problems.names
        return ids

    def format_step(self, words: Sequence[str]) -> str:
        return f"{words[0]} {''.join(words[1:])}" if words[0] in NAMES else super().format_step(words)

    def chain_ids(self, problems: DigitProblems, num_steps: int, terse: bool) -> DigitChains:
        """Return the steps as ids; with style "lookups" the digit of each name comes first."""
        assert problems.names is not None
        chains = super().chain_ids(problems, num_steps, terse)
        if terse or self.config.chain_style != "lookups":
            return chains
        ends = [TOKEN_IDS[end] for end in self.config.step_end]
        columns = [problems.names, problems.digits, *ends]
        lookups = np.stack([np.broadcast_to(column, problems.digits.shape) for column in columns], axis=2)
        n, num_lookups, width = lookups.shape
        ids = np.concatenate([lookups.reshape(n, num_lookups * width), chains.ids], axis=1)
        index = np.concatenate([np.repeat(np.arange(num_lookups), width), num_lookups + chains.step_index])
        is_digit = np.tile([i == 1 for i in range(width)], num_lookups)
        return DigitChains(ids, index, np.concatenate([is_digit, chains.is_result]))

    def documents(self, problems: DigitProblems, rows: IntArray) -> IntArray:
        """Return documents with one fact in each of k+1 equal stretches, at a random place, and fillers, [n, N]."""
        assert problems.names is not None
        k = problems.operators.shape[1]
        N = self.config.document_tokens or 0
        width = N // (k + 1)
        order = self.draw(ORDER_KEY, k, rows, k + 1).argsort(1)
        offset = (self.draw(PLACE_KEY, k, rows, k + 1) * width).astype(np.int64)
        places = order * width + offset
        fillers = self.draw(FILLER_KEY, k, rows, N) * len(FILLERS)
        ids = FIRST_FILLER + fillers.astype(np.int64)
        ids[np.arange(len(ids))[:, None], places] = FIRST_FACT + 10 * (problems.names - FIRST_NAME) + problems.digits
        return ids
