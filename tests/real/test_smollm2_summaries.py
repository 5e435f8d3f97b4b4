"""An untrained memory does no harm on SmolLM2, where the papers' raw hidden states do."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.summary_tokens import SummaryParameters
from laconic.config.methods import CompressionConfig
from laconic.config.recipe import ModelConfig
from laconic.data.tokenizer import load_tokenizer
from laconic.experiment.from_recipe.build_model import resolve_summary_init
from laconic.models.decoder import Decoder

pytestmark = pytest.mark.real
NUM_DOCUMENTS, SEGMENTS, TOKENS, TAIL = 20, 4, 64, 32
MAX_HARM = 0.1  # nats per token


def read_sections(shared: Path, folder: Path) -> Tensor:
    """Token ids of the beginnings of sections of books."""
    tokenizer, length = load_tokenizer(folder), SEGMENTS * TOKENS + TAIL
    with (shared / "data/text/standard-ebooks.jsonl").open(encoding="utf-8") as lines:
        texts = (json.loads(line)["text"][: 8 * length] for line in islice(lines, 0, None, 20))
        rows = (tokenizer.encode(text, add_special_tokens=False)[:length] for text in texts)
        return torch.tensor(list(islice((ids for ids in rows if len(ids) == length), NUM_DOCUMENTS)))


def test_untrained_memory_does_no_harm(smollm2: Path, shared: Path) -> None:
    """Behind one, two and four untrained memories, the next tokens cost at most `MAX_HARM` more than behind none."""
    decoder, ids = Decoder.from_pretrained(smollm2), read_sections(shared, smollm2)
    tail = ids[:, -TAIL:]
    mask = torch.ones_like(tail, dtype=torch.bool)

    def harm(**settings: Any) -> list[float]:
        config = resolve_summary_init(CompressionConfig(max_vectors=8, **settings), ModelConfig(name="smollm2"))
        method = AutoCompressor(decoder, SummaryParameters(decoder, config, eos_token_id=2), config, total_steps=1)
        without, changes = method.nll(tail, mask, mask), list[float]()
        for n in (1, 2, 4):
            memory = None
            for i in range(SEGMENTS - n, SEGMENTS):
                memory = method.compress(ids[:, i * TOKENS : (i + 1) * TOKENS], None, memory)
            changes.append(float((method.nll(tail, mask, mask, memory) - without).mean()) / (TAIL - 1))
        return changes

    assert len(ids) == NUM_DOCUMENTS
    assert max(harm()) < MAX_HARM
    assert min(harm(summary_init="eos")) > 1.0
