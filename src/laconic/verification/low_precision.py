"""Compare in bfloat16 and float16: the decoder's error must not exceed the reference's own error by much.

Both errors are measured against a float64 run of the same weights; ratio = error(ours) / error(reference). Norms are
compared on the reference's inputs as well, because a norm with another order of casts can be closer to float64.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

from laconic.models.decoder import Decoder
from laconic.verification.error import ErrorAccumulator, PredictionAgreement, valid_mask
from laconic.verification.float64_copy import Float64Decoder
from laconic.verification.local import LocalStages, stages_at_layer
from laconic.verification.parity import MAX_ERROR_IN_FLOORS, MIN_FLOOR, StageResult
from laconic.verification.traces import ParityCase, iterate_stages, sharpened_queries, stage_key

MAX_MEDIAN_RATIO = 1.5  # over the layers of a stage
MAX_RATIO = 3.0  # of any stage
MAX_ABS_RATIO = 5.0  # of the largest absolute errors
MAX_KL_RATIO = 1.5
TOP1_MARGIN = 0.01
NORM_STAGES = frozenset({"norm1", "norm2", "final_norm"})
NORM_TOLERANCE = 1e-4
"""Equal inputs give equal bits but for single roundings; another order of casts is off by 2e-3."""
SKIPPED_STAGES = ("last_logits", "token", "next_probs")
"""Rows of the logits; their ratio adds nothing to that of the logits."""


class ErrorRatios:
    """Errors of the decoder and of the reference against one float64 run, summed over all cases."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.errors: dict[str, tuple[str, int | None, ErrorAccumulator, ErrorAccumulator]] = {}
        self.own_predictions, self.reference_predictions = PredictionAgreement(), PredictionAgreement()
        self.norm_errors: dict[str, tuple[str, int | None, ErrorAccumulator]] = {}

    def add_case(self, case: ParityCase, reference: Any) -> None:
        """Run a case with the decoder, its float64 copy and the reference."""
        decoder, wide_decoder, L = self.decoder, Float64Decoder.from_decoder(self.decoder), len(self.decoder.layers)
        local = LocalStages(decoder, case)
        with sharpened_queries(decoder, case.query_scale):
            runs = iterate_stages(decoder, case), iterate_stages(wide_decoder, case), reference.iterate_stages(case)
            for actual, wide, recorded in zip(*runs, strict=True):
                S, T = case.pieces()[actual.piece]
                valid, layer = case.valid_mask[:, : S + T], actual.layer if 0 <= actual.layer < L else None
                for name, x in local.compute(recorded, None, NORM_STAGES).items():
                    row = self.norm_errors.setdefault(stage_key(name, layer), (name, layer, ErrorAccumulator()))
                    mask = valid_mask("B T D", x.shape, valid, S)
                    row[2].add(x, recorded.activations[name], mask, S, "B T D")
                for stage in stages_at_layer(decoder, actual.layer):
                    y = wide.activations[stage.name]
                    if stage.name in SKIPPED_STAGES or not y.is_floating_point():
                        continue
                    mask, key = valid_mask(stage.shape, y.shape, valid, S), stage_key(stage.name, layer)
                    new = (stage.name, layer, ErrorAccumulator(), ErrorAccumulator())
                    _, _, ours, theirs = self.errors.setdefault(key, new)
                    ours.add(actual.activations[stage.name], y, mask, S, stage.shape)
                    theirs.add(recorded.activations[stage.name], y, mask, S, stage.shape)
                    if stage.name == "logits":
                        self.own_predictions.add(actual.activations["logits"], y, valid[:, S:])
                        self.reference_predictions.add(recorded.activations["logits"], y, valid[:, S:])

    def results(self) -> list[StageResult]:
        """Return one result a stage and layer; its `error` is ours and its `floor` the reference's error."""
        results, by_stage = [self.norm_result(*row) for row in self.norm_errors.values()], defaultdict(list)
        for stage, layer, ours, theirs in self.errors.values():
            result = StageResult(
                "all", stage, layer, "ratio", max(ours.error, MIN_FLOOR), max(theirs.error, MIN_FLOOR), ours.max_abs,
                ours.index, ours.cosine, ours.is_bitwise_equal, note=ours.shape_note,
            )  # fmt: skip
            is_max_good = ours.max_abs <= MAX_ABS_RATIO * max(theirs.max_abs, MIN_FLOOR)
            is_good = result.error_in_floors <= MAX_RATIO and is_max_good
            results.append(replace(result, verdict="pass" if is_good else "fail"))
            by_stage[stage].append(result.error_in_floors)
        failed = {stage for stage, ratios in by_stage.items() if statistics.median(ratios) > MAX_MEDIAN_RATIO}
        results = [
            replace(r, verdict="fail", note="median over layers") if r.kind == "ratio" and r.stage in failed else r
            for r in results
        ]
        return [self.check_predictions(r) if r.stage == "logits" else r for r in results]

    def norm_result(self, stage: str, layer: int | None, error: ErrorAccumulator) -> StageResult:
        """Return the result of a norm on the reference's inputs."""
        is_good = error.error <= NORM_TOLERANCE
        note = "" if is_good else "order of casts: only low precision is wrong"
        return StageResult(
            "all", stage, layer, "local", error.error, NORM_TOLERANCE / MAX_ERROR_IN_FLOORS, error.max_abs,
            error.index, error.cosine, error.is_bitwise_equal, "pass" if is_good else "fail", note=note,
        )  # fmt: skip

    def check_predictions(self, result: StageResult) -> StageResult:
        """Compare KL and top-1 at the logits with the reference's, allowing for the counting error of few tokens."""
        (kl, top1), (their_kl, their_top1) = self.own_predictions.kl_and_top1, self.reference_predictions.kl_and_top1
        wrong = (1 - top1) + (1 - their_top1)
        counting_error = 2 * math.sqrt(wrong / max(self.own_predictions.count, 1))
        is_kl_good = kl <= max(MAX_KL_RATIO * their_kl, 1e-9)
        is_good = is_kl_good and top1 >= their_top1 - max(TOP1_MARGIN, counting_error)
        note = f"KL {kl:.2e}, the reference's {their_kl:.2e}; top-1 {top1:.1%}, the reference's {their_top1:.1%}"
        return replace(result, verdict=result.verdict if is_good else "fail", kl=kl, top1=top1, note=note)
