"""The states of torch's random generators, which a resumed or repeated update continues from."""

from collections.abc import Mapping

import torch
from torch import Tensor


def get_random_state() -> dict[str, Tensor]:
    """Return the states of torch's random generators; laconic uses neither Python's nor numpy's."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # reading them would start CUDA
    return {"torch": torch.get_rng_state(), **{f"cuda.{i}": state for i, state in enumerate(devices)}}


def set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    for name, value in state.items():
        if name.startswith("cuda.") and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(value, int(name.partition(".")[2]))
