"""Titans 21 to 31 against their oracles, and pieces against the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.config.nested import TitansOptions
from laconic.nested import state as values
from laconic.nested.state import LayerState
from laconic.nested.titans.attention_variants import mac, mag, mal
from laconic.nested.titans.layer import Titans, initial_state
from tests.core.readings import noise
from tests.nested.helpers import near, stirred
from tests.oracles.compare import agree
from tests.oracles.titans_attention import MISREAD, ORACLE

B, T, D, H, W = 2, 6, 6, 2, 3


def memory() -> Titans:
    made = stirred(Titans(D, H, 3, TitansOptions(mlp_width=4)))
    assert isinstance(made, Titans)
    return made


def weights() -> dict[str, Tensor]:
    w = {f"{name}_proj.weight": noise(n, D, D) for n, name in enumerate("qkvo")}
    norms = {f"{name}_norm.weight": 1 + 0.5 * noise(n, D) for n, name in ((5, "attention"), (6, "memory"))}
    return w | norms | {"persistent": noise(7, 2, D)}


def as_function(layer: Titans) -> tuple[Any, Any]:
    """The memory as the oracles take it."""
    return (
        lambda x, state=None: layer(x, state),
        lambda x, state=None: layer(x, state, learn=False)[0],
    )


@torch.no_grad()
def held_to(id: str, form: Any) -> None:
    layer, w = memory(), weights()
    read, asked = as_function(layer)

    def of(read: Any, asked: Any, w: Any, x: Tensor, heads: int, window: int) -> Tensor:
        return form(layer.params, w, initial_state(layer.params, len(x)), x, window)[0]

    agree(of, ORACLE[id], MISREAD[id], read, asked, w, noise(8, B, T, D), H, W)


@pytest.mark.equation("titans", "29-31")
def test_memory_as_a_layer() -> None:
    assert ORACLE["29-31"]
    assert MISREAD["29-31"]
    held_to("29-31", mal)


@pytest.mark.equation("titans", "26-28")
def test_memory_as_a_gate() -> None:
    assert ORACLE["26-28"]
    assert MISREAD["26-28"]
    held_to("26-28", mag)


@pytest.mark.equation("titans", "21-25")
def test_memory_as_context() -> None:
    """Segment by segment."""

    def of(params: Any, w: Any, state: LayerState, x: Tensor, window: int) -> tuple[Tensor, LayerState]:
        found = []
        for a in range(0, x.shape[1], window):
            y, state = mac(params, w, state, x[:, a : a + window])
            found.append(y)
        return torch.cat(found, 1), state

    assert ORACLE["21-25"]
    assert MISREAD["21-25"]
    held_to("21-25", of)


@torch.no_grad()
@pytest.mark.parametrize("form", [mal, mag])
def test_any_cut_gives_the_whole(form: Any) -> None:
    """With padding too; the window that is held does not grow."""
    layer, w, x = memory(), weights(), noise(9, 2, 8, D)
    live = torch.tensor([[1] * 8, [0, 1, 1, 0, 1, 1, 0, 1]]).bool()
    whole, after = form(layer.params, w, initial_state(layer.params, 2), x, W, attention_mask=live)
    for cut in range(1, 8):
        first, state = form(
            layer.params, w, initial_state(layer.params, 2), x[:, :cut], W, attention_mask=live[:, :cut]
        )
        second, state = form(layer.params, w, state, x[:, cut:], W, attention_mask=live[:, cut:])
        near([torch.cat([first, second], 1)], [whole])
        assert state.cache is not None
        assert state.cache.S <= W - 1
    alone, _ = form(layer.params, w, initial_state(layer.params, 1), x[1:, live[1]], W)
    near([whole[1:, live[1]]], [alone])
    assert values.num_bytes(after) > 0


@torch.no_grad()
def test_in_a_segment_nothing_comes_from_later() -> None:
    layer, w, x = memory(), weights(), noise(10, 1, 5, D)
    other = torch.cat([x[:, :3], noise(11, 1, 2, D)], 1)
    near(
        [mac(layer.params, w, initial_state(layer.params, 1), x)[0][:, :3]],
        [mac(layer.params, w, initial_state(layer.params, 1), other)[0][:, :3]],
    )
