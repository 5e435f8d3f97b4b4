"""A run asked: which of its steps, how its answers to a set are written, and the folder that keeps them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from laconic.batches import AnswerBatch
from laconic.config.recipe import FULL_CHAIN_METHODS, METHOD_TABLES, Recipe
from laconic.data.reasoning import answer_matching
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import InputError, PreemptedError, UsageError
from laconic.evaluation.reasoning.evaluate import AnswerFunction, ProgressCallback, ReasoningResult, evaluate_questions
from laconic.evaluation.reasoning.question_sets import QuestionSet, folder_safe_name
from laconic.experiment.build_data import has_text_answers
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, is_run_dir, latest_step
from laconic.experiment.methods import answer_decoding, answer_questions
from laconic.latent.answering import AnswerDecoding
from laconic.storage import manifest
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import read_json
from laconic.training import checkpoint
from laconic.training.ranks import Ranks, SingleProcess
from laconic.training.signals import SignalInterruptError, StopSignal

EVALUATIONS_FOLDER = "evaluations"


def seed_runs(path: str | Path) -> list[Path]:
    """The runs of a path: itself, or its seed-0, seed-1, … in order. Raises `BadInput` (66) where there is none."""
    folder = Path(path)
    if is_run_dir(folder):
        return [folder]
    found = [each for each in folder.glob("seed-*") if each.name[5:].isdecimal() and is_run_dir(each)]
    if not found:
        raise InputError(f"{folder} is no run, and holds no seed-N that is one; give what laconic train wrote")
    return sorted(found, key=lambda each: int(each.name[5:]))


def resolve_step(folder: Path, asked: str) -> int:
    """The number of a step by what a user calls it: latest, best (by the run's validation), or the number itself."""
    if asked.isdecimal():
        return int(asked)
    found = latest_step(folder)
    if asked == "latest":
        return found.step
    best = read_json(found.path / checkpoint.PROGRESS_FILE)["best"] if asked == "best" else None
    if not best:
        why = "its recipe has no train.best_metric" if asked == "best" else "write latest, best, or a number"
        raise UsageError(f"--checkpoint {asked}: no such step of {folder}; {why}")
    return int(best[0][1])


def choose_protocol(recipe: Recipe, name: str | None, tolerance: Decimal | None = None) -> AnswerProtocol:
    """The protocol asked for, or the one that belongs to a recipe's format."""
    data = recipe.data
    found = (
        answer_matching.default_protocol(data.format, text_answers=has_text_answers(data))
        if name is None
        else answer_matching.PROTOCOLS[name]
    )
    if found.name == "pccot":
        return answer_matching.pccot_protocol(data.answer_prompt)
    return answer_matching.decimal_protocol(tolerance) if found.name == "decimal" and tolerance is not None else found


def decoding_for(run: LoadedRun, questions: QuestionSet, *, with_cot: bool = False) -> AnswerDecoding:
    """How answers to these questions are written: the protocol's prompt and budget, as far as the model's context goes.

    CODI's gives eot alone, so that a prompt is generated too.
    """
    recipe, protocol, tokens = run.recipe, questions.protocol, token_budget(run, questions, with_cot)
    made = answer_decoding(run.parts, recipe, tokens, protocol.sampling, recipe.seed)
    if protocol.name.startswith("codi") and recipe.data.format == "pccot" and not writes_chain(run, with_cot):
        made = replace(made, answer_prompt=())
    thoughts = recipe.latents.num_latents + 2 if recipe.latents and not with_cot else 0
    room = (
        run.parts.decoder.config.max_position_embeddings
        - questions.max_question_tokens
        - thoughts
        - len(made.answer_prompt)
    )
    return replace(made, max_tokens=min(tokens, room))


def token_budget(run: LoadedRun, questions: QuestionSet, with_cot: bool) -> int:
    """Tokens an answer may have by its protocol."""
    return answer_matching.max_answer_tokens(
        questions.protocol,
        run.recipe.data.format,
        with_chain=writes_chain(run, with_cot),
        text_answers=questions.has_text_answers,
    )


def writes_chain(run: LoadedRun, with_cot: bool) -> bool:
    """Whether a chain is written before the answer, or what is left of one."""
    return with_cot or run.recipe.method in FULL_CHAIN_METHODS


def budget_warnings(run: LoadedRun, questions: QuestionSet, name: str, *, with_cot: bool = False) -> list[str]:
    """A line where the model's context ends before the protocol's budget does."""
    whole, tokens = token_budget(run, questions, with_cot), decoding_for(run, questions, with_cot=with_cot).max_tokens
    if tokens == whole:
        return []
    by = ", by chain" if with_cot else ""
    return [f"{questions.name}{by}: answers of {name} have {tokens} tokens at most, not {whole}: its context ends"]


def answer_function(
    run: LoadedRun, decoding: AnswerDecoding, *, with_cot: bool = False, stop: StopSignal | None = None
) -> AnswerFunction:
    """How a run answers a batch; a signal ends it at once, since answers change nothing."""
    device = run.parts.decoder.token_embedding.weight.device

    def answered(batch: Any) -> AnswerBatch:
        return answer_questions(run.method, batch.to(device), decoding, teacher=with_cot)

    def left(batch: Any) -> AnswerBatch:
        with cast(StopSignal, stop).interruptible():
            return answered(batch)

    return answered if stop is None else left


def evaluate_run(
    run: LoadedRun,
    questions: QuestionSet,
    decoding: AnswerDecoding,
    name: str,
    *,
    with_cot: bool = False,
    iterations: int | None = None,
    batch_size: int = 64,
    key: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
    stop: StopSignal | None = None,
    progress: ProgressCallback | None = None,
) -> ReasoningResult:
    """The evaluation `name` of a run: what is there is read, what is begun goes on, and is committed at its end.

    `rounds` are those of the thoughts, where they are not those of training. Raises `Preempted` (75) after a signal:
    what is answered is kept.
    """
    ranks = ranks or SingleProcess()
    alone, bound = ranks.world_size == 1, {"step": step_hash(run.folder, run.step), "rounds": str(iterations)}

    def between() -> None:
        if stop and not alone and ranks.any_rank(bool(stop.signal)):
            raise SignalInterruptError

    try:
        with with_iterations(run, iterations), flush_denormals(run.parts.decoder.token_embedding.weight.device):
            return evaluate_questions(
                answer_function(run, decoding, with_cot=with_cot, stop=stop if alone else None),
                questions.source,
                questions.examples,
                questions.protocol,
                batch_size=batch_size,
                bytes_per_position=bytes_per_position(run),
                folder=run.folder / EVALUATIONS_FOLDER / name,
                key={**bound, "teacher": str(with_cot), **(key or {})},
                extra_files={RECIPE_FILE: (run.folder / RECIPE_FILE).read_text(encoding="utf-8")},
                progress=progress,
                order=questions.order,
                ranks=ranks,
                before_batch=between,
            )
    except SignalInterruptError:
        why = stop.signal_name if stop and stop.signal else "a signal to another rank"
        kept = "what is answered is kept; run the same command again to go on"
        raise PreemptedError(f"{why}: {run.folder}, {questions.name}: {kept}") from None


def gold_hash(questions: QuestionSet) -> str:
    """SHA-256 of questions and gold answers."""
    return manifest.hash_json([[each.id, each.question, each.answer] for each in questions.examples])


def results_folder_name(
    questions: QuestionSet, step: int, *, limit: int | None, with_cot: bool, iterations: int | None
) -> str:
    """Where in evaluations/ the answers lie."""
    parts = [questions.name, questions.protocol.name, f"step-{step}"]
    parts += [f"first-{limit}"] if limit is not None else []
    parts += ["teacher"] if with_cot else []
    parts += [f"rounds-{iterations}"] if iterations is not None else []
    return folder_safe_name("-".join(parts))


def check_iterations(recipe: Recipe, iterations: int, run: str) -> None:
    """Raises `Usage` (2) for a run that makes no thoughts in rounds."""
    thinking = recipe.latents if "latents" in METHOD_TABLES[recipe.method] else None
    if thinking is None or thinking.jacobi_iterations is None:
        raise UsageError(
            f"--jacobi-iterations {iterations}: {run} makes no thoughts in rounds; ask a run of pccot or kava"
        )


@contextmanager
def with_iterations(run: LoadedRun, iterations: int | None) -> Iterator[None]:
    """Inside, thoughts are made in another number of rounds than they were trained with."""
    thoughts = run.parts.latents
    if iterations is None or thoughts is None:
        yield
        return
    trained = thoughts.num_iterations
    thoughts.num_iterations = iterations
    try:
        yield
    finally:
        thoughts.num_iterations = trained


@contextmanager
def flush_denormals(device: torch.device) -> Iterator[None]:
    """Inside, numbers below the normal range count as 0 on a CPU, as in training: each costs a hundred others."""
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def bytes_per_position(run: LoadedRun) -> int:
    """Bytes of one cache position: keys and values of every layer and head."""
    config, dtype = run.parts.decoder.config, run.parts.decoder.token_embedding.weight.dtype
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def step_hash(folder: Path, step: int) -> str:
    """SHA-256 of the manifest of a step."""
    return sha256(RunDirectory(folder).get_step(step).manifest.canonical_text.encode()).hexdigest()
