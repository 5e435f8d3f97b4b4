"""How an audit changes thoughts: other vectors, other keys and values, fewer thoughts, fewer Jacobi iterations."""

from dataclasses import dataclass

from laconic.batches import ReasoningBatch
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import (
    INTERVENTION_TARGETS,
    InterventionInputs,
    InterventionKind,
    InterventionSpec,
    InterventionTarget,
    run_intervention,
)
from laconic.latent.rollout import LatentRollout

AS_TRAINED = "as trained"
KINDS: tuple[InterventionKind, ...] = ("swap", "mean", "shuffle", "noise", "zero")


@dataclass(frozen=True)
class ReplacedThoughts:
    """Thoughts replaced by an intervention of `laconic inspect`: as vectors, or as keys and values in the cache."""

    kind: InterventionKind
    target: InterventionTarget

    @property
    def name(self) -> str:
        """Key in stored results."""
        return f"{self.kind} {self.target}"

    def apply(self, run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs) -> LatentRollout:
        """Return the rollout that the answers follow."""
        return run_intervention(run, batch, InterventionSpec(self.kind, self.target), inputs)


@dataclass(frozen=True)
class FirstThoughts:
    """The answer follows the first few thoughts; the others are cut off the cache."""

    num_latents: int

    @property
    def name(self) -> str:
        """Key in stored results."""
        return f"first {self.num_latents}"

    def apply(self, run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs) -> LatentRollout:
        """Return the rollout that the answers follow."""
        rollout = inputs.rollout
        num_removed = rollout.latents.shape[1] - self.num_latents
        return rollout._replace(cache=rollout.cache.crop(rollout.cache.S - num_removed))


@dataclass(frozen=True)
class FewerIterations:
    """All thoughts after fewer Jacobi iterations than in training; after 0, they are the placeholders."""

    num_iterations: int

    @property
    def name(self) -> str:
        """Key in stored results."""
        return f"{self.num_iterations} iterations"

    def apply(self, run: InspectedRun, batch: ReasoningBatch, inputs: InterventionInputs) -> LatentRollout:
        """Return the rollout that the answers follow."""
        return run.think(batch, iterations=self.num_iterations)


AuditCondition = ReplacedThoughts | FirstThoughts | FewerIterations


def list_conditions(num_latents: int, num_iterations: int | None) -> list[AuditCondition]:
    """Return the conditions of an audit.

    Args:
        num_latents: Number of thoughts M. A single one cannot be shuffled.
        num_iterations: Jacobi iterations T of training; None or 0 leaves fewer ones out.
    """
    replaced = [
        ReplacedThoughts(kind, target)
        for kind in KINDS
        for target in INTERVENTION_TARGETS
        if kind != "shuffle" or num_latents > 1
    ]
    lengths = dict.fromkeys((num_latents // 2, 0))
    iterations = dict.fromkeys((num_iterations // 2, 0)) if num_iterations else ()
    return [*replaced, *map(FirstThoughts, lengths), *map(FewerIterations, iterations)]
