"""The [data] table of a recipe: which rows, and how a row becomes ids; nothing here imports torch."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from laconic.config.synthetic import ConfigModel, FormalLanguagesConfig, MQARConfig, PositiveInt, SelectiveCopyingConfig

SplitName = Literal["test", "valid", "train"]
RowFormat = Literal["pccot", "codi", "coconut", "icot", "digits"]
SYNTHETIC_DOCUMENTS = ("recall", "mqar", "copying", "formal_languages")  # documents made when they are asked for
ROW_FILE_SUFFIXES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".txt",
)  # what ends so is a file of rows; all else that kind maths reads a name


def as_tuple(value: Any) -> Any:
    """One name as a list of one; and a list, which after this is no JSON for pydantic, as the tuple it is."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


DatasetNames = Annotated[
    tuple[str, ...] | None, BeforeValidator(as_tuple, json_schema_input_type=str | tuple[str, ...] | None)
]


class DigitsConfig(ConfigModel):
    """The generated task: operations on digits from left to right, of every result the last digit."""

    num_operations: Annotated[int, Field(ge=1, le=12)] = Field(default=4, description="k, operations in a question")
    chain_style: Literal["results", "equations", "brackets", "bracket_tokens"] = Field(
        default="results",
        description="a step of the chain: 8; 3+5=8 and step_end; <<3+5=8>>; < < 8 > >, where each mark is a token",
    )
    results_only_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="share of the steps whose chains are results alone, which a `:` asks for; 1: always"
    )
    step_end: Literal[";", ""] = Field(default=";", description="what ends each step of style steps")
    train_rows: PositiveInt = Field(default=100_000, description="training problems, all different")
    valid_rows: PositiveInt = Field(
        default=1000, description="problems a run is validated on; none of them is trained on"
    )
    test_rows: PositiveInt = Field(
        default=2000, description="problems a run is tested on; none of them is trained or validated on"
    )


class TextConfig(ConfigModel):
    """Documents: how much of one is read in a row, where it is cut, and which documents are held out."""

    row_tokens: PositiveInt = Field(default=1536, description="tokens of a row: a stretch of one document")
    segment_tokens: PositiveInt | tuple[PositiveInt, ...] = Field(
        default=256, description="tokens of a segment, the last of a document shorter; fixed: or the length of each"
    )
    segment_lengths: Literal["random", "fixed"] = Field(
        default="random", description="random: lengths in training are drawn, and `segment` is their mean (AC7)"
    )
    min_segment_tokens: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="random: tokens of a segment at least; absent: AC7's, by what the model has room for"
    )
    max_segment_tokens: PositiveInt | None = Field(
        default=None, description="random: tokens of a segment at most; absent: that room"
    )
    segments_per_window: int = Field(default=3, description="w, segments through which gradients reach, 2 at least")
    segment_overlap: Literal[0, 1] = Field(
        default=1, description="o, segments of a window that the next one reads again"
    )
    text_field: str = Field(default="text", min_length=1, description="field of a row that holds the text")
    document_field: str | None = Field(
        default=None,
        description="field that names the document a row belongs to; absent: book if the first row has it, "
        "else every row is a document",
    )
    held_out_fraction: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.1,
        description="share of the documents kept for validation, and again for testing, where neither rows (by a field "
        "split) nor data.valid and data.test say which",
    )
    vocabulary_drift_every: PositiveInt | None = Field(
        default=None, description="tokens after which the words of a document change places anew; absent: they stay"
    )

    @model_validator(mode="after")
    def check_lengths(self) -> "TextConfig":
        check_segments_per_window(self.segments_per_window)
        lengths = self.segment_tokens if isinstance(self.segment_tokens, tuple) else ()
        if lengths and (self.segment_lengths == "random" or sum(lengths) != self.row_tokens):
            asked = (
                "the mean length"
                if self.segment_lengths == "random"
                else f"lengths that sum to tokens {self.row_tokens}"
            )
            raise ValueError(f'segment {list(lengths)} with segments "{self.segment_lengths}": give {asked}')
        if self.mean_segment_tokens >= self.row_tokens:
            raise ValueError(
                f"tokens {self.row_tokens}: one segment of {self.mean_segment_tokens}, which nothing reads; ask for more"
            )
        if self.segment_lengths == "fixed":
            given = next((key for key in ("min_segment_tokens", "max_segment_tokens") if getattr(self, key)), None)
            if given:
                raise ValueError(f'{given}: of segments "random" alone; leave it out')
        elif self.row_tokens % self.mean_segment_tokens:
            raise ValueError(
                f"tokens {self.row_tokens}: no multiple of segment {self.mean_segment_tokens}, the mean of drawn lengths"
            )
        if (
            not (self.min_segment_tokens or 0)
            < self.mean_segment_tokens
            < (self.max_segment_tokens or self.row_tokens + 1)
        ):
            raise ValueError(
                f"segment {self.mean_segment_tokens}: not between low {self.min_segment_tokens} and high {self.max_segment_tokens}, as a mean is"
            )
        return self

    @property
    def mean_segment_tokens(self) -> int:
        """Tokens of a segment: all, their mean, or the longest of a list."""
        return max(self.segment_tokens) if isinstance(self.segment_tokens, tuple) else self.segment_tokens


class FactRecallConfig(ConfigModel):
    """The recall task: facts among fillers, then queries for some of them; only the values are scored."""

    segment_tokens: PositiveInt = Field(default=16, description="tokens of a segment of facts")
    num_facts: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 4, 8), description="numbers of facts in a document, equally likely"
    )
    num_keys: Annotated[int, Field(ge=1, le=16)] = Field(
        default=16, description="keys there are; those of a document differ"
    )
    num_values: Annotated[int, Field(ge=2, le=16)] = Field(default=16, description="values there are")
    num_fillers: Annotated[int, Field(ge=1, le=8)] = Field(default=8, description="symbols that mean nothing")
    num_queries: PositiveInt = Field(default=8, description="Q, queries at the end, with keys drawn again and again")
    num_segments: PositiveInt = Field(default=1, description="segments over which the facts are strewn")
    two_token_facts: bool = Field(default=False, description="a fact is key and value, not one token for both (harder)")
    train_rows: PositiveInt = Field(default=100_000, description="training documents")
    valid_rows: PositiveInt = Field(default=1000, description="documents a run is validated on")
    test_rows: PositiveInt = Field(default=2000, description="documents a run is tested on")
    segments_per_window: int | None = Field(
        default=None, description="w, segments in a window, 2 at least; absent: all of them"
    )
    segment_overlap: Literal[0, 1] = Field(
        default=0, description="o, segments of a window that the next one reads again"
    )

    @model_validator(mode="after")
    def check_facts(self) -> "FactRecallConfig":
        if self.segments_per_window is not None:
            check_segments_per_window(self.segments_per_window)
        most, columns = max(self.num_facts, default=0), 2 if self.two_token_facts else 1
        if list(self.num_facts) != sorted(set(self.num_facts)) or not self.num_facts:
            raise ValueError(f"facts {list(self.num_facts)}: ascending numbers of facts")
        if most > self.num_keys:
            raise ValueError(
                f"facts {most}: only {self.num_keys} keys, and those of a document differ; give fewer facts"
            )
        if self.segment_tokens % columns or most * columns > self.segment_tokens * self.num_segments:
            raise ValueError(
                f"length {self.segment_tokens}: {most} facts of {columns} tokens do not go into {self.num_segments} segments of it"
            )
        return self

    @property
    def window_and_overlap(self) -> tuple[int, int]:
        """(w, o): segments of facts, and the one of queries."""
        return self.segments_per_window or self.num_segments + 1, self.segment_overlap


def check_segments_per_window(segments_per_window: int) -> None:
    """Raises `ValueError` for a window in which no summary is read."""
    if segments_per_window < 2:
        raise ValueError(
            f"window: {segments_per_window} leaves no segment that reads a summary inside its own window, so nothing would learn to "
            "compress; use 2 or more"
        )


class DataConfig(ConfigModel):
    """Where rows come from, and what is made of one."""

    source: Literal["file", "catalog", "digits", "text", "recall", "mqar", "copying", "formal_languages"] = Field(
        default="file",
        description="a file with one JSON object a line, sets known by name, or generated; "
        "of documents: text of a file or of the hub, or generated",
    )
    path: str | None = Field(
        default=None,
        description="jsonl: file of training rows (.jsonl, .parquet, iCoT's .txt); text: of documents (.txt is one)",
    )
    name: DatasetNames = Field(
        default=None,
        description="maths: the sets trained on, one or a list: gsm8k-aug, a name on the hub (whynlp/gsm8k-aug), "
        "a file (.jsonl, .parquet, iCoT's .txt); NAME:SPLIT takes another split; text: one name on the hub",
    )
    valid: str | None = Field(
        default=None, description="file of validation rows; maths: also a set, as gsm8k-aug:valid"
    )
    test: str | None = Field(default=None, description="file of test rows; maths: also a set, as gsm8k:test")
    data_dir: str | None = Field(
        default=None, description="maths: folder of the sets' files; absent: they come by the hub"
    )
    revision: str | None = Field(default=None, description="commit or branch on the hub, of what is trained on")
    size_check: Literal["strict", "off"] = Field(
        default="strict", description="maths: whether a set must have as many rows as it is known to have"
    )
    digits: DigitsConfig = Field(default=DigitsConfig(), description="digits: the task")
    text: TextConfig = Field(default=TextConfig(), description="text: documents and their segments")
    recall: FactRecallConfig = Field(default=FactRecallConfig(), description="recall: the task")
    mqar: MQARConfig = Field(default=MQARConfig(), description="mqar: the task")
    copying: SelectiveCopyingConfig = Field(default=SelectiveCopyingConfig(), description="copying: the task")
    formal_languages: FormalLanguagesConfig = Field(default=FormalLanguagesConfig(), description="languages: the task")
    format: RowFormat = Field(default="pccot", description="pieces of a row and what joins them")
    chain_steps: Literal["drop_last", "all"] = Field(
        default="drop_last", description="whether the last step is left out; by default not for cot, icot, coconut"
    )
    answer_prompt: str = Field(
        default="The answer is:", min_length=1, description="text before the number (pccot, codi)"
    )
    separator: Literal["none", "eos"] = Field(
        default="none", description="codi: eos after question, chain and eot, or nothing"
    )
    chain_field: Literal["steps", "cot", "rationale"] | None = Field(
        default=None,
        description="of files: field of the chain; absent: the first of the three that the first row has, else none",
    )
    chain_split: Literal["lines", "sentences", "spaces", "whole"] = Field(
        default="lines",
        description="where a chain that is one text is cut into steps; sentences is CODI's way with prose",
    )
    answer_type: Literal["number", "text"] = Field(
        default="number",
        description="number: an answer without a digit is an error; text: the whole answer is the target",
    )
    require_leading_digit: bool = Field(
        default=False, description="leave out rows whose answer does not begin with a digit (CODI)"
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="tokens of question, chain and answer; absent: the context"
    )
    on_too_long: Literal["error", "drop", "truncate_question"] = Field(
        default="error", description="a row over its budget"
    )
    on_invalid_row: Literal["error", "skip"] = Field(
        default="error", description="a row that cannot be read; at most 0.1 % are skipped"
    )
    forbid_unknown_fields: bool = Field(
        default=False, description="of files: a field that is not read is an error, not a mark of the row"
    )
    max_train_rows: PositiveInt | None = Field(
        default=None, description="how many training rows are read, from the first; absent: all"
    )
    allow_contamination: bool = Field(default=False, description="training may hold questions of validation or test")
    eos_token: str | None = Field(
        default=None, description="the token that ends an answer, where the tokenizer's files name none"
    )

    @model_validator(mode="after")
    def check_combination(self) -> "DataConfig":
        self._check_source_keys()
        if (self.source == "digits") != (self.format == "digits"):
            raise ValueError(f'format {self.format!r} with kind {self.source!r}: "digits" goes with "digits" alone')
        if self.format in ("coconut", "icot") and self.chain_steps == "drop_last":
            raise ValueError(f'chain "drop_last": format {self.format!r} takes every step; set chain = "all"')
        if self.separator == "eos" and self.format != "codi":
            raise ValueError(f'separator "eos": of format "codi" alone, not {self.format!r}')
        return self

    def _check_source_keys(self) -> None:
        """The keys that say where rows come from go with the kind."""
        files = {"digits": ("path",), **dict.fromkeys(SYNTHETIC_DOCUMENTS, ("path", "name", "valid", "test"))}.get(
            self.source, ()
        )
        given = next((key for key in files if getattr(self, key)), None)
        if given:
            raise ValueError(f'{given} {getattr(self, given)!r}: kind "{self.source}" reads no file; leave the key out')
        takes = {"name": ("catalog", "text"), "data_dir": ("catalog",), "revision": ("catalog", "text")}
        given = next((key for key, kinds in takes.items() if getattr(self, key) and self.source not in kinds), None)
        if given:
            kinds = " or ".join(f'"{kind}"' for kind in takes[given])
            raise ValueError(f"{given}: of kind {kinds}, not {self.source!r}; set data.source")
        if self.source == "catalog" and not self.name:
            raise ValueError('name: absent; kind "maths" needs the sets trained on, as laconic data list has them')
        if self.source == "file" and self.path is None:
            raise ValueError('path: absent; kind "jsonl" needs a file of training rows')
        if self.source == "catalog" and self.path is not None:
            raise ValueError(f'path {self.path!r}: kind "maths" takes files by data.name; leave the key out')
        if self.source == "text" and (self.path is None) == (len(self.name or ()) != 1):
            raise ValueError('path: kind "text" needs a file of documents, or one data.name on the hub, and not both')


def is_row_file(name: str) -> bool:
    """Whether a text names a file of rows, and no set: by its ending."""
    return name.endswith(ROW_FILE_SUFFIXES)
