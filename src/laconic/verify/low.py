"""Low precision, judged by its ratio to the reference's own low-precision error, and norms by themselves.

Both are measured against a float64 run of the same weights; ratio = error(ours) / error(reference). A norm that casts
in another order is nearer to float64 than the reference's, so norms are fed with the reference's inputs as well.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

from laconic.core.decoder import Decoder
from laconic.verify.difference import Difference, Predictions, visible
from laconic.verify.local import Local, table
from laconic.verify.parity import FACTOR, FLOOR, Finding
from laconic.verify.traces import Case, key, peaked, stream
from laconic.verify.twin import Widened

MEDIAN, WORST, LARGEST, KL, TOP1 = 1.5, 3.0, 5.0, 1.5, 0.01
"""Over layers at most the first, for any stage the second, the largest absolute the third; KL; points of top-1."""
NORMS = frozenset({"norm1", "norm2", "final_norm"})
NORM = 1e-4
"""A norm of equal inputs gives equal bits but for a rounding here and there; another order of casts is 2e-3 away."""
SKIPPED = ("last_logits", "token", "next_probs")
"""Of the logits only a few rows: a ratio of them says nothing that the logits do not."""


class Ratios:
    """Errors of ours and of the reference against one float64 run, added up over all cases."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.sums: dict[str, tuple[str, int | None, Difference, Difference]] = {}
        self.ours, self.theirs = Predictions(), Predictions()
        self.norms: dict[str, tuple[str, int | None, Difference]] = {}

    def add(self, case: Case, reference: Any) -> None:
        """Reads one case three times."""
        decoder, twin, L = self.decoder, Widened.of(self.decoder), len(self.decoder.blocks)
        local = Local(decoder, case)
        with peaked(decoder, case.peak):
            for own, wide, made in zip(stream(decoder, case), stream(twin, case), reference.stream(case), strict=True):
                S, T = case.pieces()[own.piece]
                live, inside = case.alive[:, : S + T], own.layer if 0 <= own.layer < L else None
                for name, x in local.made(made, None, NORMS).items():
                    row = self.norms.setdefault(key(name, inside), (name, inside, Difference()))
                    row[2].add(x, made.stages[name], visible("B T D", x.shape, live, S), S, "B T D")
                for stage in table(decoder, own.layer):
                    y = wide.stages[stage.name]
                    if stage.name in SKIPPED or not y.is_floating_point():
                        continue
                    where = visible(stage.shape, y.shape, live, S)
                    row = self.sums.setdefault(
                        key(stage.name, inside), (stage.name, inside, Difference(), Difference())
                    )
                    row[2].add(own.stages[stage.name], y, where, S, stage.shape)
                    row[3].add(made.stages[stage.name], y, where, S, stage.shape)
                    if stage.name == "logits":
                        self.ours.add(own.stages["logits"], y, live[:, S:])
                        self.theirs.add(made.stages["logits"], y, live[:, S:])

    def findings(self) -> list[Finding]:
        """One a stage and layer: `error` is ours, `floor` the reference's, so `floors` is the ratio."""
        made, by_stage = [self.norm(*row) for row in self.norms.values()], defaultdict(list)
        for stage, layer, ours, theirs in self.sums.values():
            found = Finding(
                "all", stage, layer, "ratio", max(ours.error, FLOOR), max(theirs.error, FLOOR), ours.max_abs,
                ours.index, ours.cosine, ours.equal, note=ours.shape,
            )  # fmt: skip
            large = ours.max_abs <= LARGEST * max(theirs.max_abs, FLOOR)
            good = found.floors <= WORST and large
            made.append(replace(found, verdict="pass" if good else "fail"))
            by_stage[stage].append(found.floors)
        bad = {stage for stage, ratios in by_stage.items() if statistics.median(ratios) > MEDIAN}
        made = [
            replace(f, verdict="fail", note="median over layers") if f.kind == "ratio" and f.stage in bad else f
            for f in made
        ]
        return [self.predicted(f) if f.stage == "logits" else f for f in made]

    def norm(self, stage: str, layer: int | None, found: Difference) -> Finding:
        """A norm by itself."""
        good = found.error <= NORM
        return Finding(
            "all", stage, layer, "local", found.error, NORM / FACTOR, found.max_abs, found.index, found.cosine,
            found.equal, "pass" if good else "fail", note="" if good else "order of casts: only low precision is wrong",
        )  # fmt: skip

    def predicted(self, found: Finding) -> Finding:
        """The logits are held to the reference's KL and top-1 too; over few slots, to what counting them allows."""
        (kl, top1), (their_kl, their_top1) = self.ours.both, self.theirs.both
        wrong = (1 - top1) + (1 - their_top1)
        chance = 2 * math.sqrt(wrong / max(self.ours.count, 1))
        good = kl <= max(KL * their_kl, 1e-9) and top1 >= their_top1 - max(TOP1, chance)
        note = f"KL {kl:.2e}, the reference's {their_kl:.2e}; top-1 {top1:.1%}, the reference's {their_top1:.1%}"
        return replace(found, verdict=found.verdict if good else "fail", kl=kl, top1=top1, note=note)
