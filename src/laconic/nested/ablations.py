"""Ablations of a trained Hope model: the same weights with one part disabled, to measure what the part contributes.

Nested Learning arXiv:2512.24695, Table 6; Titans arXiv:2501.00663, Table 5. The papers train each ablation from
scratch; here the remaining parts were trained together with the disabled one. Levels are numbered by their chunk sizes,
the fastest 0, over all layers. What cannot be disabled in trained weights needs another recipe: the number of levels,
chunk sizes, the convolution, and a static query in place of an adaptive one.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.config.nested import SelfModifyingOptions, TitansOptions
from laconic.errors import UsageError
from laconic.nested.cms.init import ZERO_STEP_BIAS
from laconic.nested.hope.model import Hope, build_from_tensors
from laconic.nested.language_model import level_chunk_sizes

FillValue = Callable[[str], float | None]  # value for all entries of a tensor, by its name within the layers


def modify_model(
    model: Hope, memory_options: Mapping[str, object] | None = None, fill_value: FillValue = lambda _: None
) -> Hope:
    """Return a model that shares the weights, with other memory options and with some tensors set to a value.

    A state of the original model may contain what the disabled part has learned; reset it or start a new one.
    """
    config = model.hope_config
    if memory_options is not None and config.memory is not None:
        config = replace(config, memory=config.memory.model_copy(update=dict(memory_options)))
    tensors, prefix = dict[str, Tensor](model.named_parameters()), f"{model.weight_names.layers}."
    for name, w in tensors.items():
        value = fill_value(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if value is not None:
            tensors[name] = nn.Parameter(torch.full_like(w, value))
    return build_from_tensors(type(model), config, tensors, model)


def freeze_levels(model: Hope, *levels: int) -> Hope:
    """Return the model with levels, by default all, that stay at their starts."""
    sizes = level_chunk_sizes(model)
    unknown = next((level for level in levels if not 0 <= level < len(sizes)), None)
    if unknown is not None:
        raise UsageError(f"level {unknown} does not exist; levels are 0 to {len(sizes) - 1}, chunk sizes {list(sizes)}")
    frozen = {sizes[level] for level in levels or range(len(sizes))}

    def fill_value(name: str) -> float | None:
        layer, _, path = name.partition(".")
        words = path.split(".")  # mlp levels L step bias
        is_step = words[:2] == ["mlp", "levels"] and words[3] == "step"
        if not is_step or model.hope_config.chunk_sizes[int(layer)][int(words[2])] not in frozen:
            return None
        return ZERO_STEP_BIAS if words[4] == "bias" else 0.0

    return modify_model(model, fill_value=fill_value)


def override_gate(gate: str, bias: float) -> FillValue:
    """Set a memory's gate to a constant bias; `gate` is a prefix of its tensors, `keep` or `step.projections`."""
    prefix = f"memory.{gate}."

    def fill_value(name: str) -> float | None:
        path = name.partition(".")[2]
        if not path.startswith(prefix):
            return None
        return bias if path.endswith(".bias") else 0.0

    return fill_value


def build_ablations(model: Hope) -> dict[str, Hope]:
    """Return every ablation that the trained weights of a model allow, by name.

    Decay is disabled for the memory, whose norm is still bounded. For projections it cannot be, since their cap lets
    them grow by what decays. A static projection stays at its start.
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
        no_decay = override_gate("keep", -ZERO_STEP_BIAS)
        return ablations | {"without decay": modify_model(model, fill_value=no_decay)}
    if o.gate_groups == 2:
        no_decay = override_gate("keep.memory", -ZERO_STEP_BIAS)
        ablations["without decay"] = modify_model(model, fill_value=no_decay)
    if o.delta_rule:
        ablations["without erase"] = modify_model(model, {"delta_rule": False})
    return ablations | freeze_projections(model, o)


def freeze_projections(model: Hope, options: SelfModifyingOptions) -> dict[str, Hope]:
    """Return ablations with static projections: each alone if others remain, and all if they have their own step."""
    ablations: dict[str, Hope] = {}
    for name in options.adaptive_projections if len(options.adaptive_names) > 1 else ():
        others = tuple(other for other in options.adaptive_projections if other != name)
        ablations[f"static {name}"] = modify_model(model, {"adaptive_projections": others})
    if options.adaptive_names and options.gate_groups == 2:
        no_step = override_gate("step.projections", ZERO_STEP_BIAS)
        ablations["static projections"] = modify_model(model, fill_value=no_step)
    return ablations
