"""The task `memories`: plain checkpoints and AutoCompressors, and the plain baselines, on the same documents."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from laconic.batches.padding import pad_rows
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.kv.cartridge import CartridgeConfig
from laconic.compression.kv.compress import compute_window_tokens
from laconic.config.recipe import Recipe
from laconic.console import pluralize
from laconic.errors import UsageError
from laconic.evaluation.checkpoints import read_prompt
from laconic.evaluation.memories import contexts
from laconic.evaluation.memories.documents import (
    CONTINUATION_TOKENS,
    PASSAGE_TOKENS,
    Probe,
    ProbedDocument,
    load_probed_documents,
)
from laconic.evaluation.memories.report import LEGEND, build_comparison_table, compare_results, plot_comparison
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalKind
from laconic.evaluation.suite import EvalReport, EvalRequest, Results, describe_evaluation
from laconic.evaluation.tables import Table, figures_to_json
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.text_models.kv_compressor import build_repeat_prompt
from laconic.losses import score_rows_in_chunks
from laconic.models.decoder import Decoder
from laconic.storage.manifest import hash_json

TASK = "memories"
BASELINES = "baselines"


class MemorySuite:
    """Memories of documents: what they keep of the full text's gain, and how large they are."""

    kinds: Sequence[EvalKind] = ("memories",)
    users = "the task memories"
    options: Collection[str] = ("documents", "questions", "methods", "keep", "tokens", "fit")

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        return TASK in tasks

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        prompts = {folder: read_prompt(folder) for folder in recipes}
        if len(request.tasks) > 1:
            raise UsageError(f"--tasks {','.join(request.tasks)}: evaluate {TASK} by itself")
        if request.documents is None and request.questions is None:
            raise UsageError(f"--tasks {TASK}: pass --documents FILE.jsonl, --questions FILE.jsonl, or both")
        for folder, recipe in recipes.items():
            prompt = prompts[folder]
            if prompt is None and recipe.method != "autocompressor":
                raise UsageError(
                    f"{folder}: method {recipe.method} writes no memory; give a model or an autocompressor"
                )
            if prompt is not None and prompt.style != "plain":
                raise UsageError(f"{folder}: {TASK} are asked as plain text; pass --prompt plain")
        if (request.methods or request.fit is not None) and not any(prompts.values()):
            raise UsageError("--methods, --fit: only for models; an autocompressor writes summary vectors")
        unknown = next((name for name in request.methods if name not in contexts.KV_METHODS), None)
        if unknown is not None:
            raise UsageError(f"--methods {unknown}: choose from {', '.join(contexts.KV_METHODS)}")

    def describe(self, recipe: Recipe) -> dict[str, Any]:
        return {}

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        """Yield one evaluation for the plain baselines, and one for each method; each has all sizes."""
        num_tokens = choose_document_tokens(request, run)
        documents, left_out = load_probed_documents(
            run.parts.tokenizer, request.documents, request.questions, num_tokens, request.limit
        )
        key = {"data": hash_json([[d.name, d.ids, d.probes] for d in documents])}
        files = " ".join(Path(file).stem for file in (request.documents, request.questions) if file is not None)
        for method in list_methods(request, run):
            sizes = {} if method == contexts.SUMMARY else {"keep": ",".join(f"{keep:g}" for keep in request.keep)}
            sizes |= {"fit": f"{request.fit}"} if method == contexts.FIT else {}
            variant = {"method": method, "data": files, "tokens": f"{num_tokens}", **sizes}
            windows, notes = find_windows(run, method, documents)
            metadata = describe_evaluation(
                run, "memories", TASK, limit=request.limit, variant=variant, key=key | windows
            )

            def evaluate(indices: Sequence[int], method: str = method) -> list[list[EvalItem]]:
                return [[evaluate_document(request, run, method, documents[i])] for i in indices]

            yield EvalJob(metadata, len(documents), evaluate, notes=left_out if method == BASELINES else notes)

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        comparisons = compare_results(results["memories"])
        notes = list_notes(results)
        blocks: list[Table | str] = [build_comparison_table(comparison) for comparison in comparisons]
        data = {"schema": 1, "comparisons": figures_to_json(comparisons), "notes": notes}
        return EvalReport([*blocks, LEGEND, *notes], data)

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        sections = [
            PageSection(x.title, [LEGEND, plot_comparison(x), build_comparison_table(x)])
            for x in compare_results(results["memories"])
        ]
        return [*sections, PageSection("Notes on memories", [list_notes(results)])]


def list_notes(results: Results) -> list[str]:
    return list(dict.fromkeys(note for result in results["memories"] for note in result.notes))


def choose_document_tokens(request: EvalRequest, run: LoadedRun) -> int:
    """Return the length to which documents are cut. Raises `UsageError` where a probe would not fit after them."""
    context = run.parts.decoder.config.max_position_embeddings
    num_after = CONTINUATION_TOKENS + PASSAGE_TOKENS
    if request.fit is not None and not isinstance(run.method, AutoCompressor):
        num_after = max(num_after, CartridgeConfig(steps=request.fit).row_tokens)
    most = context - num_after
    num_tokens = request.document_tokens(most)
    if not 0 < num_tokens <= most:
        raise UsageError(
            f"--tokens {num_tokens}: a document and the {num_after} tokens after it need {num_tokens + num_after:,} "
            f"positions, and the model has {context:,}; the longest document has {max(most, 0):,}"
        )
    return num_tokens


def find_windows(
    run: LoadedRun, method: str, documents: Sequence[ProbedDocument]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what tells results apart, and a note, where a method reads some document in several windows."""
    if method not in (*contexts.KV_METHODS, contexts.FIT):
        return {}, ()
    score = contexts.KV_METHODS["kvzip" if method == contexts.FIT else method][0]
    context = run.parts.decoder.config.max_position_embeddings
    limit = compute_window_tokens(run.parts.decoder, score, build_repeat_prompt(run.parts.tokenizer))
    count = sum(len(document.ids) > limit for document in documents)
    note = (
        f"KVzip reads {count} of {pluralize(len(documents), 'document')} in windows, as text and repetition exceed the "
        f"context of {context:,} tokens: all heads then keep the same number of slots, so that kvzip is kvzip-equal; "
        f"--tokens {limit} or less gives one window"
    )
    return ({"window_tokens": f"{limit}"}, (note,)) if count else ({}, ())


def list_methods(request: EvalRequest, run: LoadedRun) -> list[str]:
    if isinstance(run.method, AutoCompressor):
        return [BASELINES, contexts.SUMMARY]
    return [BASELINES, *(request.methods or contexts.KV_METHODS), *([] if request.fit is None else [contexts.FIT])]


def iter_contexts(
    request: EvalRequest, run: LoadedRun, method: str, ids: Sequence[int]
) -> Iterable[contexts.ProbeContext]:
    decoder, tokenizer, compressor = run.parts.decoder, run.parts.tokenizer, run.method
    if method == BASELINES:
        num_special = len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))
        is_compressor = isinstance(compressor, AutoCompressor)
        read = (
            partial(contexts.read_text_with_compressor, compressor)
            if is_compressor
            else partial(contexts.read_into_cache, decoder)
        )
        return contexts.iter_text_contexts(read, ids, num_special, request.keep)
    if isinstance(compressor, AutoCompressor):
        return [contexts.compress_to_vectors(compressor, ids, run.recipe.data.text.mean_segment_tokens)]
    fit_steps, score = (request.fit, "kvzip") if method == contexts.FIT else (None, method)
    return contexts.iter_kv_contexts(decoder, tokenizer, ids, score, request.keep, fit_steps)


@torch.no_grad()
def evaluate_document(request: EvalRequest, run: LoadedRun, method: str, document: ProbedDocument) -> EvalItem:
    conditions: dict[str, dict[str, Any]] = {}
    for context in iter_contexts(request, run, method, document.ids):
        sizes = {name: getattr(context, name) for name in ("positions", "file_bytes", "used_bytes")}
        scores = {task: score_probes(context, run.parts.decoder, probes) for task, probes in document.probes.items()}
        conditions[context.name] = sizes | scores
    return EvalItem(document.name, conditions)


def score_probes(context: contexts.ProbeContext, decoder: Decoder, probes: Sequence[Probe]) -> dict[str, float]:
    """Return the mean nats per scored id, and the share of probes whose scored ids greedy decoding gives."""
    hidden_states = context.hidden_states(*pad_rows([probe.ids for probe in probes], device=decoder.device))
    nats, is_right = list[float](), list[bool]()
    for states, probe in zip(hidden_states, probes, strict=True):
        n = len(probe.ids)
        targets = torch.tensor(probe.ids[-probe.num_scored :], device=decoder.device)
        nll, is_correct = score_rows_in_chunks(decoder.logits, states[n - probe.num_scored - 1 : n - 1], targets)
        nats.append(float(nll.mean()))
        is_right.append(bool(is_correct.all()))
    return {"nats": sum(nats) / len(nats), "right": sum(is_right) / len(is_right)}
