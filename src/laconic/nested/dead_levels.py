"""Warn about levels that do not learn."""

import warnings
from collections.abc import Mapping, Sequence

MONITORED_UPDATES = 20  # number of successive vanishing updates after which a level counts as dead
VANISHING_SIZE = 1e-6  # relative size below which an update vanishes


class DeadLevelMonitor:
    """Warn once about each level that is not updated, or whose updates are vanishingly small."""

    def __init__(self, chunk_sizes: Sequence[int]) -> None:
        self.levels = dict(enumerate(chunk_sizes))  # those that no warning names yet
        self.idle_tokens = dict.fromkeys(self.levels, 0.0)
        self.vanishing_updates = dict.fromkeys(self.levels, 0.0)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, named as by `reading_metrics`, and warn about a dead level."""
        for i, chunk_size in list(self.levels.items()):
            num_updates, size = metrics[f"level{i}_updates"], metrics[f"level{i}_update_size"]
            if num_updates:
                self.idle_tokens[i] = 0.0
                self.vanishing_updates[i] += num_updates
            else:
                self.idle_tokens[i] += metrics["row_tokens"]
            if size >= VANISHING_SIZE:
                self.vanishing_updates[i] = 0.0
            problem = advice = ""
            if self.idle_tokens[i] >= 2 * chunk_size:
                problem = f"was not updated in {self.idle_tokens[i]:.0f} tokens"
                advice = "use longer rows, set train.stateful, or a smaller chunk size"
            elif self.vanishing_updates[i] >= MONITORED_UPDATES:
                problem = f"changed by only {size:.0e} per update over {MONITORED_UPDATES} updates"
                advice = "raise its inner_lr, start from a pretrained model, or use donor_layout 'grow'"
            if problem:
                del self.levels[i]
                warnings.warn(f"cms: level {i} (chunk size {chunk_size}) {problem}; {advice}", stacklevel=2)
