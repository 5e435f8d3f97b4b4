"""Plain text read whole: the language model beside which a memory is measured, and what compressors start from.

Symbols: N tokens scored; p the model's softmax. A window is read at once, with no memory before it.
"""

from torch import nn

from laconic.core.contract import Documents, Step
from laconic.core.decoder import Decoder
from laconic.methods.cot import nll, scored


class Plain(nn.Module):
    """Next-token prediction over documents; each window of a document stands alone."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def totals(self, batch: Documents) -> dict[str, float]:
        """Scored tokens of all windows."""
        return {"scored": sum(scored(p.targets) for p in batch.pieces)}

    def forward(self, batch: Documents, state: None = None) -> Step:
        """Nats per scored token of a window; there is no state."""
        targets = batch.targets
        total = (batch.totals or self.totals(batch))["scored"]
        hidden = self.decoder(self.decoder.embed(batch.text), live=batch.live).hidden
        said = nll(self.decoder.logits, hidden, targets, total=total)
        return Step(said.loss, {"nats": said.loss.detach(), "right": said.right.detach()})

    def restarts(self, batch: Documents) -> bool:
        """Never: one phase."""
        return False
