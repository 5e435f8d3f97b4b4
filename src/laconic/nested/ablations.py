"""Ablations of a trained Hope model: the same weights with one part disabled, to measure what the part contributes.

Nested Learning arXiv:2512.24695, Table 6; Titans arXiv:2501.00663, Table 5. The papers train each ablation from
scratch; here the remaining parts were trained together with the disabled one. Levels are numbered by their chunk sizes,
the fastest 0, over all layers. What cannot be disabled in trained weights needs another recipe: the number of levels,
chunk sizes, the convolution, and a static query in place of an adaptive one.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.config.nested import TitansOptions
from laconic.errors import UsageError
from laconic.nested.cms.init import ZERO_STEP_BIAS
from laconic.nested.hope.model import Hope, build_from_tensors
from laconic.nested.language_model import level_chunk_sizes


def modify_model(
    model: Hope, memory_options: Mapping[str, object] | None = None, values: Mapping[str, float] | None = None
) -> Hope:
    """Return a model that shares the weights, with other memory options and some tensors set to a value, by name.

    A state of the original model may contain what the disabled part has learned; reset it or start a new one.
    """
    config = model.hope_config
    if memory_options is not None and config.memory is not None:
        config = replace(config, memory=config.memory.model_copy(update=dict(memory_options)))
    tensors = dict[str, Tensor](model.named_parameters())
    for name, value in (values or {}).items():
        tensors[name] = nn.Parameter(torch.full_like(tensors[name], value))
    return build_from_tensors(type(model), config, tensors, model)


def freeze_levels(model: Hope, *levels: int) -> Hope:
    """Return the model with levels, by default all, that stay at their starts."""
    sizes = level_chunk_sizes(model)
    unknown = next((level for level in levels if not 0 <= level < len(sizes)), None)
    if unknown is not None:
        raise UsageError(f"level {unknown} does not exist; levels are 0 to {len(sizes) - 1}, chunk sizes {list(sizes)}")
    frozen = {sizes[level] for level in levels or range(len(sizes))}
    values: dict[str, float] = {}
    for n, chunk_sizes in enumerate(model.hope_config.chunk_sizes):
        for l in (l for l, C in enumerate(chunk_sizes) if C in frozen):
            values |= constant_gate(model, f"{model.weight_names.layers}.{n}.mlp.levels.{l}.step", ZERO_STEP_BIAS)
    return modify_model(model, values=values)


def constant_gate(model: Hope, gate: str, bias: float) -> dict[str, float]:
    """Return values of the parameters whose names contain that of a gate: its bias, and no dependence on the input."""
    names = [name for name, _ in model.named_parameters() if f"{gate}." in name]
    return {name: bias if name.endswith(".bias") else 0.0 for name in names}


def build_ablations(model: Hope) -> dict[str, Hope]:
    """Return every ablation that the trained weights of a model allow, by name.

    Decay is disabled for the memory, whose norm is still bounded. For projections it cannot be, since their cap lets
    them grow by what decays. A static projection stays at its start: each alone if others remain, and all of them if
    they have their own step.
    """
    sizes = level_chunk_sizes(model)
    ablations = {f"without chunk {C}": freeze_levels(model, l) for l, C in enumerate(sizes)}
    if len(ablations) > 1:
        ablations["without levels"] = freeze_levels(model)
    o = model.hope_config.memory
    if o is None:
        return ablations
    if o.momentum:
        ablations["without momentum"] = modify_model(model, {"momentum": False})
    if isinstance(o, TitansOptions):
        no_decay = constant_gate(model, "memory.keep", -ZERO_STEP_BIAS)
        return ablations | {"without decay": modify_model(model, values=no_decay)}
    if o.gate_groups == 2:
        no_decay = constant_gate(model, "memory.keep.memory", -ZERO_STEP_BIAS)
        ablations["without decay"] = modify_model(model, values=no_decay)
    if o.delta_rule:
        ablations["without erase"] = modify_model(model, {"delta_rule": False})
    for name in o.adaptive_projections if len(o.adaptive_names) > 1 else ():
        others = tuple(other for other in o.adaptive_projections if other != name)
        ablations[f"static {name}"] = modify_model(model, {"adaptive_projections": others})
    if o.adaptive_names and o.gate_groups == 2:
        no_step = constant_gate(model, "memory.step.projections", ZERO_STEP_BIAS)
        ablations["static projections"] = modify_model(model, values=no_step)
    return ablations
