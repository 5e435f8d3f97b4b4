"""The recurrence of matrix memories: chunk form against token by token, one write, the cap, the guard."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from laconic.nested.recurrence.gated_delta_rule import (
    ChunkOutput,
    Gates,
    cap_step,
    chunk_gated_delta_rule,
    clip_state_norm,
    limit_step,
    vector_norm,
)
from tests.core.readings import noise
from tests.nested.helpers import near
from tests.reference.gated_delta_rule import recurrent_gated_delta_rule

B, H, OUT, IN = 2, 2, 3, 4


def share(seed: int, *shape: int) -> Tensor:
    return noise(seed, *shape).sigmoid() * 0.9 + 0.05


def drawn(T: int, momentum: bool, erase: int, anchor: bool) -> tuple[list[Tensor], Gates, dict[str, Tensor | None]]:
    """S, k, u, q; gates; and what else the recurrence takes, all with gradients."""
    tensors = [noise(n, B, H, *s).requires_grad_() for n, s in enumerate(((OUT, IN), (T, IN), (T, OUT), (T, IN)))]
    gates = Gates(*(share(7 + n, B, H, T).requires_grad_() for n in range(2)))
    if momentum:
        gates = gates._replace(momentum=share(9, B, H, T).requires_grad_())
    more = {
        "erase": (None, gates.step_size, share(10, B, H, T).requires_grad_())[erase],
        "N": noise(11, B, H, OUT, IN).requires_grad_() if momentum else None,
        "anchor": noise(12, B, H, T, OUT).requires_grad_() if anchor else None,
    }
    return tensors, gates, more


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize(("momentum", "erase", "anchor"), list(product((False, True), (0, 1, 2), (False, True))))
def test_a_chunk_is_its_tokens_in_order(momentum: bool, erase: int, anchor: bool, read: str) -> None:
    """In values and in gradients, with tokens that are not live behind the others."""
    for T, dead in ((1, 0), (5, 0), (5, 3)):
        tensors, gates, more = drawn(T, momentum, erase, anchor)
        live = torch.arange(T) < torch.tensor([[T], [T - dead]]) if dead else None
        leaves = list({id(x): x for x in (*tensors, *gates, *more.values()) if x is not None}.values())
        found: list[list[Tensor]] = []
        for form in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
            made = form(*tensors, gates, **more, valid=live, read=read)  # type: ignore[arg-type]
            parts = [x for x in made if x is not None]
            loss = torch.stack([(x * noise(n, *x.shape)).sum() for n, x in enumerate(parts)]).sum()
            slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
            found.append(
                [*parts, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, slopes, strict=True))]
            )
        near(found[0], found[1])


def test_gradients_of_first_and_second_order() -> None:
    tensors, gates, more = drawn(3, True, 1, True)
    small = [
        x[:1, :1].detach().requires_grad_() for x in (*tensors, *gates, more["N"], more["anchor"]) if x is not None
    ]

    def of(
        S: Tensor, k: Tensor, u: Tensor, q: Tensor, keep: Tensor, step: Tensor, m: Tensor, N: Tensor, a: Tensor
    ) -> Tensor:
        made: ChunkOutput = chunk_gated_delta_rule(S, k, u, q, Gates(keep, step, m), erase=step, N=N, anchor=a)
        return torch.cat([x.flatten() for x in made if x is not None])

    assert gradcheck(of, small)
    assert gradgradcheck(of, small)


def test_one_write_of_a_unit_key_is_read_back() -> None:
    """keep 1, step 1: after it the state gives the value, whatever it held."""
    S, k, u = noise(0, 1, 1, OUT, IN), noise(1, 1, 1, 1, IN), noise(2, 1, 1, 1, OUT)
    k, one = k / k.norm(), torch.ones(1, 1, 1, dtype=torch.float64)
    made = chunk_gated_delta_rule(S, k, u, k, Gates(one, one), erase=one)
    assert made.Y is not None
    near([made.Y, made.S @ k.mT], [u, u.mT])


def test_keep_near_zero_and_momentum_zero_are_finite() -> None:
    tensors, gates, _ = drawn(6, True, 1, False)
    zero = Gates(*(torch.zeros_like(x).requires_grad_() for x in gates if x is not None))
    made = chunk_gated_delta_rule(*tensors, zero, erase=gates.step_size, N=noise(3, B, H, OUT, IN))
    parts = [x for x in made if x is not None]
    slopes = torch.autograd.grad(torch.cat([x.flatten() for x in parts]).sum(), [zero.decay, tensors[1]])
    assert all(x.isfinite().all() for x in (*parts, *slopes))


@pytest.mark.parametrize("radius", [1.0, 0.3])
def test_under_the_cap_the_state_stays_in_its_radius(radius: float) -> None:
    """For any writes, steps and keeps; without it the same writes leave it."""
    T = 64
    k, u, q = (noise(n, 1, 1, T, IN) for n in range(3))
    k, u = k / k.norm(dim=-1, keepdim=True), 5 * u
    keep, step = share(3, 1, 1, T), 2 * share(4, 1, 1, T)
    for cap in (True, False):
        size, S = vector_norm(u), torch.zeros(1, 1, IN, IN, dtype=torch.float64)
        used = cap_step(step, keep, size, radius) if cap else step
        norms = []
        for t in range(T):
            at = slice(t, t + 1)
            S = chunk_gated_delta_rule(
                S, k[:, :, at], u[:, :, at], q[:, :, at], Gates(keep[..., at], used[..., at]), erase=used[..., at]
            ).S
            norms.append(torch.linalg.matrix_norm(S[0, 0], 2).item())
        assert (max(norms) <= radius) is cap


def test_a_step_beyond_the_bound_is_cut_to_it() -> None:
    keep, step = torch.full((1, 1, 2), 0.5), torch.tensor([[[1.2, 1.9]]])
    assert limit_step(step, keep).tolist() == [[[pytest.approx(1.2), 1.5]]]


def test_the_guard_bounds_the_norm_and_has_a_gradient_at_zero() -> None:
    S = 100 * noise(0, 1, 2, 4, 4)
    near([clip_state_norm(S, 4.0).norm(dim=(-2, -1))], [torch.full((1, 2), 8.0, dtype=torch.float64)])
    small = torch.zeros(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(clip_state_norm(small, 4.0).sum(), small)
    assert torch.equal(slope, torch.ones_like(small))
    assert torch.equal(clip_state_norm(S / 1000, 4.0), S / 1000)
