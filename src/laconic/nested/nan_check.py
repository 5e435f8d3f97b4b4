"""Find the first non-finite tensor of a fast-weight state: which layer, level or memory, and which row."""

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import NonFiniteError
from laconic.interfaces import StatefulLM
from laconic.nested.state import FastWeightState
from laconic.storage.tensor_tree import unique_tensors

ADVICE = "lower its learning rate, or keep max_update_ratio, max_projection_norm and max_memory_norm on"


def describe_tensor(name: str) -> str:
    """Return a tensor name in words, such as "level 1 of layer 3 (up_proj)"."""
    match = re.search(r"layers(?:_at_start)?\.(\d+)\.(.+)", name)
    if match is None:
        return name
    words = match[2].split(".")
    if words[:2] == ["cms", "levels"]:
        subject = f"level {words[2]}"
        detail = words[3:]
    else:
        subject = " ".join(words[:2])
        detail = words[2:]
    return f"{subject} of layer {match[1]}" + (f" ({'.'.join(detail)})" if detail else "")


def find_nonfinite(tree: object, row_names: Sequence[str] = ()) -> str:
    """Describe the first non-finite tensor, its row and the tokens that it had read; "" if all are finite."""
    tensors = unique_tensors(tree)
    floating = {name: x for name, x in tensors.items() if x.is_floating_point() and x.numel()}
    if not floating:
        return ""
    # A sum is one pass over a tensor and is finite only if all of it is; a sum of finite numbers can overflow.
    if bool(torch.stack([x.sum().isfinite() for x in floating.values()]).all()):
        return ""
    broken = [(name, x) for name, x in floating.items() if not x.isfinite().all()]
    if not broken:
        return ""
    name, x = broken[0]
    row = int((~x.reshape(len(x), -1).isfinite()).any(1).nonzero()[0])
    counts = tensors.get("position", tensors.get(f"{name.rpartition('.')[0]}.num_tokens"))
    place = f"{describe_tensor(name)}, row {row}" + (f" ({row_names[row]})" if row_names else "")
    return place if counts is None else f"{place}, at or before token {int(counts[row])}"


def check_state_finite(tree: object, row_names: Sequence[str] = ()) -> None:
    """Raise `NonFiniteError` with the first non-finite part of a state, if there is one."""
    location = find_nonfinite(tree, row_names)
    if location:
        raise NonFiniteError(f"state: not finite in {location}; {ADVICE}")


class ReadOutput(NamedTuple):
    """Final hidden states, and the new state."""

    hidden_states: Float[Tensor, "B T D"]
    state: FastWeightState


def read_tokens_checked(
    model: StatefulLM,
    input_ids: Int[Tensor, "B T"],
    state: FastWeightState,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    target_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
    row_names: Sequence[str] = (),
) -> ReadOutput:
    """Call `model.read_tokens` and check the new state as `check_state_finite` does."""
    output = model.read_tokens(
        input_ids, state, attention_mask=attention_mask, target_mask=target_mask, update_weights=update_weights
    )
    state = cast(FastWeightState, output.cache)  # a StatefulLM returns its state there
    if update_weights:
        check_state_finite(state, row_names)
    return ReadOutput(output.hidden_states, state)
