"""Low precision, judged by its ratio to the reference's own low-precision error, and norms by themselves.

Both are measured against a float64 run of the same weights; ratio = error(ours) / error(reference). A norm that casts
in another order is nearer to float64 than the reference's, so norms are fed with the reference's inputs as well.
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

MAX_MEDIAN_RATIO, MAX_RATIO, MAX_ABS_RATIO, MAX_KL_RATIO, TOP1_MARGIN = 1.5, 3.0, 5.0, 1.5, 0.01
"""Over layers at most the first, for any stage the second, the largest absolute the third; KL; points of top-1."""
NORM_STAGES = frozenset({"norm1", "norm2", "final_norm"})
NORM_TOLERANCE = 1e-4
"""A norm of equal inputs gives equal bits but for a rounding here and there; another order of casts is 2e-3 away."""
SKIPPED_STAGES = ("last_logits", "token", "next_probs")
"""Of the logits only a few rows: a ratio of them says nothing that the logits do not."""


class ErrorRatios:
    """Errors of ours and of the reference against one float64 run, added up over all cases."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.errors: dict[str, tuple[str, int | None, ErrorAccumulator, ErrorAccumulator]] = {}
        self.own_predictions, self.reference_predictions = PredictionAgreement(), PredictionAgreement()
        self.norm_errors: dict[str, tuple[str, int | None, ErrorAccumulator]] = {}

    def add_case(self, case: ParityCase, reference: Any) -> None:
        """Reads one case three times."""
        decoder, twin, L = self.decoder, Float64Decoder.from_decoder(self.decoder), len(self.decoder.layers)
        local = LocalStages(decoder, case)
        with sharpened_queries(decoder, case.query_scale):
            for own, wide, made in zip(
                iterate_stages(decoder, case), iterate_stages(twin, case), reference.stream(case), strict=True
            ):
                S, T = case.pieces()[own.piece]
                live, inside = case.valid_mask[:, : S + T], own.layer if 0 <= own.layer < L else None
                for name, x in local.compute(made, None, NORM_STAGES).items():
                    row = self.norm_errors.setdefault(stage_key(name, inside), (name, inside, ErrorAccumulator()))
                    row[2].add(x, made.stages[name], valid_mask("B T D", x.shape, live, S), S, "B T D")
                for stage in stages_at_layer(decoder, own.layer):
                    y = wide.activations[stage.name]
                    if stage.name in SKIPPED_STAGES or not y.is_floating_point():
                        continue
                    where = valid_mask(stage.shape, y.shape, live, S)
                    row = self.errors.setdefault(
                        stage_key(stage.name, inside), (stage.name, inside, ErrorAccumulator(), ErrorAccumulator())
                    )
                    row[2].add(own.activations[stage.name], y, where, S, stage.shape)
                    row[3].add(made.stages[stage.name], y, where, S, stage.shape)
                    if stage.name == "logits":
                        self.own_predictions.add(own.activations["logits"], y, live[:, S:])
                        self.reference_predictions.add(made.stages["logits"], y, live[:, S:])

    def results(self) -> list[StageResult]:
        """One a stage and layer: `error` is ours, `floor` the reference's, so `floors` is the ratio."""
        made, by_stage = [self.norm_result(*row) for row in self.norm_errors.values()], defaultdict(list)
        for stage, layer, ours, theirs in self.errors.values():
            found = StageResult(
                "all", stage, layer, "ratio", max(ours.error, MIN_FLOOR), max(theirs.error, MIN_FLOOR), ours.max_abs,
                ours.index, ours.cosine, ours.is_bitwise_equal, note=ours.shape_note,
            )  # fmt: skip
            large = ours.max_abs <= MAX_ABS_RATIO * max(theirs.max_abs, MIN_FLOOR)
            good = found.error_in_floors <= MAX_RATIO and large
            made.append(replace(found, verdict="pass" if good else "fail"))
            by_stage[stage].append(found.error_in_floors)
        bad = {stage for stage, ratios in by_stage.items() if statistics.median(ratios) > MAX_MEDIAN_RATIO}
        made = [
            replace(f, verdict="fail", note="median over layers") if f.kind == "ratio" and f.stage in bad else f
            for f in made
        ]
        return [self.check_predictions(f) if f.stage == "logits" else f for f in made]

    def norm_result(self, stage: str, layer: int | None, error: ErrorAccumulator) -> StageResult:
        """A norm by itself."""
        good = error.error <= NORM_TOLERANCE
        return StageResult(
            "all", stage, layer, "local", error.error, NORM_TOLERANCE / MAX_ERROR_IN_FLOORS, error.max_abs, error.index, error.cosine,
            error.is_bitwise_equal, "pass" if good else "fail", note="" if good else "order of casts: only low precision is wrong",
        )  # fmt: skip

    def check_predictions(self, result: StageResult) -> StageResult:
        """The logits are held to the reference's KL and top-1 too; over few slots, to what counting them allows."""
        (kl, top1), (their_kl, their_top1) = self.own_predictions.kl_and_top1, self.reference_predictions.kl_and_top1
        wrong = (1 - top1) + (1 - their_top1)
        chance = 2 * math.sqrt(wrong / max(self.own_predictions.count, 1))
        good = kl <= max(MAX_KL_RATIO * their_kl, 1e-9) and top1 >= their_top1 - max(TOP1_MARGIN, chance)
        note = f"KL {kl:.2e}, the reference's {their_kl:.2e}; top-1 {top1:.1%}, the reference's {their_top1:.1%}"
        return replace(result, verdict=result.verdict if good else "fail", kl=kl, top1=top1, note=note)
