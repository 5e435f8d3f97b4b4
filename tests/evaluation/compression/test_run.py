"""The best length of each segment by trial, against a loop over all lengths; conditions that fit a baseline."""

from types import SimpleNamespace
from typing import Any

import torch

from laconic.batches import DocumentBatch
from laconic.compression.halting.inference import StopRule
from laconic.compression.lm_baseline import LanguageModelBaseline
from laconic.compression.memory import SummaryMemory
from laconic.config.methods import StopHeadConfig
from laconic.evaluation.compression.run import build_conditions, compress_with_best_lengths
from tests.compression.compressors import reader

LENGTHS = (1, 2, 4)


def documents(B: int = 3) -> DocumentBatch:
    """Two segments of context and a tail."""
    text = torch.randint(0, 200, (B, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(text, dtype=torch.bool)
    return DocumentBatch(text, mask, mask.clone(), (8, 20, 30), torch.arange(B), tuple("abc"[:B]))


def test_compress_with_best_lengths_minimizes_nats_plus_price() -> None:
    for price in (0.0, 0.4):
        model = reader(
            length_policy="stop_head",
            allowed_lengths=LENGTHS,
            halting=StopHeadConfig.model_validate({"initial_mean_fraction": 0.5, "length_cost": price}),
        ).method
        compressed, batch = compress_with_best_lengths(model, documents()), documents()
        for b in range(3):
            one, memory, lengths = batch.input_ids[b : b + 1], None, list[int]()
            for start, end, after in ((0, 8, one[:, 8:20]), (8, 20, one[:, 20:])):
                costs = dict[int, tuple[float, SummaryMemory]]()
                for n in LENGTHS:
                    tried = model.compress(one[:, start:end], None, memory, StopRule("fixed", num_vectors=n))
                    logits = model.decoder.logits(model.read_text(after, memory=tried))[0].log_softmax(-1).detach()
                    nats = -sum(float(logits[t - 1, after[0, t]]) for t in range(1, after.shape[1]))
                    costs[n] = nats + price * n, tried
                best = min(costs, key=lambda n: costs[n][0])
                memory = costs[best][1]
                lengths.append(best)
            assert memory is not None
            assert compressed.vectors_per_segment[b].tolist() == lengths
            assert torch.allclose(compressed.memory.select_rows([b]).compact().vectors, memory.vectors)
        assert len({tuple(row) for row in compressed.vectors_per_segment.tolist()}) > 1 or price


def test_build_conditions_of_a_baseline_leaves_out_texts_that_do_not_fit() -> None:
    decoder = reader(room=32).decoder
    run: Any = SimpleNamespace(method=LanguageModelBaseline(decoder), parts=SimpleNamespace(decoder=decoder))

    def names(C: int, T: int) -> list[str]:
        return [condition.name for condition in build_conditions(run, run, C, T, all_lengths=True)]

    assert names(8, 24) == ["none", "end 1", "end 2", "end 4", "full"]
    assert names(9, 24) == ["none", "end 1", "end 2", "end 4", "end 8"]
    assert names(9, 30) == ["none", "end 1", "end 2"]
