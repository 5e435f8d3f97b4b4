"""`laconic serve` as a process: OpenAI's client, streams, disconnects, slow bodies, signals, exit codes."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn

from laconic.serving.http.limits import Deadlines
from laconic.serving.http.server import GracefulServer
from tests.conftest import REPO, check_refused, needs

pytestmark = [pytest.mark.loopback, pytest.mark.usefixtures("unchecked"), pytest.mark.medium]
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


class ServerProcess:
    """A running `laconic serve` with its port."""

    def __init__(self, *flags: object, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "laconic", "serve", *map(str, flags), "--port", "0"]
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(REPO / "src")} | (env or {}), stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "serving" in line:
                break
        else:
            raise AssertionError("".join(self.log))
        self.port = int(self.log[-1].split("/v1")[0].rsplit(":", 1)[1])
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a JSON request and return status and body."""
        return self.request_raw(method, path, None if body is None else json.dumps(body).encode())

    def request_raw(self, method: str, path: str, content: bytes | None) -> tuple[int, bytes]:
        """Send bytes and return status and body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()

    def metric(self, name: str) -> float:
        """Return the value of a metric."""
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for a condition, at most 30 seconds."""
        deadline = time.monotonic() + 30
        while not is_done():
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.02)


@contextmanager
def run_server(*flags: object, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run a server for a block."""
    server = ServerProcess(*flags, env=env)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server(chat_folder: Path) -> Iterator[ServerProcess]:
    """A server on the chat model, for all tests of this file that leave it running."""
    with run_server(chat_folder, "--max-seconds", 5, "--max-batch-size", 2, "--max-queue", 4) as process:
        yield process


def open_client(server: ServerProcess, **options: Any) -> Any:
    """Return OpenAI's client."""
    needs("openai")
    import openai

    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", **options)


def test_openai_client_chats_completes_and_streams(server: ServerProcess) -> None:
    client = open_client(server)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=1
    )
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens == 6
    again = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, reply.choices[0].message, *MESSAGES], max_tokens=1
    )
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 6}
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply.choices[0].message.content
    assert chunks[-1].usage.total_tokens == reply.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1
    whole = client.completions.create(model="tiny", prompt="Once", max_tokens=5, temperature=0, logprobs=1)
    pieces = client.completions.create(model="tiny", prompt="Once", max_tokens=5, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(whole.choices[0].logprobs.token_logprobs) == 5


def test_openai_client_uses_memories(server: ServerProcess) -> None:
    client = open_client(server)
    body = {"text": "The meeting is on Thursday.", "method": "snapkv", "keep": 0.5}
    memory = client.post("/memories", body=body, cast_to=dict)
    options: dict[str, Any] = {"model": "tiny", "prompt": "When?", "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    assert client.completions.create(**options, extra_body={"memory": [memory["id"]]}).choices[0].text != plain
    assert client.delete(f"/memories/{memory['id']}", cast_to=dict)["deleted"]


def test_openai_client_raises_its_errors(server: ServerProcess) -> None:
    client = open_client(server, max_retries=0)
    import openai

    def chat(**options: Any) -> None:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 1} | options)

    with pytest.raises(openai.BadRequestError, match="tools is not supported") as error:
        chat(tools=[{"type": "function", "function": {"name": "f"}}])
    assert (error.value.param, error.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as error:
        chat(model="gpt-4")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(extra_body={"memory": ["none"]})
    with pytest.raises(openai.APITimeoutError):
        chat(max_tokens=400, n=2, timeout=0.001)


def test_client_that_disconnects_stops_costing(server: ServerProcess) -> None:
    for stream in (True, False):
        body = json.dumps({"prompt": "a", "max_tokens": 500, "n": 2, "stream": stream})
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if stream:
            assert connection.getresponse().read(20)
        server.wait_until(lambda: server.metric("laconic_batch_size") > 0)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        server.wait_until(lambda: server.metric("laconic_batch_size") == 0)
    status = 'laconic_requests_total{route="/v1/completions",status="499"}'
    server.wait_until(lambda: server.metric(status) == 2)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{", b"413"),
        (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
    ],
)
def test_raw_requests_are_refused(server: ServerProcess, data: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        with suppress(OSError):
            connection.sendall(data)
        assert connection.recv(100).split()[1] == status
    assert server.request("GET", "/health")[0] == 200


def test_slow_and_half_bodies_do_not_block(server: ServerProcess) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"prompt": '
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(head)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as half:
            half.sendall(head)
        assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert slow.recv(100).split()[1] == b"408"


def test_server_is_protected_by_its_key_or_by_loopback(run_cli, chat_folder: Path, monkeypatch) -> None:
    monkeypatch.delenv("LACONIC_API_KEY", raising=False)
    result = run_cli("serve", chat_folder, "--host", "0.0.0.0", "--port", 0)
    assert result.code == 77
    assert "give --api-key" in result.err
    with socket.create_server(("127.0.0.1", 0)) as busy:
        result = run_cli("serve", chat_folder, "--port", busy.getsockname()[1])
    assert result.code == 73
    assert "choose another port" in result.err

    def bind(listener: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", bind)
        result = run_cli("serve", chat_folder, "--host", "127.0.0.9")
    check_refused(result, 2, "--host 127.0.0.9: not an address of this machine")
    for flags, text in (
        (("--api-key", " "), "--api-key is empty"),
        (("--max-queue", 0), "--max-queue 0: give a number above 0"),
        (("--memory", "letter"), "expected NAME=FILE"),
        (("--inner-lr", 0.1), "--inner-lr: needs --learn"),
        (("--learn", "--quantize", "int8"), "--quantize: not available with --learn"),
        (("--port", 70000), "--port 70000"),
        (("--allowed-origin", "https://a.example/"), "expected scheme://host[:port] in lower case, or *"),
        (("--shutdown-seconds", -1), "give 0 or more"),
    ):
        result = run_cli("serve", chat_folder, *flags)
        check_refused(result, 2, text)
    result = run_cli("serve", "no model yet", "--memory", "letter=gone.safetensors")
    check_refused(result, 66, "no file gone.safetensors")


def start_stream(server: ServerProcess, **body: Any) -> HTTPResponse:
    """Send a streamed completion and return its answer once that has begun."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "Once", "stream": True} | body
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.read(6) == b"data: "
    return response


def refuses_connections(server: ServerProcess) -> bool:
    """Return whether nothing listens on the server's port."""
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port), timeout=30):
        return False
    return True


def interrupt_busy_server(
    server: ServerProcess, pool: ThreadPoolExecutor, number: int
) -> tuple[HTTPResponse, "Future[tuple[int, bytes]]"]:
    """Open a request of 60 texts and one that waits, signal the server, and return the first's answer and the other."""
    response = start_stream(server, max_tokens=450, n=60, seed=1, temperature=1)
    waiting = pool.submit(server.request, "POST", "/v1/completions", {"prompt": "Tom"})
    server.wait_until(lambda: server.metric("laconic_queue_length") >= 60)
    server.process.send_signal(number)
    server.wait_until(lambda: refuses_connections(server))
    return response, waiting


def test_server_ends_requests_some_time_after_sigterm() -> None:
    """A text that has begun ends with `length`; texts that wait, of the same request too, end in a 503."""
    with run_server("stories260k", "--shutdown-seconds", 1, "--max-batch-size", 1) as server:
        with ThreadPoolExecutor(1) as pool:
            response, waiting = interrupt_busy_server(server, pool, signal.SIGTERM)
            assert server.process.poll() is None, "a request still runs"
            text = response.read().decode()
            *_, last, error = text.strip().split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert 0 < text.count('"finish_reason":"') < 60
            status, content = waiting.result()
        assert (status, json.loads(content)["error"]["code"]) == (503, "shutting_down")
        assert server.process.wait(timeout=60) == 0
        assert [line.partition(",")[0] for line in server.log[1:]] == ["laconic: finishing 2 requests"]


def test_server_ends_requests_at_a_second_signal() -> None:
    with run_server("stories260k", "--max-batch-size", 1) as server:
        with ThreadPoolExecutor(1) as pool:
            response, waiting = interrupt_busy_server(server, pool, signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
            assert '"finish_reason":"length"' in response.read().decode()
            status, content = waiting.result()
        assert (status, json.loads(content)["error"]["code"]) == (503, "shutting_down")
        assert server.process.wait(timeout=60) == 130
        finishing, interrupted = server.log[1:]
        assert "finishing 2 requests, 30 s at most; Ctrl-C again ends them now" in finishing
        assert "interrupted" in interrupted


def test_second_sigterm_does_not_end_requests() -> None:
    """Wrappers forward the signal that the process group gets, too."""
    loop, server = MagicMock(), GracefulServer(uvicorn.Config("app"), Deadlines(1), 30)
    server.should_exit, server.loop = True, loop
    server.handle_exit(signal.SIGTERM, None)
    assert not loop.call_soon_threadsafe.called
    server.handle_exit(signal.SIGINT, None)
    assert loop.call_soon_threadsafe.called
    assert not server.force_exit


def test_server_finishes_what_runs_after_sigterm(server: ServerProcess) -> None:
    """The last test of the file, since it ends the server of all."""
    response = start_stream(server, max_tokens=400)
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: refuses_connections(server))
    chunks = response.read().decode().split("\n\n")
    assert chunks[-2:] == ["data: [DONE]", ""]
    assert '"finish_reason":"length"' in chunks[-3]
    assert server.process.wait(timeout=60) == 0
    assert "Traceback" not in "".join(server.log)
