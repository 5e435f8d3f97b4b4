"""Models with fast weights in `laconic compress`, `generate` and `inspect`."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import laconic
from laconic.cli.arguments import parse_dtype, refuse_flags
from laconic.cli.commands.compress import KV_FLAGS, SUMMARY_FLAGS, CompressCommand, is_plain_model
from laconic.cli.commands.generate import GenerateCommand
from laconic.cli.commands.serve import ServeCommand
from laconic.cli.files import check_memories, check_replaceable
from laconic.cli.generate_output import GenerationTimer
from laconic.cli.generate_prompts import title_rows
from laconic.cli.model_flags import ModelFlags
from laconic.console import log_message, status
from laconic.errors import UsageError
from laconic.experiment.from_recipe.untrained_levels import UNTRAINED_INNER_LR, read_untrained_levels
from laconic.experiment.state_report import describe_state_cost, format_reports
from laconic.experiment.text_models.nested_model import NestedTextModel, is_nested, load_read_documents, match_rows
from laconic.experiment.text_models.read_into_state import ReadDocument
from laconic.nested.state import FastWeightState, concat_rows

BATCH_FLAGS = ("output", "sample", "allow_long_prompt", "quantize")
MIN_REPORTED_PROMPT = 256  # tokens of prompts from which their loss is printed


def load_model(command: CompressCommand | GenerateCommand | ServeCommand, memory: Path | None) -> NestedTextModel:
    """Load a model with fast weights, or a plain checkpoint with the levels of a state, or as the flags say.

    Raises `UsageError` (2) for a run that does not learn while it reads.
    """
    name = command.model
    options: dict[str, Any] = {"device": command.device}
    if isinstance(command, ModelFlags):  # the dtype of laconic compress is that of the file
        options |= {"dtype": command.dtype, "revision": command.revision}
    if is_nested(name):
        names = ("inner_lr", *(option for option in options if option != "device"))
        refuse_flags(command, names, f"not available for a trained model such as {name}")
        return cast("NestedTextModel", laconic.load(name, device=command.device))
    if not is_plain_model(name):
        raise UsageError(
            f"{name} has no fast weights, so it cannot learn while it reads; give a checkpoint or a run of method hope"
        )
    levels = None if memory is None else read_untrained_levels(memory)
    if levels is None:
        inner_lr = UNTRAINED_INNER_LR if command.inner_lr is None else command.inner_lr
        return NestedTextModel.from_pretrained(name, inner_lr=inner_lr, **options)
    refuse_flags(command, ("inner_lr",), f"{memory} has learned with {levels.inner_lr:g}")
    decoder = laconic.Decoder.from_pretrained(name, **options)
    return NestedTextModel.from_decoder(decoder, laconic.load_tokenizer(decoder.source_folder or name), levels)


def compress_text(command: CompressCommand) -> int:
    """Read a text, or each line of a .jsonl, into a state. Raises `UsageError` (2) for flags of other memories."""
    reason = f"not available with a fast-weight state, which {command.model} writes here"
    reason = "cannot be used with --learn" if command.learn else reason
    refuse_flags(command, (*SUMMARY_FLAGS, *KV_FLAGS, "seed"), reason)
    with status(f"loading {command.model}"):
        model = load_model(command, command.memory)
        before = None if command.memory is None else model.load_memory(command.memory)
        documents = [] if command.memory is None else load_read_documents(command.memory)
    num_texts = 1
    if before is not None and len(before.position) > 1:
        with command.open_source() as file:
            num_texts = len(list(command.iter_texts(file, lambda name, text: name)))
    job, start = model.start_reading(before, num_texts), time.perf_counter()
    command.run_job(job, partial(model.token_stream, is_new=before is None), compress_resume_key(command, model))
    assert job.done is not None
    earlier = spread_documents(documents, len(job.documents))
    texts = [[*row, *new] for row, new in zip(earlier, job.documents, strict=True)]
    model.save(job.done, command.out, texts, parse_dtype(command.dtype))
    command.remove_partial()
    chunk_sizes = model.model.hope_config.chunk_sizes
    dtype = model.model.token_embedding.weight.dtype
    cost, cost_lines = describe_state_cost(job.done, chunk_sizes, model.model.config, dtype, job.tokens)
    loss = [f"loss       {job.loss.mean:.3f} nats per token while reading"] if job.loss.num_scored else []
    lines = [*cost_lines, *loss, *format_reports(job.done, chunk_sizes)]
    data = {"kind": "state", "nats": job.loss.mean, "cost": cost}
    command.print_result(lines, data, time.perf_counter() - start, job.tokens - job.previous_tokens)
    return 0


def spread_documents(documents: list[list[ReadDocument]], n: int) -> list[list[ReadDocument]]:
    """Return what each of n rows has read: the state's documents, or those of its only row for all; else none."""
    return documents if len(documents) == n else documents * n or [[]] * n


def compress_resume_key(command: CompressCommand, model: NestedTextModel) -> dict[str, Any]:
    return {
        "batch_size": command.batch_size if command.is_jsonl else None,
        "weights": model.model.weights_fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
    } | ({} if command.memory is None else {"memory": sha256(command.memory.read_bytes()).hexdigest()})


def generate_text(command: GenerateCommand) -> int:
    """Continue prompts from a state; `--save-state` saves the updated state."""
    validate_generate(command)
    rows, memory = command.read_prompts(), command.memory[0] if command.memory else None
    with status(f"loading {command.model}"):
        model = load_model(command, memory)
        if command.learn and not model.update_weights:
            raise UsageError(f"--learn: the recipe of {command.model} has inner_loop.enabled = false; remove --learn")
        state = None if memory is None else model.load_memory(memory)
        documents = [] if memory is None else load_read_documents(memory)
    ids, state = match_rows([row.encode(model.tokenizer, is_continuation=state is not None) for row in rows], state)
    rows = title_rows(rows, len(ids), documents)
    printer = command.build_printer(rows)
    show_reading = partial(report_reading, printer.timer)
    if command.max_tokens == 0:
        states, answers = [model.read_ids(ids, state, on_reading=show_reading)], [""] * len(ids)
        counts = list(map(len, ids))
        if command.format == "json":
            printer.timer.prompt_tokens = sum(counts)
            command.print_generations([], [], model.model, printer)
    else:
        config = replace(printer.attach(command.generation_config()), update_on_prompt=command.learn or None)
        generations = model.generate_from_ids(ids, state, config, show_reading)
        command.print_generations(rows, generations, model.model, printer)
        states = [cast(FastWeightState, generation.state) for generation in generations]
        answers = [generation.text for generation in generations]
        counts = [generation.num_prompt_tokens + len(generation.token_ids) for generation in generations]
    if command.save_state is not None:
        prompts = [json.dumps(row.messages) if row.text is None else row.text for row in rows]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        save_generated_state(command.save_state, model, states, documents, list(zip(texts, counts, strict=True)))
    return 0


def report_reading(timer: GenerationTimer, done: int, total: int, nats: float) -> None:
    timer.on_prefill(done, total, f"tokens, {nats:.2f} nats per token" if done else "tokens")
    if done == total >= MIN_REPORTED_PROMPT:
        log_message(f"learned from {total:,} tokens, {nats:.3f} nats per token")


def validate_generate(command: GenerateCommand) -> None:
    """Raise `UsageError` (2) for flags that do not fit a model with fast weights, before it is loaded."""
    names = ("input", "with_cot", "allow_missing", *BATCH_FLAGS)
    refuse_flags(command, names, "not available for a model with fast weights")
    if len(command.memory) > 1:
        raise UsageError(f"--memory: {len(command.memory)} files given; a model with fast weights takes one state")
    check_memories(command.memory)
    if command.save_state is None:
        return
    if not command.learn:
        raise UsageError(f"--save-state {command.save_state}: requires --learn")
    check_replaceable("--save-state", command.save_state)


def save_generated_state(
    path: Path,
    model: NestedTextModel,
    states: Sequence[FastWeightState],
    documents: list[list[ReadDocument]],
    texts: Sequence[tuple[str, int]],
) -> None:
    """Save the state of rows that had read `documents`, and then `texts`, with their numbers of tokens."""
    state, n = concat_rows(*states), len(texts)
    updated = [
        [*row, ReadDocument("prompt and answer", sha256(text.encode()).hexdigest(), num_tokens)]
        for row, (text, num_tokens) in zip(spread_documents(documents, n), texts, strict=True)
    ]
    model.save(state, path, updated)
    tokens = int(state.position.sum())
    log_message(f"wrote {path}, {path.stat().st_size:,} bytes: {tokens:,} tokens read so far")
