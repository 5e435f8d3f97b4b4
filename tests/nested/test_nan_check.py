"""A state that is not finite is named: its part in words, the row, the first token; searched by halves."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from laconic.errors import NonFiniteError
from laconic.models.decoder import DecoderOutput
from laconic.nested import nan_check
from laconic.nested.state import CMSLevelState, CMSState, FastWeightState, LayerState, LinearMemoryState, OpenChunk


def matrix(B: int = 3) -> LinearMemoryState:
    return LinearMemoryState(torch.zeros(B, 1, 2, 2), torch.zeros(B, 1, 2, 2), None, torch.full((B,), 7))


def state(B: int = 3) -> FastWeightState:
    none, zero = {"up_proj": torch.zeros(B, 2, 2)}, torch.zeros(B, dtype=torch.long)
    level = CMSLevelState(none, {"up_proj": torch.zeros(B, 2, 2)}, {}, {}, zero, zero)
    layer = LayerState({"x": torch.zeros(B, 1, 2)}, {"mixer": matrix(B)}, CMSState((level,)))
    return FastWeightState((layer, layer), torch.full((B,), 5))


class Spoiling:
    """A learner whose first level of the second layer breaks at a token of a row, and stays so."""

    config: Any = None

    def __init__(self, row: int, token: int) -> None:
        self.row, self.token, self.calls = row, token, 0

    def start(self, batch: int) -> FastWeightState:
        return replace(state(batch), position=torch.zeros(batch, dtype=torch.long))

    def advance(
        self, ids: Tensor, state: Any = None, *, live: Tensor | None = None, learn: bool = True, **_: Any
    ) -> DecoderOutput:
        self.calls += 1
        n = torch.full((len(ids),), ids.shape[1]) if live is None else live.sum(1)
        after = replace(state, position=state.position + n)
        if after.position[self.row] >= self.token:
            level = after.layers[1].cms.levels[0]
            moved = {"up_proj": level.moved["up_proj"].clone()}
            moved["up_proj"][self.row, 0, 1] = torch.inf
            layer = replace(after.layers[1], cms=CMSState((replace(level, moved=moved),)))
            after = replace(after, layers=(after.layers[0], layer))
        return DecoderOutput(ids.float()[..., None], after, {})

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_a_part_is_named_with_row_and_token() -> None:
    nan_check.check_finite(matrix())
    m = matrix()
    bad = m.change.clone()
    bad[2, 0, 1, 1] = torch.nan
    held = LayerState(memory={"mixer": replace(m, change=bad)})
    with pytest.raises(
        NonFiniteError,
        match=r"^state: not finite in memory.memory.now, row 2, at or before token 7; lower its step, or",
    ):
        nan_check.check_finite(held)
    whole = replace(state(), layers=(held, *state().layers))
    with pytest.raises(
        NonFiniteError, match=r"^state: not finite in memory memory of layer 0 \(now\), row 2 \(c\), at or be"
    ):
        nan_check.check_finite(whole, ["a", "b", "c"])
    opened = replace(
        state(), open_chunk=OpenChunk(torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long), (held,))
    )
    with pytest.raises(
        NonFiniteError, match=r"not finite in memory memory of layer 0 \(now\), row 2, at or before token 5"
    ):
        nan_check.check_finite(opened)


@pytest.mark.parametrize("token", [1, 2, 7, 12, 13])
@pytest.mark.parametrize("gaps", [False, True])
def test_the_token_is_found_by_halves(token: int, gaps: bool) -> None:
    ids = torch.arange(26).view(2, 13)
    live = torch.ones(2, 13, dtype=torch.bool)
    if gaps:
        live[1, 1::2] = False
    model = Spoiling(1, token)
    begun = model.start(2)
    if token > live[1].sum():
        assert nan_check.find_first_bad_token(model, ids, begun, attention_mask=live) is None
        assert cast(
            FastWeightState, nan_check.read_tokens_checked(model, ids, begun, attention_mask=live).cache
        ).position.tolist() == [13, 7]
        return
    says = rf"^state: not finite in level 0 of layer 1 \(up_proj\), row 1 \(b\), from token {token} on; lower its step"
    with pytest.raises(NonFiniteError, match=says):
        nan_check.read_tokens_checked(model, ids, begun, attention_mask=live, row_names=["a", "b"])
    assert model.calls <= 7, "halves, not every token"
    assert nan_check.read_tokens_checked(model, ids, begun, attention_mask=live, update_weights=False)


def test_the_whole_is_said_where_its_halves_are_finite() -> None:
    """Rounding may differ between pieces and the whole."""
    model = Spoiling(0, 3)
    once = model.advance
    model.advance = lambda ids, *args, **how: once(ids, *args, **how) if ids.shape[1] == 3 else DecoderOutput(  # type: ignore[method-assign]
        ids.float()[..., None], replace(args[0], position=args[0].position + ids.shape[1]), {})  # fmt: skip
    with pytest.raises(NonFiniteError, match="row 0, at or before token 3; lower its step"):
        nan_check.read_tokens_checked(model, torch.zeros(1, 3, dtype=torch.long), model.start(1))
