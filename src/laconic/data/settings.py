"""The [data] table of a recipe: which rows, and how a row becomes ids; nothing here imports torch."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Part = Literal["test", "valid", "train"]
Format = Literal["pccot", "codi", "coconut", "icot", "digits"]
FILES = (".jsonl", ".json", ".parquet", ".txt")  # what ends so is a file of rows; all else that kind maths reads a name


def listed(value: Any) -> Any:
    """One name as a list of one; and a list, which after this is no JSON for pydantic, as the tuple it is."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...] | None, BeforeValidator(listed, json_schema_input_type=str | tuple[str, ...] | None)]


class Settings(BaseModel):
    """Frozen, strict, no unknown key, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Digits(Settings):
    """The generated task: operations on digits from left to right, of every result the last digit."""

    operations: Annotated[int, Field(ge=1, le=12)] = Field(default=4, description="k, operations in a question")
    style: Literal["results", "steps", "brackets", "marks"] = Field(
        default="results",
        description="a step of the chain: 8; 3+5=8 and step_end; <<3+5=8>>; < < 8 > >, where each mark is a token",
    )
    terse: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="share of the steps whose chains are results alone, which a `:` asks for; 1: always"
    )
    step_end: Literal[";", ""] = Field(default=";", description="what ends each step of style steps")
    rows: Count = Field(default=100_000, description="training problems, all different")
    valid_rows: Count = Field(default=1000, description="problems a run is validated on; none of them is trained on")
    test_rows: Count = Field(
        default=2000, description="problems a run is tested on; none of them is trained or validated on"
    )


class Data(Settings):
    """Where rows come from, and what is made of one."""

    kind: Literal["jsonl", "maths", "digits"] = Field(
        default="jsonl", description="a file with one JSON object a line, sets known by name, or generated"
    )
    path: str | None = Field(default=None, description="jsonl: file of training rows (.jsonl, .parquet, iCoT's .txt)")
    name: Names = Field(
        default=None,
        description="maths: the sets trained on, one or a list: gsm8k-aug, a name on the hub (whynlp/gsm8k-aug), "
        "a file (.jsonl, .parquet, iCoT's .txt); NAME:SPLIT takes another split",
    )
    valid: str | None = Field(
        default=None, description="file of validation rows; maths: also a set, as gsm8k-aug:valid"
    )
    test: str | None = Field(default=None, description="file of test rows; maths: also a set, as gsm8k:test")
    root: str | None = Field(default=None, description="maths: folder of the sets' files; absent: they come by the hub")
    revision: str | None = Field(default=None, description="maths: commit or branch on the hub, of what is trained on")
    sizes: Literal["known", "any"] = Field(
        default="known", description="maths: whether a set must have as many rows as it is known to have"
    )
    digits: Digits = Field(default=Digits(), description="digits: the task")
    format: Format = Field(default="pccot", description="pieces of a row and what joins them")
    chain: Literal["drop_last", "all"] = Field(
        default="drop_last", description="whether the last step is left out; by default not for cot, icot, coconut"
    )
    prompt: str = Field(default="The answer is:", min_length=1, description="text before the number (pccot, codi)")
    separator: Literal["none", "eos"] = Field(
        default="none", description="codi: eos after question, chain and eot, or nothing"
    )
    field: Literal["steps", "cot", "rationale"] | None = Field(
        default=None,
        description="of files: field of the chain; absent: the first of the three that the first row has, else none",
    )
    split: Literal["lines", "sentences", "spaces", "whole"] = Field(
        default="lines",
        description="where a chain that is one text is cut into steps; sentences is CODI's way with prose",
    )
    answers: Literal["number", "text"] = Field(
        default="number",
        description="number: an answer without a digit is an error; text: the whole answer is the target",
    )
    drop_negative: bool = Field(
        default=False, description="leave out rows whose answer does not begin with a digit (CODI)"
    )
    max_tokens: Count | None = Field(
        default=None, description="tokens of question, chain and answer; absent: the context"
    )
    too_long: Literal["error", "drop", "cut-question"] = Field(default="error", description="a row over its budget")
    on_bad: Literal["error", "skip"] = Field(
        default="error", description="a row that cannot be read; at most 0.1 % are skipped"
    )
    closed: bool = Field(
        default=False, description="of files: a field that is not read is an error, not a mark of the row"
    )
    rows: Count | None = Field(default=None, description="how many training rows are read, from the first; absent: all")
    allow_overlap: bool = Field(default=False, description="training may hold questions of validation or test")
    eos: str | None = Field(
        default=None, description="the token that ends an answer, where the tokenizer's files name none"
    )

    @model_validator(mode="after")
    def fits(self) -> "Data":
        self._where()
        if (self.kind == "digits") != (self.format == "digits"):
            raise ValueError(f'format {self.format!r} with kind {self.kind!r}: "digits" goes with "digits" alone')
        if self.format in ("coconut", "icot") and self.chain == "drop_last":
            raise ValueError(f'chain "drop_last": format {self.format!r} takes every step; set chain = "all"')
        if self.separator == "eos" and self.format != "codi":
            raise ValueError(f'separator "eos": of format "codi" alone, not {self.format!r}')
        return self

    def _where(self) -> None:
        """The keys that say where rows come from go with the kind."""
        if self.kind != "maths":
            given = next((key for key in ("name", "root", "revision") if getattr(self, key)), None)
            if given:
                raise ValueError(f'{given}: of kind "maths" alone, not {self.kind!r}; set data.kind = "maths"')
        if self.kind == "maths" and not self.name:
            raise ValueError('name: absent; kind "maths" needs the sets trained on, as laconic data list has them')
        if self.kind == "jsonl" and self.path is None:
            raise ValueError('path: absent; kind "jsonl" needs a file of training rows')
        if self.kind == "digits" and self.path is not None:
            raise ValueError(f'path {self.path!r}: kind "digits" reads no file; leave the key out')
        if self.kind == "maths" and self.path is not None:
            raise ValueError(f'path {self.path!r}: kind "maths" takes files by data.name; leave the key out')


def is_file(name: str) -> bool:
    """Whether a text names a file of rows, and no set: by its ending."""
    return name.endswith(FILES)
