"""LoRA's linear layer in one autograd function, in place of the separate passes of peft's own forward.

LoRA (arXiv:2106.09685). Symbols: W, b frozen weight and bias; A, B the adapter; s its scaling; N rows.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from laconic.models.ops.linear import multiply

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as PeftLinear


class LoraProduct(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T with gradients of x, A and B; each product adds to the one before it in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "N in"],
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None,
        A: Float[Tensor, "r in"],
        B: Float[Tensor, "out r"],
        scaling: float,
    ) -> Float[Tensor, "N out"]:
        low = multiply(x, A)
        ctx.save_for_backward(x, weight, A, B, low)
        ctx.scaling = scaling
        return multiply(x, weight, bias).addmm_(low, B.t(), alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        x, weight, A, B, low = ctx.saved_tensors
        needs_x, _, _, needs_A, needs_B, _ = ctx.needs_input_grad
        low_gradient = multiply(gradient, B.t()).mul_(ctx.scaling)
        x_gradient = multiply(gradient, weight.t()).addmm_(low_gradient, A) if needs_x else None
        A_gradient = multiply(low_gradient.t(), x.t()) if needs_A else None
        B_gradient = multiply(gradient.t(), low.t()).mul_(ctx.scaling) if needs_B else None
        return x_gradient, None, None, A_gradient, B_gradient, None


def compute_lora(
    x: Float[Tensor, "*rows in"], base: nn.Linear, lora_A: nn.Linear, lora_B: nn.Linear, scaling: float
) -> Float[Tensor, "*rows out"]:
    """Compute a plain LoRA layer; the products run in the dtype of the input, or of autocast.

    peft casts the input to the adapter's dtype instead, which is float32 on a model in bfloat16.
    """
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    weight, A, B = (layer.weight.to(dtype) for layer in (base, lora_A, lora_B))
    bias = None if base.bias is None else base.bias.to(dtype)
    with torch.autocast(device, enabled=False):
        y = cast(Tensor, LoraProduct.apply(x.to(dtype).reshape(-1, x.shape[-1]), weight, bias, A, B, scaling))
    return y.view(*x.shape[:-1], y.shape[-1])


def get_plain_adapter(layer: "PeftLinear") -> str | None:
    """Return the adapter if it is the only active one, plain LoRA without dropout, on a frozen nn.Linear."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    base = layer.base_layer
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name]:
        return None
    if type(base) is not nn.Linear or base.weight.requires_grad or not layer.cast_input_dtype_enabled:
        return None
    has_dropout = layer.training and not isinstance(layer.lora_dropout[name], nn.Identity)
    return None if has_dropout else name


@cache
def define_lora_linear() -> "type[PeftLinear]":
    """Return peft's linear LoRA layer with a faster forward for the plain case; every other case is peft's."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    class LoraLinear(PeftLinear):
        """peft's linear LoRA layer with `compute_lora`."""

        def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
            name = None if args or options else get_plain_adapter(self)
            if name is None:
                return super().forward(x, *args, **options)
            lora_A, lora_B = (cast(nn.Linear, layers[name]) for layers in (self.lora_A, self.lora_B))
            return compute_lora(x, cast(nn.Linear, self.base_layer), lora_A, lora_B, self.scaling[name])

    LoraLinear.__qualname__ = LoraLinear.__name__  # where pickle looks for it
    return LoraLinear


def __getattr__(name: str) -> Any:
    """Return the class `LoraLinear`, which is defined on first use, because importing peft is slow."""
    if name != "LoraLinear":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return define_lora_linear()


def use_fast_forward(model: nn.Module) -> None:
    """Give every linear LoRA layer of a model the faster forward; its parameters and their names stay."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    for module in model.modules():
        if type(module) is PeftLinear:
            module.__class__ = define_lora_linear()
