"""`laconic generate RUN`: answer questions with a trained run, from the command line or a JSONL file."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import laconic
from laconic.cli.arguments import refuse_flags
from laconic.cli.commands.generate import RECIPE_FLAGS, RECIPE_REASON, GenerateCommand
from laconic.cli.files import print_json
from laconic.cli.generate_batch import hash_memory_files, list_options, write_rows
from laconic.cli.generate_prompts import PromptRow
from laconic.console import log_message, status
from laconic.errors import UsageError
from laconic.experiment.from_recipe.methods import encode_questions
from laconic.experiment.load_run import read_run_method, read_run_recipe
from laconic.experiment.text_models.reasoner import Answer, Reasoner
from laconic.models.checkpoints.weights import weights_fingerprint
from laconic.storage.manifest import hash_json


def answer_prompts(command: GenerateCommand) -> int:
    recipe = read_run_recipe(command.model)
    assert recipe is not None
    columns = recipe.data.columns
    rows = command.read_plain_prompts(question_column=columns.get("question", "question"))
    for row in rows:
        if not row.text:
            raise UsageError(f"{row.name} {'is empty' if row.text == '' else 'has messages'}; give a question")
    refuse_flags(command, ("stop_string", "min_tokens", "logprobs"), "not available for a run that answers questions")
    refuse_flags(command, RECIPE_FLAGS, RECIPE_REASON)
    if len(command.memory) > 1:
        raise UsageError(f"--memory: {len(command.memory)} files; a run that answers questions reads one")
    reasoner = load_reasoner(command)
    if reasoner.recipe.compression is not None and not command.memory:
        check_have_no_documents(rows, columns.get("document", "document"))
    start = time.perf_counter()
    if command.input is not None:
        num_tokens, num_passes = answer_rows(command, reasoner, rows)
        log_message(f"{num_tokens:,} tokens in {num_passes:,} passes, {time.perf_counter() - start:.1f} s")
        return 0
    memory = command.memory[0] if command.memory else None
    prompts = [row.text or "" for row in rows]
    answers = reasoner.generate(prompts, command.generation_config(), with_cot=command.with_cot, memory=memory)
    seconds = time.perf_counter() - start
    if command.format == "json":
        metadata = {"schema": 1, "model": command.model, "step": reasoner.run.step, "method": reasoner.recipe.method}
        results = [{"prompt": row.text} | answer_to_json(answer) for row, answer in zip(rows, answers, strict=True)]
        print_json(metadata | {"seconds": round(seconds, 3), "generations": results})
        return 0
    print("\n".join(answer.text for answer in answers))
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    log_message(f"{num_tokens} tokens in {sum(answer.passes.total for answer in answers)} passes, {seconds:.2f} s")
    return 0


def check_have_no_documents(rows: Sequence[PromptRow], column: str) -> None:
    """Raise `UsageError` (2) for rows with a document, in a field `column`, which the run would answer without it."""
    number = next((number for number, row in enumerate(rows, 1) if column in row.source), None)
    if number is not None:
        raise UsageError(
            f'--input: row {number} has a "{column}", which laconic evaluate --tasks FILE reads; here, compress it '
            "with laconic compress, and give --memory"
        )


def load_reasoner(command: GenerateCommand) -> Reasoner:
    """Load a run, with the tolerance of its Jacobi iterations. Raises `UsageError` (2) if it answers no questions."""
    with status(f"loading {command.model}"):
        model = laconic.load(command.model, device=command.device)
    if not isinstance(model, Reasoner):
        method = read_run_method(command.model)
        raise UsageError(
            f"{command.model}: method {method} has no `answer`, so it answers no questions; give the class one, or "
            "continue texts in Python with laconic.load(RUN, allow_code=True).generate(TEXT)"
        )
    return replace(model, jacobi_tolerance=command.jacobi_tolerance or 0.0)


def answer_rows(command: GenerateCommand, reasoner: Reasoner, rows: Sequence[PromptRow]) -> tuple[int, int]:
    """Answer the rows of a JSONL file in batches and write them; return the numbers of new tokens and of passes."""
    config, questions = command.generation_config(), [row.text or "" for row in rows]
    num_tokens = num_passes = 0

    def key() -> str:
        flags = [command.with_cot, reasoner.jacobi_tolerance, *hash_memory_files(command.memory)]
        weights = weights_fingerprint(reasoner.method.state_dict().items())
        return hash_json([weights, list_options(config), [row.source for row in rows], *flags])

    def results(first: int) -> Iterator[dict[str, Any]]:
        nonlocal num_tokens, num_passes
        for answer in reasoner.stream_answers(
            questions,
            config,
            with_cot=command.with_cot,
            memory=command.memory[0] if command.memory else None,
            batch_size=command.batch_size,
            start=first,
        ):
            num_tokens, num_passes = num_tokens + len(answer.token_ids), num_passes + answer.passes.total
            yield answer_to_json(answer)

    encode_questions(reasoner.tokenizer, reasoner.recipe.data, questions)  # fails before OUTPUT.part
    write_rows(rows, command.output, key, results)
    return num_tokens, num_passes


def answer_to_json(answer: Answer) -> dict[str, Any]:
    passes = answer.passes._asdict() | {"total": answer.passes.total}
    return {"text": answer.text, "ids": answer.token_ids, "passes": passes}
