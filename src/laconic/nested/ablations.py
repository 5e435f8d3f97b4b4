"""A trained model with a part of it taken out, its tensors shared: what is lost is what the part is worth.

Nested Learning arXiv:2512.24695, Table 6; Titans arXiv:2501.00663, Table 5. The papers train each anew; here the rest
has learned beside the part, so that a loss says what this model makes of it. Levels are numbered by their chunks, the
fastest 0, over all layers. What cannot be taken out of trained weights is a recipe's: K, chunks, `conv`, a query that
is static (`inner_query` has other weights).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.config.nested import SelfModifyingOptions, TitansOptions
from laconic.errors import UsageError
from laconic.nested.cms.layer import ZERO_STEP_BIAS
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope
from laconic.nested.metrics import level_chunk_sizes

FillValue = Callable[[str], float | None]  # what all numbers of a tensor are to be, by the name within its layer


def modify_model(
    model: Hope, memory_options: Mapping[str, object] | None = None, fill_value: FillValue = lambda _: None
) -> Hope:
    """The same weights, shared, with other options of the memory, and with tensors of a layer set to a number.

    A state that is read on may hold what the part has learned; begin anew, or reset it.
    """
    shape: HopeConfig = model.hope_config
    if memory_options is not None and shape.memory is not None:
        shape = replace(shape, memory=shape.memory.model_copy(update=dict(memory_options)))
    with torch.device("meta"):
        made = type(model)(shape, seed=None)
    held, layers = dict[str, Tensor](model.named_parameters()), f"{model.weight_names.layers}."
    for name, w in held.items():
        value = fill_value(name.removeprefix(layers)) if name.startswith(layers) else None
        if value is not None:
            held[name] = nn.Parameter(torch.full_like(w, value))
    made.load_state_dict({name: held[name] for name in made.state_dict()}, assign=True)
    made.source_folder, made.name_or_path, made.attn_implementation = (
        model.source_folder,
        model.name_or_path,
        model.attn_implementation,
    )
    return made.train(model.training)


def freeze_levels(model: Hope, *levels: int) -> Hope:
    """Levels, all where none is named, never move: their steps are 0. Raises `Usage` (2) for a level there is not."""
    chunks = level_chunk_sizes(model)
    odd = next((level for level in levels if not 0 <= level < len(chunks)), None)
    if odd is not None:
        raise UsageError(
            f"level {odd} was asked for; there are levels 0 to {len(chunks) - 1}, of chunks {list(chunks)}"
        )
    still = {chunks[level] for level in levels or range(len(chunks))}

    def filled(name: str) -> float | None:
        n, _, inside = name.partition(".")
        words = inside.split(".")  # mlp levels L step bias
        own = words[:2] == ["mlp", "levels"] and words[3] == "step"
        if not own or model.hope_config.chunk_sizes[int(n)][int(words[2])] not in still:
            return None
        return ZERO_STEP_BIAS if words[4] == "bias" else 0.0

    return modify_model(model, fill_value=filled)


def override_gate(gate: str, bias: float) -> FillValue:
    """A memory's gate at that bias, whatever it reads; `which` as its tensors begin: keep, step.projections."""
    starts = f"memory.{gate}."

    def filled(name: str) -> float | None:
        inside = name.partition(".")[2]
        if not inside.startswith(starts):
            return None
        return bias if inside.endswith(".bias") else 0.0

    return filled


def build_ablations(model: Hope) -> dict[str, Hope]:
    """Every part that this model has and that can be taken out of it, by name.

    Decay is taken from the memory, whose guard still holds it; of projections, which their cap lets grow by what they
    let go of, it cannot be taken out. A static projection stays at its start, all where their steps are 0.
    """
    levels = {f"without chunk {C}": freeze_levels(model, l) for l, C in enumerate(level_chunk_sizes(model))}
    found = levels | ({"without levels": freeze_levels(model)} if len(levels) > 1 else {})
    o = model.hope_config.memory
    if o is None:
        return found
    if o.momentum:
        found["without momentum"] = modify_model(model, {"momentum": False})
    if isinstance(o, TitansOptions):
        return found | {"without decay": modify_model(model, fill_value=override_gate("keep", -ZERO_STEP_BIAS))}
    if o.gate_groups == 2:
        found["without decay"] = modify_model(model, fill_value=override_gate("keep.memory", -ZERO_STEP_BIAS))
    if o.delta_rule:
        found["without erase"] = modify_model(model, {"delta_rule": False})
    return found | freeze_projections(model, o)


def freeze_projections(model: Hope, options: SelfModifyingOptions) -> dict[str, Hope]:
    """Projections at their starts: each alone where another is left, and all, where they have steps of their own."""
    found: dict[str, Hope] = {}
    for name in options.adaptive_projections if len(options.adaptive_names) > 1 else ():
        found[f"static {name}"] = modify_model(
            model, {"adaptive_projections": tuple(each for each in options.adaptive_projections if each != name)}
        )
    if options.adaptive_names and options.gate_groups == 2:
        found["static projections"] = modify_model(model, fill_value=override_gate("step.projections", ZERO_STEP_BIAS))
    return found
