"""Compare in bfloat16 and float16: the decoder's error must not exceed the reference's own error by much.

Both errors are measured against a float64 run of the same weights; ratio = error(ours) / error(reference). Norms are
also compared on the reference's inputs, because casting in another order can bring a norm closer to float64.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

from torch import Tensor

from laconic.models.decoder import Decoder
from laconic.verification.error import ErrorAccumulator, PredictionAgreement, valid_mask
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.local import LocalStages, stages_at_layer
from laconic.verification.parity import MAX_ERROR_IN_FLOORS, MIN_FLOOR, StageResult
from laconic.verification.traces import LayerActivations, ParityCase, iterate_stages, layer_index, sharpened_queries

MAX_MEDIAN_RATIO = 1.5  # median over the layers of a stage
MAX_RATIO = 3.0  # ratio of one stage of one layer
MAX_ABS_RATIO = 5.0  # ratio of the largest absolute errors
MAX_KL_RATIO = 1.5
TOP1_MARGIN = 0.01
NORM_STAGES = frozenset({"norm1", "norm2", "final_norm"})
NORM_TOLERANCE = 1e-4  # equal inputs differ by single roundings at most; another order of casts is off by 2e-3
SKIPPED_STAGES = ("last_logits", "token", "next_probs")  # they are computed from the logits, which are compared

StageKey = tuple[str, int | None]  # stage and layer; None outside the layers


class ErrorRatios:
    """Errors of a decoder in bfloat16 or float16 and of the reference against one float64 run, over all cases."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.errors: defaultdict[StageKey, ErrorAccumulator] = defaultdict(ErrorAccumulator)
        self.reference_errors: defaultdict[StageKey, ErrorAccumulator] = defaultdict(ErrorAccumulator)
        self.norm_errors: defaultdict[StageKey, ErrorAccumulator] = defaultdict(ErrorAccumulator)
        self.own_predictions, self.reference_predictions = PredictionAgreement(), PredictionAgreement()

    def add_case(self, case: ParityCase, reference: Any) -> None:
        wide_decoder = Float64Decoder.from_decoder(self.decoder)
        local = LocalStages(self.decoder, case)
        with sharpened_queries(self.decoder, case.query_scale):
            runs = (
                iterate_stages(self.decoder, case),
                iterate_stages(wide_decoder, case),
                reference.iterate_stages(case),
            )
            for actual, wide, recorded in zip(*runs, strict=True):
                S, T = case.pieces()[actual.piece]
                valid = case.valid_mask[:, : S + T]
                self.add_norms(local, recorded, valid, S)
                self.add_layer(actual, wide, recorded, valid, S)

    def add_norms(self, local: LocalStages, recorded: LayerActivations, valid: Tensor, S: int) -> None:
        for name, x in local.compute(recorded, None, NORM_STAGES).items():
            error = self.norm_errors[name, layer_index(self.decoder, recorded.layer)]
            error.add(x, recorded.activations[name], valid_mask("B T D", x.shape, valid, S), S, "B T D")

    def add_layer(
        self, actual: LayerActivations, wide: LayerActivations, recorded: LayerActivations, valid: Tensor, S: int
    ) -> None:
        for stage in stages_at_layer(self.decoder, actual.layer):
            if stage.name in SKIPPED_STAGES or not wide.activations[stage.name].is_floating_point():
                continue
            x, y, z = (run.activations[stage.name] for run in (actual, wide, recorded))
            mask = valid_mask(stage.shape, y.shape, valid, S)
            key = stage.name, layer_index(self.decoder, actual.layer)
            self.errors[key].add(x, y, mask, S, stage.shape)
            self.reference_errors[key].add(z, y, mask, S, stage.shape)
            if stage.name == "logits":
                self.own_predictions.add(x, y, valid[:, S:])
                self.reference_predictions.add(z, y, valid[:, S:])

    def results(self) -> list[StageResult]:
        """Return one result per stage and layer; its `error` is the decoder's and its `floor` the reference's error."""
        results = [build_norm_result(*key, error) for key, error in self.norm_errors.items()]
        ratios: defaultdict[str, list[float]] = defaultdict(list)
        for key, error in self.errors.items():
            result = build_ratio_result(*key, error, self.reference_errors[key])
            results.append(result)
            ratios[result.stage].append(result.error_in_floors)
        failed = {stage for stage, values in ratios.items() if statistics.median(values) > MAX_MEDIAN_RATIO}
        results = [
            replace(r, verdict="fail", note="median over layers") if r.kind == "ratio" and r.stage in failed else r
            for r in results
        ]
        return [self.check_predictions(r) if r.stage == "logits" else r for r in results]

    def check_predictions(self, result: StageResult) -> StageResult:
        """Compare KL and top-1 at the logits with the reference's, allowing for the counting error of few tokens."""
        kl, top1 = self.own_predictions.kl_and_top1
        their_kl, their_top1 = self.reference_predictions.kl_and_top1
        wrong = (1 - top1) + (1 - their_top1)
        counting_error = 2 * math.sqrt(wrong / max(self.own_predictions.count, 1))
        passes = kl <= max(MAX_KL_RATIO * their_kl, 1e-9) and top1 >= their_top1 - max(TOP1_MARGIN, counting_error)
        note = f"KL {kl:.2e}, the reference's {their_kl:.2e}; top-1 {top1:.1%}, the reference's {their_top1:.1%}"
        return replace(result, verdict=result.verdict if passes else "fail", kl=kl, top1=top1, note=note)


def build_ratio_result(stage: str, layer: int | None, ours: ErrorAccumulator, theirs: ErrorAccumulator) -> StageResult:
    error, floor = max(ours.error, MIN_FLOOR), max(theirs.error, MIN_FLOOR)
    passes = error / floor <= MAX_RATIO and ours.max_abs <= MAX_ABS_RATIO * max(theirs.max_abs, MIN_FLOOR)
    result = StageResult("all", stage, layer, "ratio").with_errors(ours, floor, "pass" if passes else "fail")
    return replace(result, error=error)


def build_norm_result(stage: str, layer: int | None, error: ErrorAccumulator) -> StageResult:
    result = StageResult("all", stage, layer, "local")
    floor = NORM_TOLERANCE / MAX_ERROR_IN_FLOORS
    if error.error <= NORM_TOLERANCE:
        return result.with_errors(error, floor, "pass")
    return replace(result.with_errors(error, floor, "fail"), note="order of casts: only low precision is wrong")
