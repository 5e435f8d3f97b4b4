"""Plain text read whole: the language model beside which a memory is measured, and what compressors start from.

Symbols: N tokens scored; p the model's softmax. A window is read at once, with no memory before it.
"""

from torch import nn

from laconic.batches import DocumentBatch
from laconic.interfaces import StepOutput
from laconic.losses import count_scored, masked_cross_entropy
from laconic.models.decoder import Decoder


class LanguageModelBaseline(nn.Module):
    """Next-token prediction over documents; each window of a document stands alone."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def loss_denominators(self, batch: DocumentBatch) -> dict[str, float]:
        """Scored tokens of all windows."""
        return {"scored": sum(count_scored(p.targets) for p in batch.sequential_parts)}

    def forward(self, batch: DocumentBatch, state: None = None) -> StepOutput:
        """Nats per scored token of a window; there is no state."""
        targets = batch.targets
        total = (batch.loss_denominators or self.loss_denominators(batch))["scored"]
        hidden = self.decoder(self.decoder.embed(batch.input_ids), live=batch.attention_mask).hidden
        said = masked_cross_entropy(self.decoder.logits, hidden, targets, denominator=total)
        return StepOutput(said.loss, {"nats": said.loss.detach(), "right": said.accuracy.detach()})
