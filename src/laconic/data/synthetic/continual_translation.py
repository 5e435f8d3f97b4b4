"""Continual translation: several languages one after another, with pauses, then all words of all languages again.

A tiny version of continual translation of novel languages (Nested Learning, arXiv:2512.24695, section 9). A document
teaches the words of the first language, each followed by its translation, then fillers, then the second language, and
so on. In the end every word occurs once more in random order, and its translation is scored. Words of a language are
tokens of its own; translations are independent random tokens that all languages share. The vocabulary is that of MQAR.
"""

from collections.abc import Sequence

import numpy as np

from laconic.batches import DocumentBatch
from laconic.config.synthetic import WORDS_PER_LANGUAGE, ContinualTranslationConfig
from laconic.data.synthetic.base import SyntheticDataset
from laconic.data.synthetic.mqar import TOKEN_IDS, VOCABULARY

TRANSLATION_KEY, LESSON_KEY, PAUSE_KEY, RECALL_KEY = range(4)  # purposes of random numbers


class ContinualTranslationDataset(SyntheticDataset):
    """Documents of one segment, whose recalled translations are scored (batches.TrainingData)."""

    vocabulary = VOCABULARY
    config: ContinualTranslationConfig

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        config = self.config
        index = np.asarray(rows, dtype=np.int64)
        N, n, R = config.num_languages, config.num_words, config.num_repetitions
        words = (WORDS_PER_LANGUAGE * np.arange(N)[:, None] + np.arange(n)).ravel()
        values = TOKEN_IDS["v0"] + self.randint(config.num_values, index, TRANSLATION_KEY, N * n)
        lessons = self.uniform(index, LESSON_KEY, N * R * n).reshape(-1, N, R, n).argsort(-1)
        recall = self.uniform(index, RECALL_KEY, N * n).argsort(-1)
        ends = np.sort(self.randint(config.pause_tokens + 1, index, PAUSE_KEY, N - 1))
        pauses = np.diff(ends, prepend=0, append=config.pause_tokens)
        input_ids = np.full((len(index), config.row_tokens), TOKEN_IDS["."], dtype=np.int64)
        for b in range(len(index)):
            pairs = np.stack([TOKEN_IDS["k0"] + words, values[b]], -1)
            t = 0
            for language in range(N):
                lesson = pairs[n * language + lessons[b, language].ravel()].ravel()
                input_ids[b, t : t + len(lesson)] = lesson
                t += len(lesson) + pauses[b, language]
            input_ids[b, t:] = pairs[recall[b]].ravel()
        loss_mask = np.zeros(input_ids.shape, dtype=bool)
        loss_mask[:, -2 * N * n + 1 :: 2] = True
        return self.build_batch("continual-translation", input_ids, loss_mask, index, epoch, step)


def language_of_word(token_id: int) -> int:
    """Return which language, counted from 1, has the word with this token id."""
    return (token_id - TOKEN_IDS["k0"]) // WORDS_PER_LANGUAGE + 1
