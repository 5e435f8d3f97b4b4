"""Nested Learning 76 to 96 against their oracles."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.config.nested import SelfModifyingOptions
from laconic.nested.hope.equations import dot_value, l2_value, memory_loss_gradient, mlp_memory, self_generated_values
from laconic.nested.hope.layer import initial_state
from laconic.nested.hope.memories import SelfModifyingMemories, SelfTitansParams, SelfTitansShape
from laconic.nested.recurrence.chunked_scan import scan_chunks
from laconic.nested.state import LinearMemoryState
from tests.models.fixtures import noise
from tests.oracles.compare import agree
from tests.oracles.hope import MISREAD, ORACLE

B, H, T, E = 2, 2, 7, 3
PLAIN: dict[str, Any] = {
    "gate_groups": 1,
    "max_projection_norm": 0.0,
    "max_memory_norm": 0.0,
    "memory_chunk_size": 3,
    "projection_chunk_size": 3,
}


def build_memories(w: dict[str, Tensor], **options: Any) -> SelfModifyingMemories:
    """Return the memories of a layer with these weights, in one group."""
    return SelfModifyingMemories(SelfTitansShape(H * E, H, E, SelfModifyingOptions(**(PLAIN | options))), w, "full")


def weights_by_name(k: Tensor, v: Tensor, M: Tensor, rows: Tensor, biases: Tensor) -> dict[str, Tensor]:
    """Return the weights by name; `rows` and `biases` are those of (keep, step)."""
    w = {"k.M": k, "v.M": v, "memory.M": M, "o_proj.weight": M}
    for n, name in enumerate(("keep", "step")):
        w |= {f"{name}.shared.weight": rows[n], f"{name}.shared.bias": biases[n]}
    return w


def random_inputs() -> tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor]:
    """Return x, q, starts of k, v and memory, rows and biases of (keep, step)."""
    biases = torch.tensor([[2.0, 3.0], [0.3, -0.4]], dtype=torch.float64)
    return (
        noise(0, B, H, T, E),
        noise(1, B, H, T, E),
        [noise(n, H, E, E) for n in (2, 3, 4)],
        0.5 * noise(5, 2, H, E),
        biases,
    )


@pytest.mark.equation("nested-learning", "76-78")
def test_write_static() -> None:
    x, q, (k, v, M), _, _ = random_inputs()
    keep, step = torch.tensor([0.9, 0.8]).double(), torch.tensor([0.5, 0.7]).double()

    def run(x: Tensor, q: Tensor, k: Tensor, v: Tensor, M: Tensor, keep: Tensor, step: Tensor) -> Tensor:
        rows = torch.zeros(2, H, E, dtype=torch.float64)
        memory = build_memories(
            weights_by_name(k, v, M, rows, torch.stack([keep.logit(), step.logit()])),
            adaptive_projections=(),
            decay_target="zero",
        )
        return memory.step_chunk(initial_state(SelfTitansParams(memory.shape, memory.w), len(x)).memory, (x, q), None)[
            0
        ]

    agree(run, ORACLE["76-78"], MISREAD["76-78"], x, q, k, v, M, keep, step)


@pytest.mark.equation("nested-learning", "83,86,94")
def test_generate() -> None:
    x, _, (k, v, M), rows, biases = random_inputs()
    change, running = 0.5 * noise(6, B, H, E, E), 0.5 * noise(7, B, H, E, E)

    def run(x: Tensor, change: Tensor, running: Tensor, k: Tensor, v: Tensor, rows: Tensor, biases: Tensor) -> Any:
        state = {"shared": LinearMemoryState(running, change, None, torch.zeros(len(x)).long())}
        key, value, gates = build_memories(weights_by_name(k, v, M, rows, biases)).generate(state, x)
        return key, value, gates["shared"].decay, gates["shared"].step_size

    arguments = (x, change, running, k, v, rows, biases)
    agree(run, ORACLE["83,86,94"], MISREAD["83,86,94"], *arguments)
    single = [x[:1, :, :2], change[:1], running[:1], k, v, rows, biases]
    assert gradcheck(run, [x.clone().requires_grad_() for x in single])


@pytest.mark.equation("nested-learning", "84,87,95")
def test_self_generated_values() -> None:
    def run(M: Tensor, v: Tensor, change: Tensor) -> Tensor:
        return self_generated_values(v, change) @ M.mT

    agree(run, ORACLE["84,87,95"], MISREAD["84,87,95"], noise(0, H, E, E), noise(1, B, H, T, E), noise(2, B, H, E, E))
    v, change = noise(1, B, H, T, E).requires_grad_(), noise(2, B, H, E, E).requires_grad_()
    assert gradcheck(self_generated_values, (v, change))


@pytest.mark.equation("nested-learning", "85")
def test_memory_loss_gradient() -> None:
    def run(y: Tensor, v: Tensor, factor: int) -> Tensor:
        return memory_loss_gradient(y, v)

    agree(run, ORACLE["85"], MISREAD["85"], noise(0, B, H, 2, E), noise(1, B, H, 2, E), 1)


@pytest.mark.equation("nested-learning", "88,90,96")
@pytest.mark.parametrize("objective", ["dot", "l2"])
@pytest.mark.parametrize("to_start", [True, False])
def test_self_modifying_write(objective: str, to_start: bool) -> None:
    """All memories over three chunks, through the one matrix that they share."""

    def run(x: Tensor, q: Tensor, starts: list[Tensor], rows: Tensor, biases: Tensor, C: int, *options: Any) -> Tensor:
        objective, to_start = options
        memory = build_memories(
            weights_by_name(*starts, rows, biases), objective=objective, decay_target="start" if to_start else "zero",
            memory_chunk_size=C, projection_chunk_size=C,
        )  # fmt: skip
        return scan_chunks(
            memory, initial_state(SelfTitansParams(memory.shape, memory.w), len(x)).memory, (x, q), None
        )[0]

    x, q, starts, rows, biases = random_inputs()
    agree(run, ORACLE["88,90,96"], MISREAD["88,90,96"], x, q, starts, rows, biases, 3, objective, to_start)


@pytest.mark.equation("nested-learning", "88,90,96")
def test_self_modifying_write_gradients() -> None:
    """One head over two chunks, for inputs, queries and every start."""
    x, q, starts, rows, biases = random_inputs()
    single = [x[:1, :1, :4], q[:1, :1, :4], *(M[:1] for M in starts), rows[:, :1], biases[:, :1]]
    shape = SelfTitansShape(E, 1, E, SelfModifyingOptions(**PLAIN))

    def run(x: Tensor, q: Tensor, k: Tensor, v: Tensor, M: Tensor, rows: Tensor, biases: Tensor) -> Tensor:
        memory = SelfModifyingMemories(shape, weights_by_name(k, v, M, rows, biases), "full")
        return scan_chunks(memory, initial_state(SelfTitansParams(shape, memory.w), 1).memory, (x, q), None)[0]

    assert gradcheck(run, [x.clone().requires_grad_() for x in single])


@pytest.mark.equation("nested-learning", "89,91")
def test_mlp_memory() -> None:
    z, W1, W2 = noise(0, B, H, 2, E), noise(1, H, E, 4), noise(2, H, 4, E)
    agree(mlp_memory, ORACLE["89,91"], MISREAD["89,91"], z, W1, W2)
    assert gradcheck(mlp_memory, [x.requires_grad_() for x in (z, W1, W2)])


def outer_products(u: Tensor, k: Tensor) -> Tensor:
    """Return u kᵀ of every token."""
    return (u[..., :, None] * k[..., None, :]).flatten(0, -3)


@pytest.mark.equation("nested-learning", "92")
def test_dot_value() -> None:
    v, k = noise(0, B, H, 2, E), noise(1, B, H, 2, E)
    agree(lambda v, k: outer_products(dot_value(v), k), ORACLE["92"], MISREAD["92"], v, k)


@pytest.mark.equation("nested-learning", "93")
def test_l2_value() -> None:
    v, at_key, k = (noise(n, B, H, 2, E) for n in range(3))

    def run(v: Tensor, at_key: Tensor, k: Tensor, factor: int) -> Tensor:
        return outer_products(l2_value(v, at_key), k)

    agree(run, ORACLE["93"], MISREAD["93"], v, at_key, k, 1)
    assert gradcheck(run, (v.requires_grad_(), at_key.requires_grad_(), k.requires_grad_(), 1))


def test_two_erasures_settle_at_half_the_value() -> None:
    """The paper erases and then subtracts the error: with C = 1, decay 1 and step .5 the fixed point is v̂/2."""
    k, v = noise(0, E), noise(1, E)
    k = k / k.norm()
    M, step = noise(2, E, E), 0.5
    for _ in range(200):
        M = M - step * torch.outer(M @ k, k) - step * torch.outer(M @ k - v, k)
    torch.testing.assert_close(M @ k, v / 2)
