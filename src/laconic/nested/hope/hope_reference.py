"""Reference implementation of Hope: the loss of one training step, row by row and token by token.

Nested Learning arXiv:2512.24695 (71, 83 to 97). Start reading here: `model.py` computes the same loss and gradients
in chunks, and a test holds it to this file in float64. Memories are linear and without momentum, levels a chain that
learns the next token by gradient descent. The memories of a group share their keys: each is M_t = M_0 P_t with one P.

Symbols: x input of a head, k key, v value, q query [E]; P_c the matrix at the chunk's first token; theta level weights.
"""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laconic.models.block import Block
from laconic.nested.cms.cms_reference import descend, run_levels, start_weights, zero_terms
from laconic.nested.cms.layer import CMS
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.hope.model import Hope


def hope_training_loss(model: Hope, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of all next tokens, while memories and levels learn from each text."""
    return torch.stack([loss for ids in input_ids for loss in read_row(model, ids)]).mean()


def read_row(model: Hope, ids: Int[Tensor, " T"]) -> list[Float[Tensor, ""]]:
    """Read one text and return the loss of every next token."""
    layers, losses = [ReferenceLayer(block) for block in model.blocks], list[Tensor]()
    for i, target in enumerate(ids[1:], 1):
        x = model.embed(ids[None, i - 1 : i])[0, 0]
        for layer in layers:
            x = layer.read(x)
        losses.append(F.cross_entropy(model.logits(model.final_norm(x[None, None]))[0], target[None]))
        if i % (C := min(map(min, model.hope_config.chunk_sizes))) == 0:  # all targets of the chunk are known
            update_levels(layers, torch.stack(losses[-C:]).sum(), i)
    return losses


def update_levels(layers: "list[ReferenceLayer]", loss: Tensor, i: int) -> None:
    """Apply Eq. 71 after i tokens: one gradient of a chunk's loss for all levels of all layers."""
    weights = [w for layer in layers for theta in layer.theta for w in theta.values()]
    gradients = iter(torch.autograd.grad(loss, weights, create_graph=True))
    for layer in layers:
        for l, C in enumerate(layer.cms.shape.chunk_sizes):
            step = F.softplus(layer.cms.weights[f"levels.{l}.step.bias"])
            layer.terms[l] = {name: term + step * next(gradients) for name, term in layer.terms[l].items()}
            if i % C == 0:
                layer.theta[l] = descend(layer.cms, l, layer.theta[l], layer.terms[l])
                layer.terms[l] = zero_terms(layer.terms[l])
        layer.theta = [{n: w.clone() for n, w in theta.items()} for theta in layer.theta]  # cut from earlier chunks


class ReferenceLayer:
    """One layer: norms, memory, and levels with their current weights and the terms of their open chunk."""

    def __init__(self, block: Block) -> None:
        self.block, self.cms = block, cast(CMS, block.get_submodule("mlp")).params
        self.memory = ReferenceMemory(cast(SelfTitans, block.get_submodule("memory")))
        self.theta = [start_weights(self.cms, l) for l in range(len(self.cms.shape.chunk_sizes))]
        self.terms = [zero_terms(theta) for theta in self.theta]

    def read(self, x: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Compute Eq. 97: r = x + memory(norm x), then r + levels(norm r)."""
        r = x + self.memory.read(self.block.submodule("norm1")(x[None, None])[0, 0])
        return r + run_levels(self.cms, self.theta, self.block.submodule("norm2")(r[None, None])[0, 0])[0]


class ReferenceMemory:
    """The memories of one layer: P of every group now and at its chunk's start, and the convolution's window."""

    def __init__(self, layer: SelfTitans) -> None:
        (self.shape, self.w), self.num_read = layer.params, 0
        eye = torch.eye(self.shape.head_dim, dtype=self.w["memory.M"].dtype).expand(self.shape.num_heads, -1, -1)
        self.center = eye if self.shape.options.decay_target == "start" else torch.zeros_like(eye)
        self.P, self.P_c = (dict.fromkeys(self.shape.group_chunk_sizes, eye) for _ in range(2))
        self.window = [eye.new_zeros(len(self.w["norm.weight"]))] * self.shape.options.conv_kernel_size

    def read(self, x: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Write one token into all memories and return what its query reads."""
        shape, w, o = self.shape, self.w, self.shape.options
        self.window = [*self.window[1:], w["mix_proj.weight"] @ x]
        z = F.silu((torch.stack(self.window, 1) * w["mix_conv.weight"]).sum(1)).view(shape.num_heads, -1)
        q = F.normalize((w["q_proj.weight"] @ x).view(shape.num_heads, -1), dim=-1)
        for group in [group for group, C in shape.group_chunk_sizes.items() if self.num_read % C == 0]:
            self.P_c[group] = self.P[group] = self.clip(group)
        P_c = self.P_c[shape.group_of("k")]
        inputs = {n: apply(P_c, z) if n in shape.adaptive else z for n in ("k", "v", "keep", "step")}
        k, v = F.normalize(apply(w["k.M"], inputs["k"]), dim=-1), apply(w["v.M"], inputs["v"])  # Eq. 83
        before = dict(self.P)
        for group in shape.group_chunk_sizes:  # Eq. 88, with u of Eq. 92 or 93
            a = {n: (w[f"{n}.{group}.weight"] * inputs[n]).sum(-1) + w[f"{n}.{group}.bias"] for n in ("keep", "step")}
            decay, step = a["keep"].sigmoid(), o.max_lr * a["step"].sigmoid()
            u = apply(self.P_c[group], v if o.objective == "dot" else v - k)
            if o.max_projection_norm and group != "memory":  # soft cap of VisionHOPE (arXiv:2609.33325)
                # room (1 - e^(-step / room)) < room, whose write is 0.1% smaller than what a P at the limit loses
                write = u - k if o.delta_rule and o.decay_target == "start" else u
                room = (1 - decay) * o.max_projection_norm / (write.square().sum(-1).sqrt() + 1e-6) * 0.999
                step = torch.minimum(room * -torch.expm1(-step / room), 2 * decay)
            u = u - apply(before[group], k) if o.delta_rule else u
            self.P[group] = self.center + decay[:, None, None] * (before[group] - self.center)
            self.P[group] = self.P[group] + (step[:, None] * u)[:, :, None] * k[:, None]
        read = {"token": before, "boundary": self.P_c, "after": self.P}[o.read_at][shape.group_of("memory")]
        self.num_read += 1
        y = F.rms_norm(apply(w["memory.M"], apply(read, q)), q.shape[-1:], eps=1e-6).flatten() * w["norm.weight"]
        return w["o_proj.weight"] @ (y * F.silu(w["g_proj.weight"] @ x))

    def clip(self, group: str) -> Float[Tensor, "H E E"]:
        """Return P of a group, clipped in the group of the memory that is read."""
        bound, change = self.shape.options.max_memory_norm * self.shape.head_dim**0.5, self.P[group] - self.center
        norm = change.square().sum((-2, -1), keepdim=True).clamp(min=1e-30).sqrt()
        is_clipped = bound > 0 and self.num_read > 0 and group == self.shape.group_of("memory")
        return self.center + change * (bound / norm).clamp(max=1) if is_clipped else self.P[group]


def apply(M: Float[Tensor, "H O I"], z: Float[Tensor, "H I"]) -> Float[Tensor, "H O"]:
    """Multiply each head's matrix by its vector."""
    return (M @ z[..., None])[..., 0]
