"""The [data] table of a recipe: where rows come from and how they become tokens. Nothing here imports torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from laconic.config.config_model import AscendingCounts, ConfigModel, Fraction, PathText, PositiveInt
from laconic.config.synthetic import (
    ContinualTranslationConfig,
    FormalLanguagesConfig,
    MQARConfig,
    SelectiveCopyingConfig,
)

SplitName = Literal["test", "valid", "train"]
RowFormat = Literal["pccot", "codi", "coconut", "icot", "chat", "digits"]
FieldName = Literal["id", "question", "answer", "steps", "cot", "rationale", "document"]
SYNTHETIC_DOCUMENTS = ("recall", "mqar", "copying", "continual_translation", "formal_languages")
ROW_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")  # of data.name; any other entry names a data set


def as_tuple(value: Any) -> Any:
    """Return a single name as a tuple of one, and a list as the tuple that strict mode requires."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


DatasetNames = Annotated[
    tuple[str, ...] | None, BeforeValidator(as_tuple, json_schema_input_type=str | tuple[str, ...] | None)
]


class DigitsConfig(ConfigModel):
    """[data.digits]: synthetic arithmetic on digits, evaluated from left to right modulo 10."""

    num_operations: Annotated[int, Field(ge=1, le=12)] = 4
    """k, operations in a question"""
    min_operations: Annotated[int, Field(ge=1, le=12)] | None = None
    """questions have this many to num_operations operations, in turn; default: all have k"""
    chain_style: Literal["results", "equations", "brackets", "bracket_tokens", "lookups"] = "results"
    """form of a step: 8; 3+5=8 and step_end; <<3+5=8>>; < < 8 > > with one token per bracket; or, over documents, `a 3`
    for each name and then equations"""
    results_only_fraction: Fraction = 0.0
    """fraction of updates whose chains have results only, which a `:` after the question asks for; 1: always"""
    step_end: Literal[";", ""] = ";"
    """end of each step in style equations"""
    document_tokens: PositiveInt | None = None
    """tokens of a document with a digit for each name in the question; unset: questions have digits"""
    train_rows: PositiveInt = 100_000
    """training problems, all different"""
    valid_rows: PositiveInt = 1000
    """validation problems, none of them in training"""
    test_rows: PositiveInt = 2000
    """test problems, none of them in training or validation"""

    @model_validator(mode="after")
    def check_operations(self) -> "DigitsConfig":
        if self.min_operations is not None and self.min_operations > self.num_operations:
            raise ValueError(f"min_operations {self.min_operations}: exceeds num_operations {self.num_operations}")
        if self.chain_style == "lookups" and self.document_tokens is None:
            raise ValueError('chain_style "lookups": there is nothing to look up; set document_tokens')
        least = self.num_operations + 1  # facts
        if self.document_tokens is not None and self.document_tokens < least:
            raise ValueError(f"document_tokens {self.document_tokens}: too few for the {least} facts of a question")
        return self

    @property
    def operation_counts(self) -> range:
        """Numbers of operations that questions have."""
        return range(self.min_operations or self.num_operations, self.num_operations + 1)


class TextConfig(ConfigModel):
    """[data.text]: documents, their segments and windows, and the held-out part."""

    row_tokens: PositiveInt = 1536
    """tokens of a row, a stretch of one document"""
    segment_tokens: PositiveInt | tuple[PositiveInt, ...] = 256
    """tokens of a segment (the mean if lengths are random), or a list with each length"""
    segment_lengths: Literal["random", "fixed"] = "random"
    """draw segment lengths in training with mean segment_tokens (Eq. AC7), or fix them"""
    min_segment_tokens: Annotated[int, Field(ge=2)] | None = None
    """random: shortest segment; default: by the model's context, Eq. AC7"""
    max_segment_tokens: PositiveInt | None = None
    """random: longest segment; default: what fits into the model's context"""
    segments_per_window: int = 3
    """w, segments that gradients pass through, at least 2"""
    segment_overlap: Literal[0, 1] = 1
    """o, segments shared by consecutive windows"""
    text_field: str = Field(default="text", min_length=1)
    """field of a row that holds the text"""
    document_field: str | None = None
    """field with a row's document; default: book, if the first row has it; else each row is one"""
    held_out_fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    """fraction of documents for validation, and again for testing, unless a field split or data.valid and data.test say
    which"""
    vocabulary_drift_every: PositiveInt | None = None
    """tokens after which a document's vocabulary is permuted again; unset: never"""

    @model_validator(mode="after")
    def check_lengths(self) -> "TextConfig":
        check_segments_per_window(self.segments_per_window)
        lengths = self.segment_tokens if isinstance(self.segment_tokens, tuple) else ()
        if lengths and (self.segment_lengths == "random" or sum(lengths) != self.row_tokens):
            expected = "the mean" if self.segment_lengths == "random" else f"lengths that sum to {self.row_tokens}"
            raise ValueError(f'segment_tokens {list(lengths)}: "{self.segment_lengths}" lengths need {expected}')
        if self.segment_lengths == "fixed":
            set_key = next((key for key in ("min_segment_tokens", "max_segment_tokens") if getattr(self, key)), None)
            if set_key:
                raise ValueError(f'{set_key}: only for segment_lengths "random"; remove the key')
        elif self.row_tokens % self.mean_segment_tokens:
            raise ValueError(f"row_tokens {self.row_tokens}: no multiple of segment_tokens {self.mean_segment_tokens}")
        low = self.min_segment_tokens or 0
        high = self.max_segment_tokens or self.row_tokens + 1
        if not low < self.mean_segment_tokens < high:
            raise ValueError(f"segment_tokens {self.mean_segment_tokens}: must lie between the limits {low} and {high}")
        return self

    @property
    def mean_segment_tokens(self) -> int:
        """Tokens of a segment: the given or mean number, or the longest of a list."""
        return max(self.segment_tokens) if isinstance(self.segment_tokens, tuple) else self.segment_tokens


class FactRecallConfig(ConfigModel):
    """[data.recall]: facts among fillers, then queries for some of them; only the answers are scored."""

    segment_tokens: PositiveInt = 16
    """tokens of a segment of facts"""
    num_facts: AscendingCounts = (1, 2, 4, 8)
    """possible numbers of facts in a document, equally likely"""
    num_keys: Annotated[int, Field(ge=1, le=16)] = 16
    """distinct keys"""
    num_values: Annotated[int, Field(ge=2, le=16)] = 16
    """distinct values"""
    num_fillers: Annotated[int, Field(ge=1, le=8)] = 8
    """distinct filler symbols"""
    num_queries: PositiveInt = 8
    """Q, queries at the end, keys drawn with replacement"""
    num_segments: PositiveInt = 1
    """segments over which the facts are spread"""
    two_token_facts: bool = False
    """a fact is a key and a value token instead of one (harder)"""
    train_rows: PositiveInt = 100_000
    """training documents"""
    valid_rows: PositiveInt = 1000
    """validation documents"""
    test_rows: PositiveInt = 2000
    """test documents"""
    segments_per_window: int | None = None
    """w, segments of a window, at least 2; default: all of them"""
    segment_overlap: Literal[0, 1] = 0
    """o, segments shared by consecutive windows"""

    @model_validator(mode="after")
    def check_facts(self) -> "FactRecallConfig":
        if self.segments_per_window is not None:
            check_segments_per_window(self.segments_per_window)
        largest = self.num_facts[-1]
        width = 2 if self.two_token_facts else 1
        if largest > self.num_keys:
            raise ValueError(f"num_facts {largest}: there are only {self.num_keys} distinct keys; lower it")
        if self.segment_tokens % width or largest * width > self.segment_tokens * self.num_segments:
            raise ValueError(f"segment_tokens {self.segment_tokens}: too few for {largest} facts in all segments")
        return self

    @property
    def row_tokens(self) -> int:
        """Tokens of a document: the segments of facts, then the queries."""
        return self.segment_tokens * self.num_segments + 2 * self.num_queries

    @property
    def window_and_overlap(self) -> tuple[int, int]:
        """(w, o), by default all segments of facts and the segment of queries in one window."""
        return self.segments_per_window or self.num_segments + 1, self.segment_overlap


def check_segments_per_window(segments_per_window: int) -> None:
    """Raise ValueError for a window of one segment, in which no summary is ever read."""
    if segments_per_window < 2:
        raise ValueError(f"segments_per_window {segments_per_window}: no summary is read in a window; use 2 or more")


class DataConfig(ConfigModel):
    """[data]: the source of the rows, and how a row becomes tokens."""

    source: Literal[
        "file", "catalog", "digits", "text", "recall", "mqar", "copying", "continual_translation", "formal_languages"
    ] = "file"
    """a file with one JSON object per line, data sets by name, documents, or a synthetic task"""
    path: PathText | None = None
    """file: training rows (.jsonl, .parquet, iCoT's .txt); text: documents (a .txt is one document)"""
    name: DatasetNames = None
    """catalog: one or several training sets: a known name (gsm8k-aug), a hub name (whynlp/gsm8k-aug), or a file;
    NAME:SPLIT or NAME:CONFIG:SPLIT selects a split; text: one hub name"""
    valid: PathText | None = None
    """file of validation rows; catalog: also a set, as gsm8k-aug:valid"""
    test: PathText | None = None
    """file of test rows; catalog: also a set, as gsm8k:test"""
    data_dir: PathText | None = None
    """catalog: folder with the sets' files; default: download from the hub"""
    revision: str | None = None
    """hub commit or branch of the training set"""
    size_check: Literal["strict", "off"] = "strict"
    """catalog: whether a set must have its published number of rows"""
    digits: DigitsConfig = DigitsConfig()
    """options of source digits"""
    text: TextConfig = TextConfig()
    """options of source text"""
    recall: FactRecallConfig = FactRecallConfig()
    """options of source recall"""
    mqar: MQARConfig = MQARConfig()
    """options of source mqar"""
    copying: SelectiveCopyingConfig = SelectiveCopyingConfig()
    """options of source copying"""
    continual_translation: ContinualTranslationConfig = ContinualTranslationConfig()
    """options of source continual_translation"""
    formal_languages: FormalLanguagesConfig = FormalLanguagesConfig()
    """options of source formal_languages"""
    format: RowFormat = "pccot"
    """parts of a row and the text that joins them; pccot: nothing between steps, which end in >> or ;, codi: spaces,
    coconut: line ends; chat: the tokenizer's chat template, steps on lines"""
    chain_steps: Literal["drop_last", "all"] = "drop_last"
    """whether to leave out the last step of a chain; recipes of cot, icot, coconut: all by default"""
    answer_prompt: str = Field(default="The answer is:", min_length=1)
    """text before the number (pccot, codi, chat)"""
    separator: Literal["none", "eos"] = "none"
    """codi: eos after question, chain and end vector, or nothing"""
    chain_field: Literal["steps", "cot", "rationale"] | None = None
    """file field with the chain; default: the first of the three in the first row"""
    columns: Mapping[FieldName, str] = {}
    """file: names of its fields that differ from ours, as { question = "prompt" }"""
    chain_split: Literal["lines", "sentences", "spaces", "whole"] = "lines"
    """how a chain given as one text is split into steps; CODI's prose uses sentences"""
    answer_type: Literal["number", "text"] = "number"
    """number: an answer without a digit is an error; text: the whole answer counts"""
    require_leading_digit: bool = False
    """drop rows whose answer does not begin with a digit, negative ones too (CODI)"""
    segment_tokens: PositiveInt = 256
    """tokens of the segments in which a question's document is compressed"""
    max_tokens: PositiveInt | None = None
    """maximum tokens of question, chain and answer; default: the model's context"""
    on_too_long: Literal["error", "drop", "truncate_question"] = "error"
    """what to do with a row of more than max_tokens tokens"""
    on_invalid_row: Literal["error", "skip"] = "error"
    """what to do with an unreadable row; at most 0.1 % are skipped"""
    max_train_rows: PositiveInt | None = None
    """use only the first training rows"""
    allow_contamination: bool = False
    """accept questions of validation or test in the training rows"""
    eos_token: str | None = None
    """token that ends an answer, if the tokenizer's files define none"""

    @model_validator(mode="after")
    def check_combination(self) -> "DataConfig":
        self._check_source_keys()
        if (self.source == "digits") != (self.format == "digits"):
            raise ValueError(f'format "{self.format}" with source "{self.source}": "digits" only goes with "digits"')
        if self.format in ("coconut", "icot") and self.chain_steps == "drop_last":
            raise ValueError(f'chain_steps "drop_last": format "{self.format}" uses every step; set it to "all"')
        if self.separator == "eos" and self.format != "codi":
            raise ValueError(f'separator "eos": only for format "codi", not "{self.format}"')
        return self

    def _check_source_keys(self) -> None:
        """Check the keys that name files or data sets against the source."""
        unused = {"digits": ("path",), **dict.fromkeys(SYNTHETIC_DOCUMENTS, ("path", "name", "valid", "test"))}
        set_key = next((key for key in unused.get(self.source, ()) if getattr(self, key)), None)
        if set_key:
            raise ValueError(f'{set_key}: source "{self.source}" reads no file; remove the key')
        users = {"name": ("catalog", "text"), "data_dir": ("catalog",), "revision": ("catalog", "text")}
        set_key = next(
            (key for key, sources in users.items() if getattr(self, key) and self.source not in sources), None
        )
        if set_key:
            sources = " or ".join(f'"{source}"' for source in users[set_key])
            raise ValueError(f'{set_key}: only for source {sources}, not "{self.source}"; set data.source')
        if self.source == "catalog" and not self.name:
            raise ValueError('name: missing; source "catalog" needs training sets, see laconic data list')
        if self.source == "file" and self.path is None:
            raise ValueError('path: missing; source "file" needs a file of training rows')
        if self.source == "catalog" and self.path is not None:
            raise ValueError('path: source "catalog" takes files by data.name; remove the key')
        if self.source == "text" and (self.path is None) == (len(self.name or ()) != 1):
            raise ValueError('path: source "text" needs either a file of documents or one data.name on the hub')


def is_row_file(name: str) -> bool:
    """Return whether an entry of data.name is a file of rows rather than the name of a set, by its suffix."""
    return name.lower().endswith(ROW_FILE_SUFFIXES)
