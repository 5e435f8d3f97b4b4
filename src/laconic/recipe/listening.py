"""A run as streams ask it: itself as a learner, and what it reads: its recipe's own data, tasks, needles, books."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from laconic.core.contract import Learner, Source
from laconic.core.errors import BadInput, Usage
from laconic.data.encoding import Ids
from laconic.data.languages import Strings
from laconic.data.lengths import byte_lengths
from laconic.data.needles import Needles
from laconic.data.passages import Passages, tokenized
from laconic.data.settings import Part
from laconic.data.text import documents
from laconic.evaluation.listening import Cached
from laconic.evaluation.streams import Stream
from laconic.methods.ablations import ablations
from laconic.methods.hope_config import FAR
from laconic.methods.hope_model import Hope
from laconic.recipe import rows
from laconic.recipe.opened import Opened

OWN = ("test", "valid")
STREAMS = ("mqar", "copying", "languages", "needle", "ppl", "books", "levels")
BATCH = 32_768  # tokens of items read at once
MADE: dict[str, Stream] = {"mqar": "mqar", "copying": "copying", "languages": "languages"}
FAR_BIN = {"low": 51, "high": 100}  # lengths of strings beyond those of training
NEEDLES = (128, 256, 512, 1024)  # tokens of a haystack, of models that see no further: small ones
DEEP = (4096, 8192, 16384)
FEW = 5  # needles of a cell


class Asked(NamedTuple):
    """What is asked of a run under one name: which stream it is, its items, how many at once, bytes of its ids."""

    name: str
    stream: Stream
    source: Source
    batch: int
    bytes_of: Tensor | None = None


def learner_of(run: Opened) -> Learner:
    """The model of a run; a plain decoder is heard with its cache for a state."""
    decoder = run.parts.decoder
    return decoder if isinstance(decoder, Hope) else Cached(decoder)


def variants(run: Opened) -> Mapping[str, Learner]:
    """A model, and the same with each of its parts taken out in turn. Raises `Usage` (2) for one that has no levels."""
    model = run.parts.decoder
    if not isinstance(model, Hope):
        raise Usage(f"{run.folder}: levels are of method hope, this is {run.recipe.method}; leave them out")
    return {"all levels": model, **ablations(model)}


def asked(run: Opened, name: str, count: int | None) -> list[Asked]:
    """The items of a name; test and valid are the recipe's own data. Raises `BadInput` (66) where it has none."""
    recipe, kind, part = run.recipe, run.recipe.data.kind, "valid" if name == "valid" else "test"
    stream = {"text": "ppl"}.get(kind, kind) if name in OWN else name
    if stream in ("ppl", "books", "levels"):
        source = text(run, part, count)
        bytes_of = byte_lengths(run.parts.tokenizer)
        batch = 1 if isinstance(run.parts.decoder, Hope) else max(BATCH // source.longest, 1)
        return [Asked(name, "ppl", source, batch, bytes_of)]
    if stream == "needle":
        return [needles(run, count)]
    if stream not in MADE or kind != stream:
        raise BadInput(f"--on {name}: {run.folder} is a run of data.kind {kind}; its own sets are test and valid")
    made = rows.held_out(recipe, run.parts.tokenizer, FAR, part, count).source
    found = [Asked(name, MADE[stream], made, max(BATCH // made.longest, 1))]
    if stream == "languages":
        far = Strings(rows.HELD_OUT, recipe.data.languages.model_copy(update=FAR_BIN), part, count)
        found = [found[0]._replace(name=f"{name}-bin-0"), Asked(f"{name}-bin-1", "languages", far, found[0].batch)]
    return found


def text(run: Opened, part: Part, count: int | None) -> Passages:
    """Held-out texts whole, in stretches as long as those of training; of each the first `count`."""
    how = run.recipe.data.text
    if run.recipe.data.kind != "text":
        raise BadInput(f"{run.folder} is a run of data.kind {run.recipe.data.kind}; it has no texts of its own")
    found, every, _ = rows.encoded(run.recipe, run.parts.tokenizer, part)
    ids = [each[: None if count is None else count * how.tokens] for each in every]
    whole = how.model_copy(update={"segments": "fixed", "segment": how.tokens, "low": None, "high": None})
    return Passages(found, ids, whole, run.recipe.seed, FAR, fixed=True)


def needles(run: Opened, count: int | None) -> Asked:
    """Facts hidden in a filler and in the run's own held-out texts, in lengths that its positions allow."""
    limit = run.parts.decoder.config.max_position_embeddings
    if run.recipe.data.kind != "text":
        raise BadInput(f"{run.folder} is a run of data.kind {run.recipe.data.kind}; it has no texts of its own")
    found, _ = documents(run.recipe.data, "test")
    books = tokenized(found, run.parts.tokenizer)
    least = shortest(run, books)
    deep = DEEP if DEEP[0] <= limit < FAR else ()
    lengths = tuple(n for n in (*NEEDLES, *deep) if least <= n <= limit) or (least,)
    source = Needles(run.parts.tokenizer, books, lengths=lengths, count=count or FEW)
    return Asked("needle", "needle", source, max(BATCH // source.longest, 1))


def shortest(run: Opened, books: Sequence[Ids]) -> int:
    """The first of the lengths that leaves a haystack to every kind of item. Raises `BadInput` (66) where none does."""
    for n in NEEDLES[:-1]:
        try:
            Needles(run.parts.tokenizer, books, lengths=(n,), depths=(0.5,), count=1)
        except BadInput:
            continue
        return n
    return NEEDLES[-1]
