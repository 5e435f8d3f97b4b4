"""Models that learn while they read, for `laconic compress`, `generate` and `inspect`: streams into states."""

import json
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from laconic.console import note, progress, say
from laconic.core.errors import BadInput, Usage

if TYPE_CHECKING:
    from laconic.core.generate import Generation
    from laconic.core.state import State
    from laconic.recipe.learned import Learned
    from laconic.recipe.studying import Document, Study
    from laconic.verbs.compress import Compress
    from laconic.verbs.generate import Generate

VECTORS = ("stop", "q", "tau", "n", "budget", "segment", "dtype", "seed")  # flags of summary vectors


def compressed(asked: "Compress") -> int:
    """A text, or the lines of one, read into a state. Raises `Usage` (2) for what is asked of summary vectors."""
    given = next((flag for flag in VECTORS if getattr(asked, flag)), None)
    if given:
        raise Usage(f"--{given}: of runs of autocompressor; {asked.model} keeps fast weights of one size, leave it out")
    from laconic.recipe.learned import load_learned
    from laconic.recipe.states import bill, rate_lines

    with note(f"loading {asked.model}"):
        learned = load_learned(asked.model, asked.device)
    study, began = learned.study(), time.perf_counter()
    if asked.resume:
        go_on(asked, study, key(asked, learned))
    read(asked, learned, study)
    if study.kept is None:
        raise Usage("no text is given; give one to read")
    learned.save(study.kept, asked.out, study.documents)
    asked.part.unlink(missing_ok=True)
    chunks, width = learned.model.shape.chunks, learned.model.words.weight.element_size()
    found = bill(study.kept, chunks, learned.model.config, width, study.tokens)
    seconds = time.perf_counter() - began
    if asked.format == "json":
        about = {"schema": 1, "model": asked.model, "source": asked.source, "out": str(asked.out), "kind": "state"}
        about |= {"bytes": asked.out.stat().st_size, "seconds": round(seconds, 3)}
        print(json.dumps(about | {"bill": found.plain()}, allow_nan=False))
        return 0
    print("\n".join([*found.lines(), *rate_lines(study.kept, chunks)]))
    rate = f"{(study.tokens - study.before_tokens) / max(seconds, 1e-9):,.0f} tokens/s"
    say(f"wrote {asked.out}, {asked.out.stat().st_size:,} bytes, {seconds:.1f} s, {rate}")
    return 0


def key(asked: "Compress", learned: "Learned") -> dict[str, Any]:
    """All that the state depends on besides the text."""
    return {
        "batch": asked.batch if asked.rows else None,
        "weights": learned.model.slow,
        "tokenizer": learned.tokenizer.fingerprint,
    }


def go_on(asked: "Compress", study: "Study", key: dict[str, Any]) -> None:
    """What was kept becomes where this command begins. Raises `BadInput` (66) where nothing is."""
    if not asked.part.is_file():
        raise BadInput(f"--resume: no {asked.part}; --every N keeps one while it reads")
    study.load(asked.part, key)
    say(f"going on after {study.tokens:,} tokens")


def read(asked: "Compress", learned: "Learned", study: "Study") -> None:
    """All texts read, with progress, and the state kept now and then."""
    from laconic.verbs.compress import Seen

    seen = Seen(study)
    with progress("reading") as show:
        for done, _ in enumerate(study.run(asked.groups(learned.text, seen)), 1):
            show(seen.rate(), seen.done or 1, seen.total)
            if asked.every is not None and done % asked.every == 0:
                study.save(asked.part, key(asked, learned))


def continued(asked: "Generate", prompts: list[str]) -> int:
    """Prompts continued on a state, which is saved with what was read where that is asked for."""
    check(asked)
    from laconic.recipe.learned import documents_of, load_learned

    with note(f"loading {asked.model}"):
        learned = load_learned(asked.model, asked.device)
        if asked.learn and not learned.learn:
            raise Usage(f"--learn: {asked.model} has learning.learn false, its fast weights stand still; leave it out")
        state = learned.load(asked.memory[0]) if asked.memory else None
        before = documents_of(asked.memory[0]) if asked.memory else []
    rows = 1 if state is None else len(state.position)
    heads = titles(before, rows)
    called = [f"{head}{prompts[0]}" for head in heads] if rows > 1 and len(prompts) == 1 else prompts
    start = time.perf_counter()
    written = learned.generate(
        prompts, state, learn=asked.learn, max_tokens=asked.max_tokens, min_tokens=asked.min_tokens,
        temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty, stop=asked.stop, seed=asked.seed,
        on_token=asked.streamer(prompts) if rows == 1 else None,
    )  # fmt: skip
    asked.tell(called, written, learned.model, time.perf_counter() - start)
    if asked.save is not None:
        save(asked, learned, prompts, written, before)
    return 0


def check(asked: "Generate") -> None:
    """Raises `Usage` (2) for what cannot be meant of a model that learns while it reads."""
    odd = {"chat": asked.chat, "teacher": asked.teacher, "allow_missing": asked.allow_missing, "dtype": asked.dtype,
           "revision": asked.revision}  # fmt: skip
    given = next((name for name, value in odd.items() if value), None)
    if given:
        raise Usage(f"--{given.replace('_', '-')}: not of a model that learns while it reads; leave it out")
    if len(asked.memory) > 1:
        raise Usage(f"--memory: {len(asked.memory)} files; fast weights are one state, give one file")
    if asked.save is not None and not asked.learn:
        raise Usage(f"--save {asked.save}: nothing is learned that could be kept; add --learn, or leave it out")
    if asked.save is not None and not asked.save.resolve().parent.is_dir():
        raise Usage(f"--save {asked.save}: there is no folder {asked.save.parent}; make it first")


def titles(documents: "Sequence[Sequence[Document]]", rows: int) -> list[str]:
    """What to call each row of a state: the names of what it has read, where there are several."""
    if rows == 1 or len(documents) != rows:
        return [f"[row {row}] " for row in range(1, rows + 1)]
    return [f"[{', '.join(document.name for document in row)}] " for row in documents]


def save(
    asked: "Generate",
    learned: "Learned",
    prompts: Sequence[str],
    written: "Sequence[Generation]",
    before: "list[list[Document]]",
) -> None:
    """The state after prompts and answers as a file."""
    from laconic.core import state as values
    from laconic.recipe.studying import Document

    assert asked.save is not None
    state = values.join(*(cast("State", each.state) for each in written))
    told = prompts if len(prompts) == len(written) else list(prompts) * len(written)
    rows = before if len(before) == len(written) else before * len(written) or [[] for _ in written]
    documents = [
        [*row, Document("prompt and answer", sha256((prompt + each.text).encode()).hexdigest(),
                        len(learned.tokenizer.encode(prompt)) + len(each.ids))]
        for row, prompt, each in zip(rows, told, written, strict=True)
    ]  # fmt: skip
    learned.save(state, asked.save, documents)
    say(f"wrote {asked.save}, {asked.save.stat().st_size:,} bytes: {int(state.position.sum()):,} tokens read so far")


def described(path: Path, format: str) -> int:
    """What a state's file says of itself; no run is needed. Raises `Damaged` (76) for what is no sound state."""
    from laconic.core import state_file
    from laconic.methods.hope_model import KIND
    from laconic.recipe import states

    state, about = state_file.stored(path, KIND)
    found = {"schema": 1, "memory": str(path), "bytes": path.stat().st_size, "state": states.plain(state, about)}
    if format == "json":
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
        return 0
    told, rows = found["state"], len(state.position)
    chunks = (about.get("source") or {}).get("chunks") or ()
    print(
        "\n".join(
            [
                f"{path}: a state of {told['holds']}, {rows} row{'s' * (rows > 1)}, {told['tokens']:,} tokens read, "
                f"{found['bytes']:,} bytes",
                f"model      {str(told['model'])[:12]}…, tokenizer {str(told['tokenizer'])[:12]}…",
                f"written    {told['created'] or 'at a time not known'} by laconic {told['version'] or 'not said'}, "
                f"schema {told['schema']}",
                *(states.rate_lines(state, chunks) if chunks else []),
                *(
                    f"text       {x['name']}: {x['tokens']:,} tokens; sha256 {x['sha256'][:12]}…"
                    for row in told["documents"]
                    for x in row
                ),
            ]
        )
    )
    return 0
