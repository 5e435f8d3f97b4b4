"""Models with fast weights in `laconic compress`, `generate` and `inspect`."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from laconic.cli.arguments import refuse_flags
from laconic.cli.generate_output import GenerationPrinter
from laconic.console import log_message, status
from laconic.errors import UsageError

if TYPE_CHECKING:
    from laconic.cli.compress import CompressCommand
    from laconic.cli.generate import GenerateCommand
    from laconic.experiment.nested_model import NestedTextModel
    from laconic.experiment.read_into_state import ReadDocument
    from laconic.generation.generate import Generation
    from laconic.nested.state import FastWeightState

VECTOR_FLAGS = ("stop_rule", "quantile", "threshold", "vectors", "total_vectors", "segment_tokens", "dtype", "seed")


def compress_text(command: "CompressCommand") -> int:
    """Read a text, or each line of a .jsonl, into a state. Raises `UsageError` (2) for flags of summary vectors."""
    reason = f"only for runs with method autocompressor; {command.model} has a state of fixed size"
    refuse_flags({name: getattr(command, name) for name in VECTOR_FLAGS}, reason)
    from laconic.experiment.nested_model import load_nested
    from laconic.experiment.state_report import compute_state_cost, format_reports

    with status(f"loading {command.model}"):
        model = load_nested(command.model, command.device)
    job, start = model.start_reading(), time.perf_counter()
    key = compress_resume_key(command, model)
    if command.resume:
        command.resume_from_partial(job, key)
    command.run_job(job, model.token_stream, key)
    if job.done is None:
        raise UsageError(f"{command.source} contains no text")
    model.save(job.done, command.out, job.documents)
    command.partial_path.unlink(missing_ok=True)
    chunk_sizes = model.model.hope_config.chunk_sizes
    bytes_per_number = model.model.token_embedding.weight.element_size()
    cost = compute_state_cost(job.done, chunk_sizes, model.model.config, bytes_per_number, job.tokens)
    seconds, num_bytes = time.perf_counter() - start, command.out.stat().st_size
    if command.format == "json":
        metadata = {"schema": 1, "model": command.model, "source": command.source, "out": str(command.out)}
        metadata |= {"kind": "state", "bytes": num_bytes, "seconds": round(seconds, 3)}
        print(json.dumps(metadata | {"cost": cost.to_json()}, allow_nan=False))
        return 0
    print("\n".join([*cost.to_lines(), *format_reports(job.done, chunk_sizes)]))
    rate = f"{(job.tokens - job.previous_tokens) / max(seconds, 1e-9):,.0f} tokens/s"
    log_message(f"wrote {command.out}, {num_bytes:,} bytes, {seconds:.1f} s, {rate}")
    return 0


def compress_resume_key(command: "CompressCommand", model: "NestedTextModel") -> dict[str, Any]:
    """Return everything except the text that determines the state."""
    return {
        "batch_size": command.batch_size if command.is_jsonl else None,
        "weights": model.model.weights_fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
    }


def generate_text(command: "GenerateCommand", prompts: list[str]) -> int:
    """Continue prompts from a state; `--save-state` saves the updated state."""
    validate_generate(command)
    from laconic.experiment.nested_model import load_nested, read_documents

    with status(f"loading {command.model}"):
        model = load_nested(command.model, command.device)
        if command.learn and not model.update_weights:
            raise UsageError(f"--learn: the recipe of {command.model} has inner_loop.enabled = false; remove --learn")
        state = model.load(command.memory[0]) if command.memory else None
        documents = read_documents(command.memory[0]) if command.memory else []
    rows = 1 if state is None else len(state.position)
    prompt_labels = prompts
    if rows > 1 and len(prompts) == 1:
        prompt_labels = [f"{title}{prompts[0]}" for title in state_row_titles(documents, rows)]
    printer = GenerationPrinter(prompt_labels, is_silent=command.format == "json")
    config = replace(command.generation_config(printer), update_on_prompt=command.learn or None)
    generations = model.generate(prompts, state, config=config)
    command.print_generations([{"prompt": text} for text in prompt_labels], generations, model.model, printer)
    if command.save_state is not None:
        save_generated_state(command.save_state, model, prompts, generations, documents)
    return 0


def validate_generate(command: "GenerateCommand") -> None:
    """Raise `UsageError` (2) for flags that are invalid for a model with fast weights."""
    names = ("with_cot", "allow_missing", "dtype", "revision")
    refuse_flags({name: getattr(command, name) for name in names}, "not available for a model with fast weights")
    if len(command.memory) > 1:
        raise UsageError(f"--memory: {len(command.memory)} files given; a model with fast weights takes one state")
    if command.save_state is None:
        return
    if not command.learn:
        raise UsageError(f"--save-state {command.save_state}: requires --learn")
    if not command.save_state.resolve().parent.is_dir():
        folder = command.save_state.parent
        raise UsageError(f"--save-state {command.save_state}: folder {folder} does not exist; create it first")


def state_row_titles(documents: "Sequence[Sequence[ReadDocument]]", rows: int) -> list[str]:
    """Return a prefix for each row of a state: the names of its documents, or the row number."""
    if rows == 1 or len(documents) != rows:
        return [f"[row {row}] " for row in range(1, rows + 1)]
    return [f"[{', '.join(document.name for document in row)}] " for row in documents]


def save_generated_state(
    path: Path,
    model: "NestedTextModel",
    prompts: Sequence[str],
    generations: "Sequence[Generation]",
    documents: "list[list[ReadDocument]]",
) -> None:
    """Save the state after prompts and answers; `documents` lists what each row had read before."""
    from laconic.experiment.read_into_state import ReadDocument
    from laconic.nested.state import concat_rows

    n = len(generations)
    state = concat_rows(*(cast("FastWeightState", generation.state) for generation in generations))
    row_prompts = prompts if len(prompts) == n else list(prompts) * n
    row_documents = documents if len(documents) == n else documents * n or [[] for _ in generations]
    updated: list[list[ReadDocument]] = []
    for row, prompt, generation in zip(row_documents, row_prompts, generations, strict=True):
        digest = sha256((prompt + generation.text).encode()).hexdigest()
        num_tokens = len(model.tokenizer.encode(prompt)) + len(generation.token_ids)
        updated.append([*row, ReadDocument("prompt and answer", digest, num_tokens)])
    model.save(state, path, updated)
    tokens = int(state.position.sum())
    log_message(f"wrote {path}, {path.stat().st_size:,} bytes: {tokens:,} tokens read so far")


def describe_state_file(path: Path, format: str) -> int:
    """Print the metadata of a state file without loading a model. Raises `CorruptArtifactError` (76)."""
    from laconic.experiment.state_report import format_reports, state_file_to_json
    from laconic.nested.hope.model import STATE_KIND
    from laconic.nested.state_file import read_state_file

    state, metadata = read_state_file(path, STATE_KIND)
    summary, num_bytes = state_file_to_json(state, metadata), path.stat().st_size
    if format == "json":
        report = {"schema": 1, "file": str(path), "bytes": num_bytes, "state": summary}
        print(json.dumps(report, ensure_ascii=False, allow_nan=False))
        return 0
    rows, chunk_sizes = len(state.position), (metadata.get("source") or {}).get("chunks") or ()
    lines = [
        f"{path}: state of {summary['holds']}, {rows} row{'s' * (rows > 1)}, {summary['tokens']:,} tokens read, "
        f"{num_bytes:,} bytes",
        f"model      {str(summary['model'])[:12]}…, tokenizer {str(summary['tokenizer'])[:12]}…",
        f"written    {summary['created'] or 'at an unknown time'} by laconic "
        f"{summary['version'] or '(unknown version)'}, schema {summary['schema']}",
        *(format_reports(state, chunk_sizes) if chunk_sizes else []),
        *(
            f"text       {document['name']}: {document['tokens']:,} tokens; sha256 {document['sha256'][:12]}…"
            for row in summary["documents"]
            for document in row
        ),
    ]
    print("\n".join(lines))
    return 0
