"""Recipe tables of synthetic documents: MQAR, copying, continual translation, formal languages; imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from laconic.config.config_model import AscendingCounts, ConfigModel, PositiveInt

WORDS_PER_LANGUAGE = 8  # tokens reserved for the words of each language of continual translation
FormalLanguage = Literal["parity", "aa", "abab", "anbn", "anbncn", "shuffle2"]
# A language has strings only at lengths that are multiples of its period.
LENGTH_PERIODS: dict[FormalLanguage, int] = {"parity": 1, "aa": 2, "abab": 4, "anbn": 2, "anbncn": 3, "shuffle2": 2}


class SplitSizes(ConfigModel):
    """Numbers of rows of a synthetic task."""

    train_rows: PositiveInt = 100_000
    """training rows"""
    valid_rows: PositiveInt = 500
    """validation rows"""
    test_rows: PositiveInt = 1000
    """test rows"""


class MQARConfig(SplitSizes):
    """[data.mqar]: multi-query associative recall: key-value pairs, then each key again as a query."""

    num_pairs: AscendingCounts = (8,)
    """N, numbers of pairs per document, chosen with equal probability"""
    row_tokens: PositiveInt = 64
    """T, tokens of a document, padded with blanks"""
    num_keys: Annotated[int, Field(ge=1, le=64)] = 32
    """distinct key tokens"""
    num_values: Annotated[int, Field(ge=2, le=64)] = 32
    """distinct value tokens; chance accuracy is 1 / num_values"""
    tokens_per_key: Annotated[int, Field(ge=1, le=4)] = 1
    """w, tokens of each key and value; more than 1 is MAD's fuzzy recall"""

    @model_validator(mode="after")
    def check_pairs(self) -> "MQARConfig":
        largest = self.num_pairs[-1]
        if largest > self.num_keys**self.tokens_per_key:
            raise ValueError(f"num_pairs {largest}: exceeds the number of different keys; raise num_keys")
        unit = 2 * self.tokens_per_key
        if self.row_tokens % unit or self.row_tokens < 2 * unit * largest:
            raise ValueError(f"row_tokens {self.row_tokens}: give a multiple of {unit}, at least {2 * unit * largest}")
        return self


class SelectiveCopyingConfig(SplitSizes):
    """[data.copying]: selective copying: values among blanks, then one marker per value, which predicts that value."""

    num_copied: AscendingCounts = (8,)
    """N, numbers of values per document, chosen with equal probability"""
    row_tokens: PositiveInt = 64
    """T, tokens of a document, blanks and markers included"""
    num_values: Annotated[int, Field(ge=2, le=64)] = 16
    """distinct values; chance accuracy is 1 / num_values"""

    @model_validator(mode="after")
    def check_counts(self) -> "SelectiveCopyingConfig":
        largest = self.num_copied[-1]
        if self.row_tokens < 2 * largest:
            raise ValueError(f"row_tokens {self.row_tokens}: {largest} values and markers need at least {2 * largest}")
        return self


class ContinualTranslationConfig(SplitSizes):
    """[data.continual_translation]: languages one after another, with pauses, then every word again."""

    num_languages: Annotated[int, Field(ge=1, le=8)] = 4
    """N, languages of a document, in the same order in all documents"""
    num_words: Annotated[int, Field(ge=1, le=WORDS_PER_LANGUAGE)] = WORDS_PER_LANGUAGE
    """words of each language"""
    num_repetitions: PositiveInt = 2
    """times that each word and its translation are taught"""
    pause_tokens: PositiveInt = 64
    """blanks of a document, divided at random among the pauses after its languages"""
    num_values: Annotated[int, Field(ge=2, le=64)] = 16
    """distinct translations; chance accuracy is 1 / num_values"""

    @property
    def row_tokens(self) -> int:
        """T, tokens of a document."""
        return 2 * self.num_languages * self.num_words * (self.num_repetitions + 1) + self.pause_tokens


class FormalLanguagesConfig(SplitSizes):
    """[data.formal_languages]: strings of a formal language; the target is the set of symbols that may follow."""

    language: FormalLanguage = "parity"
    """parity (even number of b), aa ((aa)*), abab ((abab)*), anbn (a^n b^n), anbncn (a^n b^n c^n), shuffle2 (shuffle of
    two bracket languages)"""
    min_length: PositiveInt = 2
    """shortest length of a string in symbols"""
    max_length: PositiveInt = 50
    """longest length of a string in symbols"""

    @model_validator(mode="after")
    def check_lengths(self) -> "FormalLanguagesConfig":
        if not self.possible_lengths:
            lengths = f"{self.min_length} to {self.max_length}"
            raise ValueError(f"max_length: no string of {self.language} has {lengths} symbols; raise it")
        return self

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: <bos> and a string."""
        return self.possible_lengths[-1] + 1

    @property
    def possible_lengths(self) -> tuple[int, ...]:
        """Lengths from `min_length` to `max_length` that the language has strings of, chosen with equal probability."""
        period = LENGTH_PERIODS[self.language]
        return tuple(n for n in range(self.min_length, self.max_length + 1) if n % period == 0)
