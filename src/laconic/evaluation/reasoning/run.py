"""Evaluate a trained run on a question set: choose the protocol and the decoding, run it, store the results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from laconic.batches import AnswerBatch
from laconic.config.recipe import FULL_CHAIN_METHODS, METHOD_TABLES, Recipe
from laconic.data.reasoning import answer_matching
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import PreemptedError, UsageError
from laconic.evaluation.reasoning.evaluate import AnswerFunction, AnswerRecord, ReasoningResult, evaluate_questions
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.results_store import (
    EVALUATIONS_FOLDER,
    ProgressCallback,
    StoredEvaluation,
    latest_evaluations,
    load_records,
)
from laconic.evaluation.runs import (
    RESUME_HINT,
    copy_recipe,
    describe_evaluation,
    flush_denormals,
)
from laconic.experiment.build_data import has_text_answers
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.methods import answer_decoding, answer_questions
from laconic.latent.answering import AnswerDecoding
from laconic.storage import manifest
from laconic.training.ranks import Ranks, SingleProcess
from laconic.training.signals import SignalInterruptError, StopSignal

DEFAULT_CONDITION, COT_CONDITION = "", "with CoT"  # as trained; the same weights write out the chain


def format_condition(*, with_cot: bool = False, iterations: int | None = None) -> str:
    """Return the name of a condition: empty as trained, else with the chain or with other Jacobi iterations."""
    if with_cot:
        return COT_CONDITION
    return DEFAULT_CONDITION if iterations is None else f"{iterations} iterations"


def choose_protocol(recipe: Recipe, name: str | None, tolerance: Decimal | None = None) -> AnswerProtocol:
    """Return the protocol of that name, or the default of the recipe's format.

    Args:
        recipe: The run's recipe.
        name: Name of a protocol, or None.
        tolerance: Tolerance of protocol "decimal".
    """
    data = recipe.data
    if name is None:
        protocol = answer_matching.default_protocol(data.format, text_answers=has_text_answers(data))
    else:
        protocol = answer_matching.PROTOCOLS[name]
    if protocol.name == "pccot":
        return answer_matching.pccot_protocol(data.answer_prompt)
    if protocol.name == "decimal" and tolerance is not None:
        return answer_matching.decimal_protocol(tolerance)
    return protocol


def decoding_for(run: LoadedRun, questions: QuestionSet, *, with_cot: bool = False) -> AnswerDecoding:
    """Return how a run decodes its answers: with the protocol's prompt and token budget, within the model's context.

    CODI's protocol gives only the end-of-thought token, so that the answer prompt is generated too.
    """
    recipe, protocol, budget = run.recipe, questions.protocol, token_budget(run, questions, with_cot)
    decoding = answer_decoding(run.parts, recipe, budget, protocol.sampling, recipe.seed)
    if protocol.name.startswith("codi") and recipe.data.format == "pccot" and not writes_chain(run, with_cot):
        decoding = replace(decoding, answer_prompt=())
    num_latents = recipe.latents.num_latents + 2 if recipe.latents and not with_cot else 0
    context = run.parts.decoder.config.max_position_embeddings
    room = context - questions.max_question_tokens - num_latents - len(decoding.answer_prompt)
    return replace(decoding, max_tokens=min(budget, room))


def token_budget(run: LoadedRun, questions: QuestionSet, with_cot: bool) -> int:
    """Return the number of tokens that the protocol allows for an answer."""
    return answer_matching.max_answer_tokens(
        questions.protocol,
        run.recipe.data.format,
        with_chain=writes_chain(run, with_cot),
        text_answers=questions.has_text_answers,
    )


def writes_chain(run: LoadedRun, with_cot: bool) -> bool:
    """Return whether a chain, or what is left of one, is generated before the answer."""
    return with_cot or run.recipe.method in FULL_CHAIN_METHODS


def budget_warnings(run: LoadedRun, questions: QuestionSet, name: str, *, with_cot: bool = False) -> list[str]:
    """Return a warning where the model's context is shorter than the protocol's token budget."""
    budget = token_budget(run, questions, with_cot)
    tokens = decoding_for(run, questions, with_cot=with_cot).max_tokens
    if tokens == budget:
        return []
    condition = f" {COT_CONDITION}" if with_cot else ""
    return [
        f"{questions.name}: answers of {name}{condition} are cut at {tokens} tokens, not {budget}: its context ends"
    ]


def answer_function(
    run: LoadedRun, decoding: AnswerDecoding, *, with_cot: bool = False, stop: StopSignal | None = None
) -> AnswerFunction:
    """Return a function that answers a batch of questions; with `stop`, a signal interrupts it at once."""
    device = run.parts.decoder.token_embedding.weight.device

    def answer(batch: Any) -> AnswerBatch:
        return answer_questions(run.method, batch.to(device), decoding, with_cot=with_cot)

    def answer_interruptibly(batch: Any) -> AnswerBatch:
        with cast(StopSignal, stop).interruptible():
            return answer(batch)

    return answer if stop is None else answer_interruptibly


def evaluate_run(
    run: LoadedRun,
    questions: QuestionSet,
    decoding: AnswerDecoding,
    *,
    with_cot: bool = False,
    iterations: int | None = None,
    limit: int | None = None,
    batch_size: int = 64,
    ranks: Ranks | None = None,
    stop: StopSignal | None = None,
    progress: ProgressCallback | None = None,
) -> ReasoningResult:
    """Evaluate a run under one condition; stored results are loaded and partial ones resumed.

    Args:
        run: The run at one of its checkpoints.
        questions: What to ask.
        decoding: How answers are decoded, from `decoding_for`.
        with_cot: Generate the chain instead of latent thoughts.
        iterations: Number of Jacobi iterations, if not the one of training.
        limit: The limit that `questions` were loaded with.
        batch_size: Questions per batch, on each rank.
        ranks: Processes that share each batch.
        stop: Signal that interrupts.
        progress: Called after each batch.

    Raises:
        PreemptedError: After a signal; finished answers are stored.
    """
    ranks = ranks or SingleProcess()
    is_single = ranks.world_size == 1
    condition = format_condition(with_cot=with_cot, iterations=iterations)
    metadata = describe_evaluation(
        run,
        "reasoning",
        questions.name,
        limit=limit,
        variant={"protocol": questions.protocol.name} | ({"condition": condition} if condition else {}),
        key={
            "data": questions.source.fingerprint,
            "gold": gold_hash(questions),
            "max_tokens": str(decoding.max_tokens),
        },
    )

    def check_signal() -> None:
        if stop and not is_single and ranks.any_rank(bool(stop.signal)):
            raise SignalInterruptError

    try:
        with with_iterations(run, iterations), flush_denormals(run.parts.decoder.token_embedding.weight.device):
            return evaluate_questions(
                answer_function(run, decoding, with_cot=with_cot, stop=stop if is_single else None),
                questions.source,
                questions.examples,
                questions.protocol,
                batch_size=batch_size,
                bytes_per_position=bytes_per_position(run),
                metadata=metadata,
                folder=run.folder / EVALUATIONS_FOLDER,
                extra_files=copy_recipe(run),
                progress=progress,
                order=questions.order,
                ranks=ranks,
                before_batch=check_signal,
            )
    except SignalInterruptError:
        why = stop.signal_name if stop and stop.signal else "a signal to another rank"
        raise PreemptedError(f"{why}: {run.folder}, {questions.name}: {RESUME_HINT}") from None


def load_result(
    folder: Path, task: str, *, with_cot: bool = False, iterations: int | None = None
) -> ReasoningResult | None:
    """Load the latest stored result of a run directory on a task under one condition; None if there is none."""
    condition = format_condition(with_cot=with_cot, iterations=iterations)
    for stored in latest_evaluations(folder / EVALUATIONS_FOLDER, "reasoning").values():
        if stored.metadata.task == task and stored.metadata.variant.get("condition", "") == condition:
            return load_stored_result(stored)
    return None


def load_stored_result(stored: StoredEvaluation) -> ReasoningResult:
    """Load a stored evaluation of kind "reasoning"."""
    records = tuple(map(AnswerRecord.from_record, load_records(stored.folder)))
    return ReasoningResult(records, stored.figures["protocol"], stored.figures["bytes_per_position"])


def gold_hash(questions: QuestionSet) -> str:
    """Return the SHA-256 of the questions and their gold answers."""
    return manifest.hash_json([[example.id, example.question, example.answer] for example in questions.examples])


def check_iterations(recipe: Recipe, iterations: int, run: str) -> None:
    """Raise `UsageError` for a run without Jacobi iterations."""
    latents = recipe.latents if "latents" in METHOD_TABLES[recipe.method] else None
    if latents is None or latents.jacobi_iterations is None:
        raise UsageError(
            f"--jacobi-iterations {iterations}: {run} has no Jacobi iterations; give a run of method pccot or kava"
        )


@contextmanager
def with_iterations(run: LoadedRun, iterations: int | None) -> Iterator[None]:
    """Use another number of Jacobi iterations than in training; None changes nothing."""
    latents = run.parts.latents
    if iterations is None or latents is None:
        yield
        return
    trained = latents.num_iterations
    latents.num_iterations = iterations
    try:
        yield
    finally:
        latents.num_iterations = trained


def bytes_per_position(run: LoadedRun) -> int:
    """Return the bytes of one cache position: keys and values of every layer and head."""
    config, dtype = run.parts.decoder.config, run.parts.decoder.token_embedding.weight.dtype
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
