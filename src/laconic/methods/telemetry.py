"""What a Hope did while it read, in a few numbers a step: updates of levels, their size, gates, norms, bytes.

Nested Learning arXiv:2512.24695. Levels are numbered by their chunks, the fastest 0, over all layers of a model.

Symbols: theta_0 a level's start, Δθ its change; P the shared state of a group of memories; E the width of a head.
"""

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.core import state as values
from laconic.core.state import Deep, Factors, Layer, Level, Matrix, State
from laconic.methods import hope_layer, titans_layer
from laconic.methods.changes import length, plus, times
from laconic.methods.chunked import System
from laconic.methods.cms_levels import start_of
from laconic.methods.cms_reading import levels_of
from laconic.methods.cms_shape import Params
from laconic.methods.delta import Gates, PerToken, let_go
from laconic.methods.fast_weights import Start, Starts, whole
from laconic.methods.hope_layer import SelfTitans
from laconic.methods.hope_learner import Learner
from laconic.methods.hope_model import Hope
from laconic.methods.hope_task import continua, unopened
from laconic.methods.packing import packed
from laconic.methods.titans_layer import Titans

EVERY = 10  # steps between looks at memories, each of which takes a fifth of a small step
SAMPLE = 16  # tokens whose gates are looked at
LOW, HIGH = 0.1, 0.9  # of them and the heads, the quantiles that are told
NEAR = 1e-3  # of its bound, within which a state counts as held by the guard
FIRINGS, DEAD = 20, 1e-6  # updates looked back at; the relative size below which they are none
Told = dict[str, Tensor]


def chunks_of(model: Hope) -> tuple[int, ...]:
    """The chunk of every level of a model, fastest first."""
    return tuple(sorted({C for chunks in model.shape.chunks for C in chunks}))


@torch.no_grad()
def told(
    model: Hope, before: State, after: State, ids: Int[Tensor, "B T"], tokens: Float[Tensor, ""], step: int = 0
) -> Told:
    """Means over rows and layers of what a reading did, by name; `tokens` are those read of a row, `row_tokens`.

    Of level N: `levelN_fired` updates a row, `levelN_update` ‖Δθ‖ / ‖theta_0‖ of one of them, from where the level was
    to where it is, `levelN_moved` the same since its start, `levelN_rank` the outer products that hold it, or its rank.
    Of a group of memories, in every tenth `step`, as the last tokens of the first row have it: `_half_life` in tokens
    and `_step`, and both quantiles, `_low` and `_high`; the share of writes that the cap bounds, `_capped`, and of
    steps held back where an erase would overshoot, `_contracted`. `_norm` is ‖P‖ / √E, `_guarded` the share of states
    that stood at the guard's bound at their last boundary. `state_bytes` of a row. Nothing here waits for the device
    token by token.
    """
    found = {"row_tokens": tokens, "state_bytes": torch.tensor(values.bytes(after) / len(after.position))}
    for i, chunk in enumerate(chunks_of(model)):
        found |= {f"level{i}_{name}": x for name, x in level_told(model, before, after, chunk).items()}
    return found | (memories_told(model, after, ids) if step % EVERY == 0 else {})


def level_told(model: Hope, before: State, after: State, chunk: int) -> Told:
    """Updates of the levels of that chunk, the size of one, and of all since the start."""
    fired: list[Tensor] = []
    update: list[Tensor] = []
    moved: list[Tensor] = []
    ranks: list[Tensor] = []
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
            ranks.append(torch.tensor([float(rank(change)) for change in now.moved.values()]).mean())
    found = {"fired": fired, "update": update, "moved": moved, "rank": ranks}
    return {name: torch.stack(of).mean() for name, of in found.items()}


def rank(change: Factors | Tensor) -> int:
    """Outer products that a change is held in; dense, what it can have."""
    return change.right.shape[1] if isinstance(change, Factors) else min(change.shape[-2:])


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
        found = [gates_told(group, gates) for group, gates in gates_of(memory, layer, x).items()]
        found += [bounds_told(memory, layer, x), guards_told(memory, now)]
        found += [{f"{own}_norm": size} for own, size in norms_of(memory, now).items()]
        for told_name, value in (item for part in found for item in part.items()):
            each.setdefault(told_name, []).append(value.double())
    return {name: torch.stack(of).mean() for name, of in each.items()}


def gates_told(group: str, gates: Gates) -> Told:
    """Half-life in tokens and step, in the middle and at both quantiles."""
    lost = -gates.keep.double().log()
    lives, step = math.log(2) / lost.clamp(min=1e-12), gates.step.double()
    found = {f"{group}_half_life": math.log(2) / lost.mean().clamp(min=1e-12), f"{group}_step": step.mean()}
    for name, x in ((f"{group}_half_life", lives), (f"{group}_step", step)):
        found |= {f"{name}_low": x.quantile(LOW), f"{name}_high": x.quantile(HIGH)}
    return found


@dataclass(frozen=True)
class Watched(Learner):
    """The memories of a layer, which note what of their writes the cap bounds."""

    hits: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])

    def bounded_gates(self, given: Gates, group: str, size: PerToken) -> Gates:
        """The same gates."""
        cap = self.shape.options.cap
        if cap and group != "memory":
            self.hits.append((group, (given.step > let_go(given.keep, size, cap)).double()))
        return super().bounded_gates(given, group, size)


def bounds_told(memory: SelfTitans | Titans, layer: Layer, x: Float[Tensor, "B T D"]) -> Told:
    """The shares of writes that the cap bounds, and of steps that are held back where an erase would overshoot."""
    if isinstance(memory, Titans):
        return {}
    heads, q, _ = hope_layer.mixed(memory.params, layer, x, None)
    own, o = hope_layer.learner(memory.params, "none"), memory.shape.options
    watched = Watched(own.shape, own.w, own.gradient)
    watched.piece(layer.memory, (heads, q), None)
    found: dict[str, list[Tensor]] = {}
    for group, hit in watched.hits:
        found.setdefault(f"{group}_capped", []).append(hit.mean())
    if o.erase and (o.step_max > 1 or o.step_form == "softplus"):
        for group in memory.shape.groups:
            gates = own.gates(layer.memory, heads, group)
            found[f"{group}_contracted"] = [(gates.step >= 1 + gates.keep).double().mean()]
    return {name: torch.stack(of).mean() for name, of in found.items()}


def guards_told(memory: SelfTitans | Titans, layer: Layer) -> Told:
    """The share of states, of rows and heads, that the guard holds: a bound a little nearer would have shrunk them."""
    guard = memory.shape.options.guard
    if not guard:
        return {}
    nearer, hits = guard * (1 - NEAR), list[Tensor]()
    for system, names in guarded(memory, nearer):
        held = {name: at_boundary(part) for name, part in layer.memory.items()}
        shrunk = system.closed(held, names)
        pairs = [(held[name], shrunk[name]) for name in names]
        both = [(old, new) for pair in pairs for old, new in zip(*map(matrices, pair), strict=True)]
        hits += [(new.now - old.now).square().sum((-2, -1)).sqrt() > NEAR / 4 * guard for old, new in both]
    name = memory.shape.group("memory") if isinstance(memory, SelfTitans) else "memory"
    return {f"{name}_guarded": torch.stack([hit.double().mean() for hit in hits]).mean()}


def guarded(memory: SelfTitans | Titans, guard: float) -> list[tuple[System, list[str]]]:
    """The memories that have a guard, with another one."""
    if isinstance(memory, Titans):
        return [(titans_layer.system_of(memory.params, name, "none", guard), [name]) for name in memory.shape.memories]
    own = hope_layer.learner(memory.params, "none")
    shape = replace(own.shape, options=own.shape.options.model_copy(update={"guard": guard}))
    group = shape.group("memory")
    return [(replace(own, shape=shape), [name for name, of in own.states.items() if of == group])]


def at_boundary(part: Matrix | Deep) -> Matrix | Deep:
    """A memory as it was at the last end of a chunk."""
    if isinstance(part, Deep):
        return Deep(replace(part.W1, now=part.W1.first), replace(part.W2, now=part.W2.first))
    return replace(part, now=part.first)


def matrices(part: Matrix | Deep) -> tuple[Matrix, ...]:
    """One, or those of two layers."""
    return (part.W1, part.W2) if isinstance(part, Deep) else (part,)


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
