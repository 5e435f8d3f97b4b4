"""Titans MAL, MAG and MAC (21 to 31) against their oracles; pieces equal the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.config.nested import TitansOptions
from laconic.nested.state import LayerState
from laconic.nested.titans.layer import Titans, initial_state
from tests.models.fixtures import noise
from tests.nested.helpers import assert_close, perturb
from tests.oracles.compare import agree
from tests.oracles.titans_attention import MISREAD, ORACLE
from tests.reference.titans_attention import mac, mag, mal

B, T, D, H, W = 2, 6, 6, 2, 3


def build() -> Titans:
    layer = perturb(Titans(D, H, 3, TitansOptions(mlp_width=4)))
    assert isinstance(layer, Titans)
    return layer


def weights() -> dict[str, Tensor]:
    w = {f"{name}_proj.weight": noise(n, D, D) for n, name in enumerate("qkvo")}
    norms = {f"{name}_norm.weight": 1 + 0.5 * noise(n, D) for n, name in ((5, "attention"), (6, "memory"))}
    return w | norms | {"persistent": noise(7, 2, D)}


@torch.no_grad()
def check(equation: str, form: Any) -> None:
    """Compare with the oracle, which takes the memory as two functions: learning and only reading."""
    layer, w = build(), weights()

    def run(learn: Any, read: Any, w: Any, x: Tensor, heads: int, window: int) -> Tensor:
        return form(layer, w, initial_state(layer.params, len(x)), x, window)[0]

    learn = lambda x, state=None: layer(x, state)  # noqa: E731
    read = lambda x, state=None: layer(x, state, update_weights=False)[0]  # noqa: E731
    agree(run, ORACLE[equation], MISREAD[equation], learn, read, w, noise(8, B, T, D), H, W)


@pytest.mark.equation("titans", "29-31")
def test_mal_equals_its_oracle() -> None:
    assert ORACLE["29-31"]
    assert MISREAD["29-31"]
    check("29-31", mal)


@pytest.mark.equation("titans", "26-28")
def test_mag_equals_its_oracle() -> None:
    assert ORACLE["26-28"]
    assert MISREAD["26-28"]
    check("26-28", mag)


@pytest.mark.equation("titans", "21-25")
def test_mac_equals_its_oracle_segment_by_segment() -> None:
    def run(params: Any, w: Any, state: LayerState, x: Tensor, window: int) -> tuple[Tensor, LayerState]:
        outputs = []
        for a in range(0, x.shape[1], window):
            y, state = mac(params, w, state, x[:, a : a + window])
            outputs.append(y)
        return torch.cat(outputs, 1), state

    assert ORACLE["21-25"]
    assert MISREAD["21-25"]
    check("21-25", run)


@torch.no_grad()
@pytest.mark.parametrize("form", [mal, mag])
def test_mal_and_mag_pieces_equal_the_whole(form: Any) -> None:
    """With padding; the cache does not grow beyond the window."""
    layer, w, x = build(), weights(), noise(9, 2, 8, D)
    start = initial_state(layer.params, 2)
    mask = torch.tensor([[1] * 8, [0, 1, 1, 0, 1, 1, 0, 1]]).bool()
    whole, _ = form(layer, w, start, x, W, attention_mask=mask)
    for cut in range(1, 8):
        first, state = form(layer, w, start, x[:, :cut], W, attention_mask=mask[:, :cut])
        second, state = form(layer, w, state, x[:, cut:], W, attention_mask=mask[:, cut:])
        assert_close([torch.cat([first, second], 1)], [whole])
        assert state.cache is not None
        assert state.cache.S <= W - 1
    alone, _ = form(layer, w, initial_state(layer.params, 1), x[1:, mask[1]], W)
    assert_close([whole[1:, mask[1]]], [alone])


@torch.no_grad()
def test_mac_is_causal_within_a_segment() -> None:
    layer, w, x = build(), weights(), noise(10, 1, 5, D)
    other = torch.cat([x[:, :3], noise(11, 1, 2, D)], 1)
    start = initial_state(layer.params, 1)
    assert_close([mac(layer, w, start, x)[0][:, :3]], [mac(layer, w, start, other)[0][:, :3]])
