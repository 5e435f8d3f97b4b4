"""Kill `laconic serve` while clients write memories, start it again, and compare its memories with those confirmed."""

import json
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path

from benchmarks.probes.counts import Counts
from benchmarks.probes.processes import KILLED, MAX_SECONDS, ForkedCommand, choose_moment, run_command_line, run_forked
from benchmarks.probes.works import check, find_leftovers

NAME, MODEL = "serve --memory-dir", "stories260k"
NUM_CLIENTS = 3
IDS = ("a", "b", "c", "d")  # memories that the clients replace and delete
WRITES_PER_KILL = 60  # of the server, among which the kill falls
PORT_WAIT = 0.01
MAX_WAIT = 0.3  # seconds before a kill at any time


class ForkedServer:
    """A running server with its port, 0 if it was killed before it had one; leaving its context kills it."""

    def __init__(self, folder: Path, kill_at: int = -1) -> None:
        action = partial(run_command_line, "serve", MODEL, "--port", 0, "--memory-dir", "memories")
        self.command = ForkedCommand(action, folder, kill_at)
        self.has_ended, self.port = False, 0
        while not self.port:
            log = self.command.logs[1].read_text()
            if "/v1" in log:
                self.port = int(log.split("/v1")[0].rsplit(":", 1)[1])
            elif self.command.has_ended():
                break
            time.sleep(PORT_WAIT)

    def request(self, method: str, path: str, content: bytes | None = None) -> tuple[int, bytes]:
        """Send a request and return status and body."""
        if not self.port:
            raise ConnectionRefusedError
        connection = HTTPConnection("127.0.0.1", self.port, timeout=MAX_SECONDS)
        try:
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def __enter__(self) -> "ForkedServer":
        return self

    def __exit__(self, *error: object) -> None:
        if not self.has_ended:
            self.stop(signal.SIGKILL)

    def stop(self, number: int) -> int:
        """End it by a signal and return its exit code."""
        self.command.send_signal(number)
        self.has_ended = True
        return self.command.wait().code


class MemoryClients:
    """Clients that put and delete memories, and remember what the server confirmed.

    Each id belongs to one client, so that its last requests are known: `allowed[id]` holds the contents that the id may
    have after a kill (None: no such memory).
    """

    def __init__(self, contents: list[bytes]) -> None:
        self.contents, self.lock = contents, threading.Lock()
        self.allowed: dict[str, set[bytes | None]] = {id: {None} for id in IDS}

    def write_forever(self, server: ForkedServer, client: int) -> None:
        """Write until the server is gone."""
        with suppress(OSError, HTTPException):
            for number in count():
                for id in IDS[client::NUM_CLIENTS]:
                    new = None if number % 5 == 4 else self.contents[number % len(self.contents)]
                    with self.lock:
                        self.allowed[id].add(new)
                    method = "DELETE" if new is None else "PUT"
                    status, body = server.request(method, f"/v1/memories/{id}", new)
                    assert status in (200, 204, 404), body
                    with self.lock:
                        self.allowed[id] = {new}

    def check(self, server: ForkedServer) -> str:
        """Return which memory is not as confirmed, "" if all are."""
        cards = {card["id"] for card in json.loads(server.request("GET", "/v1/memories")[1])["data"]}
        for id in IDS:
            content = server.request("GET", f"/v1/memories/{id}/content")[1] if id in cards else None
            if content not in self.allowed[id]:
                return f"memory {id} is {'missing' if content is None else 'another one'}"
            self.allowed[id] = {content}
            if content is not None:
                body = {"prompt": "A", "memory": [id], "max_tokens": 1}
                status, answer = server.request("POST", "/v1/completions", json.dumps(body).encode())
                if status != 200:
                    return f"memory {id} cannot be read: {answer.decode()[:200]}"
        return ""


def write_contents(model: str, folder: Path) -> list[bytes]:
    """Return the contents of two memory files."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = list[bytes]()
    for word in ("Monday", "Friday"):
        (folder / "text.txt").write_text(f"{word} is a day. " * 12)
        flags = ("--method", "window", "--keep", "0.5", "--out", "m.safetensors")
        check(run_forked(partial(run_command_line, "compress", model, "text.txt", *flags), folder))
        contents.append((folder / "m.safetensors").read_bytes())
    return contents


def kill_server(clients: MemoryClients, folder: Path, trial: int) -> str:
    """Kill a server while clients write, start another, and return what it has lost, "" if nothing."""
    moment = choose_moment(random.Random(f"serve {trial}"), WRITES_PER_KILL, MAX_WAIT)
    with (
        ForkedServer(folder, moment.write if moment.write >= 0 and not moment.delay else -1) as server,
        ThreadPoolExecutor(NUM_CLIENTS) as pool,
    ):
        tasks = [pool.submit(clients.write_forever, server, client) for client in range(NUM_CLIENTS)]
        if moment.delay:
            server.command.wait_for_write(moment.write)
            time.sleep(moment.delay)
            server.command.send_signal(signal.SIGKILL)
        for task in tasks:
            task.result()
        code = server.stop(signal.SIGKILL)
        assert code == KILLED, f"the server ended with {code}"
    with ForkedServer(folder) as server:
        return clients.check(server)


def storm_server(model: str, base: Path, num_kills: int, trial: int | None, command: str) -> Counts:
    """Kill a server `num_kills` times, or as in one trial; another one checks what it left."""
    counts, contents = Counts(NAME, command, lost=0), write_contents(model, base / "contents")
    folder = base / "server"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    clients = MemoryClients(contents)
    for number in range(num_kills) if trial is None else [trial]:
        problem = kill_server(clients, folder, number)
        counts.attempted += 1
        counts.lost = (counts.lost or 0) + bool(problem)
        if not problem and (left := find_leftovers(folder)):
            problem = f"left {left}"
        counts.survived += not problem
        if problem:
            counts.fail(number, problem)
        counts.show_progress(num_kills)
    return counts
