"""A batch of several sequential parts: each runs on the detached state of the one before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.interfaces import StepOutput
from laconic.training.loop import train
from laconic.training.run import TrainingSetup
from tests.training.toy_runs import toy_config

A, B = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])


@dataclass(frozen=True)
class OneTensorState:
    """A state of one tensor."""

    x: Tensor

    def detach(self) -> "OneTensorState":
        return OneTensorState(self.x.detach())

    def to(self, device: Any) -> "OneTensorState":
        return self

    def tensors(self) -> Mapping[str, Tensor]:
        return {"x": self.x}


@dataclass(frozen=True)
class TwoPartBatch:
    """A batch whose sequential parts are its vectors."""

    xs: tuple[Tensor, ...] = (A, B)
    loss_denominators: Mapping[str, float] | None = None
    B, ids, num_tokens = 1, ("a",), 2

    @property
    def sequential_parts(self) -> tuple["TwoPartBatch", ...]:
        return tuple(replace(self, xs=(x,)) for x in self.xs)

    def to(self, device: Any) -> "TwoPartBatch":
        return self


class TwoPartData:
    """A single batch."""

    fingerprint = "0" * 64

    def __len__(self) -> int:
        return 1

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> TwoPartBatch:
        return TwoPartBatch()


class RunningSum(nn.Module):
    """The state is w x plus the state before; the loss is its dot product with w, divided by the number of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 0.25]))

    def loss_denominators(self, batch: TwoPartBatch) -> Mapping[str, float]:
        return {"pieces": float(len(batch.xs))}

    def forward(self, batch: TwoPartBatch, state: OneTensorState | None = None) -> StepOutput:
        total = self.w * batch.xs[0] + (state.x if state is not None else 0.0)
        assert batch.loss_denominators is not None
        loss = (self.w * total).sum() / batch.loss_denominators["pieces"]
        return StepOutput(loss, {"mean": loss.detach()}, OneTensorState(total))


def test_updater_detaches_the_state_between_parts() -> None:
    method = RunningSum()
    w = method.w.detach().clone().requires_grad_()
    first = w * A
    expected = ((w * first).sum() + (w * (w * B + first.detach())).sum()) / 2
    (gradient,) = torch.autograd.grad(expected, w)
    gradients: list[Tensor] = []
    method.w.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.clone()))  # type: ignore[union-attr]
    result = train(TrainingSetup(method, TwoPartData(), toy_config(steps=1, batch_size=1, micro_batch_size=1)))
    assert result.metrics["loss"] == expected.item()
    torch.testing.assert_close(gradients[-1], gradient, rtol=0, atol=0)


def test_updater_does_not_carry_the_state_unless_stateful() -> None:
    method = RunningSum()
    losses = [
        train(
            TrainingSetup(
                method, TwoPartData(), toy_config(steps=1, batch_size=1, micro_batch_size=1, learning_rate=1e-12)
            )
        ).metrics["loss"]
        for _ in range(2)
    ]
    two = train(
        TrainingSetup(
            RunningSum(), TwoPartData(), toy_config(steps=2, batch_size=1, micro_batch_size=1, learning_rate=1e-12)
        )
    ).metrics["loss"]
    assert losses[0] == two
