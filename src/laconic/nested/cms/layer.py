"""A continuum memory as a module in place of an MLP: vectors in, vectors out, with a state that is a value.

Nested Learning arXiv:2512.24695, section 7. `start` and `advance` are pure; `CMS` holds what training changes.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.config.nested import NewLevelInit, OuterGradient
from laconic.errors import UsageError
from laconic.nested.cms.config import CMSParams, CMSShape, Options
from laconic.nested.cms.forward import forward_with_state, initial_state
from laconic.nested.init import register_parameters, sample_normal, softplus_inverse
from laconic.nested.state import LayerState

GATED_MLP = ("gate_proj", "up_proj", "down_proj")
ZERO_STEP_BIAS = -1e4  # the bias at which a softplus is 0 in every type
Vectors = Float[Tensor, "B T D"]


class CMS(nn.Module):
    """A continuum memory in place of an MLP: `y, state = mlp(x, state, live=live)`; the caller adds the residual.

    Without a state it begins with every level at its start. With `seed` None the maps are left undrawn.
    """

    def __init__(
        self,
        width: int,
        intermediate_size: int,
        chunk_sizes: Sequence[int] = (64, 512),
        options: Options | None = None,
        seed: int | None = 0,
        *,
        act: str = "silu",
        projections: tuple[str, ...] = GATED_MLP,
        has_bias: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        own = options or Options(inner_objective="associative")
        self.shape = CMSShape(width, intermediate_size, tuple(chunk_sizes), own, act, tuple(projections), has_bias, eps)
        register_parameters(
            self, init_weights(self.shape, None if seed is None else torch.Generator().manual_seed(seed))
        )

    @classmethod
    def from_mlp(
        cls,
        mlp: nn.Module,
        chunk_sizes: Sequence[int] = (64, 512),
        options: Options | None = None,
        *,
        act: str = "silu",
        new_level_init: NewLevelInit = "zero",
    ) -> "CMS":
        """Level 0 is that MLP, its tensors shared; slower levels begin with a down-projection of zeros, or as copies.

        The maps are `gate_proj`, `up_proj`, `down_proj`, without a gate the last two, or `fc1`, `fc2`. Raises `Usage`
        (2) for a module that has none of these, and for an order that runs another level first.
        """
        maps = find_mlp_projections(mlp)
        found = {name: mlp.get_submodule(name) for name in maps}
        up = found[maps[-2]].weight
        assert isinstance(up, Tensor)
        own = options or Options(inner_objective="associative", associative_target="start")
        if own.level_order == "slow_first" and len(chunk_sizes) > 1:
            raise UsageError(
                "cms: level 0 is the MLP there was, and slow_first would run another before it; take fast_first"
            )
        bias = "bias" in dict(found[maps[-1]].named_parameters())
        made = cls(up.shape[1], up.shape[0], chunk_sizes, own, act=act, projections=maps, has_bias=bias).to(up)
        made.share_start(0, found)
        with torch.no_grad():
            if "a" in dict(made.named_parameters(recurse=False)):
                made.get_parameter("a").fill_(1.0)
            for l in range(1, len(chunk_sizes)):
                for name, module in found.items():
                    for which, p in module.named_parameters(recurse=False):
                        own_p = made.get_parameter(f"levels.{l}.{name}.{which}")
                        own_p.copy_(p if new_level_init == "copy" else own_p * (name != maps[-1]))
        return made

    def share_start(self, l: int, projections: Mapping[str, nn.Module]) -> None:
        """Level `l` has these maps' own tensors for its start."""
        for name, module in projections.items():
            place = self.get_submodule(f"levels.{l}.{name}")
            for which, p in module.named_parameters(recurse=False):
                place.register_parameter(which, p)

    @property
    def params(self) -> CMSParams:
        """The shape and the tensors by name, as `start` and `advance` take them."""
        return CMSParams(self.shape, dict(self.named_parameters()))

    def forward(
        self,
        x: Vectors,
        state: LayerState | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        update_weights: bool = True,
        outer_gradient: OuterGradient = "full",
        truncate_after: int | None = None,
    ) -> tuple[Vectors, LayerState]:
        params = self.params
        state = initial_state(params, len(x)) if state is None else state
        return forward_with_state(
            params,
            state,
            x,
            attention_mask=attention_mask,
            update_weights=update_weights,
            outer_gradient=outer_gradient,
            truncate_after=truncate_after,
        )


def find_mlp_projections(module: nn.Module) -> tuple[str, ...]:
    """The names of an MLP's maps, in the order in which `Shape` takes them."""
    have = dict(module.named_children())
    for maps in (GATED_MLP, ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj")):
        if all(name in have for name in maps):
            return maps
    raise UsageError(
        f"cms: {type(module).__name__} has {', '.join(have) or 'no parts'}; an MLP has up_proj and down_proj"
    )


def init_weights(shape: CMSShape, generator: torch.Generator | None, std: float | None = None) -> dict[str, Tensor]:
    """What training begins with: maps normal with std `scale`, by default their inputs^-1/2, steps at eta."""
    o, D, w = shape.options, shape.width, dict[str, Tensor]()
    for l in range(len(shape.chunk_sizes)):
        for name in shape.projections:
            out, into = shape.projection_shape(name)
            into -= shape.has_bias
            w[f"levels.{l}.{name}.weight"] = init_matrix(generator, out, into, std or into**-0.5)
            w |= {f"levels.{l}.{name}.bias": torch.zeros(out)} if shape.has_bias else {}
        w[f"levels.{l}.step.bias"] = torch.tensor(initial_step_bias(shape, l))
        if o.lr_granularity == "token":
            w[f"levels.{l}.step.weight"] = torch.zeros(D)
        if o.inner_objective == "associative":
            w[f"levels.{l}.key.weight"] = init_matrix(generator, D, D, D**-0.5)
            value = torch.zeros(D, D) if o.associative_target == "start" else init_matrix(generator, D, D, D**-0.5)
            w[f"levels.{l}.value.weight"] = value
        if o.structure != "independent" and l != shape.run_order[0]:
            w[f"levels.{l}.norm.weight"] = torch.ones(D)
    K = len(shape.chunk_sizes)
    return w | ({"a": torch.full((K,), 1 / K)} if o.structure == "independent" else {})


def init_matrix(generator: torch.Generator | None, out: int, into: int, std: float) -> Tensor:
    """A normal matrix, undrawn without a generator."""
    return torch.empty(out, into) if generator is None else sample_normal(generator, out, into, std=std)


def initial_step_bias(shape: CMSShape, l: int) -> float:
    """Where the softplus is eta / C, or eta where the mean divides by C."""
    whole = shape.options.initial_inner_lr / (1 if shape.options.gradient_reduction == "mean" else shape.chunk_sizes[l])
    return softplus_inverse(whole) if whole else ZERO_STEP_BIAS
