"""Models that learn while they read, for `laconic compress`, `generate` and `inspect`: streams into states."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from laconic.console import log_message, progress, status
from laconic.errors import InputError, UsageError

if TYPE_CHECKING:
    from laconic.cli.compress import CompressCommand
    from laconic.cli.generate import GenerateCommand
    from laconic.experiment.nested_model import NestedTextModel
    from laconic.experiment.read_into_state import ReadDocument, StateReadingJob
    from laconic.generation.generate import Generation
    from laconic.nested.state import FastWeightState

VECTOR_FLAGS = ("stop_rule", "quantile", "threshold", "vectors", "total_vectors", "segment_tokens", "dtype", "seed")


def compress_text(command: "CompressCommand") -> int:
    """A text, or the lines of one, read into a state. Raises `Usage` (2) for what is asked of summary vectors."""
    given = next((flag for flag in VECTOR_FLAGS if getattr(command, flag)), None)
    if given:
        raise UsageError(
            f"--{given.replace('_', '-')}: of runs of autocompressor; {command.model} keeps fast weights of one size, leave it out"
        )
    from laconic.experiment.nested_model import load_nested
    from laconic.experiment.state_report import compute_state_cost, format_reports

    with status(f"loading {command.model}"):
        learned = load_nested(command.model, command.device)
    study, began = learned.start_reading(), time.perf_counter()
    if command.resume:
        resume_from_partial(command, study, resume_key(command, learned))
    read_texts(command, learned, study)
    if study.done is None:
        raise UsageError("no text is given; give one to read")
    learned.save(study.done, command.out, study.documents)
    command.partial_path.unlink(missing_ok=True)
    chunks, width = learned.model.hope_config.chunk_sizes, learned.model.token_embedding.weight.element_size()
    found = compute_state_cost(study.done, chunks, learned.model.config, width, study.tokens)
    seconds = time.perf_counter() - began
    if command.format == "json":
        about = {
            "schema": 1,
            "model": command.model,
            "source": command.source,
            "out": str(command.out),
            "kind": "state",
        }
        about |= {"bytes": command.out.stat().st_size, "seconds": round(seconds, 3)}
        print(json.dumps(about | {"bill": found.to_json()}, allow_nan=False))
        return 0
    print("\n".join([*found.to_lines(), *format_reports(study.done, chunks)]))
    rate = f"{(study.tokens - study.previous_tokens) / max(seconds, 1e-9):,.0f} tokens/s"
    log_message(f"wrote {command.out}, {command.out.stat().st_size:,} bytes, {seconds:.1f} s, {rate}")
    return 0


def resume_key(command: "CompressCommand", learned: "NestedTextModel") -> dict[str, Any]:
    """All that the state depends on besides the text."""
    return {
        "batch": command.batch_size if command.is_jsonl else None,
        "weights": learned.model.weights_fingerprint,
        "tokenizer": learned.tokenizer.fingerprint,
    }


def resume_from_partial(command: "CompressCommand", study: "StateReadingJob", key: dict[str, Any]) -> None:
    """What was kept becomes where this command begins. Raises `BadInput` (66) where nothing is."""
    if not command.partial_path.is_file():
        raise InputError(f"--resume: no {command.partial_path}; --save-every N keeps one while it reads")
    study.load(command.partial_path, key)
    log_message(f"going on after {study.tokens:,} tokens")


def read_texts(command: "CompressCommand", learned: "NestedTextModel", study: "StateReadingJob") -> None:
    """All texts read, with progress, and the state kept now and then."""
    from laconic.cli.compress import SourceProgress

    seen = SourceProgress(study)
    with progress("reading") as show:
        for done, _ in enumerate(study.run(command.text_batches(learned.token_stream, seen)), 1):
            show(seen.describe_rate(), seen.bytes_done or 1, seen.total)
            if command.save_every is not None and done % command.save_every == 0:
                study.save(command.partial_path, resume_key(command, learned))


def generate_text(command: "GenerateCommand", prompts: list[str]) -> int:
    """Prompts continued on a state, which is saved with what was read where that is asked for."""
    validate_generate(command)
    from laconic.experiment.nested_model import load_nested, read_documents

    with status(f"loading {command.model}"):
        learned = load_nested(command.model, command.device)
        if command.learn and not learned.update_weights:
            raise UsageError(
                f"--learn: {command.model} has inner_loop.enabled false, its fast weights stand still; leave it out"
            )
        state = learned.load(command.memory[0]) if command.memory else None
        before = read_documents(command.memory[0]) if command.memory else []
    rows = 1 if state is None else len(state.position)
    heads = state_row_titles(before, rows)
    called = [f"{head}{prompts[0]}" for head in heads] if rows > 1 and len(prompts) == 1 else prompts
    start = time.perf_counter()
    streamer = command.make_streamer(prompts) if rows == 1 else None
    config = replace(command.generation_config(streamer), update_on_prompt=command.learn or None)
    written = learned.generate(prompts, state, config=config)
    command.print_generations(called, written, learned.model, time.perf_counter() - start)
    if command.save_state is not None:
        save_generated_state(command, learned, prompts, written, before)
    return 0


def validate_generate(command: "GenerateCommand") -> None:
    """Raises `Usage` (2) for what cannot be meant of a model that learns while it reads."""
    odd = {"chat": command.chat, "teacher": command.with_cot, "allow_missing": command.allow_missing, "dtype": command.dtype,
           "revision": command.revision}  # fmt: skip
    given = next((name for name, value in odd.items() if value), None)
    if given:
        raise UsageError(f"--{given.replace('_', '-')}: not of a model that learns while it reads; leave it out")
    if len(command.memory) > 1:
        raise UsageError(f"--memory: {len(command.memory)} files; fast weights are one state, give one file")
    if command.save_state is not None and not command.learn:
        raise UsageError(
            f"--save-state {command.save_state}: nothing is learned that could be kept; add --learn, or leave it out"
        )
    if command.save_state is not None and not command.save_state.resolve().parent.is_dir():
        raise UsageError(
            f"--save-state {command.save_state}: there is no folder {command.save_state.parent}; make it first"
        )


def state_row_titles(documents: "Sequence[Sequence[ReadDocument]]", rows: int) -> list[str]:
    """What to call each row of a state: the names of what it has read, where there are several."""
    if rows == 1 or len(documents) != rows:
        return [f"[row {row}] " for row in range(1, rows + 1)]
    return [f"[{', '.join(document.name for document in row)}] " for row in documents]


def save_generated_state(
    command: "GenerateCommand",
    learned: "NestedTextModel",
    prompts: Sequence[str],
    written: "Sequence[Generation]",
    before: "list[list[ReadDocument]]",
) -> None:
    """The state after prompts and answers as a file."""
    from laconic.experiment.read_into_state import ReadDocument
    from laconic.nested import state as values

    assert command.save_state is not None
    state = values.concat_rows(*(cast("FastWeightState", each.state) for each in written))
    told = prompts if len(prompts) == len(written) else list(prompts) * len(written)
    rows = before if len(before) == len(written) else before * len(written) or [[] for _ in written]
    documents = [
        [*row, ReadDocument("prompt and answer", sha256((prompt + each.text).encode()).hexdigest(),
                        len(learned.tokenizer.encode(prompt)) + len(each.token_ids))]
        for row, prompt, each in zip(rows, told, written, strict=True)
    ]  # fmt: skip
    learned.save(state, command.save_state, documents)
    log_message(
        f"wrote {command.save_state}, {command.save_state.stat().st_size:,} bytes: {int(state.position.sum()):,} tokens read so far"
    )


def describe_state_file(path: Path, format: str) -> int:
    """What a state's file says of itself; no run is needed. Raises `Damaged` (76) for what is no sound state."""
    from laconic.experiment import state_report
    from laconic.nested import state_file
    from laconic.nested.hope.model import STATE_KIND

    state, about = state_file.read_state_file(path, STATE_KIND)
    found = {
        "schema": 1,
        "mixer": str(path),
        "bytes": path.stat().st_size,
        "state": state_report.state_file_to_json(state, about),
    }
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
                *(state_report.format_reports(state, chunks) if chunks else []),
                *(
                    f"text       {x['name']}: {x['tokens']:,} tokens; sha256 {x['sha256'][:12]}…"
                    for row in told["documents"]
                    for x in row
                ),
            ]
        )
    )
    return 0
