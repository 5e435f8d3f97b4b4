"""Questions about contexts: a run answers after no context, its vectors, as many last tokens, and the whole text."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from laconic.compression.memory import SummaryMemory
from laconic.console import pluralize
from laconic.errors import InputError
from laconic.evaluation import statistics
from laconic.evaluation.compression.scores import clustered_standard_error, mean_context_size
from laconic.evaluation.context_questions import ContextQuestion, load_questions
from laconic.evaluation.example_answers import NUM_EXAMPLES, ExampleAnswer, ExampleQuestion
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalMetadata
from laconic.evaluation.statistics import Estimate
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import (
    Column,
    Table,
    build_table,
    format_count,
    format_percent,
    format_with_error,
)
from laconic.experiment.text_models.compressor import TextCompressor
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import generate

AnswerMetric = Callable[[str, Sequence[str]], float]  # of an output and the answers


def build_question_job(compressor: TextCompressor, file: Path, metadata: EvalMetadata) -> EvalJob:
    """Return the evaluation of a file of questions, in an order in which each context is compressed once."""
    questions = load_questions(file)[: metadata.limit]
    if any(question.is_document_name for question in questions):
        raise InputError(f"{file}: a question names a document; give its text as context")
    contexts = {text: n for n, text in enumerate(dict.fromkeys(question.context for question in questions))}
    compress = lru_cache(maxsize=1)(lambda text: compressor.compress([text]))

    def evaluate(indices: Sequence[int]) -> list[list[EvalItem]]:
        items: list[list[EvalItem]] = []
        for i in indices:
            question = questions[i]
            shared = {"context": contexts[question.context], "question": question.question}
            answers = answer_question(compressor, question, compress(question.context))
            shared["answers"] = list(question.answers)
            items.append([EvalItem(str(i), {name: shared | answer for name, answer in answers.items()})])
        return items

    order = sorted(range(len(questions)), key=lambda i: contexts[questions[i].context])
    return EvalJob(metadata, len(questions), evaluate, order=order)


def answer_question(
    compressor: TextCompressor, question: ContextQuestion, memory: SummaryMemory
) -> dict[str, dict[str, Any]]:
    """Return output and context size by condition; texts that do not fit the model are left out.

    Special ids that the tokenizer puts before a prompt precede the context.
    """
    prompt, tokenizer = f"{question.question}\n{question.answer_prefix}", compressor.tokenizer
    context = tokenizer.encode(f"{question.context}\n", add_special_tokens=False)
    n = int(memory.num_vectors[0])
    config = GenerationConfig(max_tokens=question.max_new_tokens)
    texts = {"none": [], "compressed": None, "truncated": context[max(len(context) - n, 0) :], "full": context}
    outputs: dict[str, dict[str, Any]] = {}
    for condition, before in texts.items():
        if before is None:
            (output,) = compressor.generate([prompt], config, memory=memory)
        else:
            ids = [*tokenizer.encode(""), *before, *tokenizer.encode(prompt, add_special_tokens=False)]
            if before and len(ids) + config.max_tokens > compressor.decoder.config.max_position_embeddings:
                continue
            stopping = GenerationConfig(max_tokens=config.max_tokens, eos_token_ids=compressor.stop_token_ids)
            with compressor.reading_mode():
                (output,) = generate(compressor.decoder, tokenizer, input_ids=[ids], config=stopping)
        outputs[condition] = {"output": output.text, "context_size": n if before is None else len(before)}
    return outputs


def normalize_words(text: str) -> list[str]:
    """Split text into lower-case words without articles and punctuation, as SQuAD does."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def answer_match(prediction: str, answers: Sequence[str]) -> float:
    return float(any(normalize_words(prediction) == normalize_words(answer) for answer in answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Return the largest F1 of words with any answer; two texts without words are equal."""
    words = Counter(normalize_words(prediction))
    scores = list[float]()
    for other in (Counter(normalize_words(answer)) for answer in answers):
        total = words.total() + other.total()
        scores.append(2 * (words & other).total() / total if total else 1.0)
    return max(scores)


def substring_match(prediction: str, answers: Sequence[str]) -> float:
    """Return the share of answers that occur in the prediction, ignoring case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


METRICS: dict[str, AnswerMetric] = {"match": answer_match, "F1": f1_score, "substring match": substring_match}


class MetricResult(NamedTuple):
    """A metric of one condition and its gain over no context, paired by question.

    Standard errors are clustered by context, because questions about one context are alike.
    """

    mean: Estimate
    se: float
    gain: float
    gain_se: float


class ConditionScores(NamedTuple):
    """The metrics of one condition, and the mean number of vectors or tokens before the question."""

    condition: str
    context_size: float
    metrics: dict[str, MetricResult]


def score_conditions(result: RunResult) -> list[ConditionScores]:
    contexts = [str(item.shared["context"]) for item in result.items_by_seed[0]]

    def score(condition: str, metric: AnswerMetric) -> MetricResult:
        values, without = (
            result.scores(name, lambda x: metric(x["output"], x["answers"])) for name in (condition, "none")
        )
        gain = values - without
        mean = statistics.estimate_proportion(values)
        se, gain_se = (clustered_standard_error(x, contexts) for x in (values, gain))
        return MetricResult(mean, se, float(gain.mean()), gain_se)

    return [
        ConditionScores(name, mean_context_size(result, name), {title: score(name, x) for title, x in METRICS.items()})
        for name in result.conditions
    ]


def list_examples(result: RunResult) -> list[ExampleQuestion]:
    examples: list[ExampleQuestion] = []
    for item in result.items_by_seed[0][:NUM_EXAMPLES]:
        gold = item.shared["answers"]
        outputs = [(name, item.conditions[name]["output"]) for name in result.conditions]
        answers = tuple(
            ExampleAnswer(f"{result.run}, {name}", text, answer_match(text, gold) == 1) for name, text in outputs
        )
        examples.append(ExampleQuestion(result.task, item.shared["question"], " or ".join(gold), answers))
    return examples


def count_items(result: RunResult) -> dict[str, Any]:
    items = result.items_by_seed[0]
    return {"items": len(items), "contexts": len({item.shared["context"] for item in items})}


def metric_columns(name: str) -> tuple[Column, Column]:
    def format_gain(score: ConditionScores) -> str:
        x = score.metrics[name]
        gain = format_with_error(f"{100 * x.gain:+z.1f}", 100 * x.gain_se, 1)
        return "–" if score.condition == "none" else gain

    def format_metric(score: ConditionScores) -> str:
        x = score.metrics[name]
        return format_with_error(format_percent(x.mean.mean), 100 * x.se, 1)

    return Column(f"{name}, %", format_metric), Column("gain", format_gain)


COLUMNS = (
    Column("context", lambda score: score.condition, is_text=True),
    Column("before", lambda score: format_count(score.context_size)),
    *(column for name in METRICS for column in metric_columns(name)),
)
LEGEND = (
    "none: no context. full: the whole text. before: vectors or tokens before the question. ±: standard error over "
    "contexts. gain: over no context, paired. truncated: as many last tokens of the context as there are vectors. "
    "match: normalized words equal those of an answer. F1: of words. substring match: share of the answers that occur "
    "in the output."
)


def build_score_table(result: RunResult) -> Table:
    counts = count_items(result)
    about = f"{pluralize(counts['items'], 'question')} about {pluralize(counts['contexts'], 'context')}"
    return build_table(COLUMNS, score_conditions(result), f"{result.run}, {result.task}: {about}")
