"""A continuum memory as a module in place of an MLP: vectors in, vectors out, with a state that is a value.

Nested Learning arXiv:2512.24695, section 7. `start` and `advance` are pure; `CMS` holds what training changes.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.core.errors import Usage
from laconic.core.state import Layer
from laconic.methods.cms_reading import advance, start
from laconic.methods.cms_shape import Options, Params, Shape
from laconic.methods.learning_settings import Gradient, Grow
from laconic.methods.starts import hold, normal, softplus_inverse

GATED = ("gate_proj", "up_proj", "down_proj")
STILL = -1e4  # the bias at which a softplus is 0 in every type
Vectors = Float[Tensor, "B T D"]


class CMS(nn.Module):
    """A continuum memory in place of an MLP: `y, state = mlp(x, state, live=live)`; the caller adds the residual.

    Without a state it begins with every level at its start. With `seed` None the maps are left undrawn.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        chunks: Sequence[int] = (64, 512),
        options: Options | None = None,
        seed: int | None = 0,
        *,
        act: str = "silu",
        maps: tuple[str, ...] = GATED,
        bias: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        own = options or Options(inner="associative")
        self.shape = Shape(width, hidden, tuple(chunks), own, act, tuple(maps), bias, eps)
        hold(self, weights(self.shape, None if seed is None else torch.Generator().manual_seed(seed)))

    @classmethod
    def of(
        cls,
        mlp: nn.Module,
        chunks: Sequence[int] = (64, 512),
        options: Options | None = None,
        *,
        act: str = "silu",
        grow: Grow = "zero",
    ) -> "CMS":
        """Level 0 is that MLP, its tensors shared; slower levels begin with a down-projection of zeros, or as copies.

        The maps are `gate_proj`, `up_proj`, `down_proj`, without a gate the last two, or `fc1`, `fc2`. Raises `Usage`
        (2) for a module that has none of these, and for an order that runs another level first.
        """
        maps = maps_of(mlp)
        found = {name: mlp.get_submodule(name) for name in maps}
        up = found[maps[-2]].weight
        assert isinstance(up, Tensor)
        own = options or Options(inner="associative", target="start")
        if own.order == "slow_first" and len(chunks) > 1:
            raise Usage(
                "cms: level 0 is the MLP there was, and slow_first would run another before it; take fast_first"
            )
        bias = "bias" in dict(found[maps[-1]].named_parameters())
        made = cls(up.shape[1], up.shape[0], chunks, own, act=act, maps=maps, bias=bias).to(up)
        made.adopt(0, found)
        with torch.no_grad():
            if "a" in dict(made.named_parameters(recurse=False)):
                made.get_parameter("a").fill_(1.0)
            for l in range(1, len(chunks)):
                for name, module in found.items():
                    for which, p in module.named_parameters(recurse=False):
                        own_p = made.get_parameter(f"levels.{l}.{name}.{which}")
                        own_p.copy_(p if grow == "copy" else own_p * (name != maps[-1]))
        return made

    def adopt(self, l: int, maps: Mapping[str, nn.Module]) -> None:
        """Level `l` has these maps' own tensors for its start."""
        for name, module in maps.items():
            place = self.get_submodule(f"levels.{l}.{name}")
            for which, p in module.named_parameters(recurse=False):
                place.register_parameter(which, p)

    @property
    def params(self) -> Params:
        """The shape and the tensors by name, as `start` and `advance` take them."""
        return Params(self.shape, dict(self.named_parameters()))

    def forward(
        self,
        x: Vectors,
        state: Layer | None = None,
        *,
        live: Bool[Tensor, "B T"] | None = None,
        learn: bool = True,
        gradient: Gradient = "full",
        horizon: int | None = None,
    ) -> tuple[Vectors, Layer]:
        params = self.params
        state = start(params, len(x)) if state is None else state
        return advance(params, state, x, live=live, learn=learn, gradient=gradient, horizon=horizon)


def maps_of(module: nn.Module) -> tuple[str, ...]:
    """The names of an MLP's maps, in the order in which `Shape` takes them."""
    have = dict(module.named_children())
    for maps in (GATED, ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj")):
        if all(name in have for name in maps):
            return maps
    raise Usage(f"cms: {type(module).__name__} has {', '.join(have) or 'no parts'}; an MLP has up_proj and down_proj")


def weights(shape: Shape, generator: torch.Generator | None, scale: float | None = None) -> dict[str, Tensor]:
    """What training begins with: maps normal with std `scale`, by default their inputs^-1/2, steps at eta."""
    o, D, w = shape.options, shape.width, dict[str, Tensor]()
    for l in range(len(shape.chunks)):
        for name in shape.maps:
            out, into = shape.sizes(name)
            into -= shape.bias
            w[f"levels.{l}.{name}.weight"] = drawn(generator, out, into, scale or into**-0.5)
            w |= {f"levels.{l}.{name}.bias": torch.zeros(out)} if shape.bias else {}
        w[f"levels.{l}.step.bias"] = torch.tensor(step_bias(shape, l))
        if o.step == "token":
            w[f"levels.{l}.step.weight"] = torch.zeros(D)
        if o.inner == "associative":
            w[f"levels.{l}.key.weight"] = drawn(generator, D, D, D**-0.5)
            value = torch.zeros(D, D) if o.target == "start" else drawn(generator, D, D, D**-0.5)
            w[f"levels.{l}.value.weight"] = value
        if o.structure != "independent" and l != shape.order[0]:
            w[f"levels.{l}.norm.weight"] = torch.ones(D)
    K = len(shape.chunks)
    return w | ({"a": torch.full((K,), 1 / K)} if o.structure == "independent" else {})


def drawn(generator: torch.Generator | None, out: int, into: int, scale: float) -> Tensor:
    """A normal matrix, undrawn without a generator."""
    return torch.empty(out, into) if generator is None else normal(generator, out, into, scale=scale)


def step_bias(shape: Shape, l: int) -> float:
    """Where the softplus is eta / C, or eta where the mean divides by C."""
    whole = shape.options.moved_by / (1 if shape.options.reduce == "mean" else shape.chunks[l])
    return softplus_inverse(whole) if whole else STILL
