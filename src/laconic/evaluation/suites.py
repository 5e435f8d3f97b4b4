"""The suites of `laconic evaluate` and `laconic report`, in the order in which they are tried."""

from collections.abc import Sequence

from laconic.config.recipe import DOCUMENT_METHODS
from laconic.errors import UsageError
from laconic.evaluation.compression.suite import CompressionSuite
from laconic.evaluation.inspection.audit_suite import AuditSuite
from laconic.evaluation.memories.suite import MemorySuite
from laconic.evaluation.reasoning.suite import ReasoningSuite
from laconic.evaluation.runs import load_recipes
from laconic.evaluation.streams.suite import StreamSuite
from laconic.evaluation.streams.tasks import STREAM_NAMES
from laconic.evaluation.suite import EvalSuite
from laconic.evaluation.text_loss import TextLossSuite

SUITES: tuple[EvalSuite, ...] = (
    TextLossSuite(),
    MemorySuite(),
    StreamSuite(),
    CompressionSuite(),
    AuditSuite(),
    ReasoningSuite(),
)


def choose_suite(runs: Sequence[str], tasks: Sequence[str]) -> EvalSuite:
    recipes = load_recipes(runs)
    suite = next((suite for suite in SUITES if suite.accepts(recipes.values(), tasks)), None)
    stream = next((task for task in tasks if task in STREAM_NAMES), None)
    if stream is not None and not isinstance(suite, StreamSuite):
        raise UsageError(f"--tasks {stream}: for runs of methods hope and lm; the loss of a model is --tasks loss")
    if suite is None:
        reader = next(folder for folder, recipe in recipes.items() if recipe.method in DOCUMENT_METHODS)
        raise UsageError(f"{reader} reads documents, and others answer questions; evaluate them separately")
    return suite
