"""nan_check: a non-finite state is named by its layer, level or memory, and row."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.errors import NonFiniteError
from laconic.models.decoder import DecoderOutput
from laconic.nested.nan_check import check_state_finite, find_nonfinite, read_tokens_checked
from laconic.nested.state import CMSLevelState, CMSState, FastWeightState, LayerState, LinearMemoryState, OpenChunk


def memory_state(B: int = 3) -> LinearMemoryState:
    return LinearMemoryState(torch.zeros(B, 1, 2, 2), torch.zeros(B, 1, 2, 2), None, torch.full((B,), 7))


def model_state(B: int = 3) -> FastWeightState:
    zero = torch.zeros(B, dtype=torch.long)
    level = CMSLevelState({"up_proj": torch.zeros(B, 2, 2)}, {"up_proj": torch.zeros(B, 2, 2)}, {}, {}, zero, zero)
    layer = LayerState({"x": torch.zeros(B, 1, 2)}, {"memory": memory_state(B)}, CMSState((level,)))
    return FastWeightState((layer, layer), torch.full((B,), 5))


class BreakingModel:
    """A stateful model whose level 0 of layer 1 becomes infinite in one row."""

    config: Any = None

    def initial_state(self, batch_size: int) -> FastWeightState:
        return model_state(batch_size)

    def read_tokens(self, input_ids: Tensor, state: Any = None, **_: Any) -> DecoderOutput:
        level = state.layers[1].cms.levels[0]
        change = {"up_proj": level.change["up_proj"].clone()}
        change["up_proj"][1, 0, 1] = torch.inf
        layer = replace(state.layers[1], cms=CMSState((replace(level, change=change),)))
        after = replace(state, layers=(state.layers[0], layer))
        return DecoderOutput(input_ids.float()[..., None], after, {})

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


def test_find_nonfinite_names_part_row_and_tokens() -> None:
    assert find_nonfinite(model_state()) == ""
    m = memory_state()
    bad = m.change.clone()
    bad[2, 0, 1, 1] = torch.nan
    layer = LayerState(memory={"memory": replace(m, change=bad)})
    assert find_nonfinite(layer) == "memory.memory.change, row 2, at or before token 7"
    whole = replace(model_state(), layers=(layer, *model_state().layers))
    assert find_nonfinite(whole, ["a", "b", "c"]) == (
        "memory memory of layer 0 (change), row 2 (c), at or before token 5"
    )  # fmt: skip
    zero = torch.zeros(3, dtype=torch.long)
    in_open_chunk = replace(model_state(), open_chunk=OpenChunk(zero[:, None], zero, (layer,)))
    assert find_nonfinite(in_open_chunk) == "memory memory of layer 0 (change), row 2, at or before token 5"
    with pytest.raises(NonFiniteError, match="memory memory of layer 0"):
        check_state_finite(in_open_chunk)


def test_read_tokens_checked_names_level_layer_and_row() -> None:
    model, ids = BreakingModel(), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(NonFiniteError, match=r"level 0 of layer 1 \(up_proj\), row 1 \(b\)"):
        read_tokens_checked(model, ids, model.initial_state(2), row_names=["a", "b"])
    assert read_tokens_checked(model, ids, model.initial_state(2), update_weights=False)
