"""A server that is killed while it writes memories leaves each one as it was, new, or not at all."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from laconic.compression.kv_compress import KVCompressionConfig
from laconic.experiment.kv_compressor import compress_text
from laconic.experiment.language_model import LanguageModel
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.memories import check_and_add
from laconic.serving.http.memory_store import MemoryStore
from tests.trust.children import Child

pytestmark = pytest.mark.usefixtures("unchecked")
ROUNDS = 12


def test_memory_is_old_or_new_or_missing_after_a_kill(chat_model: LanguageModel, tmp_path: Path) -> None:
    texts = [f"{word} " * 40 for word in ("Monday", "Friday")]
    config = KVCompressionConfig("window", keep=0.5)
    files = [tmp_path / f"{number}.bin" for number in range(2)]
    for file, text in zip(files, texts, strict=True):
        compress_text(chat_model.decoder, chat_model.tokenizer, text, config).memory.save(file)
    contents = [file.read_bytes() for file in files]
    folder = tmp_path / "memories"
    folder.mkdir()
    served = ApiModel("tiny", chat_model)

    def open_store() -> MemoryStore:
        return MemoryStore(served, chat_model.decoder, folder, 256, {})

    def write_forever(report) -> None:
        store, step = open_store(), 0
        report(0)
        while True:
            path = store.new_path()
            path.write_bytes(contents[step % 2])
            check_and_add(store, path, "replaced")
            path = store.new_path()
            path.write_bytes(contents[step % 2])
            check_and_add(store, path, f"new_{os.getpid()}_{step % 8}")
            step += 1

    waits, num_memories = random.Random(0), 0
    for _ in range(ROUNDS):
        child = Child(write_forever)
        child.wait_for(0)
        time.sleep(waits.uniform(0.0, 0.05))
        child.signal(signal.SIGKILL)
        assert child.end() == 128 + signal.SIGKILL
        store = open_store()
        for card in store.list():
            path = store.get(card.id).path
            assert path.read_bytes() in contents
            store.load_prefix((card.id,))
        num_memories = max(num_memories, len(store.list()))
        assert {path.suffix for path in folder.iterdir()} <= {".safetensors"}, "temporary files are removed"
    assert num_memories > 1
