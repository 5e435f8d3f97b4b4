"""chunk_gated_delta_rule equals its recurrence; the cap and the norm clip bound the state."""

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
    limit_step,
    norm_clip_factor,
    vector_norm,
)
from tests.models.fixtures import noise
from tests.nested.helpers import assert_close
from tests.reference.gated_delta_rule import recurrent_gated_delta_rule

B, H, OUT, IN = 2, 2, 3, 4


def fractions(seed: int, *shape: int) -> Tensor:
    return noise(seed, *shape).sigmoid() * 0.9 + 0.05


def inputs(T: int, momentum: bool, erase: int, anchor: bool) -> tuple[list[Tensor], Gates, dict[str, Tensor | None]]:
    """Return S, k, u, q; gates; and the other arguments of the recurrence, all with gradients."""
    sizes = (OUT, IN), (T, IN), (T, OUT), (T, IN)
    tensors = [noise(n, B, H, *size).requires_grad_() for n, size in enumerate(sizes)]
    gates = Gates(*(fractions(7 + n, B, H, T).requires_grad_() for n in range(2)))
    if momentum:
        gates = gates._replace(momentum=fractions(9, B, H, T).requires_grad_())
    gates = gates._replace(erase=(None, gates.step_size, fractions(10, B, H, T).requires_grad_())[erase])
    options = {
        "N": noise(11, B, H, OUT, IN).requires_grad_() if momentum else None,
        "anchor": noise(12, B, H, T, OUT).requires_grad_() if anchor else None,
    }
    return tensors, gates, options


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize(("momentum", "erase", "anchor"), list(product((False, True), (0, 1, 2), (False, True))))
def test_gated_delta_rule_chunk_equals_recurrence(momentum: bool, erase: int, anchor: bool, read: str) -> None:
    """Values and gradients, with padding on the right."""
    for T, padding in ((1, 0), (5, 0), (5, 3)):
        tensors, gates, options = inputs(T, momentum, erase, anchor)
        valid = torch.arange(T) < torch.tensor([[T], [T - padding]]) if padding else None
        leaves = list({id(x): x for x in (*tensors, *gates, *options.values()) if x is not None}.values())
        results: list[list[Tensor]] = []
        masked = gates._replace(valid=valid)
        for form in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
            outputs = [x for x in form(*tensors, masked, **options, read=read) if x is not None]  # type: ignore[arg-type]
            loss = torch.stack([(x * noise(n, *x.shape)).sum() for n, x in enumerate(outputs)]).sum()
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            filled = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))
            results.append([*outputs, *filled])
        assert_close(results[0], results[1])


@pytest.mark.medium
def test_gated_delta_rule_first_and_second_gradients() -> None:
    tensors, gates, options = inputs(3, True, 1, True)
    leaves = (*tensors, *gates[:3], options["N"], options["anchor"])
    single = [x[:1, :1].detach().requires_grad_() for x in leaves if x is not None]

    def run(
        S: Tensor, k: Tensor, u: Tensor, q: Tensor, decay: Tensor, step: Tensor, m: Tensor, N: Tensor, a: Tensor
    ) -> Tensor:
        output: ChunkOutput = chunk_gated_delta_rule(S, k, u, q, Gates(decay, step, m, step), N=N, anchor=a)
        return torch.cat([x.flatten() for x in output if x is not None])

    assert gradcheck(run, single)
    assert gradgradcheck(run, single)


def test_gated_delta_rule_one_write_of_a_unit_key_is_read_back() -> None:
    """With decay 1 and step size 1 the state then returns the value, whatever it stored."""
    S, k, u = noise(0, 1, 1, OUT, IN), noise(1, 1, 1, 1, IN), noise(2, 1, 1, 1, OUT)
    k, one = k / k.norm(), torch.ones(1, 1, 1, dtype=torch.float64)
    output = chunk_gated_delta_rule(S, k, u, k, Gates(one, one, erase=one))
    assert output.Y is not None
    assert_close([output.Y, output.S @ k.mT], [u, u.mT])


def test_gated_delta_rule_zero_gates_have_finite_gradients() -> None:
    tensors, gates, _ = inputs(6, True, 1, False)
    decay, step_size, momentum = (torch.zeros(B, H, 6, dtype=torch.float64).requires_grad_() for _ in range(3))
    S, k, u, q = tensors
    zero = Gates(decay, step_size, momentum, gates.step_size)
    output = chunk_gated_delta_rule(S, k, u, q, zero, N=noise(3, B, H, OUT, IN))
    parts = [x for x in output if x is not None]
    grads = torch.autograd.grad(torch.cat([x.flatten() for x in parts]).sum(), [decay, k])
    assert all(x.isfinite().all() for x in (*parts, *grads))


@pytest.mark.parametrize("max_norm", [1.0, 0.3])
def test_cap_step_bounds_the_spectral_norm(max_norm: float) -> None:
    """For any writes, step sizes and decays; without the cap the same writes exceed the bound."""
    T = 64
    k, u, q = (noise(n, 1, 1, T, IN) for n in range(3))
    k, u = k / k.norm(dim=-1, keepdim=True), 5 * u
    decay, step = fractions(3, 1, 1, T), 2 * fractions(4, 1, 1, T)
    for is_capped in (True, False):
        S = torch.zeros(1, 1, IN, IN, dtype=torch.float64)
        used = cap_step(step, decay, vector_norm(u), max_norm) if is_capped else step
        norms = []
        for t in range(T):
            at = slice(t, t + 1)
            gates = Gates(decay[..., at], used[..., at], erase=used[..., at])
            S = chunk_gated_delta_rule(S, k[:, :, at], u[:, :, at], q[:, :, at], gates).S
            norms.append(torch.linalg.matrix_norm(S[0, 0], 2).item())
        assert (max(norms) <= max_norm) is is_capped


def test_limit_step_clamps_to_one_plus_decay() -> None:
    decay, step = torch.full((1, 1, 2), 0.5), torch.tensor([[[1.2, 1.9]]])
    assert limit_step(step, decay).tolist() == [[[pytest.approx(1.2), 1.5]]]


def test_norm_clip_factor_bounds_the_norm_and_has_a_gradient_at_zero() -> None:
    S = 100 * noise(0, 1, 2, 4, 4)
    clipped = S * norm_clip_factor(4.0, S)
    assert_close([clipped.norm(dim=(-2, -1))], [torch.full((1, 2), 8.0, dtype=torch.float64)])
    zero = torch.zeros(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((zero * norm_clip_factor(4.0, zero)).sum(), zero)
    assert torch.equal(grad, torch.ones_like(zero))
    assert norm_clip_factor(4.0, S / 1000).eq(1).all()
