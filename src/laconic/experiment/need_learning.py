"""What a model that learns while it reads needs, by formulas: numbers kept for the backward pass, state, work.

Its boundaries are decided by counts, which tensors without numbers do not have, so no pass over such can be followed.
The factors were counted on CPU passes of small models of every kind; a test holds the formula to such a count.
"""

from laconic.config.nested import InnerLoopConfig, SelfModifyingOptions, TitansOptions
from laconic.nested.hope.config import HopeConfig

TASK, OWN = (10.5, 0.3), (3.9, 1.35)  # numbers kept of a map's inputs and outputs a token, and of its whole a chunk
DEEP, AFFINE, MOVED, SHARED, FLAT, STILL = 3.6, 1.6, 1.45, 0.7, 0.54, 0.79


def kept(shape: HopeConfig, how: InnerLoopConfig) -> float:
    """Numbers that all layers keep for the backward pass, a token of a row."""
    D, L = shape.decoder.hidden_size, shape.decoder.num_hidden_layers
    learned = how.enabled and not shape.cms_shape(0).is_frozen
    levels = sum(level(shape, C, learned) for chunks in shape.chunk_sizes for C in chunks)
    return L * (3 * D + mixed(shape)) + levels


def level(shape: HopeConfig, C: int, learned: bool) -> float:
    """One level, of chunk C."""
    D, F, maps = shape.decoder.hidden_size, shape.decoder.intermediate_size, len(shape.mlp_projections)
    still = 3 * D + 2 * (maps - 1) * F
    token, chunk = TASK if shape.cms.inner_objective == "task" else OWN
    return still + (maps * (token * (D + F) + chunk * D * F / C) if learned else 0)


def mixed(shape: HopeConfig) -> float:
    """What stands in the place of attention, or attention."""
    d, o = shape.decoder, shape.memory
    if o is None:
        return 3 * d.num_attention_heads * d.head_dim + 4 * d.num_key_value_heads * d.head_dim
    E = shape.head_dim or d.hidden_size // shape.num_heads
    if isinstance(o, TitansOptions):
        C = shape.memory_chunk_size
        whole = 44 * E + 7.2 * E * E / C + 15.3 * C + 30
        share = (1.0 if o.memory_depth == 2 else FLAT) * (1.0 if o.momentum else STILL)
        return shape.num_heads * (20 * E + 2 * E * E / C if o.activation_checkpointing else share * whole)
    C = o.memory_chunk_size
    whole = 28 * E + 5 * E * E / C + 18 * C + 83
    share = {"linear": 1.0, "affine": AFFINE, "mlp": DEEP}[o.memory_kind] * (MOVED if o.momentum else 1.0)
    share *= SHARED if o.gate_groups == 1 else 1.0
    return shape.num_heads * (10 * E + 2 * E * E / C if o.activation_checkpointing else share * whole)


def state_bytes(shape: HopeConfig) -> int:
    """Bytes of a state of one row once every level has learned more than a sum of factors holds, in float32.

    Attention's cache is left out: it grows with what is read.
    """
    D, F = shape.decoder.hidden_size, shape.decoder.intermediate_size
    numbers = shape.decoder.num_hidden_layers * memory_numbers(shape)
    moments = shape.cms.inner_optimizer in ("momentum", "delta_momentum", "muon")
    for chunks in shape.chunk_sizes if not shape.cms_shape(0).is_frozen else ():
        for l, C in enumerate(chunks):
            nested = shape.cms.structure == "nested" and l < len(chunks) - 1
            whole = 1 + moments + nested * (1 + (shape.cms.meta_gradient == "first_order"))
            numbers += len(shape.mlp_projections) * (whole * D * F + min(C * (D + F), D * F))
    return 4 * numbers


def memory_numbers(shape: HopeConfig) -> int:
    """Of one layer's memory: now, at the last boundary, momentum, and the convolutions' last vectors."""
    o, D = shape.memory, shape.decoder.hidden_size
    if o is None:
        return 0
    E = shape.head_dim or D // shape.num_heads
    copies, square = 2 + o.momentum, shape.num_heads * E * E
    if isinstance(o, TitansOptions):
        one = square if o.memory_depth == 1 else 2 * shape.num_heads * E * (o.mlp_width or E)
        return copies * one * (1 + (o.global_chunk_size is not None)) + 3 * (o.conv_kernel_size - 1) * D
    tails = (o.conv_kernel_size - 1) * shape.num_heads * E if o.input_proj == "map" else 0
    return copies * square * groups(o) + tails


def groups(o: SelfModifyingOptions) -> int:
    """Matrices of a head that are carried: a shared P of each group, Q of an affine memory, all of an mlp's."""
    if o.memory_kind == "mlp":
        return 2 * (1 + len(o.adaptive_names))
    return (1 if o.gate_groups == 1 or not o.adaptive_names else 2) + (o.memory_kind == "affine") * (
        1 + len(o.adaptive_names)
    )


def work(shape: HopeConfig, how: InnerLoopConfig) -> float:
    """FLOP of a token forward through all layers, and of what the levels learn of it."""
    d = shape.decoder
    D, F, L = d.hidden_size, d.intermediate_size, d.num_hidden_layers
    levels = len(shape.mlp_projections) * D * F * sum(map(len, shape.chunk_sizes))
    learned = how.enabled and not shape.cms_shape(0).is_frozen
    again = (2 if shape.cms.inner_objective == "task" else 3) if learned else 0
    return 2.0 * ((1 + again) * levels + L * mixing(shape))


def mixing(shape: HopeConfig) -> float:
    """Products of a token in what stands in the place of attention, or attention."""
    d, o = shape.decoder, shape.memory
    D = d.hidden_size
    if o is None:
        return 2 * D * d.head_dim * (d.num_attention_heads + d.num_key_value_heads)
    E = shape.head_dim or D // shape.num_heads
    maps, C = (5, shape.memory_chunk_size) if isinstance(o, TitansOptions) else (4, o.memory_chunk_size)
    return maps * D * shape.num_heads * E + shape.num_heads * (8 * E * E + 1.5 * C * E)
