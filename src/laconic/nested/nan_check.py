"""What is learned while reading, looked at: which part of a state is first not finite, in which row, from which token.

The whole of a state is looked at with one wait for the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.errors import NonFiniteError
from laconic.interfaces import StatefulLM
from laconic.models.decoder import DecoderOutput
from laconic.nested.state import FastWeightState
from laconic.storage.tensor_tree import unique_tensors

ADVICE = "lower its step, or keep clip, cap and guard on"


class NonFiniteLocation(NamedTuple):
    """A part of a state that is not finite, the row, and since when."""

    part: str
    row: int
    since: str = ""

    def describe(self, row_names: Sequence[str] = ()) -> str:
        """In words; `names` are what the rows are called."""
        name = f" ({row_names[self.row]})" if row_names else ""
        return f"{self.part}, row {self.row}{name}{self.since}"


def describe_tensor(name: str) -> str:
    """A tensor of a state in words: level 1 of layer 3 (up_proj), memory projections of layer 0 (now)."""
    open_, _, rest = name.rpartition("layers.")
    layer, _, part = rest.partition(".")
    if not open_ and not layer.isdecimal():
        return name
    words = part.split(".")
    if words[:2] == ["cms", "levels"]:
        what, inside = f"level {words[2]}", words[3:]
    else:
        what, inside = " ".join(words[:2]), words[2:]
    return f"{what} of layer {layer}" + (f" ({'.'.join(inside)})" if inside else "")


def find_nonfinite(tree: object) -> NonFiniteLocation | None:
    """The first part, in the order of names, that is not finite, with the tokens read or learned until then."""
    tensors = unique_tensors(tree)
    held = {name: x for name, x in tensors.items() if x.is_floating_point() and x.numel()}
    if not held:
        return None
    broken = torch.stack([~x.isfinite().all() for x in held.values()]).cpu()
    if not bool(broken.any()):
        return None
    name, x = [*held.items()][int(broken.int().argmax())]
    row = int((~x.reshape(len(x), -1).isfinite()).any(1).nonzero()[0])
    counts = tensors.get("position", tensors.get(f"{name.rpartition('.')[0]}.count"))
    return NonFiniteLocation(
        describe_tensor(name), row, "" if counts is None else f", at or before token {int(counts[row])}"
    )


def check_finite(tree: object, row_names: Sequence[str] = ()) -> None:
    """Raises `NonFinite` (65) with the part, the row and the tokens read until then; call it once per update."""
    found = find_nonfinite(tree)
    if found is not None:
        raise NonFiniteError(f"state: not finite in {found.describe(row_names)}; {ADVICE}")


def read_tokens_checked(
    model: StatefulLM,
    input_ids: Int[Tensor, "B T"],
    state: FastWeightState,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    target_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
    row_names: Sequence[str] = (),
) -> DecoderOutput:
    """`advance`, and a look at what was learned. Raises `NonFinite` (65): level or memory, layer, row and token."""
    seen = model.read_tokens(
        input_ids, state, attention_mask=attention_mask, target_mask=target_mask, update_weights=update_weights
    )
    whole = find_nonfinite(seen.cache) if update_weights else None
    if whole is not None:
        found = (
            find_first_bad_token(model, input_ids, state, attention_mask=attention_mask, target_mask=target_mask)
            or whole
        )
        raise NonFiniteError(f"state: not finite in {found.describe(row_names)}; {ADVICE}")
    return seen


@torch.no_grad()
def find_first_bad_token(
    model: StatefulLM,
    input_ids: Int[Tensor, "B T"],
    state: FastWeightState,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    target_mask: Bool[Tensor, "B T"] | None = None,
) -> NonFiniteLocation | None:
    """The token from which on a state is not finite where these are learned: halves are read again, each on its own.

    None where all is finite, as it may be if it was so by a hair only.
    """

    def after(start: int, end: int) -> Any:
        here, asked = (None if x is None else x[:, start:end] for x in (attention_mask, target_mask))
        return model.read_tokens(input_ids[:, start:end], state, attention_mask=here, target_mask=asked).cache

    a, b = 0, input_ids.shape[1]
    while b - a > 1:
        middle = (a + b) // 2
        half = after(a, middle)
        if find_nonfinite(half) is None:
            a, state = middle, half
        else:
            b = middle
    last: FastWeightState = after(a, b)
    found = find_nonfinite(last)
    return found and found._replace(since=f", from token {int(last.position[found.row])} on")
