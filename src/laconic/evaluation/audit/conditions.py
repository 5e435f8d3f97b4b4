"""How an audit changes thoughts: other vectors, other keys and values, fewer thoughts, fewer Jacobi iterations."""

from collections.abc import Callable
from typing import NamedTuple

from laconic.batches import ReasoningBatch
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import (
    InterventionInputs,
    InterventionSpec,
    list_interventions,
    run_intervention,
)
from laconic.latent.rollout import LatentRollout

AS_TRAINED = "as trained"


class AuditCondition(NamedTuple):
    """A change of the thoughts: its key in stored results, and what returns the rollout that the answers follow."""

    name: str
    apply: Callable[[InspectedRun, ReasoningBatch, InterventionInputs], LatentRollout]


def replace_thoughts(spec: InterventionSpec) -> AuditCondition:
    """Replace the thoughts by an intervention of `laconic inspect`: as vectors, or as keys and values in the cache."""
    return AuditCondition(
        f"{spec.kind} {spec.target}", lambda run, batch, inputs: run_intervention(run, batch, spec, inputs)
    )


def cut_thoughts(n: int) -> AuditCondition:
    """Cut all thoughts but the first `n` off the cache."""

    def apply(run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs) -> LatentRollout:
        rollout = inputs.rollout
        return rollout._replace(cache=rollout.cache.crop(rollout.cache.S - rollout.latents.shape[1] + n))

    return AuditCondition(f"first {n}", apply)


def limit_iterations(n: int) -> AuditCondition:
    """Think with fewer Jacobi iterations than in training; after 0, the thoughts are the placeholders."""
    return AuditCondition(f"{n} iterations", lambda run, batch, inputs: run.think(batch, iterations=n))


def list_conditions(num_latents: int, num_iterations: int | None) -> list[AuditCondition]:
    """Return the conditions of an audit, for M thoughts and T Jacobi iterations of training, if there are any."""
    replaced = map(replace_thoughts, list_interventions(num_latents))
    lengths = dict.fromkeys((num_latents // 2, 0))
    iterations = dict.fromkeys((num_iterations // 2, 0)) if num_iterations else ()
    return [*replaced, *map(cut_thoughts, lengths), *map(limit_iterations, iterations)]
