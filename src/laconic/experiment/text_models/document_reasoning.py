"""Answer questions about a document that has been compressed: thoughts and answers follow its summary vectors.

The document of each row is compressed segment by segment as by an AutoCompressor (arXiv:2305.14788), and the KV cache
of its summary vectors precedes the question. The reasoning method is unchanged; gradients of its loss train the summary
vectors too.

Symbols: B rows, Nd columns of documents, K summary vectors of a segment.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.memory import SummaryMemory
from laconic.compression.segment import resolve_position_scheme
from laconic.compression.segment_model import SegmentModel
from laconic.errors import UsageError
from laconic.interfaces import ResetsOptimizer, StepOutput
from laconic.latent.answering import AnswerDecoding, AnswerPrompt, PromptedAnswers
from laconic.latent.codi import Codi
from laconic.latent.cot import Cot, NoCot
from laconic.latent.rollout import Intervention, LatentRollout
from laconic.models.cache import KVCache
from laconic.models.modes import eval_no_grad


def compress_documents(
    model: SegmentModel, document_ids: Int[Tensor, "B Nd"], document_mask: Bool[Tensor, "B Nd"], segment_tokens: int
) -> SummaryMemory:
    """Compress documents into K summary vectors per segment; gradients flow through all of them."""
    memory = model.empty_memory(len(document_ids))
    K = model.config.fixed_length
    for ids, mask in zip(document_ids.split(segment_tokens, 1), document_mask.split(segment_tokens, 1), strict=True):
        model.check_fits(memory, ids.shape[1])
        _, compressed = model.run_segment(memory, ids, mask, K)
        assert compressed is not None
        num_tokens = mask.sum(1)
        vectors = model.select_vectors(compressed, mask, torch.full_like(num_tokens, K))
        memory = model.update_memory(memory, vectors, num_tokens)
    return memory


class DocumentReasoning(PromptedAnswers):
    """A reasoning method whose questions follow the summary vectors of their documents; others are read alone."""

    def __init__(self, method: Cot | NoCot | Codi, compressor: AutoCompressor, segment_tokens: int) -> None:
        super().__init__()
        scheme = resolve_position_scheme(compressor.config, compressor.decoder.config)
        if scheme != "contiguous":
            raise UsageError(
                f'compression.summary_positions "{scheme}", the default of {compressor.decoder.config.family}: answers '
                "to questions about documents need consecutive positions, as in a model with RoPE"
            )
        self.method, self.compressor, self.segment_tokens = method, compressor, segment_tokens
        self.decoder = method.decoder

    def read_documents(self, batch: ReasoningBatch) -> KVCache | None:
        """Return the KV cache of the summary vectors of a batch's documents; None if it has no documents."""
        if batch.document_ids is None or batch.document_mask is None:
            return None
        model = self.compressor.segment_model
        return model.prefill_memory(
            compress_documents(model, batch.document_ids, batch.document_mask, self.segment_tokens)
        )

    def find_state(self, questions: ReasoningBatch, state: KVCache | None) -> KVCache | None:
        """Return `state`, or that of the questions' documents if it is None; without gradients."""
        if state is not None:
            return state
        with eval_no_grad(self):
            return self.read_documents(questions)

    def loss_denominators(self, batch: ReasoningBatch) -> Mapping[str, float]:
        """Return the counts that the sums of the loss are divided by."""
        return self.method.loss_denominators(batch)

    def resets_optimizer_state(self, batch: ReasoningBatch) -> bool:
        return isinstance(self.method, ResetsOptimizer) and self.method.resets_optimizer_state(batch)

    def forward(self, batch: ReasoningBatch, state: KVCache | None = None) -> StepOutput:
        """Return loss and terms of a batch; `state` is the KV cache of a memory to read in place of documents."""
        return self.method(batch, self.read_documents(batch) if state is None else state)

    def prompt_answers(
        self, questions: ReasoningBatch, decoding: AnswerDecoding, state: KVCache | None = None
    ) -> AnswerPrompt:
        """Return the prompt of the answers; `state` is as in `forward`."""
        return self.method.prompt_answers(questions, decoding, self.find_state(questions, state))

    def prompt_chains(
        self, questions: ReasoningBatch, decoding: AnswerDecoding, state: KVCache | None = None
    ) -> AnswerPrompt:
        """Return the prompt of a written chain and the answer; `state` is as in `forward`."""
        return self.method.prompt_chains(questions, decoding, self.find_state(questions, state))


class LatentDocumentReasoning(DocumentReasoning):
    """`DocumentReasoning` with latent thoughts: codi, pccot or kava."""

    method: Codi

    def think(
        self,
        questions: ReasoningBatch,
        intervention: Intervention | None = None,
        record_passes: bool = False,
        question_cache: KVCache | None = None,
        state: KVCache | None = None,
    ) -> LatentRollout:
        """Return the latents after documents and questions, as `Codi.think`; `state` is as in `forward`."""
        if question_cache is None:
            state = self.find_state(questions, state)
        return self.method.think(questions, intervention, record_passes, question_cache, state)


def add_documents(method: Cot | NoCot | Codi, compressor: AutoCompressor, segment_tokens: int) -> DocumentReasoning:
    """Return a method that reads the documents of its questions, with `think` if it has latents."""
    kind = LatentDocumentReasoning if isinstance(method, Codi) else DocumentReasoning
    return kind(method, compressor, segment_tokens)
