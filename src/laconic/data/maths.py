"""Data sets by name, of files or of the hub: loaded, sizes checked, merged for training by the rules for that."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from laconic.core.contract import Example
from laconic.core.errors import BadInput
from laconic.data.contamination import merged, refuse_files, refuse_marks, refuse_names, refuse_overlap, same
from laconic.data.examples import Read, Reader, read_examples, unswept
from laconic.data.sets import PUBLISHED, SETS, Answer, Set, Split, files, known, named, parted
from laconic.data.settings import Data, Part, is_file
from laconic.data.tables import hub

__all__ = ["SETS", "answers", "apart", "at_hand", "held", "load", "named", "rows_of", "training"]

HELD_OUT: tuple[Part, ...] = ("valid", "test")


def load(asked: str, part: Part, how: Data, rows: int | None = None) -> Read:
    """The rows of a set, of a name on the hub or of a file; of the split that `asked` names, else of `part`.

    Raises `BadInput` for an unknown name or split, a size that is not the known one, and rows that are bad.
    """
    if is_file(asked):
        return noted(asked, read_examples(asked, how, rows))
    name, split = parted(asked)
    split = split or part
    if known(asked) is None and name.count("/") == 1:
        return from_hub(f"{name}:{split}", Set(name, "", "", {}, name), Split(None, hub=hub_name(split)), how, rows)
    found = named(asked)
    there = next((one for key, one in found.splits.items() if key == split), None)
    if there is None:
        more = f"; laconic data make {found.made} makes rows to train on" if found.made and split == "train" else ""
        raise BadInput(f"{found.name} has no split {split}; it has {', '.join(found.splits)}{more}")
    label = f"{found.name}:{split}"
    if found.members:
        return united(label, found, how, rows)
    path = placed(asked, found, there, how)
    if path is None:
        return from_hub(label, found, there, how, rows)
    return from_file(label, path, found, there, how, rows)


def training(how: Data) -> Read:
    """The rows trained on, questions of several sets once. Raises `BadInput` where a rule of contamination says so."""
    refuse_names(how)
    names = how.name or ()
    every = [asked for asked in (*names, how.valid, how.test) if asked]
    if how.field and not any(is_file(asked) or known(asked) is None for asked in every):
        raise BadInput(f"data.field {how.field}: sets known by name have their own chain; leave the key out")
    reads = {asked: load(asked, "train", how, how.rows) for asked in names}
    return apart(how, reads, {part: held(how, part) for part in HELD_OUT if getattr(how, part)})


def apart(how: Data, reads: Mapping[str, Read], kept: Mapping[Part, Read]) -> Read:
    """The rows of `reads`, files or sets by what was asked, none of which is held out. Raises `BadInput`."""
    all_of = dict(files())
    found = [*reads.items(), *((str(getattr(how, part)), read) for part, read in kept.items())]
    whole = {name: all_of[read.sha256] for name, read in found if read.sha256 in all_of}
    refuse_files(how, {name: split for name, split in whole.items() if how.kind == "jsonl" or is_file(name)})
    for name, read in reads.items():
        refuse_marks(name, read.examples, how.allow_overlap)
    examples, notes = merged(list(reads), [read.examples for read in reads.values()])
    refuse_overlap(examples, [e for read in kept.values() for e in read.examples], how.allow_overlap)
    refuse_shared(kept)
    return joined(list(reads.values()), examples[: how.rows], notes)


def held(how: Data, part: Part, rows: int | None = None) -> Read:
    """The rows of validation or test. Raises `BadInput`, also where the recipe names none."""
    asked = how.valid if part == "valid" else how.test
    if asked is None:
        raise BadInput(f"data.{part}: absent; name the rows that are held out, a file or a set")
    return load(asked, part, how, rows)


def refuse_shared(kept: Mapping[Part, Read]) -> None:
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
    whole = 0
    for asked in how.name or ():
        found = known(asked)
        split = found.splits.get("train") if found else None
        here = split.file if found and split and how.root and asked == found.name else None
        count = here.rows if here and split and split.mark is None else split.rows if split else None
        if count is None:
            return None
        whole += count
    return whole if how.rows is None else min(whole, how.rows)


def placed(asked: str, found: Set, split: Split, how: Data) -> Path | None:
    """Where the file of a split has to lie; None where its rows come from the hub."""
    if how.root is None or split.file is None or parted(asked)[0] != found.name:
        return None
    return Path(how.root) / split.file.path


def at_hand(asked: str, how: Data) -> bool:
    """Whether all training rows of a file or set lie in files here."""
    if is_file(asked):
        return Path(asked).is_file()
    found = known(asked)
    if found is None or "train" not in found.splits:
        return False
    if found.members:
        return all(at_hand(member, how) for member in found.members)
    path = placed(asked, found, found.splits["train"], how)
    return path is not None and path.is_file()


def from_file(label: str, path: Path, found: Set, split: Split, how: Data, rows: int | None) -> Read:
    """The rows of a set's local file."""
    file = split.file
    assert file is not None
    if not path.is_file():
        raise BadInput(f"{label}: no file {path}; data.root is the folder that holds {file.path}")
    if how.sizes == "known" and file.rows != split.published:
        raise BadInput(
            f"{label}: {file.path} holds {file.rows:,} rows, the set {split.published:,}; "
            'data.sizes = "any" takes what is there, gsm8k-aug-subset names just these'
        )
    with unswept():
        read = read_examples(path, fitted(how, found))
    there = len(read.examples) + len(read.skipped)
    if how.sizes == "any":
        return cut(marked(sized(read, label, there, split), split), rows)
    if there != file.rows:
        raise wrong_size(label, there, file.rows)
    if read.sha256 != file.sha256:
        raise BadInput(
            f"{label}: {path} is not the file known: SHA-256 {read.sha256[:12]}…, not {file.sha256[:12]}…; "
            'copy it again, or set data.sizes = "any"'
        )
    return cut(marked(read, split), rows)


def from_hub(label: str, found: Set, split: Split, how: Data, rows: int | None) -> Read:
    """The rows of a set from the hub."""
    if found.repo is None or split.hub is None:
        raise BadInput(f"{label} is not on the hub; set data.root to the folder that holds its files")
    trained = {other.repo if (other := known(asked)) else parted(asked)[0] for asked in how.name or ()}
    table = hub(found.repo, found.config, split.hub, how.revision if found.repo in trained else None)
    if how.sizes == "known" and split.published not in (None, table.count):
        raise wrong_size(label, table.count, split.published or 0)
    columns = found.columns if found.splits else None
    reader = Reader(label, fitted(how, found), None if split.mark else rows, columns=columns)
    with unswept():
        reader.table(table.rows)
    read = sized(reader.result(), label, table.count, split)
    if split.mark:
        read = tagged(read, how, split.mark[0], "gsm8k-aug:valid", ("valid", "train"))
    if found.name == "gsm-hard":
        read = tagged(read, how, "unchanged_from_gsm8k", "gsm8k:test", (True, False))
    return cut(marked(read, split), rows)


def wrong_size(label: str, there: int, asked: int) -> BadInput:
    return BadInput(f'{label}: {there:,} rows, the set has {asked:,}; fetch it again, or set data.sizes = "any"')


def sized(read: Read, label: str, there: int, split: Split) -> Read:
    """With a note where rows are taken that are not as many as the set has."""
    if split.published in (None, there):
        return read
    return replace(read, notes=(*read.notes, f"{label}: {there:,} rows, of the {split.published:,} that the set has"))


def fitted(how: Data, found: Set) -> Data:
    """How the rows of a set are read: by its own chain."""
    chain = {"field": found.chain, "split": found.cut} if found.splits else {}
    return how.model_copy(update={**chain, "closed": False})


def hub_name(split: str) -> str:
    """What the hub calls a split."""
    return "validation" if split == "valid" else split


def tagged(read: Read, how: Data, mark: str, other: str, values: tuple[object, object]) -> Read:
    """Rows of the hub with a mark that the local file has: the first value where a question stands in another set."""
    there = {same(example.question) for example in load(other, "test", how).examples}
    examples = [replace(e, flags={**e.flags, mark: values[same(e.question) not in there]}) for e in read.examples]
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
