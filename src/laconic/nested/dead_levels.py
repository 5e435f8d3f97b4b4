"""Warn about levels that do not learn."""

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

MONITORED_UPDATES = 20  # number of last updates whose size is monitored
DEAD_LEVEL_THRESHOLD = 1e-6  # relative size of an update below which a level counts as dead


class DeadLevelMonitor:
    """Warn once about each level that is not updated, or whose updates are vanishingly small."""

    def __init__(self, chunk_sizes: Sequence[int]) -> None:
        self.chunk_sizes = tuple(chunk_sizes)
        self.tokens_without_update = [0.0] * len(self.chunk_sizes)
        self.recent_updates = [deque[tuple[float, float]]() for _ in self.chunk_sizes]  # (relative size, number)
        self.warned: set[int] = set()

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, named as by `reading_metrics`, and warn about a dead level."""
        for i, chunk_size in enumerate(self.chunk_sizes):
            num_updates = metrics[f"level{i}_updates"]
            recent = self.recent_updates[i]
            if num_updates:
                self.tokens_without_update[i] = 0.0
                recent.append((metrics[f"level{i}_update_size"], num_updates))
            else:
                self.tokens_without_update[i] += metrics["row_tokens"]
            # forget the oldest entry as long as the others have enough updates
            while recent and sum(n for _, n in recent) - recent[0][1] >= MONITORED_UPDATES:
                recent.popleft()
            problem = "" if i in self.warned else self.diagnose(i)
            if problem:
                self.warned.add(i)
                warnings.warn(f"cms: level {i} (chunk size {chunk_size}) {problem}", stacklevel=2)

    def diagnose(self, i: int) -> str:
        """Return what is wrong with a level, or ""."""
        tokens, recent = self.tokens_without_update[i], self.recent_updates[i]
        if tokens >= 2 * self.chunk_sizes[i]:
            return (
                f"was not updated in {tokens:.0f} tokens; use longer rows, set train.stateful, or a smaller chunk size"
            )
        size = median(size for size, _ in recent) if recent else math.inf
        if sum(n for _, n in recent) >= MONITORED_UPDATES and size < DEAD_LEVEL_THRESHOLD:
            return (
                f"changed by only {size:.0e} per update over {MONITORED_UPDATES} updates; raise its inner_lr, start "
                "from a pretrained model, or use donor_layout 'grow'"
            )
        return ""
