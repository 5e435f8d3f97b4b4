"""Nested Learning 76 to 96 against their oracles."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.config.nested import SelfModifyingOptions
from laconic.nested.hope.config import SelfTitansParams, SelfTitansShape
from laconic.nested.hope.equations import dot_value, l2_value, memory_loss_gradient, mlp_memory, self_generated_values
from laconic.nested.hope.layer import initial_state
from laconic.nested.hope.memories import SelfModifyingMemories
from laconic.nested.recurrence.chunked_scan import ScanOptions, scan_chunks
from laconic.nested.state import LinearMemoryState
from tests.core.readings import noise
from tests.oracles.compare import agree
from tests.oracles.hope import MISREAD, ORACLE

B, H, T, E = 2, 2, 7, 3
FULL = ScanOptions("full", None, {}, False)
PLAIN: dict[str, Any] = {"groups": 1, "cap": 0.0, "guard": 0.0, "chunk_memory": 3, "chunk_projections": 3}


def learned(w: dict[str, Tensor], **options: Any) -> SelfModifyingMemories:
    """The memories of a layer with these weights, one group."""
    return SelfModifyingMemories(SelfTitansShape(H * E, H, E, SelfModifyingOptions(**(PLAIN | options))), w, "full")


def named(k: Tensor, v: Tensor, M: Tensor, rows: Tensor, biases: Tensor) -> dict[str, Tensor]:
    """Weights by name; `rows` and `biases` those of (keep, step)."""
    w = {"k.M": k, "v.M": v, "memory.M": M, "o_proj.weight": M}
    for n, name in enumerate(("keep", "step")):
        w |= {f"{name}.shared.weight": rows[n], f"{name}.shared.bias": biases[n]}
    return w


def drawn() -> tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor]:
    """x, q, starts of k, v and memory, rows and biases of (keep, step)."""
    biases = torch.tensor([[2.0, 3.0], [0.3, -0.4]], dtype=torch.float64)
    return (
        noise(0, B, H, T, E),
        noise(1, B, H, T, E),
        [noise(n, H, E, E) for n in (2, 3, 4)],
        0.5 * noise(5, 2, H, E),
        biases,
    )


@pytest.mark.equation("nested-learning", "76-78")
def test_static_projections() -> None:
    x, q, (k, v, M), _, _ = drawn()
    keep, step = torch.tensor([0.9, 0.8]).double(), torch.tensor([0.5, 0.7]).double()

    def of(x: Tensor, q: Tensor, k: Tensor, v: Tensor, M: Tensor, keep: Tensor, step: Tensor) -> Tensor:
        rows = torch.zeros(2, H, E, dtype=torch.float64)
        memory = learned(named(k, v, M, rows, torch.stack([keep.logit(), step.logit()])), inner=(), decay_target="zero")
        return memory.step_chunk(initial_state(SelfTitansParams(memory.shape, memory.w), len(x)).memory, (x, q), None)[
            0
        ]

    agree(of, ORACLE["76-78"], MISREAD["76-78"], x, q, k, v, M, keep, step)


@pytest.mark.equation("nested-learning", "83,86,94")
def test_what_is_generated() -> None:
    x, _, (k, v, M), rows, biases = drawn()
    change, running = 0.5 * noise(6, B, H, E, E), 0.5 * noise(7, B, H, E, E)

    def of(x: Tensor, change: Tensor, running: Tensor, k: Tensor, v: Tensor, rows: Tensor, biases: Tensor) -> Any:
        state = {"shared": LinearMemoryState(running, change, None, torch.zeros(len(x)).long())}
        key, value, gates = learned(named(k, v, M, rows, biases)).generate(state, x)
        return key, value, gates["shared"].decay, gates["shared"].step_size

    given = (x, change, running, k, v, rows, biases)
    agree(of, ORACLE["83,86,94"], MISREAD["83,86,94"], *given)
    few = [x[:1, :, :2], change[:1], running[:1], k, v, rows, biases]
    assert gradcheck(of, [x.clone().requires_grad_() for x in few])


@pytest.mark.equation("nested-learning", "84,87,95")
def test_own_values() -> None:
    def of(M: Tensor, v: Tensor, change: Tensor) -> Tensor:
        return self_generated_values(v, change) @ M.mT

    agree(of, ORACLE["84,87,95"], MISREAD["84,87,95"], noise(0, H, E, E), noise(1, B, H, T, E), noise(2, B, H, E, E))
    v, change = noise(1, B, H, T, E).requires_grad_(), noise(2, B, H, E, E).requires_grad_()
    assert gradcheck(self_generated_values, (v, change))
    assert not self_generated_values(v, change, differentiable=False).requires_grad


@pytest.mark.equation("nested-learning", "85")
@pytest.mark.parametrize("factor", [1, 2])
def test_memory_loss(factor: int) -> None:
    agree(memory_loss_gradient, ORACLE["85"], MISREAD["85"], noise(0, B, H, 2, E), noise(1, B, H, 2, E), factor)


@pytest.mark.equation("nested-learning", "88,90,96")
@pytest.mark.parametrize("objective", ["dot", "l2"])
@pytest.mark.parametrize("to_start", [True, False])
def test_memories_write_themselves(objective: str, to_start: bool) -> None:
    """All of them, over three chunks, by the one matrix they share."""

    def of(x: Tensor, q: Tensor, starts: list[Tensor], rows: Tensor, biases: Tensor, C: int, *how: Any) -> Tensor:
        objective, to_start = how
        memory = learned(
            named(*starts, rows, biases), objective=objective, decay_target="start" if to_start else "zero",
            memory_chunk_size=C, projection_chunk_size=C,
        )  # fmt: skip
        return scan_chunks(
            memory, initial_state(SelfTitansParams(memory.shape, memory.w), len(x)).memory, (x, q), None, FULL
        )[0]

    x, q, starts, rows, biases = drawn()
    agree(of, ORACLE["88,90,96"], MISREAD["88,90,96"], x, q, starts, rows, biases, 3, objective, to_start)


@pytest.mark.equation("nested-learning", "88,90,96")
def test_gradients_of_memories_that_write_themselves() -> None:
    """One head over two chunks, to the inputs, the queries and every start."""
    x, q, starts, rows, biases = drawn()
    few = [x[:1, :1, :4], q[:1, :1, :4], *(M[:1] for M in starts), rows[:, :1], biases[:, :1]]
    shape = SelfTitansShape(E, 1, E, SelfModifyingOptions(**PLAIN))

    def single(x: Tensor, q: Tensor, k: Tensor, v: Tensor, M: Tensor, rows: Tensor, biases: Tensor) -> Tensor:
        memory = SelfModifyingMemories(shape, named(k, v, M, rows, biases), "full")
        return scan_chunks(memory, initial_state(SelfTitansParams(shape, memory.w), 1).memory, (x, q), None, FULL)[0]

    assert gradcheck(single, [x.clone().requires_grad_() for x in few])


@pytest.mark.equation("nested-learning", "89,91")
def test_mlp_memory() -> None:
    z, W1, W2 = noise(0, B, H, 2, E), noise(1, H, E, 4), noise(2, H, 4, E)
    agree(mlp_memory, ORACLE["89,91"], MISREAD["89,91"], z, W1, W2)
    assert gradcheck(mlp_memory, [x.requires_grad_() for x in (z, W1, W2)])


def spread(u: Tensor, k: Tensor) -> Tensor:
    """u kᵀ of every token."""
    return (u[..., :, None] * k[..., None, :]).flatten(0, -3)


@pytest.mark.equation("nested-learning", "92")
def test_dot_value() -> None:
    v, k = noise(0, B, H, 2, E), noise(1, B, H, 2, E)
    agree(lambda v, k: spread(dot_value(v), k), ORACLE["92"], MISREAD["92"], v, k)


@pytest.mark.equation("nested-learning", "93")
@pytest.mark.parametrize("factor", [1, 2])
def test_l2_value(factor: int) -> None:
    v, at_key, k = (noise(n, B, H, 2, E) for n in range(3))

    def of(v: Tensor, at_key: Tensor, k: Tensor, factor: int) -> Tensor:
        return spread(l2_value(v, at_key, factor), k)

    agree(of, ORACLE["93"], MISREAD["93"], v, at_key, k, factor)
    assert gradcheck(of, (v.requires_grad_(), at_key.requires_grad_(), k.requires_grad_(), factor))


def test_with_two_erases_a_repeated_pair_settles_at_half_its_value() -> None:
    """The print erases and then takes the error: at C = 1, keep 1 and step .5, the fixed point is v̂/2."""
    k, v = noise(0, E), noise(1, E)
    k = k / k.norm()
    M, step = noise(2, E, E), 0.5
    for _ in range(200):
        M = M - step * torch.outer(M @ k, k) - step * torch.outer(M @ k - v, k)
    torch.testing.assert_close(M @ k, v / 2)
