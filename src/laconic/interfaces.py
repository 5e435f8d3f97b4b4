"""Protocols between the packages: what training requires of data and methods, and generation requires of models."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.batches import AnswerBatch, ReasoningBatch
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.decoder import DecoderOutput


@runtime_checkable
class MethodState(Protocol):
    """Immutable state that one training step passes to the next, such as a cache or a memory."""

    def detach(self) -> Any: ...
    def to(self, device: torch.device | str) -> Any: ...
    def tensors(self) -> Mapping[str, Tensor]: ...


class StepOutput(NamedTuple):
    """Result of a training step: the loss, its detached unweighted metrics by name, and the new state."""

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    state: MethodState | None = None


@runtime_checkable
class Batch(Protocol):
    """A batch as the training loop sees it; `sequential_parts` run in order within one optimizer step."""

    @property
    def B(self) -> int: ...
    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def sequential_parts(self) -> tuple[Any, ...]: ...
    def to(self, device: torch.device | str) -> Any: ...


@runtime_checkable
class TrainingData(Protocol):
    """Rows to train on; `batch` is a pure function of its arguments."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows, stored with every checkpoint of a run."""
        ...

    def __len__(self) -> int: ...
    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Batch: ...


@runtime_checkable
class Method(Protocol):
    """A paper's training objective: a torch module whose trainable parameters are what is trained.

    This is all that a method must have. The protocols below are optional parts; docs/extending.md says what happens
    without each of them.
    """

    def __call__(self, batch: Any, state: Any = None) -> StepOutput: ...


@runtime_checkable
class NormalizesLoss(Protocol):
    """Optional part of a method: losses that are sums over tokens, divided by those of the whole update.

    Without it, the loss of a micro-batch counts as a mean over its rows.
    """

    def loss_denominators(self, batch: Any) -> Mapping[str, float]:
        """Return the denominators of the loss terms. Their sums over micro-batches and ranks come back in `batch`."""
        ...


def weigh_mean_over_rows(output: StepOutput, part: Any, num_parts: int) -> StepOutput:
    """Scale a mean over the rows of one part of a micro-batch to its share of the mean over the whole update."""
    weight = part.B / part.loss_denominators["rows"] / num_parts
    metrics = {name: value * weight for name, value in output.metrics.items()}
    return StepOutput(output.loss * weight, metrics, output.state)


@runtime_checkable
class AnswersQuestions(Protocol):
    """Optional part of a method: answer questions, for evaluation and `laconic.load`.

    Without it, `laconic.load` returns the trained decoder as a `LanguageModel`.
    """

    def answer(self, questions: ReasoningBatch, decoding: Any, *, with_cot: bool = False) -> AnswerBatch:
        """Answer each question; `decoding` is a `latent.answering.AnswerDecoding`."""
        ...


@runtime_checkable
class PromptsAnswers(Protocol):
    """Optional part of a method: return the prompts of its answers (the KV cache and vectors that they continue).

    With it, a server decodes several answers together; without it, a server answers one question at a time.
    """

    def prompt_answers(self, questions: ReasoningBatch, decoding: Any) -> Any:
        """Return a `latent.answering.AnswerPrompt`."""
        ...


@runtime_checkable
class PromptsAnswersStepwise(Protocol):
    """Optional part of a method: return the prompt of an answer, read in steps.

    With it, a server reads the prompt while other answers are decoded. Without it, a server calls
    `prompt_answers`, and running answers wait for the KV cache that it computes.
    """

    def prompt_answer_stepwise(self, question: ReasoningBatch, decoding: Any) -> Any:
        """Return a `latent.answering.StepwisePrompt` of one question."""
        ...


@runtime_checkable
class ThinksInLatents(Protocol):
    """Optional part of a method: compute the latent thoughts before its answers."""

    def think(self, questions: ReasoningBatch) -> Any:
        """Return a `latent.rollout.LatentRollout`."""
        ...


@runtime_checkable
class CarriesState(Protocol):
    """Optional part of a method: its state continues from one training step to the next."""

    @property
    def state_types(self) -> Mapping[str, type]:
        """Dataclasses that the state consists of, by name, so that it can be loaded."""
        ...


@runtime_checkable
class ResetsOptimizer(Protocol):
    """Optional part of a method: reset the optimizer's moments before some steps (iCoT, Coconut)."""

    def resets_optimizer_state(self, batch: Any) -> bool: ...


@runtime_checkable
class AfterUpdateHook(Protocol):
    """Optional part of a method: react to the metrics of an optimizer update."""

    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Receive loss and metrics over all ranks after an update was applied."""
        ...


@runtime_checkable
class ChecksFiniteState(Protocol):
    """Optional part of a `StatefulLM`: check the numbers of a state."""

    def check_finite_state(self, state: Any, row_names: Sequence[str] = ()) -> None:
        """Raise NonFiniteError naming the layer, memory and row of the first non-finite tensor."""
        ...


@runtime_checkable
class RecurrentState(Protocol):
    """Immutable state of a `StatefulLM`, one row per sequence."""

    @property
    def position(self) -> Int[Tensor, " B"]:
        """Tokens read so far, per row."""
        ...

    @property
    def attention_cache(self) -> KVCache | None:
        """KV cache of the first layer with attention; None for a model without attention."""
        ...

    def select_rows(self, rows: Sequence[int]) -> Self: ...
    def tensors(self) -> Mapping[str, Tensor]: ...


@runtime_checkable
class StatefulLM(Protocol):
    """Language model that updates fast weights while it reads. Reusing an old state forks it.

    With `update_weights=False` fast weights stay as they are, while convolutions, cache and position advance. Tokens
    where `target_mask` is False are not targets of the inner loss. `DecoderOutput.cache` is the new state.
    """

    @property
    def config(self) -> DecoderConfig: ...
    def initial_state(self, batch_size: int) -> Any: ...
    def read_tokens(
        self,
        input_ids: Tensor,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        update_weights: bool = True,
    ) -> DecoderOutput: ...
    def logits(self, hidden_states: Tensor) -> Tensor: ...
