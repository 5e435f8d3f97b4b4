"""Evaluate a trained run on a question set: choose the protocol and the decoding, run it, store the results."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

from laconic.batches import AnswerBatch
from laconic.config.recipe import FULL_CHAIN_METHODS, Recipe
from laconic.data.reasoning import answer_matching
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.data.reasoning.dataset import ReasoningDataset
from laconic.errors import UsageError
from laconic.evaluation import results_store
from laconic.evaluation.checkpoints import STOP_STRINGS, read_prompt
from laconic.evaluation.reasoning.evaluate import AnswerFunction, match_answers
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.results_store import EVALUATIONS_FOLDER, EvalItem, EvalJob, ReportFraction
from laconic.evaluation.suite import describe_evaluation, run_name
from laconic.experiment.from_recipe.build_data import choose_default_protocol
from laconic.experiment.from_recipe.cost import count_cache_bytes
from laconic.experiment.from_recipe.methods import answer_decoding, answer_questions
from laconic.experiment.load_run import LoadedRun
from laconic.generation.config import OnFinish
from laconic.latent.answering import AnswerDecoding
from laconic.latent.codi import Codi
from laconic.latent.thoughts import LatentThoughts
from laconic.storage import manifest

COT_CONDITION = "with CoT"
UNCHANGED_FLAG = "unchanged_from_gsm8k"  # marks the questions of GSM-Hard that are those of GSM8K


@dataclass(frozen=True)
class EvalCondition:
    """One way to answer: as trained, with the same weights writing out the chain, or with other Jacobi iterations.

    The number of iterations is that of training by default; with a tolerance, the iterations of a question end when
    their residual is below it.
    """

    with_cot: bool = False
    iterations: int | None = None
    tolerance: float = 0.0

    @property
    def name(self) -> str:
        """Its name in tables and stored results; empty as trained."""
        if self.with_cot:
            return COT_CONDITION
        if self.tolerance:
            return f"tolerance {self.tolerance:g}"
        return "" if self.iterations is None else f"{self.iterations} iterations"


AS_TRAINED = EvalCondition()


def choose_protocol(recipe: Recipe, name: str | None, tolerance: Decimal | None = None) -> AnswerProtocol:
    """Return the protocol of that name, or the default of the recipe's format; only "decimal" has a tolerance."""
    if name is None:
        return choose_default_protocol(recipe.data)
    if name == "pccot":
        return answer_matching.pccot_protocol(recipe.data.answer_prompt)
    if name == "decimal" and tolerance is not None:
        return answer_matching.decimal_protocol(tolerance)
    return answer_matching.PROTOCOLS[name]


def decoding_for(run: LoadedRun, questions: QuestionSet, *, with_cot: bool = False) -> AnswerDecoding:
    """Return how a run decodes its answers: with the protocol's prompt and token budget, within the model's context.

    CODI's protocol gives only the end-of-thought token, so that the answer prompt is generated too.
    """
    recipe = run.recipe
    protocol = questions.protocol
    budget = token_budget(run, questions, with_cot)
    decoding = answer_decoding(run.parts.tokenizer, recipe.data, budget, protocol.sampling, recipe.seed)
    if protocol.name.startswith("codi") and recipe.data.format == "pccot" and not writes_chain(run, with_cot):
        decoding = replace(decoding, answer_prompt=())
    prompt = read_prompt(run.folder)
    if prompt is not None and prompt.style == "plain":
        sampling = replace(decoding.sampling, stop_strings=STOP_STRINGS)
        decoding = replace(decoding, sampling=sampling, tokenizer=run.parts.tokenizer)
    num_latents = 0 if with_cot else recipe.num_latent_positions
    context = run.parts.decoder.config.max_position_embeddings
    room = context - questions.max_question_tokens - num_latents - len(decoding.answer_prompt)
    return replace(decoding, max_tokens=min(budget, room))


def token_budget(run: LoadedRun, questions: QuestionSet, with_cot: bool) -> int:
    with_chain = writes_chain(run, with_cot)
    row_format = run.recipe.data.format
    return answer_matching.max_answer_tokens(
        questions.protocol, row_format, with_chain=with_chain, text_answers=questions.has_text_answers
    )


def writes_chain(run: LoadedRun, with_cot: bool) -> bool:
    """Return whether a chain, or what is left of one, is generated before the answer."""
    return with_cot or run.recipe.method in FULL_CHAIN_METHODS


def budget_warnings(run: LoadedRun, questions: QuestionSet, condition: EvalCondition = AS_TRAINED) -> list[str]:
    """Return a warning where the model's context is shorter than the protocol's token budget."""
    budget = token_budget(run, questions, condition.with_cot)
    tokens = decoding_for(run, questions, with_cot=condition.with_cot).max_tokens
    if tokens == budget:
        return []
    name = " ".join((run_name(run.folder), *([COT_CONDITION] if condition.with_cot else ())))
    return [f"{questions.name}: answers of {name} are cut at {tokens} tokens, not {budget}: its context ends"]


def answer_function(
    run: LoadedRun, decoding: AnswerDecoding, condition: EvalCondition = AS_TRAINED, on_finish: OnFinish | None = None
) -> AnswerFunction:
    """Return a function that answers a batch of questions under a condition, and calls `on_finish` for each answer."""
    device = run.parts.decoder.device
    sampling = replace(decoding.sampling, on_finish=on_finish)
    decoding = replace(decoding, jacobi_tolerance=condition.tolerance, sampling=sampling)

    def answer(batch: Any) -> AnswerBatch:
        with with_iterations(run, condition.iterations):
            return answer_questions(run.method, batch.to(device), decoding, with_cot=condition.with_cot)

    return answer


def build_question_job(
    run: LoadedRun,
    questions: QuestionSet,
    condition: EvalCondition = AS_TRAINED,
    *,
    limit: int | None = None,
    batch_size: int = 64,
) -> EvalJob:
    """Return the evaluation of a run under one condition on a question set that was loaded with `limit`."""
    examples, source, protocol = questions.examples, questions.source, questions.protocol
    if writes_chain(run, condition.with_cot):
        protocol = protocol.for_chain()
    decoding = decoding_for(run, questions, with_cot=condition.with_cot)
    figures: dict[str, Any] = {
        "protocol": protocol.name,
        "bytes_per_position": count_cache_bytes(run.parts.decoder, 1),
        "unchanged": [example.id for example in examples if example.metadata.get(UNCHANGED_FLAG)],
    }
    key = {"data": source.fingerprint, "gold": gold_hash(questions), "max_tokens": str(decoding.max_tokens)}
    variant = {"protocol": protocol.name} | ({"condition": condition.name} if condition.name else {})

    def evaluate(indices: Sequence[int], report: ReportFraction) -> list[list[EvalItem]]:
        num_finished = count(1)
        answer = answer_function(run, decoding, condition, lambda *_: report(next(num_finished) / len(indices)))
        chosen = [examples[i] for i in indices]
        answers = match_answers(answer(source.batch(indices, 0, 0)), chosen, protocol)
        return [[EvalItem(x.id, {condition.name: a._asdict()})] for x, a in zip(chosen, answers, strict=True)]

    options: dict[str, Any] = {"limit": limit, "variant": variant, "key": key, "suffix": questions.suffix}
    return EvalJob(
        describe_evaluation(run, "reasoning", questions.name, **options),
        num_units=len(examples),
        evaluate=evaluate,
        batch_size=batch_size,
        order=questions.order,
        summarize=lambda _: figures,
        notes=(*questions.notes, *budget_warnings(run, questions, condition)),
        source=questions,
        reports_fraction=True,
    )


def load_result(folder: Path, task: str, condition: EvalCondition = AS_TRAINED) -> list[EvalItem] | None:
    """Load the latest stored answers of a run directory to a task under one condition; None if there are none."""
    for stored in results_store.latest_evaluations(folder / EVALUATIONS_FOLDER, "reasoning").values():
        if stored.metadata.task == task and stored.metadata.variant.get("condition", "") == condition.name:
            return results_store.load_items(stored.folder)
    return None


def gold_hash(questions: QuestionSet) -> str:
    """Return the SHA-256 of names, questions as they are asked, and gold answers."""
    prompts = questions.source.examples if isinstance(questions.source, ReasoningDataset) else questions.examples
    pairs = zip(prompts, questions.examples, strict=True)
    return manifest.hash_json([[example.id, prompt.question, example.answer] for prompt, example in pairs])


def check_iterations(recipe: Recipe, flag: str, run: str) -> None:
    """Raise `UsageError` for a flag about Jacobi iterations and a run without them."""
    latents = recipe.latents if "latents" in recipe.method_tables else None
    if latents is None or latents.jacobi_iterations is None:
        raise UsageError(f"{flag}: {run} has no Jacobi iterations; give a run of method pccot or kava")


def find_latents(run: LoadedRun) -> LatentThoughts | None:
    """Return the latents of a run, also of a method outside laconic that is a kind of CODI, such as a kind of KaVa."""
    method = run.method
    return method.latent_thoughts if run.parts.latents is None and isinstance(method, Codi) else run.parts.latents


@contextmanager
def with_iterations(run: LoadedRun, iterations: int | None) -> Iterator[None]:
    """Use another number of Jacobi iterations than in training; None changes nothing."""
    latents = find_latents(run)
    if iterations is None or latents is None:
        yield
        return
    trained, latents.num_iterations = latents.num_iterations, iterations
    try:
        yield
    finally:
        latents.num_iterations = trained
