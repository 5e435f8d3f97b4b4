"""How much of the source one has to read to follow an update or a compression: whole files that it enters."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from laconic.batches import DocumentBatch, ReasoningBatch
from laconic.config.training import TrainingConfig
from laconic.nested.language_model import NestedLanguageModel
from laconic.training.random_state import get_random_state
from laconic.training.ranks import Ranks
from laconic.training.row_order import compute_update_index
from laconic.training.step import Updater
from tests.compression.compressors import reader
from tests.house.walk import count_lines, trace_files
from tests.latent.batches import build_kava, reasoning_batch
from tests.nested.test_hope_model import build_hope, random_ids

MAX_FILES, MAX_LINES = 14, 2200  # a third of it is the decoder; lower these when files shrink
MAX_COMPRESSION_FILES = 25  # six are the decoder, eight compression, eleven tokenize, stream and store
MAX_HOPE_FILES, MAX_HOPE_LINES = 20, 4400  # three are the decoder, ten levels and memories, three their recurrences

pytestmark = pytest.mark.usefixtures("unchecked")


class ReasoningData:
    """Four rows of questions, chains and answers."""

    fingerprint = "0" * 64

    def __init__(self) -> None:
        self.rows = reasoning_batch(((5, 6, 4), (3, 3, 3), (4, 0, 5), (6, 5, 2)))

    def __len__(self) -> int:
        return self.rows.B

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        return self.rows.select_rows(rows)


def test_walk_kava_update() -> None:
    """One update of KaVa: forward, backward and optimizer."""
    config, data = TrainingConfig(steps=2, batch_size=4, micro_batch_size=2), ReasoningData()
    updater = Updater(build_kava().float(), config, 2, Ranks(), torch.device("cpu"))
    index = compute_update_index(config, 0, 0, len(data))
    random_state = get_random_state()
    files = trace_files(lambda: updater.update(data, index, random_state))
    assert {"latent/kava.py", "latent/rkv.py", "models/decoder.py", "training/step.py"} <= files.keys()
    assert len(files) <= MAX_FILES, sorted(files)
    assert count_lines(files) <= MAX_LINES, sorted(files)


def test_walk_compress(tmp_path: Path) -> None:
    """From a loaded model to a written memory file."""
    model = reader()
    files = trace_files(lambda: model.compress(["a text of several segments"]).save(tmp_path / "memory.safetensors"))
    assert {"compression/segment.py", "compression/saved_memory.py"} <= files.keys()
    assert len(files) <= MAX_COMPRESSION_FILES, sorted(files)


@pytest.mark.parametrize("objective", ["task", "associative"])
def test_walk_hope_update(objective: str) -> None:
    """Forward, backward and optimizer step of a batch of documents."""
    method = NestedLanguageModel(build_hope(objective))
    optimizer, ids = torch.optim.AdamW(method.parameters()), random_ids(2, 9)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    batch = DocumentBatch(ids, mask, mask, (ids.shape[1],), torch.arange(len(ids)), step=1)

    def update() -> None:
        method(batch).loss.backward()
        optimizer.step()

    files = trace_files(update)
    assert {"nested/hope/memories.py", "nested/cms/updates.py", "nested/language_model.py"} <= files.keys()
    assert len(files) <= MAX_HOPE_FILES, sorted(files)
    assert count_lines(files) <= MAX_HOPE_LINES, sorted(files)
