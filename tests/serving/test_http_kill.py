"""A server that is killed while it writes leaves each memory as it was, new, or not at all; sessions are forgotten."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load
from torch import Tensor

from laconic.compression.kv.config import KVCompressionConfig
from laconic.experiment.text_models.kv_compressor import compress_text
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.memories import check_and_add
from laconic.serving.http.memory_store import MemoryStore
from tests.runs import train_tiny_run
from tests.serving.test_http_process import ServerProcess, run_server
from tests.trust.children import Child

pytestmark = pytest.mark.usefixtures("unchecked")
ROUNDS = 12


def write_memories(model: LanguageModel, folder: Path) -> list[bytes]:
    """Return the contents of two memory files."""
    config, file = KVCompressionConfig("window", keep=0.5), folder / "memory.bin"
    contents = list[bytes]()
    for word in ("Monday", "Friday"):
        compress_text(model.decoder, model.tokenizer, f"{word} " * 40, config).memory.save(file)
        contents.append(file.read_bytes())
    return contents


@pytest.mark.medium
def test_memory_is_old_or_new_or_missing_after_a_kill(chat_model: LanguageModel, tmp_path: Path) -> None:
    contents = write_memories(chat_model, tmp_path)
    folder = tmp_path / "memories"
    folder.mkdir()
    served = ApiModel("tiny", chat_model)

    def open_store() -> MemoryStore:
        return MemoryStore(served, chat_model.decoder, folder)

    def write_forever(report) -> None:
        store = open_store()
        for step in count():
            report(step)
            for id in ("replaced", f"new_{os.getpid()}_{step % 8}"):
                with store.new_file() as path:
                    path.write_bytes(contents[step % 2])
                    check_and_add(store, path, id)

    waits, num_memories = random.Random(0), 0
    for _ in range(ROUNDS // 2):
        child = Child(write_forever)
        child.wait_for(waits.randrange(3))
        time.sleep(waits.uniform(0.0, 0.02))
        child.signal(signal.SIGKILL)
        assert child.end() == 128 + signal.SIGKILL
        store = open_store()
        for card in store.list():
            path = store.find(card.id).path
            assert path.read_bytes() in contents
            store.load_prefix((card.id,))
        num_memories = max(num_memories, len(store.list()))
        assert {path.suffix for path in folder.iterdir()} <= {".safetensors"}, "temporary files are removed"
    assert num_memories > 1


def write_until_killed(server: ServerProcess, work: Callable[[int], None], num_threads: int, seconds: float) -> None:
    """Call `work` with numbers from several threads, and kill the server meanwhile."""

    def work_until_killed(thread: int) -> None:
        with suppress(OSError, HTTPException):
            for step in count():
                work(thread + num_threads * step)

    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work_until_killed, thread) for thread in range(num_threads)]
        time.sleep(seconds)
        server.process.kill()
    for future in futures:
        future.result()


def check_memories(server: ServerProcess, contents: list[bytes]) -> list[str]:
    """Check that every memory is whole and can be read; return the ids."""
    cards = json.loads(server.request("GET", "/v1/memories")[1])["data"]
    for card in cards:
        content = server.request("GET", f"/v1/memories/{card['id']}/content")[1]
        assert len(content) == card["bytes"]
        assert content in contents or card["name"].startswith("text ")
        status, answer = server.request(
            "POST", "/v1/completions", {"prompt": "When?", "memory": [card["id"]], "max_tokens": 1}
        )
        assert status == 200, answer
    return [card["id"] for card in cards]


@pytest.mark.slow
@pytest.mark.loopback
def test_server_killed_while_memories_are_written_restarts_with_whole_ones(
    chat_model: LanguageModel, chat_folder: Path, tmp_path: Path
) -> None:
    contents, folder, waits = write_memories(chat_model, tmp_path), tmp_path / "memories", random.Random(0)
    kinds = set[str]()
    for number in range(ROUNDS + 1):
        with run_server(chat_folder, "--memory-dir", folder) as server:
            ids = check_memories(server, contents)
            kinds |= {id.split("_")[0] for id in ids}
            assert number == 0 or "replaced" in ids, "a memory that is replaced never vanishes"
            assert not list(folder.glob(".tmp-*"))
            assert server.request_raw("PUT", "/v1/memories/replaced", contents[0])[0] == 200

            def write(step: int, server: ServerProcess = server) -> None:
                match step % 4:
                    case 0:
                        server.request_raw("PUT", "/v1/memories/replaced", contents[step // 4 % 2])
                    case 1:
                        server.request_raw("PUT", f"/v1/memories/new_{step % 24}", contents[step // 4 % 2])
                    case 2:
                        body = {"text": f"Text {step}. " * 5, "name": f"text {step}", "method": "window", "keep": 0.5}
                        server.request("POST", "/v1/memories", body)
                    case _:
                        server.request("DELETE", f"/v1/memories/new_{(step - 10) % 24}")

            if number < ROUNDS:
                write_until_killed(server, write, 4, waits.uniform(0.05, 0.6))
    assert kinds == {"replaced", "new", "mem"}


@pytest.mark.slow
@pytest.mark.loopback
def test_server_killed_while_sessions_learn_restarts_without_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, states = train_tiny_run("hope", tmp_path), list[dict[str, Tensor]]()
    for number in range(4):
        with run_server(run, "--memory-dir", tmp_path / "memories", "--max-sessions", 4) as server:
            assert json.loads(server.request("GET", "/v1/sessions")[1])["data"] == []
            routes = [f"/v1/sessions/{json.loads(server.request('POST', '/v1/sessions')[1])['id']}" for _ in range(4)]
            assert server.request("POST", f"{routes[0]}/learn", {"text": "Anna has a dog. "})[0] == 200
            states.append(load(server.request("GET", f"{routes[0]}/state")[1]))

            def learn(step: int, routes: list[str] = routes, server: ServerProcess = server) -> None:
                server.request("POST", f"{routes[step % 4]}/learn", {"text": f"Text {step}. " * 20})

            write_until_killed(server, learn, 4, 0.1 + 0.1 * number)
    for state in states[1:]:
        assert all(state[name].equal(tensor) for name, tensor in states[0].items()), "learned from the beginning"
