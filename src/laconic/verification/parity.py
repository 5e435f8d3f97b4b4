"""Compare a decoder with a reference stage by stage, in units of the float32 rounding noise of each stage.

The local error of a stage is that of the decoder's function on the reference's inputs; the propagated error is that
of the decoder's own run. A floor is the error of float32 against float64 at the same stage.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from laconic.models.activations import Activation
from laconic.models.decoder import Decoder
from laconic.verification.error import (
    MASK_SENSITIVE_STAGES,
    TINY_ABS_ERROR,
    ErrorAccumulator,
    PredictionAgreement,
    valid_mask,
)
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.local import LocalStages, stages_at_layer
from laconic.verification.traces import (
    LayerActivations,
    ParityCase,
    iterate_stages,
    layer_index,
    replay_stages,
    run_case,
    sharpened_queries,
    stage_key,
    trace_stages,
)

MIN_FLOOR = 1e-7
MAX_ERROR_IN_FLOORS = 10.0

Verdict = Literal["pass", "fail", "not run", "shown"]

USUAL_SUSPECTS = {
    "embed": "wrong file or prefix, or the offset of learned positions",
    "norm1": "epsilon, centring, wrong weight, or order of casts",
    "q": "orientation, bias, number of heads, or order of the q/k/v split",
    "q_rot": "RoPE pairing, base, sign, start position, scaling, or precision of the angles",
    "k_cache": "order of concatenation, stale slots, or unrotated keys",
    "scores": "scale, or which key head a query head reads",
    "scores_seen": "mask, sliding window, or bias",
    "probs": "precision of the softmax, or the mask",
    "context": "how heads are merged, or the values",
    "mid": "gate and up swapped, or another activation function",
    "resid1": "a dropped residual, or norms in another order",
    "logits": "final norm, or the output matrix",
    "last_logits": "index of the last valid token",
}
SAME_SUSPECTS = {
    "norm2": "norm1", "final_norm": "norm1", "k": "q", "v": "q", "q_raw": "q", "k_raw": "q", "attn_out": "q",
    "gate": "q", "up": "q", "mlp_out": "q", "k_rot": "q_rot", "v_cache": "k_cache", "resid2": "resid1",
    "token": "last_logits", "next_probs": "last_logits",
}  # fmt: skip


def usual_suspects(stage: str) -> str:
    return USUAL_SUSPECTS[SAME_SUSPECTS.get(stage, stage)]


@dataclass(frozen=True)
class StageResult:
    """The error of one stage of one layer of one case, and its verdict; "shown" is neither pass nor fail."""

    case: str
    stage: str
    layer: int | None  # None outside the layers
    kind: str  # "local", "propagated", "backend" (default attention against eager) or "ratio" (low precision)
    error: float = math.nan  # relative L2 error
    floor: float = math.nan
    max_abs: float = math.nan
    index: tuple[int, ...] = ()  # position of the largest difference, counted from the start of the case
    cosine: float = math.nan
    bitwise: bool = False
    verdict: Verdict = "not run"
    kl: float | None = None  # divergence of the predictions in nats per token, at the logits
    top1: float | None = None  # share of equal most likely tokens, at the logits
    note: str = ""

    @property
    def error_in_floors(self) -> float:
        return self.error / self.floor

    def with_errors(self, errors: ErrorAccumulator, floor: float, verdict: Verdict) -> "StageResult":
        return replace(
            self,
            error=errors.error,
            floor=floor,
            max_abs=errors.max_abs,
            index=errors.index,
            cosine=errors.cosine,
            bitwise=errors.is_bitwise_equal,
            verdict=verdict,
            note=errors.shape_note,
        )


class CaseComparison:
    """Compare one case with a reference layer by layer; keeps error sums and the reference's KV cache only.

    The noise floors are measured along the way, with the float64 copy of the decoder.
    """

    def __init__(self, decoder: Decoder, case: ParityCase) -> None:
        self.decoder, self.case = decoder, case
        self.float64_decoder = Float64Decoder.from_decoder(decoder)
        self.own_stages = LocalStages(decoder, case)
        self.float64_stages = LocalStages(self.float64_decoder, case)
        self.past: dict[int, tuple[Tensor, Tensor]] = {}
        self.errors: dict[tuple[str, str], ErrorAccumulator] = {}
        self.missing: set[tuple[str, str]] = set()
        self.stage_order: dict[str, tuple[str, int | None, bool]] = {}
        self.predictions = PredictionAgreement()

    def run(self, reference: Iterator[LayerActivations], *, with_default_backend: bool = False) -> list[StageResult]:
        with sharpened_queries(self.decoder, self.case.query_scale):
            default = run_case(self.decoder, self.case, ("context", "logits")) if with_default_backend else {}
            stages, L = trace_stages(self.decoder, self.case), len(self.decoder.layers)
            wide_run = iterate_stages(self.float64_decoder, self.case)
            for actual, wide in zip(replay_stages(stages, self.case, L), wide_run, strict=True):
                self.add_floors(actual, wide)
            own_run = replay_stages(stages, self.case, L)
            del stages, actual, wide  # so that each layer is freed once it is compared
            for recorded, actual in zip(reference, own_run, strict=True):
                self.add_layer(recorded, actual, default)
        return self.results()

    def add_floors(self, actual: LayerActivations, wide: LayerActivations) -> None:
        """Compare one layer of one piece of the decoder's own eager run with that of the float64 copy."""
        for stage in stages_at_layer(self.decoder, actual.layer):
            pair = actual.activations.get(stage.name), wide.activations.get(stage.name)
            self.add_stage(stage, actual, {"propagated floor": pair})

    def add_layer(
        self, reference: LayerActivations, actual: LayerActivations, default_backend: Mapping[str, Tensor]
    ) -> None:
        """Compare one layer of one piece: the reference's and the decoder's own eager run.

        `default_backend` has activations of the decoder's default attention backend, by key.
        """
        past = self.past.get(reference.layer)
        local = self.own_stages.compute(reference, past)
        wide = self.float64_stages.compute(reference, past)
        for stage in stages_at_layer(self.decoder, reference.layer):
            name = stage.name
            x, y = actual.activations.get(name), reference.activations.get(name)
            pairs = {
                "local": (local.get(name), y),
                "propagated": (x, y),
                "local floor": (local.get(name), wide.get(name)),
            }
            index = layer_index(self.decoder, reference.layer)
            key = stage_key(name, index, reference.piece, len(self.case.pieces()))
            if y is not None and key in default_backend:
                pairs["backend"] = (default_backend[key], x)
            self.add_stage(stage, reference, pairs)
        if "logits" in reference.activations and "logits" in actual.activations:
            S, T = self.case.pieces()[reference.piece]
            valid = self.case.valid_mask[:, S : S + T]
            self.predictions.add(actual.activations["logits"], reference.activations["logits"], valid)
        if "k_cache" in reference.activations and "v_cache" in reference.activations:  # for the next piece
            self.past[reference.layer] = reference.activations["k_cache"], reference.activations["v_cache"]

    def add_stage(
        self, stage: Activation, recorded: LayerActivations, pairs: Mapping[str, tuple[Tensor | None, Tensor | None]]
    ) -> None:
        S, T = self.case.pieces()[recorded.piece]
        layer = layer_index(self.decoder, recorded.layer)
        key = stage_key(stage.name, layer)
        self.stage_order[key] = (stage.name, layer, stage.bitwise)
        for kind, (x, y) in pairs.items():
            if x is None or y is None:
                self.missing.add((kind, key))
                continue
            with_masked_keys = stage.name in MASK_SENSITIVE_STAGES
            valid = self.case.valid_mask[:, : S + T]
            mask = valid_mask(stage.shape, y.shape, valid, S, include_masked_keys=with_masked_keys)
            self.errors.setdefault((kind, key), ErrorAccumulator()).add(x, y, mask, S, stage.shape)

    def results(self) -> list[StageResult]:
        """Return the local, propagated and (if run) backend result of every stage in the order of computation."""
        kinds = ("local", "propagated", "backend")
        pairs = ((kind, key) for key in self.stage_order for kind in kinds)
        return [self.stage_result(*pair) for pair in pairs if pair[0] != "backend" or pair in self.errors]

    def get_floor(self, kind: Literal["local", "propagated"], key: str) -> float:
        """Return the noise floor of a stage, at least `MIN_FLOOR`; NaN, which nothing passes, if it is unknown."""
        error = self.errors.get((f"{kind} floor", key))
        return math.nan if error is None else max(error.error, MIN_FLOOR)

    def stage_result(self, kind: str, key: str) -> StageResult:
        """Return the verdict on a stage: local errors count everywhere, propagated ones only at the logits."""
        stage, layer, bitwise = self.stage_order[key]
        error = self.errors.get((kind, key))
        not_run = StageResult(self.case.name, stage, layer, kind, note=f"{key}: not in the bundle: not run")
        if error is None or (kind, key) in self.missing:
            return not_run
        noise = self.get_floor("local" if kind == "local" else "propagated", key)
        floor = TINY_ABS_ERROR / MAX_ERROR_IN_FLOORS if error.is_tiny else noise
        is_good = error.is_bitwise_equal if bitwise and kind == "local" else error.error <= MAX_ERROR_IN_FLOORS * floor
        verdict: Verdict = "pass" if is_good else "fail"
        if kind == "propagated" and stage != "logits":
            verdict = "shown"
        result = not_run.with_errors(error, floor, verdict)
        if (kind, key) == ("propagated", "logits"):
            kl, top1 = self.predictions.kl_and_top1
            return replace(result, kl=kl, top1=top1)
        return result


def first_divergence(results: list[StageResult]) -> StageResult | None:
    """Return the first stage in the order of computation whose local error is too large.

    If every stage passes by itself and the logits of the whole run do not, the stages are connected wrongly: then
    return the first propagated error above the noise. Last, a divergence of the default backend from eager attention.
    """
    failed = next((r for r in results if r.kind == "local" and r.verdict == "fail"), None)
    if failed is None and any(r.kind == "propagated" and r.verdict == "fail" for r in results):
        measured = (r for r in results if r.kind == "propagated" and r.verdict != "not run")
        failed = next((r for r in measured if not r.error <= MAX_ERROR_IN_FLOORS * r.floor), None)
    return failed or next((r for r in results if r.kind == "backend" and r.verdict == "fail"), None)
