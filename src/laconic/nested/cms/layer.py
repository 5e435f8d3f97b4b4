"""A continuum memory system as a module in place of an MLP: vectors in, vectors out, with an immutable state.

Nested Learning arXiv:2512.24695, section 7. `forward.py` has the pure functions; `CMS` holds the trained weights.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.config.nested import CMSOptions, NewLevelInit, OuterGradient
from laconic.errors import UsageError
from laconic.nested.cms.config import CMSParams, CMSShape
from laconic.nested.cms.forward import forward_with_state, initial_state
from laconic.nested.init import register_parameters, sample_normal, softplus_inverse
from laconic.nested.state import LayerState

GATED_MLP = ("gate_proj", "up_proj", "down_proj")
ZERO_STEP_BIAS = -1e4  # the bias at which softplus is 0 in every floating-point type
Vectors = Float[Tensor, "B T D"]


class CMS(nn.Module):
    """A continuum memory system in place of an MLP: `y, state = mlp(x, state)`; the caller adds the residual.

    Args:
        width: width of the vectors.
        intermediate_size: inner width of the MLPs.
        chunk_sizes: tokens between two updates of each level, fastest first.
        options: options of the levels, by default those of the associative objective.
        seed: seed of the initial weights; None leaves them uninitialized.
        activation: activation of the MLPs.
        projections: names of the linear maps: gate, up and down, or up and down.
        has_bias: whether the maps have biases.
        eps: epsilon of the norms between levels.

    Example:
        >>> import torch, laconic
        >>> mlp = laconic.CMS(32, 64, chunk_sizes=(2, 4))
        >>> y, state = mlp(torch.randn(1, 10, 32))
        >>> y.shape
        torch.Size([1, 10, 32])
    """

    def __init__(
        self,
        width: int,
        intermediate_size: int,
        chunk_sizes: Sequence[int] = (64, 512),
        options: CMSOptions | None = None,
        seed: int | None = 0,
        *,
        activation: str = "silu",
        projections: tuple[str, ...] = GATED_MLP,
        has_bias: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        options = options or CMSOptions(inner_objective="associative")
        self.shape = CMSShape(
            width, intermediate_size, tuple(chunk_sizes), options, activation, tuple(projections), has_bias, eps
        )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        register_parameters(self, init_weights(self.shape, generator))

    @classmethod
    def from_mlp(
        cls,
        mlp: nn.Module,
        chunk_sizes: Sequence[int] = (64, 512),
        options: CMSOptions | None = None,
        *,
        activation: str = "silu",
        new_level_init: NewLevelInit = "zero",
    ) -> "CMS":
        """Build levels on a trained MLP, which becomes level 0 and shares its tensors.

        Args:
            mlp: a module with `gate_proj`, `up_proj` and `down_proj`, with the last two, or with `fc1` and `fc2`.
            chunk_sizes: tokens between two updates of each level, fastest first.
            options: options of the levels, by default the associative objective with the start as its target.
            activation: activation of the MLP.
            new_level_init: whether a slower level starts with a zero down-projection or copies level 0.

        Raises:
            UsageError: for another kind of module.
        """
        projections = find_mlp_projections(mlp)
        maps = {name: mlp.get_submodule(name) for name in projections}
        up = maps[projections[-2]].weight
        assert isinstance(up, Tensor)
        options = options or CMSOptions(inner_objective="associative", associative_target="start")
        has_bias = "bias" in dict(maps[projections[-1]].named_parameters())
        cms = cls(
            up.shape[1], up.shape[0], chunk_sizes, options,
            activation=activation, projections=projections, has_bias=has_bias,
        ).to(up)  # fmt: skip
        cms.share_start(0, maps)
        with torch.no_grad():
            if "a" in dict(cms.named_parameters(recurse=False)):
                cms.get_parameter("a").fill_(1.0)
            for l in range(1, len(chunk_sizes)):
                for name, module in maps.items():
                    for kind, p in module.named_parameters(recurse=False):
                        level_p = cms.get_parameter(f"levels.{l}.{name}.{kind}")
                        level_p.copy_(p if new_level_init == "copy" else level_p * (name != projections[-1]))
        return cms

    def share_start(self, l: int, projections: Mapping[str, nn.Module]) -> None:
        """Use the tensors of these linear maps as the start of level `l`."""
        for name, module in projections.items():
            target = self.get_submodule(f"levels.{l}.{name}")
            for kind, p in module.named_parameters(recurse=False):
                target.register_parameter(kind, p)

    @property
    def params(self) -> CMSParams:
        """Shape and weights by name, for the functions of `forward.py`."""
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
        """Call `forward_with_state`, by default on the state of levels that have read nothing."""
        params = self.params
        return forward_with_state(
            params,
            initial_state(params, len(x)) if state is None else state,
            x,
            attention_mask=attention_mask,
            update_weights=update_weights,
            outer_gradient=outer_gradient,
            truncate_after=truncate_after,
        )


def find_mlp_projections(module: nn.Module) -> tuple[str, ...]:
    """Return the names of an MLP's linear maps, the down-projection last."""
    children = dict(module.named_children())
    for names in (GATED_MLP, ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj")):
        if all(name in children for name in names):
            return names
    raise UsageError(
        f"cms: {type(module).__name__} with children {list(children)} is not an MLP; expected up_proj and down_proj"
    )


def init_weights(shape: CMSShape, generator: torch.Generator | None, std: float | None = None) -> dict[str, Tensor]:
    """Return the initial weights by name; without a generator, matrices are left uninitialized.

    `std` is the standard deviation of the linear maps, by default their inputs^-1/2.
    """
    o, D, w = shape.options, shape.width, dict[str, Tensor]()
    for l in range(len(shape.chunk_sizes)):
        for name in shape.projections:
            outputs, inputs = shape.projection_shape(name)
            inputs -= shape.has_bias
            w[f"levels.{l}.{name}.weight"] = init_matrix(generator, outputs, inputs, std or inputs**-0.5)
            if shape.has_bias:
                w[f"levels.{l}.{name}.bias"] = torch.zeros(outputs)
        w[f"levels.{l}.step.bias"] = torch.tensor(initial_step_bias(shape, l))
        if o.lr_granularity == "token":
            w[f"levels.{l}.step.weight"] = torch.zeros(D)
        if o.inner_objective == "associative":
            w[f"levels.{l}.key.weight"] = init_matrix(generator, D, D, D**-0.5)
            zero_value = o.associative_target == "start"
            w[f"levels.{l}.value.weight"] = torch.zeros(D, D) if zero_value else init_matrix(generator, D, D, D**-0.5)
        if o.structure != "independent" and l != shape.run_order[0]:
            w[f"levels.{l}.norm.weight"] = torch.ones(D)
    K = len(shape.chunk_sizes)
    return w | ({"a": torch.full((K,), 1 / K)} if o.structure == "independent" else {})


def init_matrix(generator: torch.Generator | None, outputs: int, inputs: int, std: float) -> Tensor:
    """Sample a normal matrix, or leave it uninitialized without a generator."""
    if generator is None:
        return torch.empty(outputs, inputs)
    return sample_normal(generator, outputs, inputs, std=std)


def initial_step_bias(shape: CMSShape, l: int) -> float:
    """Return the bias at which the softplus is the initial learning rate divided by C."""
    step_size = shape.options.initial_inner_lr / shape.chunk_sizes[l]
    return softplus_inverse(step_size) if step_size else ZERO_STEP_BIAS
