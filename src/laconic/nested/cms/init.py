"""Initial weights of the levels of a continuum memory system."""

import torch
from torch import Tensor

from laconic.nested.cms.level import CMSShape
from laconic.nested.init import sample_normal, softplus_inverse

GATED_MLP = ("gate_proj", "up_proj", "down_proj")
ZERO_STEP_BIAS = -1e4  # the bias at which softplus is 0 in every floating-point type


def init_weights(shape: CMSShape, generator: torch.Generator | None, std: float | None = None) -> dict[str, Tensor]:
    """Return the initial weights by name; without a generator, matrices are left uninitialized.

    `std` is the standard deviation of the linear maps, by default their inputs^-1/2.
    """
    o, D = shape.options, shape.width
    w: dict[str, Tensor] = {}
    for l in range(len(shape.chunk_sizes)):
        for name in shape.projections:
            outputs, inputs = shape.projection_shape(name)
            inputs -= shape.has_bias
            w[f"levels.{l}.{name}.weight"] = init_matrix(generator, outputs, inputs, std or inputs**-0.5)
            if shape.has_bias:
                w[f"levels.{l}.{name}.bias"] = torch.zeros(outputs)
        step_bias = ZERO_STEP_BIAS if shape.is_frozen else softplus_inverse(o.initial_inner_lr / shape.chunk_sizes[l])
        w[f"levels.{l}.step.bias"] = torch.tensor(step_bias)
        if o.lr_granularity == "token":
            w[f"levels.{l}.step.weight"] = torch.zeros(D)
        if o.inner_objective == "associative":
            w[f"levels.{l}.key.weight"] = init_matrix(generator, D, D, D**-0.5)
            zero_value = o.associative_target == "start"
            w[f"levels.{l}.value.weight"] = torch.zeros(D, D) if zero_value else init_matrix(generator, D, D, D**-0.5)
        if o.structure != "independent" and l:
            w[f"levels.{l}.norm.weight"] = torch.ones(D)
    K = len(shape.chunk_sizes)
    return w | ({"a": torch.full((K,), 1 / K)} if o.structure == "independent" else {})


def init_matrix(generator: torch.Generator | None, outputs: int, inputs: int, std: float) -> Tensor:
    """Sample a normal matrix, or leave it uninitialized without a generator."""
    if generator is None:
        return torch.empty(outputs, inputs)
    return sample_normal(generator, outputs, inputs, std=std)
