"""A decoder against a reference, stage by stage: errors in units of the noise that float32 itself makes there.

The local error of a stage is that of its function fed with the reference's inputs; the propagated one is our own run's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from laconic.models.decoder import Decoder
from laconic.verification.error import (
    MASK_SENSITIVE_STAGES,
    TINY_ABS_ERROR,
    ErrorAccumulator,
    PredictionAgreement,
    valid_mask,
)
from laconic.verification.evidence import Evidence
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.local import LocalStages, stages_at_layer
from laconic.verification.traces import (
    LayerActivations,
    ParityCase,
    forward_arguments,
    iterate_stages,
    sharpened_queries,
    stage_key,
)

MIN_FLOOR, MAX_ERROR_IN_FLOORS = 1e-7, 10.0
"""No floor lies below the first; a float32 error passes up to the second times its floor."""

Verdict = Literal["pass", "fail", "not run", "shown"]


@dataclass(frozen=True)
class StageResult:
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
    def error_in_floors(self) -> float:
        """The error in floors."""
        return self.error / self.floor

    @property
    def exceeds_noise(self) -> bool:
        """Whether the error is more than noise, whatever the verdict."""
        return self.verdict != "not run" and not self.error <= MAX_ERROR_IN_FLOORS * self.floor


@dataclass
class NoiseFloors:
    """What float32 makes of each stage against float64: fed with equal inputs, and after a whole run."""

    local: dict[str, float] = field(default_factory=dict)
    propagated: dict[str, float] = field(default_factory=dict)


def trace_stages(decoder: Decoder, case: ParityCase) -> dict[str, Tensor]:
    """Our own eager run, every stage of every layer: `embed`, `norm1.0`, …; of several pieces `q_rot.3/1`."""
    n, L, made = len(case.pieces()), len(decoder.layers), {}
    with sharpened_queries(decoder, case.query_scale):
        for part in iterate_stages(decoder, case):
            inside = part.layer if 0 <= part.layer < L else None
            made |= {stage_key(name, inside, part.piece, n): t for name, t in part.activations.items() if name != "x"}
    return made


def replay_stages(reference: Mapping[str, Tensor], case: ParityCase, decoder: Decoder) -> Iterator[LayerActivations]:
    """A dictionary of stages in the order of computation; what a block reads is what the one before it made."""
    n, L = len(case.pieces()), len(decoder.layers)
    for piece in range(n):
        for layer in range(-1, L + 1):
            inside = layer if 0 <= layer < L else None
            names = [stage.name for stage in stages_at_layer(decoder, layer)]
            found = {name: reference[at] for name in names if (at := stage_key(name, inside, piece, n)) in reference}
            before = stage_key("embed", None, piece, n) if layer <= 0 else stage_key("resid2", layer - 1, piece, n)
            if layer >= 0 and before in reference:
                found["x"] = reference[before]
            yield LayerActivations(piece, layer, found)


def local_stage(
    decoder: Decoder, stage: str, layer: int | None, reference: Mapping[str, Tensor], case: ParityCase
) -> Tensor:
    """A stage of the last piece, made by the decoder's own function from the reference's inputs."""
    past: dict[int, tuple[Tensor, Tensor]] = {}
    maker, L, last = LocalStages(decoder, case), len(decoder.layers), len(case.pieces()) - 1
    with sharpened_queries(decoder, case.query_scale):
        for made in replay_stages(reference, case, decoder):
            inside = made.layer if 0 <= made.layer < L else None
            if (
                made.piece == last
                and inside == layer
                and stage in {row.name for row in stages_at_layer(decoder, made.layer)}
            ):
                return maker.compute(made, past.get(made.layer), frozenset({stage}))[stage]
            store_past(past, made)
    raise KeyError(f"{stage}: no such stage at layer {layer}")


def store_past(past: dict[int, tuple[Tensor, Tensor]], recorded: LayerActivations) -> None:
    """Remembers the reference's cache of a layer for the next piece."""
    if "k_cache" in recorded.activations and "v_cache" in recorded.activations:
        past[recorded.layer] = recorded.activations["k_cache"], recorded.activations["v_cache"]


class CaseComparison:
    """One case against a reference, fed layer by layer; nothing but sums and the reference's cache is kept.

    `floors` None measures them on the way, which needs our float64 run beside ours.
    """

    def __init__(
        self, decoder: Decoder, case: ParityCase, floors: NoiseFloors | None, float64_decoder: Float64Decoder | None = None,
        layers: frozenset[int] | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.case, self.floors, self.layers = decoder, case, floors, layers
        self.own_stages = LocalStages(decoder, case)
        self.float64_stages = None if float64_decoder is None else LocalStages(float64_decoder, case)
        self.past: dict[int, tuple[Tensor, Tensor]] = {}
        self.errors: dict[tuple[str, str], ErrorAccumulator] = {}
        self.missing: dict[tuple[str, str], str] = {}
        self.stage_order: dict[str, tuple[str, int | None, bool]] = {}
        self.predictions = PredictionAgreement()
        self.suspects: dict[str, Evidence] = {}

    def add_layer(
        self,
        reference: LayerActivations,
        own: LayerActivations,
        float64_run: LayerActivations | None = None,
        default_backend: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Compares one layer of one piece; `default` has what the default back end makes, by key."""
        made, L = reference, len(self.decoder.layers)
        if self.layers is not None and 0 <= made.layer < L and made.layer not in self.layers:
            store_past(self.past, made)
            return
        S, T = self.case.pieces()[made.piece]
        live = self.case.valid_mask[:, : S + T]
        inside = made.layer if 0 <= made.layer < L else None
        past = self.past.get(made.layer)
        locals_ = self.own_stages.compute(made, past)
        wides = None if self.float64_stages is None else self.float64_stages.compute(made, past)
        names = {name: stage_key(name, inside, made.piece, len(self.case.pieces())) for name in made.activations}
        back = {
            name: default_backend[at]
            for name, at in names.items()
            if default_backend is not None and at in default_backend
        }
        for stage in stages_at_layer(self.decoder, made.layer):
            at = stage_key(stage.name, inside)
            self.stage_order[at] = (stage.name, inside, stage.bitwise)
            there = made.activations.get(stage.name)
            pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
                ("local", locals_.get(stage.name), there),
                ("propagated", own.activations.get(stage.name), there),
            ]
            if wides is not None:
                pairs.append(("local floor", locals_.get(stage.name), wides.get(stage.name)))
            if float64_run is not None:
                pairs.append(
                    ("propagated floor", own.activations.get(stage.name), float64_run.activations.get(stage.name))
                )
            if stage.name in back:
                pairs.append(("backend", back[stage.name], own.activations.get(stage.name)))
            for kind, x, y in pairs:
                if x is None or y is None:
                    self.missing[kind, at] = f"{at}: not in the bundle: not run"
                else:
                    where = valid_mask(
                        stage.shape, y.shape, live, S, include_masked_keys=stage.name in MASK_SENSITIVE_STAGES
                    )
                    self.errors.setdefault((kind, at), ErrorAccumulator()).add(x, y, where, S, stage.shape)
        if "logits" in made.activations and "logits" in own.activations:
            self.predictions.add(own.activations["logits"], made.activations["logits"], live[:, S:])
        self.suspect(made, {"local": locals_, "propagated": own.activations, "backend": back}, S, T)
        store_past(self.past, made)

    def suspect(self, made: LayerActivations, ours: Mapping[str, Mapping[str, Tensor]], S: int, T: int) -> None:
        """Keeps what is known of the first stage that is wrong by itself, and of the first at which our run parts."""
        before, told = list(self.stage_order), forward_arguments(self.case, S, T)
        for kind, stages in ours.items():
            held = self.suspects.get(kind)
            last = len(before) if held is None else before.index(stage_key(held.stage, held.layer))
            for stage in stages_at_layer(self.decoder, made.layer):
                at = stage_key(stage.name, made.layer if 0 <= made.layer < len(self.decoder.layers) else None)
                if before.index(at) < last and (kind, at) in self.errors and self.parts(kind, at):
                    vectors = self.own_stages.embeddings[:, S : S + T]
                    self.suspects[kind] = Evidence(
                        self.decoder, stage.name, self.stage_order[at][1], stages[stage.name], made.activations[stage.name],
                        {"x": vectors, "vectors": vectors} | made.activations, self.case.valid_mask[:, : S + T],
                        self.case.position_ids[:, : S + T], told["bias"],
                    )  # fmt: skip
                    break

    def parts(self, kind: str, at: str) -> bool:
        """Whether a stage is wrong by itself, or parts in our run."""
        found = self.stage_result(kind, at)
        return found.exceeds_noise if kind == "propagated" else found.verdict == "fail"

    @property
    def evidence(self) -> Evidence | None:
        """What is known of the first divergence."""
        found = first_divergence(self.results())
        return None if found is None else self.suspects.get(found.kind)

    def results(self) -> list[StageResult]:
        """Local, propagated and, where it was run, the default back end, of every stage in the order of computation."""
        kinds = ("local", "propagated", "backend")
        held = [
            (kind, at) for at in self.stage_order for kind in kinds if kind != "backend" or (kind, at) in self.errors
        ]
        return [self.stage_result(kind, at) for kind, at in held]

    def measured_floors(self) -> NoiseFloors:
        """The floors that were found on the way."""
        made = NoiseFloors()
        for (kind, at), found in self.errors.items():
            if kind.endswith("floor"):
                getattr(made, kind.split()[0])[at] = clamp_floor(found)
        return made

    def get_floor(self, kind: str, at: str) -> float:
        """The floor told or found on the way; NaN, which nothing passes, where there is none."""
        if self.floors is not None:
            return getattr(self.floors, kind).get(at, math.nan)
        found = self.errors.get((f"{kind} floor", at))
        return math.nan if found is None else clamp_floor(found)

    def stage_result(self, kind: str, at: str) -> StageResult:
        """The verdict on one stage: local errors count everywhere, propagated ones at the logits."""
        stage, layer, bitwise = self.stage_order[at]
        found = self.errors.get((kind, at))
        if found is None or (kind, at) in self.missing:
            return StageResult(self.case.name, stage, layer, kind, note=self.missing[kind, at])
        noise = self.get_floor("local" if kind == "local" else "propagated", at)
        floor = TINY_ABS_ERROR / MAX_ERROR_IN_FLOORS if found.is_tiny else max(noise, MIN_FLOOR)
        good = found.is_bitwise_equal if bitwise and kind == "local" else found.error <= MAX_ERROR_IN_FLOORS * floor
        verdict: Verdict = "pass" if good else "fail"
        if kind == "propagated" and stage != "logits":
            verdict = "shown"
        return StageResult(
            self.case.name, stage, layer, kind, found.error, floor, found.max_abs, found.index, found.cosine,
            found.is_bitwise_equal, verdict, *(self.predictions.kl_and_top1 if (kind, at) == ("propagated", "logits") else (None, None)),
            note=found.shape_note,
        )  # fmt: skip


def clamp_floor(error: ErrorAccumulator) -> float:
    """A floor is never below the least one, and of faint stages it is what their absolute rule allows."""
    return max(error.error, MIN_FLOOR)


def measure_floors(decoder: Decoder, case: ParityCase) -> NoiseFloors:
    """The floors of a case: our own float32 run against our own in float64."""
    with sharpened_queries(decoder, case.query_scale):
        twin = Float64Decoder.from_decoder(decoder)
        comparison = CaseComparison(decoder, case, None, twin)
        for own, wide in zip(iterate_stages(decoder, case), iterate_stages(twin, case), strict=True):
            comparison.add_layer(own, own, wide)
    return comparison.measured_floors()


def compare_stages(
    decoder: Decoder, reference: Mapping[str, Tensor], case: ParityCase, floors: NoiseFloors | None = None
) -> list[StageResult]:
    """Every stage of a case against a dictionary of the reference's; `floors` None measures them with this decoder."""
    comparison = CaseComparison(decoder, case, floors or measure_floors(decoder, case))
    with sharpened_queries(decoder, case.query_scale):
        for made, own in zip(replay_stages(reference, case, decoder), iterate_stages(decoder, case), strict=True):
            comparison.add_layer(made, own)
    return comparison.results()


def first_divergence(results: list[StageResult]) -> StageResult | None:
    """The first stage, in order of computation, whose local error is too large.

    If every stage is right by itself and the run is wrong all the same, the way they are put together is: then the
    first stage at which the run parts from the reference. Last, where the default back end parts from the eager one.
    """
    found = next((f for f in results if f.kind == "local" and f.verdict == "fail"), None)
    if found is None and any(f.kind == "propagated" and f.verdict == "fail" for f in results):
        found = next((f for f in results if f.kind == "propagated" and f.exceeds_noise), None)
    return found or next((f for f in results if f.kind == "backend" and f.verdict == "fail"), None)
