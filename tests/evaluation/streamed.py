"""Small class-incremental streams, two-layer models, and evaluations of streams for tests."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from laconic.config.nested import CMSOptions
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance
from laconic.evaluation.results_store import EvalItem, EvalMetadata, run_resumable
from laconic.evaluation.streams.evaluate import StreamCondition
from laconic.evaluation.streams.tasks import StreamRequest, build_stream_job, list_conditions
from laconic.interfaces import StatefulLM, TrainingData
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder
from laconic.nested.hope.config import HopeConfig
from laconic.nested.hope.model import Hope, HopeAttention

V, ARROW, END, FIRST = 24, 1, 2, 3
WORDS = ((4,), (5, 6), (5, 7), (8, 9, 10), (9,), (10, 4))


def tasks(seed: int = 0, train_per_class: int = 4, test_per_class: int = 2) -> ClassIncrementalStream:
    """Return six classes in three tasks; an utterance contains an id of its class among random ones."""
    g = torch.Generator().manual_seed(seed)

    def item(label: int) -> LabelledUtterance:
        rest = torch.randint(18, V, (int(torch.randint(1, 4, (1,), generator=g)),), generator=g).tolist()
        return LabelledUtterance((*rest, 12 + label, ARROW), label)

    order = ((0, 3), (4, 1), (2, 5))
    train = tuple(tuple(item(label) for _ in range(train_per_class) for label in classes) for classes in order)
    test = tuple(tuple(item(label) for _ in range(test_per_class) for label in classes) for classes in order)
    return ClassIncrementalStream("six", seed, WORDS, order, train, test, (FIRST,), (END,))


def decoder(seed: int = 0, width: int = 16) -> Decoder:
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "vocab_size": V, "intermediate_size": 2 * width}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    model = Decoder(DecoderConfig.tiny("llama", **sizes, **heads), seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(8)  # as initialized, a decoder gives all tokens nearly the same probability
    return model.eval()


def attending(eta: float = 0.5, chunks: tuple[int, ...] = (4, 8), **options: Any) -> HopeAttention:
    return HopeAttention.from_decoder(
        decoder(), chunks, "grow", options=CMSOptions(inner_lr=eta, associative_target="start", **options)
    )


def remembering() -> Hope:
    return Hope(HopeConfig.attention_free(V, 16, 1, chunk_sizes=(4,), num_heads=2, head_dim=8)).eval()


def evaluate_stream(
    model: StatefulLM,
    stream: str,
    source: TrainingData,
    *,
    batch_size: int = 1,
    bytes_per_token: torch.Tensor | None = None,
    conditions: Sequence[StreamCondition] | None = None,
    folder: Path | None = None,
) -> list[EvalItem]:
    """Return the items of a stream, as `laconic evaluate` computes, stores and resumes them."""
    request = StreamRequest(stream, stream, source, batch_size, bytes_per_token)
    conditions = list_conditions(model, stream) if conditions is None else conditions
    job = build_stream_job(EvalMetadata("streams", stream), request, conditions, torch.device("cpu"))
    with TemporaryDirectory() as empty:
        return run_resumable(job, folder or Path(empty))


def sums(item: EvalItem, condition: str) -> dict[str, tuple[float, float]]:
    """Return the sum of scores and their number of each metric."""
    return {metric: (score, n) for metric, (score, n) in item.conditions[condition]["sums"].items()}
