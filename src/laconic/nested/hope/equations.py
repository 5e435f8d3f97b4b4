"""Self-modifying Titans: keys, values and gates come from memories that write their own values.

Nested Learning arXiv:2512.24695 (76 to 96); VisionHOPE arXiv:2609.33325 for the soft cap. Linear memories share their
keys, and each memory generates its own values; so every memory of a group is its start times the same matrix,
M_t = M_0 P_t. An affine memory is z + (M_0 P + Q) z, with one Q beside P.

Symbols: □ one of the memories k, v, step, keep, q and memory; x input of a head, k keys, v values, q queries [E]; P_c
the state at the chunk's first token, from which the whole chunk is generated; u what a write adds along its key.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.nested.recurrence.gated_delta_rule import Gates, PerToken, decay_gate
from laconic.nested.recurrence.memory_cells import Vectors


def gate_logit(p: Vectors, row: Float[Tensor, "H E"], bias: Float[Tensor, " H"]) -> PerToken:
    """Return the output of a gate memory, which has one row per head, before its activation."""
    return (p * row[:, None]).sum(-1) + bias[:, None]


def compute_gates(p: Mapping[str, Vectors], w: Mapping[str, Tensor], group: str, max_step: float) -> Gates:
    """Return the gates of a group from the inputs "x", "keep" and "step" of the gate memories.

    Momentum, if there is any, is a static function of the input.
    """
    decay = decay_gate(gate_logit(p["keep"], w[f"keep.{group}.weight"], w[f"keep.{group}.bias"]))
    a = gate_logit(p["step"], w[f"step.{group}.weight"], w[f"step.{group}.bias"])
    step_size = max_step * a.sigmoid()
    if f"momentum.{group}.bias" not in w:
        return Gates(decay, step_size)
    a = gate_logit(p["x"], w[f"momentum.{group}.weight"], w[f"momentum.{group}.bias"])
    return Gates(decay, step_size, decay_gate(a))


def self_generated_values(v: Vectors, change: Float[Tensor, "B H E E"]) -> Vectors:
    """Eq. 84,87,95: v̂_□ = M_□,0 P_c v for every □; here P_c v, to which each start is applied where it is read."""
    return v + v @ change.mT


def memory_loss_gradient(y: Vectors, v: Vectors) -> Vectors:
    """Eq. 85: the gradient of ½‖M(k) - v̂‖² by the memory's output y; the square is summed over E."""
    return y - v


def dot_value(v: Vectors) -> Vectors:
    """Eq. 92: descent on -⟨M k, v̂⟩ adds v̂ kᵀ. The paper subtracts it."""
    return v


def l2_value(v: Vectors, at_key: Vectors) -> Vectors:
    """Eq. 93: descent on ½‖M k - v̂‖² adds (v̂ - M_c k) kᵀ."""
    return -memory_loss_gradient(at_key, v)


def mlp_memory(z: Vectors, W1: Float[Tensor, "*B H E F"], W2: Float[Tensor, "*B H F E"]) -> Vectors:
    """Eq. 89,91: M(z) = z + W1 σ(W2 z), σ = SiLU."""
    return z + F.silu(z @ W2.mT) @ W1.mT
