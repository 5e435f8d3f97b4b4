"""SmolLM2 learns while it reads a book: it predicts better, and its saved state is exact and written once."""

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import learning
from laconic.data.tokenizer import load_tokenizer
from laconic.experiment.from_recipe.untrained_levels import parse_level_options
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.losses import masked_cross_entropy
from laconic.models.decoder import Decoder
from laconic.nested import state as values
from laconic.nested.state import FastWeightState
from tests.nested.helpers import states_equal

pytestmark = pytest.mark.real
SECTION, TOKENS, MIDDLE = 40, 448, 224  # The Blue Carbuncle; the middle is inside a chunk of 64


def read(model: NestedTextModel, ids: Tensor, state: FastWeightState | None, learn: bool) -> tuple[Any, float]:
    with torch.no_grad():
        output = model.model.read_tokens(ids, state, update_weights=learn)
        loss = masked_cross_entropy(model.model.logits, output.hidden_states[:, :-1], ids[:, 1:]).loss
    return output, float(loss)


def test_levels_without_clipping_read_as_dynamic_evaluation_with_sgd(smollm2: Path, shared: Path) -> None:
    """The step of a level is that of torch.optim.SGD on the MLPs after each chunk; only the clipping is added."""
    decoder = Decoder.from_pretrained(smollm2)
    levels = parse_level_options({"inner_lr": 0.03, "chunk_sizes": [64], "max_update_ratio": 0, "max_error_norm": 0})
    model = NestedTextModel.from_decoder(Decoder.from_pretrained(smollm2), load_tokenizer(smollm2), levels)
    ids = learning.load_book(model.tokenizer, learning.VALIDATION_BOOK, 256)
    with_levels = learning.read_with_levels(model.model, ids, window=512)
    for name, p in decoder.named_parameters():
        p.requires_grad_(".mlp." in name)
    with_sgd = learning.evaluate_dynamically(decoder, ids, 512, 64, partial(torch.optim.SGD, lr=0.03))
    still = learning.read_with_fixed_weights(decoder, ids[:, :65], 512)  # by now the decoder has learned
    assert not torch.allclose(still.nats, with_sgd.nats[:64], atol=1e-2)
    torch.testing.assert_close(with_levels.nats, with_sgd.nats, atol=2e-3, rtol=0)


def test_smollm2_learns_from_a_book(smollm2: Path, shared: Path, tmp_path: Path) -> None:
    model, decoder = NestedTextModel.from_pretrained(smollm2), Decoder.from_pretrained(smollm2)
    with (shared / "data/text/standard-ebooks.jsonl").open(encoding="utf-8") as lines:
        text = json.loads(next(islice(lines, SECTION, None)))["text"]
    ids = torch.tensor([model.tokenizer.encode(text)[:TOKENS]])
    with torch.no_grad():
        chunk = ids[:, :64]
        assert torch.equal(model.model.read_tokens(chunk).hidden_states, decoder(decoder.embed(chunk)).hidden_states)

    middle = read(model, ids[:, :MIDDLE], None, learn=True)[0].cache
    path = tmp_path / "state.safetensors"
    model.save(middle, path)
    # A change of rank MIDDLE in every map of the MLPs, applied or in the open chunk, and the keys and values
    maps = [p for name, p in model.model.named_parameters() if ".mlp.levels." in name and p.ndim == 2]
    numbers = MIDDLE * sum(sum(p.shape) for p in maps)
    cache = values.num_bytes(middle.attention_cache)
    assert path.stat().st_size < 1.01 * (4 * numbers + len(middle.layers) * cache)

    uninterrupted, loss = read(model, ids[:, MIDDLE:], middle, learn=True)
    resumed, _ = read(model, ids[:, MIDDLE:], model.load_memory(path), learn=True)
    assert torch.equal(resumed.hidden_states, uninterrupted.hidden_states)
    assert states_equal(resumed.cache, uninterrupted.cache)

    still = read(model, ids[:, :MIDDLE], None, learn=False)[0].cache
    assert loss < read(model, ids[:, MIDDLE:], still, learn=False)[1]
