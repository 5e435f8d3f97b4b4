"""Time of a step and size of the state of M3, compared with torch.optim.Muon and AdamW on the same matrices."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.measure import Scale, Table, clock, clock_name, time_interleaved, verdict
from laconic import M3

PERIOD = 10  # M3 updates its slow memory every tenth step
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "torch.optim.Muon": lambda matrices: torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1),
    "M3": lambda matrices: M3(matrices, lr=1e-3, weight_decay=0.1),
    "torch.optim.AdamW": lambda matrices: torch.optim.AdamW(matrices, lr=1e-3, weight_decay=0.1),
}


def optimizers(scale: Scale) -> Table:
    """Return the table of optimizers."""
    rows: list[tuple[str, ...]] = []
    for layers, width in ((scale.layers, scale.width), (2, scale.width // 4)):
        rows += optimizer_rows(scale, layers, width)
    text = (
        f"{PERIOD} steps of each optimizer on the matrices of Llama blocks (attention and a gated MLP) with random "
        f"gradients, float32, weight decay .1. Every {PERIOD}th step of M3 includes its slow update. Muon runs "
        f"Newton-Schulz in bfloat16, M3 only where the CPU is fast at it. Time: milliseconds per step by "
        f"{clock_name()}, best of {scale.rounds}, rounds interleaved. State: bytes per number of the matrices."
    )
    return Table("Optimizers", text, ("matrices", "optimizer", "ms per step", "to Muon", "state", "target"), rows)


def optimizer_rows(scale: Scale, layers: int, width: int) -> list[tuple[str, ...]]:
    """Return the rows of a number of layers of one width."""
    shapes, built = matrix_shapes(layers, width), build_optimizers(layers, width)
    steps = {name: repeat_step(optimizer) for name, optimizer in built.items()}
    times = time_interleaved(steps, scale.rounds, scale.patience)
    size, muon = sum(o * i for o, i in shapes), clock(times["torch.optim.Muon"])
    rows: list[tuple[str, ...]] = []
    for name, optimizer in built.items():
        seconds = clock(times[name])
        state = sum(tensor.nbytes for entries in optimizer.state.values() for tensor in entries.values()) / size
        is_m3 = name == "M3"
        targets = f"time {verdict(seconds / muon, most=1.2)}; state {verdict(state, most=12)}" if is_m3 else ""
        rows.append((
            f"{len(shapes)} of width {width}", name, f"{1e3 * seconds / PERIOD:.2f}", f"{seconds / muon:.2f}",
            f"{state:.2f}", targets,
        ))  # fmt: skip
    return rows


def matrix_shapes(layers: int, width: int) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of Llama blocks: attention and a gated MLP."""
    wide = width * 8 // 3
    return [*[(width, width)] * 4, (wide, width), (wide, width), (width, wide)] * layers


def build_optimizers(layers: int, width: int, device: torch.device | str = "cpu") -> dict[str, torch.optim.Optimizer]:
    """Return each optimizer on matrices of its own with random gradients."""
    built: dict[str, torch.optim.Optimizer] = {}
    for name, build in OPTIMIZERS.items():
        generator = torch.Generator().manual_seed(0)
        matrices: list[Tensor] = []
        for shape in matrix_shapes(layers, width):
            matrices.append(nn.Parameter(torch.randn(shape, generator=generator).to(device)))
            matrices[-1].grad = torch.randn(shape, generator=generator).to(device)
        built[name] = build(matrices)
    return built


def repeat_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that takes as many steps as M3's period has."""

    def run() -> None:
        for _ in range(PERIOD):
            optimizer.step()

    return run
