"""Nested Learning 70 to 74, 97 and 7.3a against their oracles."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

from laconic.config.nested import CMSOptions
from laconic.models.block import rms_norm
from laconic.nested.cms.layer import CMS, aggregate, chain, require_levels
from laconic.nested.cms.level import CMSParams, CMSShape, level_mlp, to_dense
from laconic.nested.hope.forward import hope_block
from laconic.nested.hope.init import place_levels
from laconic.nested.state import LayerState
from tests.models.fixtures import noise
from tests.oracles.cms import MISREAD, ORACLE
from tests.oracles.compare import agree

B, T, D, F, K = 2, 7, 3, 4, 2
MAPS = ("up_proj", "down_proj")


def weights_by_name(*w: Tensor) -> dict[str, Tensor]:
    """Return weights by name: up, down, norms, keys, values, rows and biases of steps."""
    kinds = ("up_proj", "down_proj", "norm", "key", "value", "step")
    weights = {
        f"levels.{l}.{kind}.weight": x for kind, many in zip(kinds, w[:-1], strict=True) for l, x in enumerate(many)
    }
    return weights | {f"levels.{l}.step.bias": b for l, b in enumerate(w[-1])}


def random_weights(levels: int = K) -> list[Tensor]:
    """Return U, V, gains, keys, values, and rows and biases of steps, large enough that updates matter."""
    sizes = [(F, D), (D, F), (D,), (D, D), (D, D), (D,)]
    w = [noise(n, levels, *size) for n, size in enumerate(sizes, 1)]
    return [*w[:5], 0.5 * w[5], torch.linspace(-1.5, -2.0, levels, dtype=torch.float64)]


def read_stream(
    structure: str, x: Tensor, w: list[Tensor], chunks: tuple[int, ...], meta: str = "first_order"
) -> tuple[Tensor, ...]:
    """Return the outputs and the final weights of the layer."""
    options: dict[str, Any] = {
        "structure": structure,
        "inner_objective": "associative",
        "lr_granularity": "token",
        "max_update_ratio": 0.0,
        "meta_gradient": meta,
    }
    cms = CMS(D, F, chunks, CMSOptions(**options), projections=MAPS)
    weights = weights_by_name(*w)
    y, state = functional_call(cms, {name: weights[name] for name, _ in cms.named_parameters()}, (x,))
    moved = [to_dense(level.change[name]) for level in require_levels(state) for name in MAPS]
    return y, *(change + W[l] for (l, W), change in zip([(l, W) for l in range(K) for W in w[:2]], moved, strict=True))


def maps_of(U: Tensor, V: Tensor) -> list[Any]:
    """Return the MLP of every level as a function."""
    w = {f"levels.{l}.{name}.weight": x[l] for l in range(len(U)) for name, x in zip(MAPS, (U, V), strict=True)}
    params = CMSParams(CMSShape(D, F, (1,) * len(U), CMSOptions(), projections=MAPS), w)
    return [partial(level_mlp, params, l, None, None) for l in range(len(U))]


@pytest.mark.equation("nested-learning", "70")
@pytest.mark.parametrize("link", ["residual", "plain"])
def test_chain(link: str) -> None:
    def run(x: Tensor, U: Tensor, V: Tensor, gains: Tensor, link: Any) -> Tensor:
        norms = [None, *(partial(rms_norm, weight=gain, eps=1e-6) for gain in gains[1:])]
        return chain(x, maps_of(U, V), norms, link)

    x, (U, V, gains, *_) = noise(0, B, 2, D), random_weights(3)
    misread = MISREAD["70"] | (MISREAD["70 residual"] if link == "residual" else {})
    agree(run, ORACLE["70"], misread, x, U, V, gains, link)
    single = [t.clone().requires_grad_() for t in (x[:1, :1], U, V, gains)]
    assert gradcheck(lambda x, U, V, gains: run(x, U, V, gains, link), single, fast_mode=True)


@pytest.mark.medium
@pytest.mark.equation("nested-learning", "71")
def test_update() -> None:
    """Two levels over three and a half of the faster chunks, with a step size for every token."""
    run, x, w = partial(read_stream, "sequential"), noise(0, B, T, D), random_weights()
    agree(run, ORACLE["71"], MISREAD["71"], x, w, (2, 4))
    single = [t.clone().requires_grad_() for t in (x[:1, :3], *w)]
    assert gradcheck(lambda x, *w: run(x, list(w), (1, 2)), single, fast_mode=True)


@pytest.mark.medium
@pytest.mark.equation("nested-learning", "72")
def test_restart() -> None:
    agree(partial(read_stream, "nested"), ORACLE["72"], MISREAD["72"], noise(0, B, T, D), random_weights(), (2, 4))
    single = [t.clone().requires_grad_() for t in (noise(0, 1, 3, D), *random_weights())]
    assert gradcheck(lambda x, *w: read_stream("nested", x, list(w), (1, 2)), single, fast_mode=True)


@pytest.mark.medium
@pytest.mark.equation("nested-learning", "72")
def test_restart_through_the_updates() -> None:
    run = partial(read_stream, "nested", meta="full")
    agree(run, ORACLE["72 full"], MISREAD["72 full"], noise(0, B, T, D), random_weights(), (2, 4))
    single = [t.clone().requires_grad_() for t in (noise(0, 1, 5, D), *random_weights())]
    assert gradcheck(lambda x, *w: run(x, list(w), (2, 4)), single, fast_mode=True)


@pytest.mark.equation("nested-learning", "74")
def test_aggregate() -> None:
    def run(x: Tensor, U: Tensor, V: Tensor, a: Tensor) -> Tensor:
        return aggregate([level(x) for level in maps_of(U, V)], a)

    x, (U, V, *_), a = noise(0, B, 2, D), random_weights(3), noise(9, 3)
    agree(run, ORACLE["74"], MISREAD["74"], x, U, V, a)
    assert gradcheck(run, [t.clone().requires_grad_() for t in (x, U, V, a)], fast_mode=True)


@pytest.mark.equation("nested-learning", "7.3a")
@pytest.mark.parametrize("place", ["depth", "grow", "chain"])
def test_stack(place: Any) -> None:
    def run(layers: int, chunks: tuple[int, ...], place: Any) -> tuple[float, ...]:
        placed = place_levels(layers, chunks, place)
        return tuple(float(-1 if n is None else n) for one in placed for n in (*one.chunk_sizes, *one.donor_layers))

    misread = MISREAD["7.3a"] if place == "depth" else {}
    agree(run, ORACLE["7.3a"], misread, 6, (128, 512, 2048), place)


def through(W: Tensor, x: Tensor, layer: LayerState) -> tuple[Tensor, LayerState]:
    """Use a linear map in place of a sublayer."""
    return x @ W.mT, layer


@pytest.mark.equation("nested-learning", "97")
def test_block() -> None:
    def run(x: Tensor, A: Tensor, M: Tensor) -> Tensor:
        return hope_block(x, LayerState(), partial(through, A), partial(through, M))[0]

    arguments = noise(0, B, 2, D), noise(1, D, D), noise(2, D, D)
    agree(run, ORACLE["97"], MISREAD["97"], *arguments)
    assert gradcheck(run, [t.clone().requires_grad_() for t in arguments], fast_mode=True)
