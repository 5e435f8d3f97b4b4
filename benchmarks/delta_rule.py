"""The chunked delta rule beside flash-linear-attention's form in plain PyTorch, and the limit of its products."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import ABSENT, Scale, Table, Workload, clock_name, time_per_call, verdict
from laconic.nested.recurrence.gated_delta_rule import Gates, chunk_gated_delta_rule

CHUNK = 64


@torch.no_grad()
def delta_rule(scale: Scale) -> Table:
    """Return the table of milliseconds per text, and of the share of the time that the matrix products alone need."""
    theirs = load_fla()
    rows: list[tuple[str, ...]] = []
    for heads, width, T in scale.delta_rule:
        inputs = random_inputs(heads, width, T)
        workloads: dict[str, Workload] = {"ours": lambda inputs=inputs: run_chunks(*inputs), "products": square_product}
        if theirs is not None:
            check_equal(theirs, inputs)
            workloads["theirs"] = lambda inputs=inputs: theirs(*inputs, chunk_size=CHUNK)
        seconds = time_per_call(workloads, scale.rounds, statistic=min)
        limit = num_operations(heads, width, T) * seconds["products"] / num_square_operations()
        share, ratio = 100 * limit / seconds["ours"], seconds.get("theirs", 0.0) / seconds["ours"]
        rows.append((
            f"{heads} × {width}", f"{T:,}", f"{1e3 * seconds['ours']:.1f}",
            ABSENT if theirs is None else f"{1e3 * seconds['theirs']:.1f}",
            ABSENT if theirs is None else f"{ratio:.1f}", ABSENT if theirs is None else verdict(ratio, least=3),
            f"{share:.0f} %", verdict(share, least=35, digits=0),
        ))  # fmt: skip
    text = (
        f"Milliseconds per text by {clock_name()}, the best of {scale.rounds}: one row, float32, no gradient, chunks "
        f"of {CHUNK}. flash-linear-attention's `delta_rule_chunkwise` computes the same function without Triton "
        "(results are compared before the timing), with a decay of 1, which laconic multiplies by nevertheless. "
        "*Products* is the time that the matrix products of the chunks would need at the speed of a product of 512 × "
        "512, as a share of laconic's time."
    )
    head = ("heads × width", "tokens", "laconic", "flash-linear-attention", "ratio", "target", "products", "target")
    return Table("Delta rule against flash-linear-attention", text, head, rows)


def random_inputs(heads: int, width: int, T: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, unit keys, values and step sizes."""
    q, k, v = torch.randn(3, 1, heads, T, width).unbind()
    return q, torch.nn.functional.normalize(k, dim=-1), v, torch.rand(1, heads, T)


def run_chunks(q: Tensor, k: Tensor, v: Tensor, step_size: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the queries read and the state after the text."""
    S, outputs = k.new_zeros(1, k.shape[1], v.shape[-1], k.shape[-1]), list[Tensor]()
    for start in range(0, k.shape[2], CHUNK):
        at = slice(start, start + CHUNK)
        gates = Gates(torch.ones_like(step_size[..., at]), step_size[..., at], erase=step_size[..., at])
        S, _, Y = chunk_gated_delta_rule(S, k[:, :, at], v[:, :, at], q[:, :, at], gates)
        assert Y is not None
        outputs.append(Y)
    return torch.cat(outputs, 2), S


def load_fla() -> Any:
    """Return `delta_rule_chunkwise` of fla-core, or None. Its file is loaded alone: the package imports Triton."""
    package = find_spec("fla")
    if package is None or package.origin is None:
        return None
    spec = spec_from_file_location("fla_naive", Path(package.origin).parent / "ops" / "delta_rule" / "naive.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.delta_rule_chunkwise


def check_equal(theirs: Any, inputs: tuple[Tensor, ...]) -> None:
    """Fail unless both forms agree; flash-linear-attention divides the queries by √width and transposes the state."""
    q, k, v, step_size = inputs
    expected, state = theirs(q * q.shape[-1] ** 0.5, k, v, step_size, chunk_size=CHUNK)
    Y, S = run_chunks(*inputs)
    torch.testing.assert_close(Y, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(S.mT, state, rtol=1e-3, atol=1e-3)


def num_operations(heads: int, width: int, T: int) -> int:
    """Count the operations: K Kᵀ, Q Kᵀ and the writes' read-out; the solve; S K, S Q and the state's update."""
    return T // CHUNK * heads * (6 * CHUNK**2 * width + CHUNK**2 * width + 6 * CHUNK * width**2)


def square_product(size: int = 512) -> Tensor:
    """Multiply two square matrices."""
    a = torch.ones(size, size)
    return a @ a


def num_square_operations(size: int = 512) -> int:
    """Count the operations of `square_product`."""
    return 2 * size**3
