"""Loss of a text while it is read into fast weights, with a warning if learning makes the model worse."""

import warnings

from torch import Tensor

from laconic.batches import next_token_targets
from laconic.experiment.resumable_stream import PaddedIds
from laconic.losses import count_scored, masked_cross_entropy
from laconic.nested.hope.model import Hope

HARM = 0.1  # nats per token above the loss without learning that are worth a warning


class ReadingLoss:
    """Mean loss of the tokens read so far; the first token of each segment is not scored.

    The 1st, 2nd, 4th, 8th … segment is read once more by a model that has read and learned nothing. That model does not
    see the text before the segment, so a loss above its loss means that learning does harm.

    Attributes:
        nats: Summed loss of the scored tokens.
        num_scored: Their number.
        num_segments: Segments read.
        has_warned: Whether a warning was given.
    """

    def __init__(self, model: Hope) -> None:
        self.model = model
        self.nats, self.num_scored, self.num_segments, self.has_warned = 0.0, 0.0, 0, False

    @property
    def mean(self) -> float:
        """Nats per token; 0 before anything is scored."""
        return self.nats / max(self.num_scored, 1.0)

    def add(self, piece: PaddedIds, hidden_states: Tensor) -> None:
        """Score a segment, from the hidden states with which the model read it."""
        targets = next_token_targets(piece.input_ids, piece.attention_mask, piece.attention_mask)
        scored = count_scored(targets)
        if not scored:
            return
        loss = float(masked_cross_entropy(self.model.logits, hidden_states, targets).loss)
        self.nats, self.num_scored = self.nats + scored * loss, self.num_scored + scored
        self.num_segments += 1
        if self.num_segments & (self.num_segments - 1) == 0 and not self.has_warned:
            self.compare_without_learning(piece, targets, loss)

    def compare_without_learning(self, piece: PaddedIds, targets: Tensor, loss: float) -> None:
        """Warn if the model would predict a segment better without anything that it has learned."""
        output = self.model.read_tokens(piece.input_ids, attention_mask=piece.attention_mask, update_weights=False)
        baseline = float(masked_cross_entropy(self.model.logits, output.hidden_states, targets).loss)
        if not loss <= baseline + HARM:  # also for NaN
            self.has_warned = True
            warnings.warn(
                f"learning does harm: {loss:.2f} nats per token in segment {self.num_segments:,}, {baseline:.2f} "
                "without learning; lower inner_lr or max_update_ratio",
                stacklevel=2,
            )
