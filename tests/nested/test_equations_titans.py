"""Titans 11 to 19 against their oracles."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.nested.recurrence.chunked_scan import pack_left
from laconic.nested.recurrence.gated_delta_rule import Gates
from laconic.nested.recurrence.memory_cells import MLPStart, UpdateRule, zero_state
from laconic.nested.state import LayerState, LinearMemoryState, MLPMemoryState
from laconic.nested.titans.equations import chunk_update, loss_gradient, project_qkv, read_memory
from laconic.nested.titans.layer import prepend_persistent
from tests.models.fixtures import noise
from tests.oracles.compare import agree
from tests.oracles.titans import MISREAD, ORACLE
from tests.reference.titans import recurrent_step

B, H, T, E, W = 2, 2, 4, 3, 3
D = H * E


def fractions(seed: int, *shape: int) -> Tensor:
    return noise(seed, *shape).sigmoid() * 0.8 + 0.1


@pytest.mark.equation("titans", "11")
def test_project_qkv() -> None:
    x, Ws, taps = noise(0, B, T, D), [noise(n, D, D) for n in (1, 2, 3)], [noise(n, D, W) for n in (4, 5, 6)]

    def run(x: Tensor, Ws: list[Tensor], taps: list[Tensor], heads: int) -> Any:
        w = {f"{name}_proj.weight": W for name, W in zip("qkv", Ws, strict=True)}
        w |= {f"{name}_conv.weight": c for name, c in zip("qkv", taps, strict=True)}
        return tuple(project_qkv(x, w, {name: torch.zeros(B, W - 1, D).double() for name in "qkv"}, heads, None)[:3])

    agree(run, ORACLE["11"], MISREAD["11"], x, Ws, taps, H)


@pytest.mark.equation("titans", "12")
@pytest.mark.parametrize("factor", [1, 2])
def test_loss_gradient(factor: int) -> None:
    y, v = noise(0, B, H, T, E), noise(1, B, H, T, E)
    agree(loss_gradient, ORACLE["12"], MISREAD["12"], y, v, factor)
    y = y.requires_grad_()
    (grad,) = torch.autograd.grad(factor / 2 * (y - v).square().sum(), y)
    torch.testing.assert_close(loss_gradient(y, v, factor), grad)


@pytest.mark.equation("titans", "13,14")
def test_recurrent_step() -> None:
    M, S, gradient = (noise(n, B, H, E, E) for n in range(3))
    decay, step, momentum = (fractions(n, B, H) for n in range(3, 6))
    agree(recurrent_step, ORACLE["13,14"], MISREAD["13,14"], M, S, gradient, decay, step, momentum)
    assert gradcheck(recurrent_step, [x.requires_grad_() for x in (M, S, gradient, decay, step, momentum)])


@pytest.mark.equation("titans", "15")
def test_read_memory() -> None:
    def run(M: Tensor, change: Tensor, boundary: Tensor, q: Tensor) -> Tensor:
        return read_memory(M, LinearMemoryState(change, boundary, None, torch.zeros(B).long()), q, UpdateRule())

    arguments = noise(0, H, E, E), noise(1, B, H, E, E), noise(2, B, H, E, E), noise(3, B, H, T, E)
    agree(run, ORACLE["15"], MISREAD["15"], *arguments)
    assert gradcheck(run, [x.requires_grad_() for x in arguments])


def run_chunk(starts: list[Tensor], k: Tensor, v: Tensor, q: Tensor, *gates: Tensor) -> Any:
    """Return Y, and every M and S at the end."""
    parts = [zero_state(len(k), tuple(M.shape), True, k) for M in starts]
    is_mlp = len(starts) == 2
    start, state = (MLPStart(*starts), MLPMemoryState(*parts)) if is_mlp else (starts[0], parts[0])
    y, new = chunk_update(start, state, k, v, q, Gates(*gates), UpdateRule())
    after = [new.W1, new.W2] if isinstance(new, MLPMemoryState) else [new]
    return (y, *(M + m.change for M, m in zip(starts, after, strict=True)), *(m.momentum for m in after))


@pytest.mark.equation("titans", "16-18")
@pytest.mark.parametrize("depth", [1, 2])
def test_chunk_update(depth: int) -> None:
    starts = [noise(0, H, E, E)] if depth == 1 else [noise(0, H, E, 4), noise(1, H, 4, E)]
    k, v, q = (noise(n, B, H, T, E) for n in (2, 3, 4))
    k = k / k.norm(dim=-1, keepdim=True)
    gates = [fractions(n, B, H, T) for n in (5, 6, 7)]
    agree(run_chunk, ORACLE["16-18"], MISREAD["16-18"], starts, k, v, q, *gates)
    single = [x[:1, :1, :3].requires_grad_() for x in (k, v, q, *gates)]
    heads = [M[:1].requires_grad_() for M in starts]
    assert gradcheck(lambda *a: run_chunk(list(a[6:]), *a[:6]), [*single, *heads])


@pytest.mark.equation("titans", "19")
def test_prepend_persistent() -> None:
    persistent, x = noise(0, 2, D), noise(1, 4, T, D)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()

    def run(persistent: Tensor, x: Tensor, count: list[int], mask: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(4, 1, 1, 1, dtype=torch.float64)
        state = LayerState(memory={"memory": LinearMemoryState(zero, zero, None, torch.tensor(count))})
        tokens = pack_left(*prepend_persistent({"persistent": persistent}, state, x, mask, True))
        assert tokens.lengths is not None
        return tokens.x, torch.tensor(tokens.lengths).double()

    agree(run, ORACLE["19"], MISREAD["19"], persistent, x, [0, 0, 0, 5], mask)
