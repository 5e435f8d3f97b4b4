"""Float32 linear layers by torch, by `laconic.models.ops.linear` (oneDNN on AMD processors), and with packed ones."""

import copy
from functools import partial

import torch
from torch import nn

from benchmarks.measure import Scale, Table, clock_name, time_per_call
from laconic.models.ops.linear import apply_linear, is_onednn_faster
from laconic.models.ops.packed_linear import pack_weights

LAYERS = ((576, 1536), (1536, 576), (768, 4096))
ROWS = (1, 2, 8, 24, 512)


@torch.no_grad()
def linear(scale: Scale) -> Table:
    """Return the table of microseconds per layer."""
    rows: list[tuple[str, ...]] = []
    for inputs, outputs in LAYERS:
        layer = nn.Linear(inputs, outputs, bias=False)
        packed = copy.deepcopy(layer)
        pack_weights(packed)
        for n in ROWS:
            x = torch.randn(n, inputs)
            workloads = {
                "torch": partial(layer, x), "laconic": partial(apply_linear, layer, x), "packed": partial(packed, x),
            }  # fmt: skip
            seconds = time_per_call(workloads, scale.rounds, statistic=min)
            micros = {name: 1e6 * value for name, value in seconds.items()}
            ratios = (f"{seconds['torch'] / seconds[name]:.2f}" for name in ("laconic", "packed"))
            rows.append((f"{inputs} → {outputs}", str(n), *(f"{v:.0f}" for v in micros.values()), *ratios))
    text = (
        f"Microseconds by {clock_name()}, the best of {scale.rounds}: one layer in float32 without gradients. On AMD's "
        "processors with AVX-512, laconic calls oneDNN from eight rows on; on others it "
        f"calls torch, and the ratio is 1. This processor: {'oneDNN' if is_onednn_faster() else 'torch'}. Packed: "
        "after `laconic.pack_weights`, on all processors."
    )
    head = ("layer", "rows", "torch, µs", "laconic, µs", "packed, µs", "ratio", "ratio, packed")
    return Table("Float32 linear layers", text, head, rows)
