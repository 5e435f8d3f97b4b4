"""What a Hope did while it read, in a few numbers a step: updates of levels, their size, gates, norms, bytes.

Nested Learning arXiv:2512.24695. Levels are numbered by their chunks, the fastest 0, over all layers of a model.

Symbols: theta_0 a level's start, Δθ its change; P the shared state of a group of memories; E the width of a head.
"""

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.core import state as values
from laconic.core.state import Deep, Layer, Level, Matrix, State
from laconic.methods import hope_layer, titans_layer
from laconic.methods.changes import length, plus, times
from laconic.methods.cms_levels import start_of
from laconic.methods.cms_reading import levels_of
from laconic.methods.cms_shape import Params
from laconic.methods.delta import Gates
from laconic.methods.fast_weights import Start, Starts, whole
from laconic.methods.hope_layer import SelfTitans
from laconic.methods.hope_model import Hope
from laconic.methods.hope_task import continua, unopened
from laconic.methods.packing import packed
from laconic.methods.titans_layer import Titans

SAMPLE = 16  # tokens whose gates are looked at
FIRINGS, DEAD = 20, 1e-6  # updates looked back at; the relative size below which they are none
Told = dict[str, Tensor]


def chunks_of(model: Hope) -> tuple[int, ...]:
    """The chunk of every level of a model, fastest first."""
    return tuple(sorted({C for chunks in model.shape.chunks for C in chunks}))


@torch.no_grad()
def told(model: Hope, before: State, after: State, ids: Int[Tensor, "B T"], tokens: Float[Tensor, ""]) -> Told:
    """Means over rows and layers of what a reading did, by name; `tokens` are those read of a row, `row_tokens`.

    Of level N: `levelN_fired` updates a row, `levelN_update` ‖Δθ‖ / ‖theta_0‖ of one of them, from where the level was
    to where it is, `levelN_moved` the same since its start. Of a group of memories: `_half_life` in tokens and `_step`
    as the last tokens of the first row set them, `_norm` ‖P‖ / √E. `state_bytes` of a row.
    """
    found = {"row_tokens": tokens, "state_bytes": torch.tensor(values.bytes(after) / len(after.position))}
    for i, chunk in enumerate(chunks_of(model)):
        found |= {f"level{i}_{name}": x for name, x in level_told(model, before, after, chunk).items()}
    return found | memories_told(model, after, ids)


def level_told(model: Hope, before: State, after: State, chunk: int) -> Told:
    """Updates of the levels of that chunk, the size of one, and of all since the start."""
    fired: list[Tensor] = []
    update: list[Tensor] = []
    moved: list[Tensor] = []
    for params, old, new in zip(continua(model), before.layers, after.layers, strict=True):
        for l, C in enumerate(params.shape.chunks):
            if chunk != C:
                continue
            was, now = levels_of(old)[l], levels_of(new)[l]
            times_fired = (now.updates - was.updates).float()
            fired.append(times_fired.mean())
            size, far = sizes(params, l, was, now)
            update.append((size.cpu() / times_fired.clamp(min=1)).mean())
            moved.append(far.mean().cpu())
    return {name: torch.stack(of).mean() for name, of in (("fired", fired), ("update", update), ("moved", moved))}


def sizes(params: Params, l: int, was: Level, now: Level) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """‖Δθ‖ / ‖theta_0‖ of a level over all its maps, since `was` and since its start."""
    names = params.shape.maps
    start = torch.stack([start_of(params, l, name).square().sum() for name in names]).sum().clamp(min=1e-30)
    steps = [length(plus(now.moved[name], times(was.moved[name], -1.0))).square() for name in names]
    whole_way = [length(now.moved[name]).square() for name in names]
    return (torch.stack(steps).sum(0) / start).sqrt(), (torch.stack(whole_way).sum(0) / start).sqrt()


def memories_told(model: Hope, state: State, ids: Int[Tensor, "B T"]) -> Told:
    """Half-life and step of every group of memories, and the norm of every state, over the layers."""
    layers = [dict(part.named_children()).get("memory") for part in model.parts]
    memories = [layer for layer in layers if isinstance(layer, SelfTitans | Titans)]
    if not memories:
        return {}
    first, few = values.take(state, [0]), ids[:1, -SAMPLE:]
    opened = None if first.open is None else unopened(first.layers, few)
    names = tuple(f"hidden.{n}" for n in range(len(memories)))
    seen = model(model.embed(few), replace(first, open=opened), want=names, learn=False)
    each: dict[str, list[Tensor]] = {}
    for name, memory, part, layer, now in zip(names, memories, model.parts, first.layers, state.layers, strict=True):
        x = part.part("norm1")(seen.stages[name])
        for group, gates in gates_of(memory, layer, x).items():
            kept = -gates.keep.double().log().mean().clamp(max=-1e-12)
            each.setdefault(f"{group}_half_life", []).append(math.log(2) / kept)
            each.setdefault(f"{group}_step", []).append(gates.step.double().mean())
        for own, size in norms_of(memory, now).items():
            each.setdefault(f"{own}_norm", []).append(size.double())
    return {name: torch.stack(of).mean() for name, of in each.items()}


def gates_of(memory: SelfTitans | Titans, layer: Layer, x: Float[Tensor, "B T D"]) -> dict[str, Gates]:
    """Of every group, as these inputs set them."""
    if isinstance(memory, SelfTitans):
        heads, _, _ = hope_layer.mixed(memory.params, layer, x, None)
        own = hope_layer.learner(memory.params, "none")
        return {group: own.gates(layer.memory, heads, group) for group in memory.shape.groups}
    inputs, _ = titans_layer.gated(memory.params, layer, packed(x, None), dict(layer.tails))
    return {"memory": Gates(inputs[0], inputs[1])}


def norms_of(memory: SelfTitans | Titans, layer: Layer) -> Told:
    """‖state‖ / √E of every memory: P, Q or M, of two layers the root mean square of theirs; over rows and heads."""
    return {name: norm(start_of_memory(memory, name), part).mean() for name, part in layer.memory.items()}


def start_of_memory(memory: SelfTitans | Titans, name: str) -> Start | Starts:
    """What a state is a change of: a trained start, the identity for P (None), zeros for Q."""
    w = memory.params.tensors
    if isinstance(memory, Titans) or f"{name}.W1" in w:
        return titans_layer.begun(w, name)
    if not memory.shape.adaptive:
        return w["memory.M"]
    return torch.zeros_like(w["memory.M"]) if name.endswith("_own") else None


def norm(start: Start | Starts, part: Matrix | Deep) -> Float[Tensor, "B H"]:
    """Frobenius norm over the root of the width."""
    if isinstance(part, Deep):
        assert isinstance(start, Starts)
        both = [norm(start.W1, part.W1).square(), norm(start.W2, part.W2).square()]
        return torch.stack(both).mean(0).sqrt()
    assert not isinstance(start, Starts)
    return whole(start, part.now).square().sum((-2, -1)).div(part.now.shape[-1]).sqrt()


class Liveness:
    """Which levels still move: a level that does not fire, or whose updates are nothing, is said once."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self.quiet = [0.0] * len(self.chunks)
        self.updates = [deque[tuple[float, float]]() for _ in self.chunks]
        self.said: set[int] = set()

    def look(self, numbers: Mapping[str, float]) -> None:
        """At the numbers of a step, as `told` names them; warns of a dead level."""
        for i, chunk in enumerate(self.chunks):
            fired = numbers[f"level{i}_fired"]
            self.quiet[i] = 0.0 if fired else self.quiet[i] + numbers["row_tokens"]
            last = self.updates[i]
            if fired:
                last.append((numbers[f"level{i}_update"], fired))
            while last and sum(n for _, n in last) - last[0][1] >= FIRINGS:
                last.popleft()
            if i not in self.said and (what := self.dead(i)):
                self.said.add(i)
                warnings.warn(f"cms: level {i} (chunk {chunk}) {what}", stacklevel=2)

    def dead(self, i: int) -> str:
        """What is wrong with a level, if anything."""
        if self.quiet[i] >= 2 * self.chunks[i]:
            tokens = f"{self.quiet[i]:.0f} tokens"
            return f"was not updated in {tokens}; read longer rows, carry the state, or take a smaller chunk"
        last = self.updates[i]
        size = median(size for size, _ in last) if last else math.inf
        if sum(n for _, n in last) >= FIRINGS and size < DEAD:
            return (
                f"moved {size:.0e} per update over {FIRINGS} updates; raise its eta, start from a pretrained model, or "
                "grow the levels"
            )
        return ""
