"""What a recipe may say of generated streams: pairs to recall, values to copy, languages; no torch is imported."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
FormalLanguage = Literal["parity", "aa", "abab", "anbn", "anbncn", "shuffle2"]
LENGTH_PERIODS: dict[FormalLanguage, int] = {"parity": 1, "aa": 2, "abab": 4, "anbn": 2, "anbncn": 3, "shuffle2": 2}


class ConfigModel(BaseModel):
    """Frozen, strict, no unknown key, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class MQARConfig(ConfigModel):
    """Multi-query associative recall: pairs of key and value, then each key once more, far or near, for its value."""

    num_pairs: tuple[PositiveInt, ...] = Field(
        default=(8,), description="N, numbers of pairs in a document, equally likely"
    )
    row_tokens: PositiveInt = Field(
        default=64, description="T, tokens of a document; what no pair and no query fills is silent"
    )
    num_keys: Annotated[int, Field(ge=1, le=64)] = Field(
        default=32, description="keys there are; those of a document differ"
    )
    num_values: Annotated[int, Field(ge=2, le=64)] = Field(
        default=32, description="values there are; chance is one in so"
    )
    tokens_per_key: Annotated[int, Field(ge=1, le=4)] = Field(
        default=1, description="w, tokens of a key and of a value; more than one: fuzzy recall, MAD-like"
    )
    train_rows: PositiveInt = Field(default=100_000, description="training documents")
    valid_rows: PositiveInt = Field(default=500, description="documents a run is validated on")
    test_rows: PositiveInt = Field(default=1000, description="documents a run is tested on")

    @model_validator(mode="after")
    def check_pairs(self) -> "MQARConfig":
        most = max(self.num_pairs, default=0)
        if list(self.num_pairs) != sorted(set(self.num_pairs)) or not self.num_pairs:
            raise ValueError(f"pairs {list(self.num_pairs)}: ascending numbers of pairs")
        if most > self.num_keys**self.tokens_per_key:
            raise ValueError(
                f"pairs {most}: only {self.num_keys} keys, and those of a document differ; give fewer pairs"
            )
        if self.row_tokens % (2 * self.tokens_per_key) or self.row_tokens < 4 * most * self.tokens_per_key:
            raise ValueError(
                f"length {self.row_tokens}: {most} pairs and as many queries take a multiple of {2 * self.tokens_per_key}, "
                f"{4 * most * self.tokens_per_key} at least"
            )
        return self


class SelectiveCopyingConfig(ConfigModel):
    """Selective copying: values among silence, then as many markers, each of which predicts the next of the values."""

    num_copied: tuple[PositiveInt, ...] = Field(
        default=(8,), description="N, numbers of values in a document, equally likely"
    )
    row_tokens: PositiveInt = Field(default=64, description="T, tokens of a document, silence and markers among them")
    num_values: Annotated[int, Field(ge=2, le=64)] = Field(
        default=16, description="values there are; chance is one in so"
    )
    train_rows: PositiveInt = Field(default=100_000, description="training documents")
    valid_rows: PositiveInt = Field(default=500, description="documents a run is validated on")
    test_rows: PositiveInt = Field(default=1000, description="documents a run is tested on")

    @model_validator(mode="after")
    def check_counts(self) -> "SelectiveCopyingConfig":
        if list(self.num_copied) != sorted(set(self.num_copied)) or not self.num_copied:
            raise ValueError(f"counts {list(self.num_copied)}: ascending numbers of values")
        if self.row_tokens < 2 * self.num_copied[-1]:
            most = self.num_copied[-1]
            raise ValueError(f"length {self.row_tokens}: {most} values and as many markers take {2 * most} at least")
        return self


class FormalLanguagesConfig(ConfigModel):
    """Strings of a formal language; at each symbol the set of those that may follow is to be told, the end included."""

    language: FormalLanguage = Field(
        default="parity", description="an even number of b; (aa)*, (abab)*; a^n b^n, a^n b^n c^n; two kinds of brackets"
    )
    min_length: PositiveInt = Field(default=2, description="symbols of a string at least")
    max_length: PositiveInt = Field(default=50, description="symbols of a string at most")
    train_rows: PositiveInt = Field(default=100_000, description="training strings")
    valid_rows: PositiveInt = Field(default=500, description="strings a run is validated on")
    test_rows: PositiveInt = Field(default=1000, description="strings a run is tested on")

    @model_validator(mode="after")
    def check_lengths(self) -> "FormalLanguagesConfig":
        if not self.possible_lengths:
            raise ValueError(
                f"low {self.min_length}, high {self.max_length}: {self.language} has no string of such a length, "
                f"which is a multiple of {LENGTH_PERIODS[self.language]}"
            )
        return self

    @property
    def possible_lengths(self) -> tuple[int, ...]:
        """Those from low to high that strings of the language have, equally likely."""
        period = LENGTH_PERIODS[self.language]
        return tuple(n for n in range(self.min_length, self.max_length + 1) if n % period == 0)
