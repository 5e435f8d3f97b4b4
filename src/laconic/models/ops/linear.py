"""Linear layers, by oneDNN on CPUs where the library that torch calls for float32 products has no AVX-512 kernels.

torch hands float32 products to MKL, which uses AVX2 on AMD's processors. oneDNN, which torch has too, uses AVX-512
there: from 24 rows on it was 1.7 to 2.3 times as fast on one EPYC, and 0.96 to 1.2 times on another
(docs/benchmarks.md, docs/log.md). For single rows, which are bound by memory, there is no difference.

Symbols: y = x W^T + b with W [out, in].
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import Parameter

NN_MODULE: Any = nn.modules.module
TORCH_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
ONEDNN: Any = torch.ops.mkldnn  # private, as are the operators for packed weights
MIN_ROWS = 8  # for fewer rows oneDNN gains little or loses
CPU_INFO = Path("/proc/cpuinfo")
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@cache
def is_onednn_faster() -> bool:
    """Return whether this is an AMD processor with AVX-512, on Linux."""
    if not hasattr(ONEDNN, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        with CPU_INFO.open() as lines:
            return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in lines)
    except OSError:
        return False


def can_use_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes this layer faster; not for subclasses of Tensor, and not in compiled code."""
    return (
        not torch.compiler.is_compiling()  # first: nothing below can be traced
        and is_onednn_faster()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() >= MIN_ROWS * x.shape[-1] > 0
        and type(x) in (Tensor, Parameter)
        and type(weight) in (Tensor, Parameter)
        and not torch.is_autocast_enabled("cpu")
    )


def multiply(x: Float[Tensor, "N in"], weight: Float[Tensor, "out in"], bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b without gradients, by oneDNN if that is faster; both may be transposed views."""
    # FlopCounterMode counts F.linear, but does not know oneDNN's operator
    if can_use_onednn(x, weight) and not TORCH_C._len_torch_dispatch_stack():
        return ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class LinearProduct(torch.autograd.Function):
    """x W^T + b by oneDNN, with gradients of x, W and b."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "N in"], weight: Float[Tensor, "out in"], bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        product = F.linear if torch.is_grad_enabled() else multiply  # with gradients of gradients, by autograd
        return (
            product(gradient, weight.t()) if needs_x else None,
            product(gradient.t(), x.t()) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def linear(
    x: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*rows out"]:
    """Compute `F.linear(x, weight, bias)`, equal up to rounding."""
    if not can_use_onednn(x, weight):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y = cast(Tensor, LinearProduct.apply(rows, weight, bias))  # pyright: ignore[reportUnknownMemberType]
    else:
        y = multiply(rows, weight, bias)
    return y.view(*x.shape[:-1], len(weight))


def apply_linear(module: nn.Module, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
    """Call a module, through `linear` if it is a plain `nn.Linear` that is unmodified."""
    if type(module) is nn.Linear and is_unmodified(module):
        return linear(x, module.weight, module.bias)
    return module(x)


def is_unmodified(module: nn.Module) -> bool:
    """Return whether calling a module does what its class says: it has no hooks and no `forward` of its own."""
    hooks = any(getattr(module, attribute) for attribute in HOOK_ATTRIBUTES)
    return not (hooks or "forward" in vars(module) or NN_MODULE._has_any_global_hook())


# What blocks, heads and levels call: chosen once, so that other processors pay nothing.
call_linear: Callable[[nn.Module, Tensor], Tensor] = apply_linear if is_onednn_faster() else nn.Module.__call__
linear_function: Callable[..., Tensor] = linear if is_onednn_faster() else F.linear
