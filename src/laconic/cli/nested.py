"""Models with fast weights in `laconic compress`, `generate` and `serve`."""

import time
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import laconic
from laconic.cli.arguments import parse_dtype, refuse_flags
from laconic.cli.commands.chat import ChatCommand
from laconic.cli.commands.compress import KV_FLAGS, SUMMARY_FLAGS, CompressCommand, is_plain_model
from laconic.cli.commands.generate import GenerateCommand
from laconic.cli.commands.serve import ServeCommand
from laconic.cli.model_flags import ModelFlags
from laconic.console import status
from laconic.errors import UsageError
from laconic.experiment.from_recipe.untrained_levels import UNTRAINED_INNER_LR, read_untrained_levels
from laconic.experiment.load_run import is_nested
from laconic.experiment.state_report import describe_state_cost, format_reports
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.experiment.text_models.read_into_state import load_read_documents, spread_documents


def load_model(
    command: CompressCommand | GenerateCommand | ServeCommand | ChatCommand, memory: Path | None
) -> NestedTextModel:
    """Load a model with fast weights, or a plain checkpoint with the levels of a state, or as the flags say."""
    name, inner_lr = command.model, getattr(command, "inner_lr", None)  # laconic chat has no --inner-lr
    options: dict[str, Any] = {"device": command.device}
    if isinstance(command, ModelFlags):  # the dtype of laconic compress is that of the file
        options |= {"dtype": command.dtype, "revision": command.revision}
    if is_nested(name):
        names = [*(["inner_lr"] if inner_lr is not None else []), *(key for key in options if key != "device")]
        refuse_flags(command, names, f"not available for a trained model such as {name}")
        return cast("NestedTextModel", laconic.load(name, device=command.device))
    if not is_plain_model(name):
        raise UsageError(
            f"{name} has no fast weights, so it cannot learn while it reads; give a checkpoint or a run of method hope"
        )
    levels = None if memory is None else read_untrained_levels(memory)
    if levels is None:
        inner_lr = UNTRAINED_INNER_LR if inner_lr is None else inner_lr
        return NestedTextModel.from_pretrained(name, inner_lr=inner_lr, **options)
    if inner_lr is not None:
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
            num_texts = len(list(command.iter_texts(file)))
    job = model.start_reading(before, num_texts)
    start = time.perf_counter()
    key = {
        "batch_size": command.batch_size if command.is_jsonl else None,
        "weights": model.model.weights_fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
    }
    if command.memory is not None:
        key["memory"] = sha256(command.memory.read_bytes()).hexdigest()
    command.run_job(job, partial(model.token_stream, is_new=before is None), key)
    assert job.done is not None
    earlier = spread_documents(documents, len(job.documents))
    texts = [[*row, *new] for row, new in zip(earlier, job.documents, strict=True)]
    model.save(job.done, command.out, texts, parse_dtype(command.dtype))
    command.remove_partial()
    chunk_sizes = model.model.hope_config.chunk_sizes
    dtype = model.model.dtype
    cost, cost_lines = describe_state_cost(job.done, chunk_sizes, model.model.config, dtype, job.tokens)
    loss = [f"loss       {job.loss.mean:.3f} nats per token while reading"] if job.loss.num_scored else []
    lines = [*cost_lines, *loss, *format_reports(job.done, chunk_sizes)]
    data = {"kind": "state", "nats": job.loss.mean, "cost": cost}
    command.print_result(lines, data, time.perf_counter() - start, job.tokens - job.previous_tokens)
    return 0
