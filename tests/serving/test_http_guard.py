"""Access, limits and errors: keys, hosts, sizes, times, queues, and what answers do not tell."""

import asyncio
import gzip
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from laconic.errors import NonFiniteError
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.serving.engine import EngineStats
from laconic.serving.http import guard as guard_module
from laconic.serving.http import worker
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.guard import LimitedBody, RequestGuard, is_local_host
from laconic.serving.http.limits import Deadline, Deadlines, ServerOptions
from laconic.serving.http.memory_store import MemoryStore
from laconic.serving.http.metrics import ServerMetrics
from laconic.serving.sequence import RunningSequence
from tests.serving.conftest import NAME, StartServer

pytestmark = pytest.mark.usefixtures("unchecked")
BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


def error_of(response: Any) -> dict[str, Any]:
    return response.json()["error"]


def wait_until(is_done: Callable[[], bool]) -> None:
    """Wait for a condition, at most 30 seconds."""
    deadline = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_key_is_required_everywhere_but_for_health(chat_model: LanguageModel, start_server: StartServer) -> None:
    server = start_server(chat_model, api_key="sésame")
    assert server.get("/health").json() == {"status": "ok"}
    for value in (b"", b"Bearer wrong", "sésame".encode()):
        for route in ("/v1/models", "/metrics", "/nowhere"):
            response = server.get(route, headers={b"Authorization": value})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
    key = {b"Authorization": "Bearer sésame".encode()}
    assert server.get("/v1/models", headers=key).json()["data"][0]["id"] == NAME
    assert server.get("/v1/models", headers=key | {b"Host": b"example.org"}).status_code == 200


def test_compressed_bodies_are_refused_by_name(chat_model: LanguageModel, start_server: StartServer) -> None:
    server = start_server(chat_model)
    response = server.post("/v1/completions", content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415
    assert error_of(response)["message"] == "Content-Encoding 'gzip' is not supported; send the body uncompressed"
    assert server.post("/v1/completions", json=BODY, headers={"Content-Encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True), ("localhost:8000", True), ("127.0.0.1:8000", True), ("127.3.2.1", True), ("[::1]", True),
        ("[::1]:80", True), ("LOCALHOST", True), ("a.localhost", True), ("example.org", False), ("10.0.0.1:80", False),
        ("localhost.example.org", False), ("[::2]", False), ("", False), ("127.0.0.1.example.org:80", False),
    ],
)  # fmt: skip
def test_host_of_this_machine(host: str, is_local: bool) -> None:
    assert is_local_host(host) == is_local


def test_host_of_another_machine_is_refused_without_a_key(client: TestClient) -> None:
    response = client.get("/v1/models", headers={"Host": "attacker.example"})
    assert response.status_code == 403
    assert "--api-key" in error_of(response)["message"]


@pytest.mark.parametrize("key", [None, "secret"])
def test_pages_of_allowed_origins_get_answers(chat_model: LanguageModel, start_server: StartServer, key) -> None:
    server = start_server(chat_model, api_key=key, allowed_origins=["https://app.example"])
    headers = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    preflight = server.options("/v1/completions", headers=headers | {"Access-Control-Request-Headers": "authorization"})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://app.example")
    headers = {"Origin": "https://app.example", "Authorization": f"Bearer {key}"}
    answer = server.get("/v1/models", headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    other = server.get("/v1/models", headers=headers | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert other.status_code == (403 if key is None else 200)


def test_requests_are_logged_with_the_id_of_the_client(
    chat_model: LanguageModel, start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(chat_model, log_requests=True)
    assert server.get("/nowhere", headers={"X-Request-Id": "trace-7"}).headers["x-request-id"] == "trace-7"
    assert server.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2:5] for line in lines] == [["GET", "/nowhere", "404"], ["GET", "/health", "200"]]
    assert lines[0].startswith("trace-7 ")
    server.get("/x%0Aforged 10.0.0.1 POST /v1/completions 200")
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("route", ["/health", "/v1/models", "/metrics"])
def test_head_has_the_status_of_get(client: TestClient, route: str) -> None:
    """Health checks such as `wget --spider` send HEAD."""
    assert client.head(route).status_code == client.get(route).status_code == 200
    assert client.head("/nowhere").status_code == 404
    assert client.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("origin", ["https://example.org", "null"])
def test_web_page_of_another_machine_is_refused_without_a_key(client: TestClient, origin: str) -> None:
    assert client.post("/v1/sessions", headers={"Origin": origin}).status_code == 403
    assert client.get("/v1/models", headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_cors_and_documentation_pages_are_off(client: TestClient) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    response = client.options("/v1/models", headers=headers)
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert {client.get(route).status_code for route in ("/docs", "/redoc", "/openapi.json")} == {404}
    assert client.post("/v1/completions", content=b'{"prompt": "a"}').status_code == 400  # without a JSON type


def test_unknown_routes_and_methods_name_what_the_server_has(client: TestClient) -> None:
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    for route in ("/v1/responses", "/v1/embeddings", "/", "/v1/memories/"):
        response = client.post(route, json={"input": "Hello"})
        assert response.status_code == 404
        assert error_of(response)["code"] == "unknown_route"
        assert error_of(response)["type"] == "not_found_error"
        assert f"'{route}' is not a route" in error_of(response)["message"]
        assert "/v1/chat/completions, /v1/completions, /v1/memories, /v1/models" in error_of(response)["message"]
    for method, route, allowed in (("GET", "/v1/completions", "POST"), ("PATCH", "/v1/memories", "GET, POST")):
        response = client.request(method, route)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
        assert error_of(response)["message"] == f"'{route}' takes {allowed}, not {method}"


def test_limits_of_sizes(chat_model: LanguageModel, start_server: StartServer) -> None:
    server = start_server(chat_model, max_body_bytes=200, max_prompt_tokens=20, max_generated_tokens=5)
    assert error_of(server.post("/v1/completions", json={"prompt": "a" * 300}))["code"] == "body_too_large"
    parts = (b'{"prompt": "', b"a" * 300, b'"}')
    response = server.post("/v1/completions", content=iter(parts), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    response = server.post("/v1/completions", json={"prompt": "a" * 21})
    assert error_of(response)["code"] == "context_length_exceeded"
    for max_tokens in ({"max_tokens": 5}, {"max_tokens": 10**9}, {}):
        answer = server.post("/v1/completions", json={"prompt": "a" * 20} | max_tokens).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[RunningSequence], float]) -> None:
    """Let the engine wait after each token."""
    choose = RunningSequence.choose_next

    def choose_slowly(self: RunningSequence, logits: Any) -> None:
        choose(self, logits)
        time.sleep(seconds(self))

    monkeypatch.setattr(RunningSequence, "choose_next", choose_slowly)


@pytest.mark.medium
def test_deadline_ends_an_answer_with_length(
    chat_model: LanguageModel, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(chat_model, max_seconds=1)
    slow_down(monkeypatch, lambda sequence: 1.5 * (sequence.num_tokens == 2))
    choice = server.post("/v1/completions", json=BODY | {"max_tokens": 100}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["text"]) <= 4
    monkeypatch.setattr(RunningSequence, "choose_next", lambda self, logits: time.sleep(1.5))
    response = server.post("/v1/completions", json=BODY)
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    streamed = server.post("/v1/completions", json=BODY | {"stream": True})
    assert '"error"' in streamed.text
    assert "[DONE]" not in streamed.text


@pytest.mark.medium
def test_deadline_refuses_a_request_with_texts_that_have_not_begun(
    chat_model: LanguageModel, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(chat_model, max_seconds=1, max_batch_size=1)
    slow_down(monkeypatch, lambda sequence: 0.6)
    prompts = {"prompt": ["abc", "abx", "aby"], "max_tokens": 50}
    assert server.post("/v1/completions", json=BODY | prompts).status_code == 408
    scoring = BODY | prompts | {"max_tokens": 0, "echo": True, "logprobs": 1}
    assert server.post("/v1/completions", json=scoring).status_code == 408
    monkeypatch.undo()
    scores = server.post("/v1/completions", json=scoring).json()["choices"]
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in scores] == [3, 3, 3]


def test_time_limits_that_have_just_expired_are_not_moved() -> None:
    """asyncio refuses to move them, which would break the shutdown, or the request that wants the place of another."""

    async def run() -> None:
        loop, errors = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda loop, context: errors.append(context))
        deadline = Deadline(loop.time() + 600)
        with pytest.raises(ApiError):  # noqa: PT012
            async with deadline.limit():
                next(iter(deadline.timeouts)).reschedule(0)
                loop.call_soon(deadline.shorten, 0)  # after the timeout has expired, before the block ends
                await asyncio.sleep(60)
        assert not errors
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0) as expired:
                await asyncio.sleep(60)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"end"}

        open_bodies: Any = {"another": expired}
        body = LimitedBody(receive, 100, Deadline(loop.time() + 600), open_bodies, max_open=1)
        assert (await body.receive())["body"] == b"end"

    asyncio.run(run())


@pytest.mark.parametrize(("is_shutdown", "status"), [(False, 408), (True, 503)])
def test_deadline_ends_what_a_request_waits_for(is_shutdown: bool, status: int) -> None:
    async def wait() -> None:
        deadlines = Deadlines(600 if is_shutdown else 0.01)
        with deadlines.open() as deadline:
            if is_shutdown:
                asyncio.get_running_loop().call_soon(deadlines.shut_down, 0.01)
            with pytest.raises(ApiError) as error:
                async with deadline.limit():
                    await asyncio.sleep(60)
            assert error.value.status_code == status
        with deadlines.open() as later:
            assert later.is_shutdown == is_shutdown

    asyncio.run(wait())


async def read_body(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the size of the body."""
    body = await Request(scope, receive).body()
    await Response(str(len(body)))(scope, receive, send)


def build_scope() -> dict[str, Any]:
    headers = [(b"host", b"localhost")]
    return {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}


def test_client_that_leaves_during_its_upload_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = ServerMetrics(EngineStats)
    guard = RequestGuard(read_body, ServerOptions(), Deadlines(600), metrics)
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        pass

    asyncio.run(guard(build_scope(), receive, send))
    assert b'laconic_requests_total{route="unknown",status="499"} 1.0' in metrics.render()
    assert capsys.readouterr().err == ""


def test_body_that_does_not_arrive_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of open bodies the one that waits longest ends; one that still arrives is read."""
    options = ServerOptions(max_batch_size=1, max_queue=1)
    guard = RequestGuard(read_body, options, Deadlines(600), ServerMetrics(EngineStats))

    async def post(*pieces: bytes) -> tuple[int, bytes | None]:
        messages = iter([{"type": "http.request", "body": piece, "more_body": True} for piece in pieces])
        start: dict[str, Any] = {}

        async def receive() -> Any:
            message = next(messages, None)
            if message is not None and message["body"] == b"end":
                return message | {"more_body": False}
            return message or await asyncio.sleep(600)

        async def send(message: Any) -> None:
            start.update(message if message["type"] == "http.response.start" else {})

        await guard(build_scope(), receive, send)
        return start["status"], dict(start["headers"]).get(b"connection")

    async def run() -> None:
        half = [asyncio.ensure_future(post(b"{")) for _ in range(3)]
        assert await half[0] == (408, b"close")
        assert await post(b"{", b"end") == (200, None)
        assert await half[1] == (408, b"close"), "each new one ends the one that has waited longest"
        assert not half[2].done()
        monkeypatch.setattr(guard_module, "BODY_SECONDS", 0.01)
        assert await post(b"{", b"{") == (408, b"close")
        half[2].cancel()

    asyncio.run(run())


def test_full_queue_is_a_429(
    chat_model: LanguageModel, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(chat_model, max_batch_size=1, max_queue=2)
    may_go_on, choose = threading.Event(), RunningSequence.choose_next

    def wait_and_choose(self: RunningSequence, logits: Any) -> None:
        assert may_go_on.wait(30)
        choose(self, logits)

    monkeypatch.setattr(RunningSequence, "choose_next", wait_and_choose)
    engine, results = cast(Any, server.app).state.services.engine, list[int]()

    def start_post() -> threading.Thread:
        post = threading.Thread(target=lambda: results.append(server.post("/v1/completions", json=BODY).status_code))
        post.start()
        return post

    threads = [start_post()]
    wait_until(lambda: engine.stats().num_running == 1)
    threads += [start_post(), start_post()]
    wait_until(lambda: engine.stats().num_waiting == 2)
    response = server.post("/v1/completions", json=BODY)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert error_of(response)["code"] == "queue_full"
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert results == [200, 200, 200]


def test_waiting_texts_are_limited(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_JOBS", 0)
    response = client.post("/v1/memories", json={"text": "a"})
    assert response.status_code == 429


def test_worker_removes_a_job_whose_thread_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        texts, deadlines = worker.Worker(), Deadlines(600)
        with deadlines.open() as deadline:
            with monkeypatch.context() as patch:
                patch.setattr(worker, "start_thread", fail)
                with pytest.raises(RuntimeError):
                    await texts.run(lambda turn: None, deadline)
            assert not texts.jobs
            assert await texts.run(lambda turn: "read", deadline) == "read"

    asyncio.run(run())


def test_worker_lets_texts_take_turns() -> None:
    """A short text waits for one piece of each long one; a cancelled job ends at its turn, and so do all at the end."""

    async def run() -> list[str]:
        texts, deadlines, order, has_all = worker.Worker(), Deadlines(600), list[str](), threading.Event()

        def read(name: str, num_pieces: int) -> Callable[[Callable[[], None]], str]:
            def work(pass_turn_on: Callable[[], None]) -> str:
                assert has_all.wait(30)
                for _ in range(num_pieces):
                    order.append(name)
                    pass_turn_on()
                return name

            return work

        with deadlines.open() as deadline:
            tasks = [
                asyncio.ensure_future(texts.run(read(name, n), deadline))
                for name, n in (("long", 5), ("gone", 9), ("short", 1), ("longest", 10**9))
            ]
            await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.sleep(0)
            has_all.set()
            assert await tasks[2] == "short"
            assert await tasks[0] == "long"
            await asyncio.get_running_loop().run_in_executor(None, texts.close)
            with pytest.raises(worker.JobCancelledError):
                await tasks[3]
            assert not texts.jobs
            return order

    order = asyncio.run(run())
    assert order[:6] == ["long", "short", "longest", "long", "longest", "long"]
    assert "gone" not in order


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priority of threads")
def test_worker_leaves_the_cores_to_the_engine(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities, add = list[int](), MemoryStore.add

    def add_and_note(store: MemoryStore, *arguments: Any) -> Any:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return add(store, *arguments)

    monkeypatch.setattr(MemoryStore, "add", add_and_note)
    assert client.post("/v1/memories", json={"text": "a b", "method": "window"}).status_code == 200
    assert priorities[0] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def test_internal_error_says_nothing_but_its_id(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise NonFiniteError("/secret/folder: logits are not finite")

    monkeypatch.setattr(RunningSequence, "choose_next", fail)
    response = client.post("/v1/completions", json=BODY)
    assert response.status_code == 500
    request_id = response.headers["x-request-id"]
    assert error_of(response)["message"] == f"internal error; the server's log has it under request {request_id}"
    assert f"request {request_id} failed" in (log := capsys.readouterr().err)
    assert "/secret/folder" in log
    monkeypatch.setattr(RunningSequence, "end_prompt", fail)
    messages = [{"role": "user", "content": "Hi"}]
    streamed = client.post("/v1/chat/completions", json={"messages": messages, "stream": True})
    role, error, end = streamed.text.split("\n\n")
    assert '"delta":{"role":"assistant","content":""}' in role, "the role does not wait for the prompt"
    assert ("internal error" in error, end) == (True, "")
    assert "secret" not in streamed.text
    monkeypatch.undo()
    assert client.post("/v1/completions", json=BODY).status_code == 200


def test_metrics_count_requests_and_tokens(chat_model: LanguageModel, start_server: StartServer) -> None:
    server = start_server(chat_model)
    server.post("/v1/completions", json=BODY | {"n": 2})
    server.post("/v1/completions", json={})
    server.get("/nowhere/at/all")
    lines = server.get("/metrics").text.splitlines()
    for line in (
        'laconic_requests_total{route="/v1/completions",status="200"} 1.0',
        'laconic_requests_total{route="/v1/completions",status="400"} 1.0',
        'laconic_requests_total{route="unknown",status="404"} 1.0',
        "laconic_prompt_tokens_total 8.0",
        "laconic_generated_tokens_total 8.0",
        "laconic_time_to_first_token_seconds_count 2.0",
        "laconic_inter_token_seconds_count 6.0",
        "laconic_batch_size 0.0",
        "laconic_queue_length 0.0",
        "laconic_kv_cache_bytes 0.0",
    ):
        assert line in lines, line
