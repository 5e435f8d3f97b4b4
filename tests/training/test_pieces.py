"""A batch of several pieces: read in order on the state of the one before, which is cut from its graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.interfaces import StepOutput
from laconic.training.loop import train
from tests.training.ground import how

A, B = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])


@dataclass(frozen=True)
class Held:
    """A state of one tensor."""

    x: Tensor

    def detach(self) -> "Held":
        return Held(self.x.detach())

    def to(self, device: Any) -> "Held":
        return self

    def tensors(self) -> Mapping[str, Tensor]:
        return {"x": self.x}


@dataclass(frozen=True)
class Two:
    """A batch whose pieces are its vectors, one by one."""

    xs: tuple[Tensor, ...] = (A, B)
    totals: Mapping[str, float] | None = None
    B, ids, tokens = 1, ("a",), 2

    @property
    def pieces(self) -> tuple["Two", ...]:
        return tuple(replace(self, xs=(x,)) for x in self.xs)

    def to(self, device: Any) -> "Two":
        return self


class Twos:
    """The one batch."""

    fingerprint = "0" * 64

    def __len__(self) -> int:
        return 1

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Two:
        return Two()


class Running(nn.Module):
    """The state is w x plus the state before; the loss is its sum times w, over the pieces of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 0.25]))

    def totals(self, batch: Two) -> Mapping[str, float]:
        return {"pieces": float(len(batch.xs))}

    def restarts(self, batch: Two) -> bool:
        return False

    def forward(self, batch: Two, state: Held | None = None) -> StepOutput:
        held = self.w * batch.xs[0] + (state.x if state is not None else 0.0)
        assert batch.totals is not None
        loss = (self.w * held).sum() / batch.totals["pieces"]
        return StepOutput(loss, {"loss": loss.detach()}, Held(held))


def test_the_state_goes_from_piece_to_piece_without_its_graph() -> None:
    method = Running()
    w = method.w.detach().clone().requires_grad_()
    first = w * A
    by_hand = ((w * first).sum() + (w * (w * B + first.detach())).sum()) / 2
    (gradient,) = torch.autograd.grad(by_hand, w)
    kept: list[Tensor] = []
    method.w.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))  # type: ignore[union-attr]
    outcome = train(method, Twos(), how(steps=1, batch=1, micro=1))
    assert outcome.metrics["loss"] == by_hand.item()
    torch.testing.assert_close(kept[-1], gradient, rtol=0, atol=0)


def test_the_state_of_one_update_is_not_the_next_ones() -> None:
    method = Running()
    losses = [train(method, Twos(), how(steps=1, batch=1, micro=1, lr=1e-12)).metrics["loss"] for _ in range(2)]
    two = train(Running(), Twos(), how(steps=2, batch=1, micro=1, lr=1e-12)).metrics["loss"]
    assert losses[0] == two
