"""Another package's kernel in our letters: a stand-in from what it says of itself, and itself where there is a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.nested.recurrence import gated_delta_rule as room
from laconic.nested.recurrence import kernel
from laconic.nested.recurrence.gated_delta_rule import Gates, chunk_gated_delta_rule, recurrent_gated_delta_rule
from tests.conftest import needs
from tests.core.readings import noise
from tests.methods.learned import near

B, H, T, OUT, IN = 2, 3, 5, 4, 6


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens before heads: q, k [B, T, H, K], v [B, T, H, V], g and beta [B, T, H], the state [B, H, K, V]."""
    assert output_final_state
    h, said = initial_state, []
    for t in range(k.shape[1]):
        h = g[:, t].exp()[..., None, None] * h
        off = v[:, t] - (h * k[:, t, :, :, None]).sum(-2)
        h = h + beta[:, t, :, None, None] * k[:, t, :, :, None] * off[:, :, None]
        said.append((h * q[:, t, :, :, None]).sum(-2) * scale)
    return torch.stack(said, 1), h


def drawn() -> tuple[list[Tensor], Gates, Tensor, Tensor]:
    """S, k, u, q; gates, of which some steps are larger than what is kept; an anchor; and where tokens are live."""
    tensors = [noise(n, B, H, *s) for n, s in enumerate(((OUT, IN), (T, IN), (T, OUT), (T, IN)))]
    gates = Gates(noise(7, B, H, T).sigmoid() * 0.9 + 0.05, noise(8, B, H, T).sigmoid())
    return tensors, gates, noise(9, B, H, T, OUT), torch.tensor([[True] * T, [True] * 3 + [False] * 2])


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_our_letters_are_its(monkeypatch: pytest.MonkeyPatch, anchored: bool, ragged: bool, asked: bool) -> None:
    (S, k, u, q), gates, anchor, live = drawn()
    how: dict[str, Any] = {"anchor": anchor if anchored else None, "live": live if ragged else None}
    query = q if asked else None
    told = recurrent_gated_delta_rule(S, k, u, query, gates, erase=gates.step_size, **how)
    monkeypatch.setattr(room, "KERNEL", stand_in)
    monkeypatch.setattr(room, "fits", lambda *_: True)
    monkeypatch.setattr(room, "products", None)  # nothing else is computed
    found = chunk_gated_delta_rule(S, k, u, query, gates, erase=gates.step_size, **how)
    near([x for x in found if x is not None], [x for x in told if x is not None])


def test_what_is_not_its_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    (S, k, u, q), gates, _, _ = drawn()
    monkeypatch.setattr(room, "KERNEL", None)
    told = [
        chunk_gated_delta_rule(S, k, u, q, gates, erase=gates.step_size, read="before"),
        chunk_gated_delta_rule(S, k, u, q, gates),
    ]
    monkeypatch.setattr(room, "KERNEL", lambda **_: pytest.fail("it cannot say this"))
    monkeypatch.setattr(room, "fits", lambda *_: True)
    found = [
        chunk_gated_delta_rule(S, k, u, q, gates, erase=gates.step_size, read="before"),
        chunk_gated_delta_rule(S, k, u, q, gates),
    ]
    assert all(x.S.equal(y.S) for x, y in zip(found, told, strict=True))
    monkeypatch.undo()
    assert not kernel.fits(S.float(), k, u), "on a CPU"
    assert kernel.found() is None or torch.cuda.is_available()


@pytest.mark.cuda
def test_the_kernel_itself() -> None:
    needs("fla")
    assert kernel.KERNEL is not None
    (S, k, u, q), gates, anchor, live = drawn()
    told = recurrent_gated_delta_rule(S, k, u, q, gates, erase=gates.step_size, anchor=anchor, valid=live)
    S, k, u, q, anchor, keep, step = (x.float().cuda() for x in (S, k, u, q, anchor, *gates[:2]))
    assert kernel.fits(S, k, u, q, keep, step, anchor)
    found = chunk_gated_delta_rule(S, k, u, q, Gates(keep, step), erase=step, anchor=anchor, valid=live.cuda())
    near([x.double().cpu() for x in found if x is not None], [x for x in told if x is not None], token_range=1e-4)
