"""Float32 linear layers by torch, and by `laconic.models.ops.linear`, which uses oneDNN on AMD processors."""

from functools import partial

import torch
from torch import nn

from benchmarks.measure import Scale, Table, clock_name, time_per_call
from laconic.models.ops.linear import apply_linear, is_onednn_faster

LAYERS = ((576, 1536), (1536, 576), (768, 4096))
ROWS = (1, 8, 24, 512)


@torch.no_grad()
def linear(scale: Scale) -> Table:
    """Return the table of microseconds per layer."""
    rows: list[tuple[str, ...]] = []
    for inputs, outputs in LAYERS:
        layer = nn.Linear(inputs, outputs, bias=False)
        for n in ROWS:
            x = torch.randn(n, inputs)
            workloads = {"torch": partial(layer, x), "laconic": partial(apply_linear, layer, x)}
            seconds = time_per_call(workloads, scale.rounds, statistic=min)
            micros = {name: 1e6 * value for name, value in seconds.items()}
            ratio = seconds["torch"] / seconds["laconic"]
            rows.append((f"{inputs} → {outputs}", str(n), *(f"{v:.0f}" for v in micros.values()), f"{ratio:.2f}"))
    text = (
        f"Microseconds by {clock_name()}, the best of {scale.rounds}: one layer in float32 without gradients. On AMD's "
        "processors with AVX-512, laconic calls oneDNN from eight rows on; on others it calls torch, and the ratio is "
        f"1. This processor: {'oneDNN' if is_onednn_faster() else 'torch'}."
    )
    return Table("Float32 linear layers", text, ("layer", "rows", "torch, µs", "laconic, µs", "ratio"), rows)
