"""The [data] table of a recipe: which rows, and how a row becomes ids; nothing here imports torch."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from laconic.data.task_settings import Copying, Count, Languages, Pairs, Settings

Part = Literal["test", "valid", "train"]
Format = Literal["pccot", "codi", "coconut", "icot", "digits"]
GENERATED = ("recall", "mqar", "copying", "languages")  # documents made when they are asked for
FILES = (".jsonl", ".json", ".parquet", ".txt")  # what ends so is a file of rows; all else that kind maths reads a name


def listed(value: Any) -> Any:
    """One name as a list of one; and a list, which after this is no JSON for pydantic, as the tuple it is."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...] | None, BeforeValidator(listed, json_schema_input_type=str | tuple[str, ...] | None)]


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


class Text(Settings):
    """Documents: how much of one is read in a row, where it is cut, and which documents are held out."""

    tokens: Count = Field(default=1536, description="tokens of a row: a stretch of one document")
    segment: Count | tuple[Count, ...] = Field(
        default=256, description="tokens of a segment, the last of a document shorter; fixed: or the length of each"
    )
    segments: Literal["random", "fixed"] = Field(
        default="random", description="random: lengths in training are drawn, and `segment` is their mean (AC7)"
    )
    low: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="random: tokens of a segment at least; absent: AC7's, by what the model has room for"
    )
    high: Count | None = Field(default=None, description="random: tokens of a segment at most; absent: that room")
    window: int = Field(default=3, description="w, segments through which gradients reach, 2 at least")
    overlap: Literal[0, 1] = Field(default=1, description="o, segments of a window that the next one reads again")
    field: str = Field(default="text", min_length=1, description="field of a row that holds the text")
    document: str | None = Field(
        default=None,
        description="field that names the document a row belongs to; absent: book if the first row has it, "
        "else every row is a document",
    )
    held: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.1,
        description="share of the documents kept for validation, and again for testing, where neither rows (by a field "
        "split) nor data.valid and data.test say which",
    )
    drift: Count | None = Field(
        default=None, description="tokens after which the words of a document change places anew; absent: they stay"
    )

    @model_validator(mode="after")
    def fits(self) -> "Text":
        check_window(self.window)
        lengths = self.segment if isinstance(self.segment, tuple) else ()
        if lengths and (self.segments == "random" or sum(lengths) != self.tokens):
            asked = "the mean length" if self.segments == "random" else f"lengths that sum to tokens {self.tokens}"
            raise ValueError(f'segment {list(lengths)} with segments "{self.segments}": give {asked}')
        if self.mean >= self.tokens:
            raise ValueError(f"tokens {self.tokens}: one segment of {self.mean}, which nothing reads; ask for more")
        if self.segments == "fixed":
            given = next((key for key in ("low", "high") if getattr(self, key)), None)
            if given:
                raise ValueError(f'{given}: of segments "random" alone; leave it out')
        elif self.tokens % self.mean:
            raise ValueError(f"tokens {self.tokens}: no multiple of segment {self.mean}, the mean of drawn lengths")
        if not (self.low or 0) < self.mean < (self.high or self.tokens + 1):
            raise ValueError(f"segment {self.mean}: not between low {self.low} and high {self.high}, as a mean is")
        return self

    @property
    def mean(self) -> int:
        """Tokens of a segment: all, their mean, or the longest of a list."""
        return max(self.segment) if isinstance(self.segment, tuple) else self.segment


class Recall(Settings):
    """The recall task: facts among fillers, then queries for some of them; only the values are scored."""

    length: Count = Field(default=16, description="tokens of a segment of facts")
    facts: tuple[Count, ...] = Field(default=(1, 2, 4, 8), description="numbers of facts in a document, equally likely")
    keys: Annotated[int, Field(ge=1, le=16)] = Field(
        default=16, description="keys there are; those of a document differ"
    )
    values: Annotated[int, Field(ge=2, le=16)] = Field(default=16, description="values there are")
    fillers: Annotated[int, Field(ge=1, le=8)] = Field(default=8, description="symbols that mean nothing")
    queries: Count = Field(default=8, description="Q, queries at the end, with keys drawn again and again")
    segments: Count = Field(default=1, description="segments over which the facts are strewn")
    two_tokens: bool = Field(default=False, description="a fact is key and value, not one token for both (harder)")
    rows: Count = Field(default=100_000, description="training documents")
    valid_rows: Count = Field(default=1000, description="documents a run is validated on")
    test_rows: Count = Field(default=2000, description="documents a run is tested on")
    window: int | None = Field(default=None, description="w, segments in a window, 2 at least; absent: all of them")
    overlap: Literal[0, 1] = Field(default=0, description="o, segments of a window that the next one reads again")

    @model_validator(mode="after")
    def fits(self) -> "Recall":
        if self.window is not None:
            check_window(self.window)
        most, columns = max(self.facts, default=0), 2 if self.two_tokens else 1
        if list(self.facts) != sorted(set(self.facts)) or not self.facts:
            raise ValueError(f"facts {list(self.facts)}: ascending numbers of facts")
        if most > self.keys:
            raise ValueError(f"facts {most}: only {self.keys} keys, and those of a document differ; give fewer facts")
        if self.length % columns or most * columns > self.length * self.segments:
            raise ValueError(
                f"length {self.length}: {most} facts of {columns} tokens do not go into {self.segments} segments of it"
            )
        return self

    @property
    def windows(self) -> tuple[int, int]:
        """(w, o): segments of facts, and the one of queries."""
        return self.window or self.segments + 1, self.overlap


def check_window(window: int) -> None:
    """Raises `ValueError` for a window in which no summary is read."""
    if window < 2:
        raise ValueError(
            f"window: {window} leaves no segment that reads a summary inside its own window, so nothing would learn to "
            "compress; use 2 or more"
        )


class Data(Settings):
    """Where rows come from, and what is made of one."""

    kind: Literal["jsonl", "maths", "digits", "text", "recall", "mqar", "copying", "languages"] = Field(
        default="jsonl",
        description="a file with one JSON object a line, sets known by name, or generated; "
        "of documents: text of a file or of the hub, or generated",
    )
    path: str | None = Field(
        default=None,
        description="jsonl: file of training rows (.jsonl, .parquet, iCoT's .txt); text: of documents (.txt is one)",
    )
    name: Names = Field(
        default=None,
        description="maths: the sets trained on, one or a list: gsm8k-aug, a name on the hub (whynlp/gsm8k-aug), "
        "a file (.jsonl, .parquet, iCoT's .txt); NAME:SPLIT takes another split; text: one name on the hub",
    )
    valid: str | None = Field(
        default=None, description="file of validation rows; maths: also a set, as gsm8k-aug:valid"
    )
    test: str | None = Field(default=None, description="file of test rows; maths: also a set, as gsm8k:test")
    root: str | None = Field(default=None, description="maths: folder of the sets' files; absent: they come by the hub")
    revision: str | None = Field(default=None, description="commit or branch on the hub, of what is trained on")
    sizes: Literal["known", "any"] = Field(
        default="known", description="maths: whether a set must have as many rows as it is known to have"
    )
    digits: Digits = Field(default=Digits(), description="digits: the task")
    text: Text = Field(default=Text(), description="text: documents and their segments")
    recall: Recall = Field(default=Recall(), description="recall: the task")
    mqar: Pairs = Field(default=Pairs(), description="mqar: the task")
    copying: Copying = Field(default=Copying(), description="copying: the task")
    languages: Languages = Field(default=Languages(), description="languages: the task")
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
        files = {"digits": ("path",), **dict.fromkeys(GENERATED, ("path", "name", "valid", "test"))}.get(self.kind, ())
        given = next((key for key in files if getattr(self, key)), None)
        if given:
            raise ValueError(f'{given} {getattr(self, given)!r}: kind "{self.kind}" reads no file; leave the key out')
        takes = {"name": ("maths", "text"), "root": ("maths",), "revision": ("maths", "text")}
        given = next((key for key, kinds in takes.items() if getattr(self, key) and self.kind not in kinds), None)
        if given:
            kinds = " or ".join(f'"{kind}"' for kind in takes[given])
            raise ValueError(f"{given}: of kind {kinds}, not {self.kind!r}; set data.kind")
        if self.kind == "maths" and not self.name:
            raise ValueError('name: absent; kind "maths" needs the sets trained on, as laconic data list has them')
        if self.kind == "jsonl" and self.path is None:
            raise ValueError('path: absent; kind "jsonl" needs a file of training rows')
        if self.kind == "maths" and self.path is not None:
            raise ValueError(f'path {self.path!r}: kind "maths" takes files by data.name; leave the key out')
        if self.kind == "text" and (self.path is None) == (len(self.name or ()) != 1):
            raise ValueError('path: kind "text" needs a file of documents, or one data.name on the hub, and not both')


def is_file(name: str) -> bool:
    """Whether a text names a file of rows, and no set: by its ending."""
    return name.endswith(FILES)
