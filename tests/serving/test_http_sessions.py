"""/v1/sessions of models that learn: learn, fork, reset, state; one writer, and readers see the state before it."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

import laconic
from laconic.experiment.text_models import read_into_state
from laconic.experiment.text_models.nested_model import NestedTextModel
from laconic.generation.config import GenerationConfig
from laconic.nested import state_file
from laconic.serving.http import prompts, sessions
from tests.nested.helpers import states_equal
from tests.runs import train_tiny_run
from tests.serving.conftest import StartServer, start_client
from tests.serving.interleaving import check_no_leaks

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.medium]
TEXT = "The meeting has been moved to Thursday at noon, in the red room."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NestedTextModel:
    folder = tmp_path_factory.mktemp("hope")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return cast(NestedTextModel, laconic.load(train_tiny_run("hope", folder)))


@pytest.fixture(scope="module")
def learner(model: NestedTextModel) -> Iterator[TestClient]:
    """A client of a server on a model that learns."""
    with ExitStack() as stack:
        yield start_client(stack, model, max_sessions=6, max_body_bytes=1500)


def post(client: TestClient, route: str, **body: Any) -> dict[str, Any]:
    response = client.post(f"/v1/sessions{route}", json=body or None)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: TestClient, session: str | None, prompt: str = "When?") -> str:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "session": session}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def generate(model: NestedTextModel, *texts: str, prompt: str = "When?") -> str:
    state = None
    for text in texts:
        state = model.compress([text], state)
    return model.generate([prompt], GenerationConfig(max_tokens=6), memory=state)[0].text


def test_session_learns_forks_resets_and_is_deleted(
    learner: TestClient, model: NestedTextModel, tmp_path: Path
) -> None:
    session = post(learner, "")
    assert session["tokens"] == 0
    assert complete(learner, session["id"]) == complete(learner, None) == generate(model)
    assert post(learner, f"/{session['id']}/learn", text=TEXT)["tokens"] == len(TEXT)
    fork = post(learner, f"/{session['id']}/fork")
    assert fork["tokens"] == len(TEXT)
    post(learner, f"/{fork['id']}/learn", text="A second text, for the fork alone.")
    assert complete(learner, session["id"]) == generate(model, TEXT)
    assert complete(learner, fork["id"]) == generate(model, TEXT, "A second text, for the fork alone.")
    path = tmp_path / "state.safetensors"
    path.write_bytes(learner.get(f"/v1/sessions/{session['id']}/state").content)
    assert states_equal(model.load_memory(path), model.compress([TEXT]))
    assert post(learner, f"/{session['id']}/reset")["tokens"] == 0
    assert complete(learner, session["id"]) == generate(model)
    ids = {entry["id"] for entry in learner.get("/v1/sessions").json()["data"]}
    assert {session["id"], fork["id"]} <= ids
    for id in ids:
        assert learner.delete(f"/v1/sessions/{id}").json()["deleted"]
    assert learner.get(f"/v1/sessions/{fork['id']}").status_code == 404


def test_state_is_uploaded_to_another_session(
    learner: TestClient, client: TestClient, model: NestedTextModel, tmp_path: Path
) -> None:
    """A state survives a restart of the server in the client's hands, and one from the command line goes on."""
    first, second = post(learner, "")["id"], post(learner, "")["id"]
    post(learner, f"/{first}/learn", text=TEXT)
    content = learner.get(f"/v1/sessions/{first}/state").content
    assert len(content) > 1500  # the limit of JSON bodies
    card = learner.put(f"/v1/sessions/{second}/state", content=content).json()
    assert (card["id"], card["tokens"]) == (second, len(TEXT))
    assert complete(learner, second) == generate(model, TEXT)
    assert post(learner, f"/{second}/learn", text="Then on.")["tokens"] == len(TEXT) + 8
    assert complete(learner, second) == generate(model, TEXT, "Then on.")
    post(learner, f"/{first}/reset")
    untouched = learner.get(f"/v1/sessions/{first}/state").content
    assert learner.put(f"/v1/sessions/{second}/state", content=untouched).json()["tokens"] == 0
    assert complete(learner, second) == generate(model)

    post(learner, f"/{second}/learn", text=TEXT)
    model.save(model.compress([TEXT, TEXT[::-1]]), tmp_path / "two.safetensors")
    for bad, words in (
        (content[:-9], "cut off"),
        (b"", "the file"),
        ((tmp_path / "two.safetensors").read_bytes(), "the states of 2 texts"),
    ):
        response = learner.put(f"/v1/sessions/{second}/state", content=bad)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert words in message
        assert "/tmp" not in message
    for documents in (None, [[{"name": "a", "sha256": "b", "tokens": 3, "x": 1}]]):  # both are read
        changed = tmp_path / "changed.safetensors"
        state_file.save_state(
            model.compress([TEXT]), changed,
            model_fingerprint=model.model.weights_fingerprint,
            source={"tokenizer": model.tokenizer.fingerprint, "documents": documents},
        )  # fmt: skip
        response = learner.put(f"/v1/sessions/{second}/state", content=changed.read_bytes())
        assert (response.status_code, response.json()["tokens"]) == (200, len(TEXT))
    assert complete(learner, second) == generate(model, TEXT)
    assert learner.put("/v1/sessions/ses_0/state", content=content).status_code == 404
    assert client.put("/v1/sessions/ses_0/state", content=content).status_code == 400
    assert "upload a state to /v1/sessions" in client.put("/v1/memories/a", content=content).json()["error"]["message"]
    for id in (first, second):
        learner.delete(f"/v1/sessions/{id}")


def test_state_that_is_uploaded_does_not_block_its_session(
    learner: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = post(learner, "")["id"]
    content = learner.get(f"/v1/sessions/{session}/state").content
    store, save = cast(Any, learner.app).state.services.sessions, sessions.save_body

    async def save_while_another_writes(*arguments: Any) -> None:
        with store.write(session):
            await save(*arguments)

    monkeypatch.setattr(sessions, "save_body", save_while_another_writes)
    assert learner.put(f"/v1/sessions/{session}/state", content=content).status_code == 200
    learner.delete(f"/v1/sessions/{session}")


def test_session_keeps_its_attention_cache_if_no_length_is_given(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients leave max_tokens out or send a large number; what was read just before must still be seen."""
    monkeypatch.setattr(prompts, "MIN_ANSWER_TOKENS", 16)
    folder = tmp_path / "of 96 positions"
    shutil.copytree(Path(laconic.__file__).parent / "checkpoints/stories260k", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    client = start_server(NestedTextModel.from_pretrained(folder))
    session = post(client, "")["id"]
    post(client, f"/{session}/learn", text="Tim had a blue kite. " * 4)
    body = {"prompt": "Tim had", "temperature": 0, "session": session}
    texts = [
        client.post("/v1/completions", json=body | length).json()["choices"][0]["text"]
        for length in ({"max_tokens": 8}, {"max_tokens": 100_000}, {})
    ]
    assert texts[0]
    assert texts[1].startswith(texts[0])
    assert texts[2].startswith(texts[0]) or texts[0].startswith(texts[2])


def test_sessions_of_a_plain_checkpoint(start_server: StartServer) -> None:
    """As `laconic generate --learn` has them, with BOS before the first text alone."""
    stories = NestedTextModel.from_pretrained("stories260k")
    assert stories.tokenizer.encode("") == [stories.tokenizer.bos_token_id]
    client, texts = start_server(stories), ["Once upon a time, there was a red dog. " * 9, "The dog saw a bird. " * 16]
    session = post(client, "")["id"]
    answers = [complete(client, session, "The dog")]
    encode, num_tokens = stories.tokenizer.encode, 0
    for text in texts:
        num_tokens += len(encode(text, add_special_tokens=num_tokens == 0))
        assert post(client, f"/{session}/learn", text=text)["tokens"] == num_tokens
        answers.append(complete(client, session, "The dog"))
    assert answers == [generate(stories, *texts[:n], prompt="The dog") for n in range(3)]
    assert len(set(answers)) > 1


def test_session_has_one_writer_and_readers_see_the_state_before(
    learner: TestClient, model: NestedTextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = post(learner, "")["id"]
    has_begun, may_go_on = threading.Event(), threading.Event()
    advance = read_into_state.StateReadingJob.advance

    def wait_and_advance(self: Any, piece: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(30)
        return advance(self, piece)

    monkeypatch.setattr(read_into_state.StateReadingJob, "advance", wait_and_advance)
    results: list[dict[str, Any]] = []
    writer = threading.Thread(target=lambda: results.append(post(learner, f"/{session}/learn", text=TEXT)))
    writer.start()
    assert has_begun.wait(30)
    for method, route in (("POST", "learn"), ("POST", "reset"), ("DELETE", "")):
        body = {"text": TEXT} if route == "learn" else {}
        response = learner.request(method, f"/v1/sessions/{session}/{route}".rstrip("/"), json=body)
        assert response.status_code == 409, response.text
        assert response.headers["x-should-retry"] == "false"
    assert complete(learner, session) == generate(model)
    may_go_on.set()
    writer.join()
    assert results[0]["tokens"] == len(TEXT)
    assert complete(learner, session) == generate(model, TEXT)
    learner.delete(f"/v1/sessions/{session}")


def test_sessions_have_limits_and_names(learner: TestClient, client: TestClient) -> None:
    ids = [post(learner, "")["id"] for _ in range(6)]
    response = learner.post("/v1/sessions")
    assert response.status_code == 400
    assert "delete one first" in response.json()["error"]["message"]
    for id in ids:
        learner.delete(f"/v1/sessions/{id}")
    assert learner.post("/v1/completions", json={"prompt": "a", "session": "none"}).status_code == 404
    session = post(learner, "")["id"]
    assert learner.post(f"/v1/sessions/{session}/learn", json={"text": "\n"}).status_code == 200
    response = learner.post(f"/v1/sessions/{session}/learn", json={"text": ""})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text")
    for route in ("", f"/{session}/fork", f"/{session}/reset"):
        response = learner.post(f"/v1/sessions{route}", json={"name": "mine"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "name")
        assert learner.post(f"/v1/sessions{route}", content=b"x" * 2000).status_code == 413
    assert learner.post(f"/v1/sessions/{session}/reset", json={}).status_code == 200
    response = learner.post("/v1/completions", json={"prompt": "a", "session": session, "memory": ["x"]})
    assert "give one of them" in response.json()["error"]["message"]
    response = learner.post("/v1/memories", json={"text": TEXT})
    assert "reads no memories over HTTP; use /v1/sessions" in response.json()["error"]["message"]
    assert "see laconic serve --learn" in client.post("/v1/sessions").json()["error"]["message"]


@pytest.mark.parametrize("num_requests", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_sessions_do_not_leak_between_requests(
    model: NestedTextModel, start_server: StartServer, num_requests: int
) -> None:
    """Completions on sessions, and on forks that learn at the same time."""
    client = start_server(model)
    ids = [post(client, "")["id"] for _ in range(3)]
    for number, id in enumerate(ids[1:]):
        post(client, f"/{id}/learn", text=f"{TEXT} And {number} times more. " * (number + 1))
    texts = [f"{word} likes the {colour} room. " for word in ("Anna", "Tom") for colour in ("red", "blue")]
    check_no_leaks(client, [{"session": id} for id in ids] + [{}], num_requests, texts)
