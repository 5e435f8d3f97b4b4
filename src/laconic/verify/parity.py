"""A decoder against a reference, stage by stage: errors in units of the noise that float32 itself makes there.

The local error of a stage is that of its function fed with the reference's inputs; the propagated one is our own run's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from laconic.core.decoder import Decoder
from laconic.verify.difference import FAINT_ERROR, JUDGED, Difference, Predictions, visible
from laconic.verify.evidence import Evidence
from laconic.verify.local import Local, table
from laconic.verify.traces import Case, Made, arguments, key, peaked, stream
from laconic.verify.twin import Widened

FLOOR, FACTOR = 1e-7, 10.0
"""No floor lies below the first; a float32 error passes up to the second times its floor."""

Verdict = Literal["pass", "fail", "not run", "shown"]


@dataclass(frozen=True)
class Finding:
    """One stage of one layer of one case: the error, what it is measured in, and what is thought of it.

    `kind`: local, propagated or backend (the default back end against eager). `layer` is None outside the layers.
    `index` is where |x - y| is largest, slots counted from the start of the case. `verdict` "shown" is no verdict.
    """

    case: str
    stage: str
    layer: int | None
    kind: str
    error: float = math.nan
    floor: float = math.nan
    max_abs: float = math.nan
    index: tuple[int, ...] = ()
    cosine: float = math.nan
    bitwise: bool = False
    verdict: Verdict = "not run"
    kl: float | None = None
    top1: float | None = None
    note: str = ""

    @property
    def floors(self) -> float:
        """The error in floors."""
        return self.error / self.floor

    @property
    def far(self) -> bool:
        """Whether the error is more than noise, whatever the verdict."""
        return self.verdict != "not run" and not self.error <= FACTOR * self.floor


@dataclass
class Floors:
    """What float32 makes of each stage against float64: fed with equal inputs, and after a whole run."""

    local: dict[str, float] = field(default_factory=dict)
    propagated: dict[str, float] = field(default_factory=dict)


def trace(decoder: Decoder, case: Case) -> dict[str, Tensor]:
    """Our own eager run, every stage of every layer: `embed`, `norm1.0`, …; of several pieces `q_rot.3/1`."""
    n, L, made = len(case.pieces()), len(decoder.blocks), {}
    with peaked(decoder, case.peak):
        for part in stream(decoder, case):
            inside = part.layer if 0 <= part.layer < L else None
            made |= {key(name, inside, part.piece, n): t for name, t in part.stages.items() if name != "x"}
    return made


def replay(reference: Mapping[str, Tensor], case: Case, decoder: Decoder) -> Iterator[Made]:
    """A dictionary of stages in the order of computation; what a block reads is what the one before it made."""
    n, L = len(case.pieces()), len(decoder.blocks)
    for piece in range(n):
        for layer in range(-1, L + 1):
            inside = layer if 0 <= layer < L else None
            names = [stage.name for stage in table(decoder, layer)]
            found = {name: reference[at] for name in names if (at := key(name, inside, piece, n)) in reference}
            before = key("embed", None, piece, n) if layer <= 0 else key("resid2", layer - 1, piece, n)
            if layer >= 0 and before in reference:
                found["x"] = reference[before]
            yield Made(piece, layer, found)


def local(decoder: Decoder, stage: str, layer: int | None, reference: Mapping[str, Tensor], case: Case) -> Tensor:
    """A stage of the last piece, made by the decoder's own function from the reference's inputs."""
    past: dict[int, tuple[Tensor, Tensor]] = {}
    maker, L, last = Local(decoder, case), len(decoder.blocks), len(case.pieces()) - 1
    with peaked(decoder, case.peak):
        for made in replay(reference, case, decoder):
            inside = made.layer if 0 <= made.layer < L else None
            if made.piece == last and inside == layer and stage in {row.name for row in table(decoder, made.layer)}:
                return maker.made(made, past.get(made.layer), frozenset({stage}))[stage]
            keep_past(past, made)
    raise KeyError(f"{stage}: no such stage at layer {layer}")


def keep_past(past: dict[int, tuple[Tensor, Tensor]], made: Made) -> None:
    """Remembers the reference's cache of a layer for the next piece."""
    if "k_cache" in made.stages and "v_cache" in made.stages:
        past[made.layer] = made.stages["k_cache"], made.stages["v_cache"]


class Comparison:
    """One case against a reference, fed layer by layer; nothing but sums and the reference's cache is kept.

    `floors` None measures them on the way, which needs our float64 run beside ours.
    """

    def __init__(
        self, decoder: Decoder, case: Case, floors: Floors | None, twin: Widened | None = None,
        layers: frozenset[int] | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.case, self.floors, self.layers = decoder, case, floors, layers
        self.ours = Local(decoder, case)
        self.wide = None if twin is None else Local(twin, case)
        self.past: dict[int, tuple[Tensor, Tensor]] = {}
        self.sums: dict[tuple[str, str], Difference] = {}
        self.missing: dict[tuple[str, str], str] = {}
        self.order: dict[str, tuple[str, int | None, bool]] = {}
        self.predictions = Predictions()
        self.suspects: dict[str, Evidence] = {}

    def add(
        self, reference: Made, own: Made, own64: Made | None = None, default: Mapping[str, Tensor] | None = None
    ) -> None:
        """Compares one layer of one piece; `default` has what the default back end makes, by key."""
        made, L = reference, len(self.decoder.blocks)
        if self.layers is not None and 0 <= made.layer < L and made.layer not in self.layers:
            keep_past(self.past, made)
            return
        S, T = self.case.pieces()[made.piece]
        live = self.case.alive[:, : S + T]
        inside = made.layer if 0 <= made.layer < L else None
        past = self.past.get(made.layer)
        locals_ = self.ours.made(made, past)
        wides = None if self.wide is None else self.wide.made(made, past)
        names = {name: key(name, inside, made.piece, len(self.case.pieces())) for name in made.stages}
        back = {name: default[at] for name, at in names.items() if default is not None and at in default}
        for stage in table(self.decoder, made.layer):
            at = key(stage.name, inside)
            self.order[at] = (stage.name, inside, stage.bitwise)
            there = made.stages.get(stage.name)
            pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
                ("local", locals_.get(stage.name), there),
                ("propagated", own.stages.get(stage.name), there),
            ]
            if wides is not None:
                pairs.append(("local floor", locals_.get(stage.name), wides.get(stage.name)))
            if own64 is not None:
                pairs.append(("propagated floor", own.stages.get(stage.name), own64.stages.get(stage.name)))
            if stage.name in back:
                pairs.append(("backend", back[stage.name], own.stages.get(stage.name)))
            for kind, x, y in pairs:
                if x is None or y is None:
                    self.missing[kind, at] = f"{at}: not in the bundle: not run"
                else:
                    where = visible(stage.shape, y.shape, live, S, dead_keys=stage.name in JUDGED)
                    self.sums.setdefault((kind, at), Difference()).add(x, y, where, S, stage.shape)
        if "logits" in made.stages and "logits" in own.stages:
            self.predictions.add(own.stages["logits"], made.stages["logits"], live[:, S:])
        self.suspect(made, {"local": locals_, "propagated": own.stages, "backend": back}, S, T)
        keep_past(self.past, made)

    def suspect(self, made: Made, ours: Mapping[str, Mapping[str, Tensor]], S: int, T: int) -> None:
        """Keeps what is known of the first stage that is wrong by itself, and of the first at which our run parts."""
        before, told = list(self.order), arguments(self.case, S, T)
        for kind, stages in ours.items():
            held = self.suspects.get(kind)
            last = len(before) if held is None else before.index(key(held.stage, held.layer))
            for stage in table(self.decoder, made.layer):
                at = key(stage.name, made.layer if 0 <= made.layer < len(self.decoder.blocks) else None)
                if before.index(at) < last and (kind, at) in self.sums and self.parts(kind, at):
                    vectors = self.ours.vectors[:, S : S + T]
                    self.suspects[kind] = Evidence(
                        self.decoder, stage.name, self.order[at][1], stages[stage.name], made.stages[stage.name],
                        {"x": vectors, "vectors": vectors} | made.stages, self.case.alive[:, : S + T],
                        self.case.places[:, : S + T], told["bias"],
                    )  # fmt: skip
                    break

    def parts(self, kind: str, at: str) -> bool:
        """Whether a stage is wrong by itself, or parts in our run."""
        found = self.finding(kind, at)
        return found.far if kind == "propagated" else found.verdict == "fail"

    @property
    def evidence(self) -> Evidence | None:
        """What is known of the first divergence."""
        found = first_divergence(self.findings())
        return None if found is None else self.suspects.get(found.kind)

    def findings(self) -> list[Finding]:
        """Local, propagated and, where it was run, the default back end, of every stage in the order of computation."""
        kinds = ("local", "propagated", "backend")
        held = [(kind, at) for at in self.order for kind in kinds if kind != "backend" or (kind, at) in self.sums]
        return [self.finding(kind, at) for kind, at in held]

    def measured(self) -> Floors:
        """The floors that were found on the way."""
        made = Floors()
        for (kind, at), found in self.sums.items():
            if kind.endswith("floor"):
                getattr(made, kind.split()[0])[at] = floor_of(found)
        return made

    def floor(self, kind: str, at: str) -> float:
        """The floor told or found on the way; NaN, which nothing passes, where there is none."""
        if self.floors is not None:
            return getattr(self.floors, kind).get(at, math.nan)
        found = self.sums.get((f"{kind} floor", at))
        return math.nan if found is None else floor_of(found)

    def finding(self, kind: str, at: str) -> Finding:
        """The verdict on one stage: local errors count everywhere, propagated ones at the logits."""
        stage, layer, bitwise = self.order[at]
        found = self.sums.get((kind, at))
        if found is None or (kind, at) in self.missing:
            return Finding(self.case.name, stage, layer, kind, note=self.missing[kind, at])
        noise = self.floor("local" if kind == "local" else "propagated", at)
        floor = FAINT_ERROR / FACTOR if found.faint else max(noise, FLOOR)
        good = found.equal if bitwise and kind == "local" else found.error <= FACTOR * floor
        verdict: Verdict = "pass" if good else "fail"
        if kind == "propagated" and stage != "logits":
            verdict = "shown"
        return Finding(
            self.case.name, stage, layer, kind, found.error, floor, found.max_abs, found.index, found.cosine,
            found.equal, verdict, *(self.predictions.both if (kind, at) == ("propagated", "logits") else (None, None)),
            note=found.shape,
        )  # fmt: skip


def floor_of(found: Difference) -> float:
    """A floor is never below the least one, and of faint stages it is what their absolute rule allows."""
    return max(found.error, FLOOR)


def measure(decoder: Decoder, case: Case) -> Floors:
    """The floors of a case: our own float32 run against our own in float64."""
    with peaked(decoder, case.peak):
        twin = Widened.of(decoder)
        comparison = Comparison(decoder, case, None, twin)
        for own, wide in zip(stream(decoder, case), stream(twin, case), strict=True):
            comparison.add(own, own, wide)
    return comparison.measured()


def compare(
    decoder: Decoder, reference: Mapping[str, Tensor], case: Case, floors: Floors | None = None
) -> list[Finding]:
    """Every stage of a case against a dictionary of the reference's; `floors` None measures them with this decoder."""
    comparison = Comparison(decoder, case, floors or measure(decoder, case))
    with peaked(decoder, case.peak):
        for made, own in zip(replay(reference, case, decoder), stream(decoder, case), strict=True):
            comparison.add(made, own)
    return comparison.findings()


def first_divergence(findings: list[Finding]) -> Finding | None:
    """The first stage, in order of computation, whose local error is too large.

    If every stage is right by itself and the run is wrong all the same, the way they are put together is: then the
    first stage at which the run parts from the reference. Last, where the default back end parts from the eager one.
    """
    found = next((f for f in findings if f.kind == "local" and f.verdict == "fail"), None)
    if found is None and any(f.kind == "propagated" and f.verdict == "fail" for f in findings):
        found = next((f for f in findings if f.kind == "propagated" and f.far), None)
    return found or next((f for f in findings if f.kind == "backend" and f.verdict == "fail"), None)
