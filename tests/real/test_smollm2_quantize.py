"""SmolLM2 with int8 weights: loss on book text, and agreement of its greedy choices."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import laconic
from laconic.data.tokenizer import Tokenizer

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("unchecked")]
WINDOWS, LENGTH = 6, 512
MAX_LOSS, LEAST_AGREEMENT = 0.02, 0.9  # nats per token; share of positions with the same most likely token


def read_windows(path: Path, tokenizer: Tokenizer) -> Tensor:
    """Return ids from the middle of the first long sections, [WINDOWS, LENGTH]."""
    rows: list[list[int]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            ids = tokenizer.encode(text[len(text) // 2 :][: 8 * LENGTH])[:LENGTH]
            if len(ids) == LENGTH:
                rows.append(ids)
            if len(rows) == WINDOWS:
                break
    return torch.tensor(rows)


@torch.inference_mode()
def measure(decoder: laconic.Decoder, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each window and the most likely token at each position."""
    losses: list[Tensor] = []
    choices: list[Tensor] = []
    for row in ids:
        logits = decoder.logits(decoder(decoder.embed(row[None])).hidden_states[0, :-1])
        losses.append(F.cross_entropy(logits, row[1:]))
        choices.append(logits.argmax(-1))
    return torch.stack(losses), torch.stack(choices)


def test_quantized_smollm2_loses_little(smollm2: Path, shared: Path) -> None:
    decoder = laconic.Decoder.from_pretrained(smollm2, dtype=torch.float32)
    ids = read_windows(shared / "data/text/standard-ebooks.jsonl", laconic.load_tokenizer(smollm2))
    (expected, choices), (losses, quantized) = (measure(d, ids) for d in (decoder, laconic.quantize_decoder(decoder)))
    assert losses.mean() - expected.mean() <= MAX_LOSS
    assert not losses.equal(expected)
    assert (choices == quantized).float().mean() >= LEAST_AGREEMENT


def test_quantized_smollm2_answers(smollm2: Path) -> None:
    decoder = laconic.quantize_decoder(laconic.Decoder.from_pretrained(smollm2, dtype=torch.float32))
    config = laconic.GenerationConfig(max_tokens=12)
    (answer,) = laconic.generate(decoder, laconic.load_tokenizer(smollm2), ["The capital of France is"], config=config)
    assert "Paris" in answer.text
