"""Result of a forward pass of the decoder."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from laconic.console import to_html_table
from laconic.models.cache import KVCache


class Activations(dict[str, Tensor]):
    """Captured activations by name: `k.3`, `hidden.0`, `logits`, in the order of computation.

    A name without a layer, as `capture` takes it, gives the tuple of all layers: `activations["hidden"]` has the L + 1
    hidden states that Hugging Face returns.
    """

    def __missing__(self, name: str) -> tuple[Tensor, ...]:
        """Return an activation of all captured layers; raise KeyError if it was not captured."""
        layers = [(int(key.partition(".")[2]), x) for key, x in self.items() if key.startswith(f"{name}.")]
        if not layers:
            raise KeyError(f"{name} was not captured; the activations are {', '.join(self) or 'empty'}")
        return tuple(x for _, x in sorted(layers, key=lambda layer: layer[0]))


class DecoderOutput(NamedTuple):
    """Result of a forward pass.

    `hidden_states` [B, T, D] after the final norm (pass them to `Decoder.logits`), the new `cache`, and the captured
    `activations` by name.

    Examples:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> output = decoder(decoder.embed(torch.tensor([[1, 17]])), capture=("probs.0",))
        >>> output.hidden_states.shape, output.cache.S, output.activations["probs.0"].shape
        (torch.Size([1, 2, 48]), 2, torch.Size([1, 4, 2, 2]))
        >>> output
        DecoderOutput(hidden_states [1, 2, 48], KVCache(2 layers, B=1, S=2, float32), activations: probs)
    """

    hidden_states: Tensor
    cache: KVCache
    activations: Mapping[str, Tensor]

    def __repr__(self) -> str:
        stems = dict.fromkeys(name.partition(".")[0] for name in self.activations)
        names = f", activations: {', '.join(stems)}" if stems else ""
        return f"{type(self).__name__}(hidden_states {list(self.hidden_states.shape)}, {self.cache!r}{names})"

    def _repr_html_(self) -> str:
        tensors = {"hidden_states": self.hidden_states, **self.activations}
        rows = [(name, str(list(x.shape)), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()]
        return to_html_table(("tensor", "shape", "dtype"), rows)
