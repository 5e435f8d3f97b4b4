"""Data sets by name, of files or of the hub: loaded, sizes checked, merged for training by the rules for that."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from laconic.core.contract import Example
from laconic.core.errors import BadInput
from laconic.data.contamination import merged, refuse_files, refuse_marks, refuse_names, same
from laconic.data.examples import Read, Reader, read_examples, refuse_overlap, unswept
from laconic.data.sets import PUBLISHED, SETS, Answer, Set, Split, files, known, meant, named, parted
from laconic.data.settings import Data, Part, is_file
from laconic.data.tables import hub

__all__ = ["SETS", "answers", "held", "load", "named", "rows_of", "training"]

HELD_OUT: tuple[Part, ...] = ("valid", "test")


def load(asked: str, part: Part, how: Data, rows: int | None = None) -> Read:
    """The rows of a set, of a name on the hub or of a file; of the split that `asked` names, else of `part`.

    Raises `BadInput` for an unknown name or split, a size that is not the known one, and rows that are bad.
    """
    if is_file(asked):
        return noted(asked, read_examples(asked, how, rows))
    name, split = parted(asked)
    found, split = known(asked), split or part
    if found is None:
        if name.count("/") != 1:
            raise BadInput(f"no data set {name}; {meant(name)}")
        return from_hub(f"{name}:{split}", Set(name, "", "", {}, name), Split(None, hub=hub_name(split)), how, rows)
    there = next((one for key, one in found.splits.items() if key == split), None)
    if there is None:
        raise BadInput(f"{found.name} has no split {split}; it has {', '.join(found.splits)}")
    if how.field not in (None, found.chain):
        raise BadInput(f"data.field {how.field}: {found.name} has its chain in {found.chain}; leave the key out")
    label = f"{found.name}:{split}"
    if found.members:
        return united(label, found, how, rows)
    if how.root is None or there.file is None or name != found.name:
        return from_hub(label, found, there, how, rows)
    return from_file(label, found, there, how, rows)


def training(how: Data) -> Read:
    """The rows trained on, questions of several sets once. Raises `BadInput` where a rule of contamination says so."""
    refuse_names(how)
    names = how.name or ()
    reads = {asked: load(asked, "train", how, how.rows) for asked in names}
    kept: dict[Part, Read] = {part: held(how, part) for part in HELD_OUT if getattr(how, part)}
    every = [*reads.items(), *((str(getattr(how, part)), read) for part, read in kept.items())]
    of = dict(files())
    refuse_files(how, {name: of[read.sha256] for name, read in every if is_file(name) and read.sha256 in of})
    for name, read in reads.items():
        refuse_marks(name, read.examples, how.allow_overlap)
    examples, notes = merged(names, [reads[name].examples for name in names])
    refuse_overlap(examples, [e for read in kept.values() for e in read.examples], how.allow_overlap, same)
    refuse_shared(kept)
    return joined(list(reads.values()), examples[: how.rows], notes)


def held(how: Data, part: Part, rows: int | None = None) -> Read:
    """The rows of validation or test. Raises `BadInput`, also where the recipe names none."""
    asked = how.valid if part == "valid" else how.test
    if asked is None:
        raise BadInput(f"data.{part}: absent; name the rows that are held out, a file or a set")
    return load(asked, part, how, rows)


def refuse_shared(kept: "dict[Part, Read]") -> None:
    """Raises `BadInput` where a question of test stands in validation."""
    if len(kept) < 2:
        return
    tested = {same(example.question) for example in kept["test"].examples}
    shared = sum(same(example.question) in tested for example in kept["valid"].examples)
    if shared:
        raise BadInput(f"{shared:,} questions of data.valid stand in data.test: test rows choose nothing; take others")


def answers(how: Data) -> Answer:
    """What the answers of the sets trained on are: numbers, unless one of them has others."""
    for asked in how.name or ():
        found = known(asked)
        if found and found.answer != "number":
            return found.answer
    return "number"


def rows_of(how: Data) -> int | None:
    """How many rows the sets trained on have by what is known of them, with nothing read; None where it is not."""
    counts = [found.splits["train"].rows if (found := known(asked)) and "train" in found.splits else None
              for asked in how.name or ()]  # fmt: skip
    whole = None if None in counts else sum(count or 0 for count in counts)
    return whole if how.rows is None or whole is None else min(whole, how.rows)


def from_file(label: str, found: Set, split: Split, how: Data, rows: int | None) -> Read:
    """The rows of a set's local file."""
    file = split.file
    assert file is not None
    path = Path(str(how.root)) / file.path
    if not path.is_file():
        raise BadInput(f"{label}: no file {path}; data.root is the folder that holds {file.path}")
    strict = how.sizes == "known"
    if strict and file.rows != split.published:
        raise BadInput(
            f"{label}: {file.path} holds {file.rows:,} rows, the set {split.published:,}; "
            'data.sizes = "any" takes what is there, gsm8k-aug-subset names just these'
        )
    with unswept():
        read = read_examples(path, fitted(how, found))
    if strict and len(read.examples) + len(read.skipped) != file.rows:
        raise wrong_size(label, len(read.examples) + len(read.skipped), file.rows)
    if strict and read.sha256 != file.sha256:
        raise BadInput(
            f"{label}: {path} is not the file known: SHA-256 {read.sha256[:12]}…, not {file.sha256[:12]}…; "
            'copy it again, or set data.sizes = "any"'
        )
    return cut(marked(read, split), rows)


def from_hub(label: str, found: Set, split: Split, how: Data, rows: int | None) -> Read:
    """The rows of a set from the hub."""
    if found.repo is None or split.hub is None:
        raise BadInput(f"{label} is not on the hub; set data.root to the folder that holds its files")
    table = hub(found.repo, found.config, split.hub, how.revision)
    if how.sizes == "known" and split.published not in (None, table.count):
        raise wrong_size(label, table.count, split.published or 0)
    reader = Reader(label, fitted(how, found), None if split.mark else rows, columns=found.columns)
    with unswept():
        reader.table(table.rows)
    read = reader.result()
    if split.mark and split.mark[0] == "icot_split":
        read = tagged(read, how)
    return cut(marked(read, split), rows)


def wrong_size(label: str, there: int, asked: int) -> BadInput:
    return BadInput(f'{label}: {there:,} rows, the set has {asked:,}; fetch it again, or set data.sizes = "any"')


def fitted(how: Data, found: Set) -> Data:
    """How the rows of a set are read: by its own chain."""
    chain = {"field": found.chain, "split": found.cut} if found.splits else {}
    return how.model_copy(update={**chain, "closed": False})


def hub_name(split: str) -> str:
    """What the hub calls a split."""
    return "validation" if split == "valid" else split


def tagged(read: Read, how: Data) -> Read:
    """GSM8K's training rows from the hub with the mark that the local file has: whether GSM8K-Aug validates on them."""
    chosen = {same(example.question) for example in load("gsm8k-aug:valid", "valid", how).examples}
    split = {True: "valid", False: "train"}
    examples = [replace(e, flags={**e.flags, "icot_split": split[same(e.question) in chosen]}) for e in read.examples]
    return replace(read, examples=tuple(examples))


def marked(read: Read, split: Split) -> Read:
    """The rows that have the mark of a split."""
    if split.mark is None:
        return read
    mark, value = split.mark
    at = [i for i, example in enumerate(read.examples) if example.flags.get(mark) == value]
    return picked(read, at)


def cut(read: Read, rows: int | None) -> Read:
    """The first rows."""
    return read if rows is None else picked(read, range(min(rows, len(read.examples))))


def picked(read: Read, at: Sequence[int]) -> Read:
    """Some of the rows."""
    return replace(read, examples=tuple(read.examples[i] for i in at), offsets=tuple(read.offsets[i] for i in at))


def noted(asked: str, read: Read) -> Read:
    """A file that is known by its hash, with a note of what it is."""
    if read.sha256 != PUBLISHED:
        return read
    return replace(read, notes=(*read.notes, f"{Path(asked).name}: all training rows of GSM8K-Aug, as published"))


def united(label: str, found: Set, how: Data, rows: int | None) -> Read:
    """The rows of a set that is several."""
    reads = [load(member, "train", how) for member in found.members]
    examples, notes = merged(found.members, [read.examples for read in reads])
    size = found.splits["train"].published
    if how.sizes == "known" and len(examples) != size:
        raise wrong_size(label, len(examples), size or 0)
    return joined(reads, examples[:rows], notes)


def joined(reads: Sequence[Read], examples: Sequence[Example], notes: Sequence[str]) -> Read:
    """Several reads as one; a row begins where it does in its own file."""
    if len(reads) == 1:
        return replace(reads[0], examples=tuple(examples))
    starts = {example.id: at for read in reads for example, at in zip(read.examples, read.offsets, strict=True)}
    every = (*(note for read in reads for note in read.notes), *notes)
    digest = hashlib.sha256("".join(read.sha256 for read in reads).encode()).hexdigest()
    skipped = tuple(text for read in reads for text in read.skipped)
    return Read(tuple(examples), digest, tuple(starts[example.id] for example in examples), every, skipped)
