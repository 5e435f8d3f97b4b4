"""Language-model baseline: next-token prediction on plain text, without a memory.

Compressors are initialised from such a model and compared with it.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.batches import DocumentBatch
from laconic.compression.memory import SummaryMemory
from laconic.interfaces import StepOutput
from laconic.losses import count_scored, masked_cross_entropy
from laconic.models.decoder import Decoder


class LanguageModelBaseline(nn.Module):
    """Next-token prediction over documents; each window is read on its own."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def loss_denominators(self, batch: DocumentBatch) -> dict[str, float]:
        return {"scored": sum(count_scored(part.targets) for part in batch.sequential_parts)}

    def forward(self, batch: DocumentBatch, state: None = None) -> StepOutput:
        """Compute the mean loss of a window, in nats per scored token; `state` is unused."""
        targets = batch.targets
        denominator = (batch.loss_denominators or self.loss_denominators(batch))["scored"]
        hidden = self.read_text(batch.input_ids, batch.attention_mask)
        result = masked_cross_entropy(self.decoder.logits, hidden, targets, denominator=denominator)
        return StepOutput(result.loss, {"nats": result.loss.detach(), "accuracy": result.accuracy.detach()})

    def read_text(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"] | None = None,
        memory: SummaryMemory | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Compute the last hidden states of a text, as `AutoCompressor.read_text` does; `memory` is unused."""
        return self.decoder(self.decoder.embed(input_ids), attention_mask=attention_mask).hidden_states
