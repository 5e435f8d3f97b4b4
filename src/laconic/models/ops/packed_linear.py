"""Linear layers with a second copy of their float32 weights, in the layout that oneDNN reads fastest on CPUs.

torch rearranges the weights for every product of a few rows, which takes up to half of its time. A packed copy is
rearranged once (table in docs/benchmarks.md).
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laconic.errors import UsageError
from laconic.models.ops.linear import ONEDNN, linear

MIN_ROWS = 2  # a single row is bound by memory


def has_onednn_packing(device: torch.device) -> bool:
    """Return whether this torch has oneDNN and its operators for packed weights, which are private."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and all(hasattr(ONEDNN, n) for n in names)


class PackedLinear(nn.Linear):
    """A linear layer that uses its packed weight where no gradients are recorded, and its weight elsewhere.

    After a change of the weight the packed one is no longer used.
    """

    packed: Tensor | None
    packed_version: tuple[int, int]  # of the weight that was packed
    packed_values: Tensor  # seven of them

    def pack(self) -> None:
        w = self.weight.detach()
        self.packed, self.packed_version = ONEDNN._reorder_linear_weight(w, None), get_version(w)
        self.packed_values = w.as_strided((7,), (w.numel() // 7,)).clone()

    def is_current(self) -> bool:
        """Return whether the weight is that which was packed; `.data` and fused optimizers change only its values."""
        w = self.weight
        is_same = self.packed is not None and self.packed_version == get_version(w) and w.dtype == torch.float32
        return is_same and torch.equal(w.as_strided((7,), (w.numel() // 7,)), self.packed_values)

    def can_use_packed(self, x: Tensor) -> bool:
        return (
            not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and type(x) is Tensor
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and x.numel() >= MIN_ROWS * self.in_features
            and not torch.is_autocast_enabled("cpu")
            and self.is_current()
        )

    def forward(self, input: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        if self.can_use_packed(input):
            return ONEDNN._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return linear(input, self.weight, self.bias)

    def __getstate__(self) -> dict[str, Any]:  # for copies: packed tensors cannot be copied
        return {**vars(self), "packed": None}


def get_version(weight: Tensor) -> tuple[int, int]:
    """Return the address and in-place change counter of a weight; inference tensors have no counter."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def pack_weights(decoder: nn.Module) -> None:
    """Pack the weights of a decoder's linear layers, for forward passes over a few positions without gradients.

    Latent thoughts, prompts and batches then take less time, and decoding a single row as much as before. It takes as
    much memory again as the weights of these layers. Weights that change later are used as they are, unpacked, until
    they are packed again. Changes through `.data`, or by a fused optimizer, are noticed by seven values of each weight.

    Args:
        decoder: A decoder with float32 weights on a CPU. It is modified in place.

    Raises:
        UsageError: If it is not a decoder, or no linear layer can be packed: other types and devices, int8, or a torch
            without oneDNN.

    Examples:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> laconic.pack_weights(decoder)
        >>> with torch.no_grad():
        ...     decoder(decoder.embed(torch.tensor([[5, 6, 7]]))).hidden_states.shape
        torch.Size([1, 3, 48])
    """
    if not isinstance(decoder, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"pack_weights: give a Decoder, such as model.decoder, not {type(decoder).__name__}")
    layers = [layer for layer in decoder.modules() if isinstance(layer, nn.Linear) and can_be_packed(layer)]
    if not layers:
        raise UsageError("pack_weights: there are no linear layers with float32 weights on a CPU with oneDNN")
    for layer in layers:
        layer.__class__ = PackedLinear
        cast(PackedLinear, layer).pack()


def can_be_packed(layer: nn.Linear) -> bool:
    is_plain = type(layer) in (nn.Linear, PackedLinear)
    is_float32 = layer.weight.dtype == torch.float32 and layer.weight.is_contiguous()
    return is_plain and is_float32 and has_onednn_packing(layer.weight.device)
