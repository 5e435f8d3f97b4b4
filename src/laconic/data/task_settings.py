"""What a recipe may say of generated streams: pairs to recall, values to copy, languages; no torch is imported."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Language = Literal["parity", "aa", "abab", "anbn", "anbncn", "shuffle2"]
PERIOD: dict[Language, int] = {"parity": 1, "aa": 2, "abab": 4, "anbn": 2, "anbncn": 3, "shuffle2": 2}


class Settings(BaseModel):
    """Frozen, strict, no unknown key, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Pairs(Settings):
    """Multi-query associative recall: pairs of key and value, then each key once more, far or near, for its value."""

    pairs: tuple[Count, ...] = Field(default=(8,), description="N, numbers of pairs in a document, equally likely")
    length: Count = Field(default=64, description="T, tokens of a document; what no pair and no query fills is silent")
    keys: Annotated[int, Field(ge=1, le=64)] = Field(
        default=32, description="keys there are; those of a document differ"
    )
    values: Annotated[int, Field(ge=2, le=64)] = Field(default=32, description="values there are; chance is one in so")
    words: Annotated[int, Field(ge=1, le=4)] = Field(
        default=1, description="w, tokens of a key and of a value; more than one: fuzzy recall, MAD-like"
    )
    rows: Count = Field(default=100_000, description="training documents")
    valid_rows: Count = Field(default=500, description="documents a run is validated on")
    test_rows: Count = Field(default=1000, description="documents a run is tested on")

    @model_validator(mode="after")
    def fits(self) -> "Pairs":
        most = max(self.pairs, default=0)
        if list(self.pairs) != sorted(set(self.pairs)) or not self.pairs:
            raise ValueError(f"pairs {list(self.pairs)}: ascending numbers of pairs")
        if most > self.keys**self.words:
            raise ValueError(f"pairs {most}: only {self.keys} keys, and those of a document differ; give fewer pairs")
        if self.length % (2 * self.words) or self.length < 4 * most * self.words:
            raise ValueError(
                f"length {self.length}: {most} pairs and as many queries take a multiple of {2 * self.words}, "
                f"{4 * most * self.words} at least"
            )
        return self


class Copying(Settings):
    """Selective copying: values among silence, then as many markers, each of which predicts the next of the values."""

    counts: tuple[Count, ...] = Field(default=(8,), description="N, numbers of values in a document, equally likely")
    length: Count = Field(default=64, description="T, tokens of a document, silence and markers among them")
    values: Annotated[int, Field(ge=2, le=64)] = Field(default=16, description="values there are; chance is one in so")
    rows: Count = Field(default=100_000, description="training documents")
    valid_rows: Count = Field(default=500, description="documents a run is validated on")
    test_rows: Count = Field(default=1000, description="documents a run is tested on")

    @model_validator(mode="after")
    def fits(self) -> "Copying":
        if list(self.counts) != sorted(set(self.counts)) or not self.counts:
            raise ValueError(f"counts {list(self.counts)}: ascending numbers of values")
        if self.length < 2 * self.counts[-1]:
            most = self.counts[-1]
            raise ValueError(f"length {self.length}: {most} values and as many markers take {2 * most} at least")
        return self


class Languages(Settings):
    """Strings of a formal language; at each symbol the set of those that may follow is to be told, the end included."""

    language: Language = Field(
        default="parity", description="an even number of b; (aa)*, (abab)*; a^n b^n, a^n b^n c^n; two kinds of brackets"
    )
    low: Count = Field(default=2, description="symbols of a string at least")
    high: Count = Field(default=50, description="symbols of a string at most")
    rows: Count = Field(default=100_000, description="training strings")
    valid_rows: Count = Field(default=500, description="strings a run is validated on")
    test_rows: Count = Field(default=1000, description="strings a run is tested on")

    @model_validator(mode="after")
    def fits(self) -> "Languages":
        if not self.lengths:
            raise ValueError(
                f"low {self.low}, high {self.high}: {self.language} has no string of such a length, "
                f"which is a multiple of {PERIOD[self.language]}"
            )
        return self

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those from low to high that strings of the language have, equally likely."""
        period = PERIOD[self.language]
        return tuple(n for n in range(self.low, self.high + 1) if n % period == 0)
