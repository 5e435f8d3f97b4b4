"""Runs that think, over HTTP: answers and counts of latents are those of `Reasoner.generate`."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest
from starlette.testclient import TestClient

import laconic
from laconic.experiment.reasoner import Reasoner
from laconic.generation.config import GenerationConfig
from tests.runs import train_tiny_run
from tests.serving.conftest import start_client

pytestmark = pytest.mark.usefixtures("unchecked")
QUESTIONS = ["1+2*3=", "4*5-6="]


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Reasoner:
    folder = tmp_path_factory.mktemp("kava")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return cast(Reasoner, laconic.load(train_tiny_run("kava", folder)))


@pytest.fixture(scope="module")
def thinker(reasoner: Reasoner) -> Iterator[TestClient]:
    """A client of a server on a run that thinks."""
    with ExitStack() as stack:
        yield start_client(stack, reasoner)


def test_question_is_answered_with_latents(thinker: TestClient, reasoner: Reasoner) -> None:
    answers = reasoner.generate(QUESTIONS, GenerationConfig(max_tokens=6))
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 6}
    reply = thinker.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == answers[0].text
    latents = {"latent_passes": answers[0].passes.latent, "latent_positions": 2}
    assert reply["usage"]["completion_tokens_details"] == latents
    both = thinker.post("/v1/completions", json={"prompt": QUESTIONS, "max_tokens": 6}).json()
    assert [choice["text"] for choice in both["choices"]] == [answer.text for answer in answers]
    assert both["usage"]["completion_tokens_details"] == {"latent_passes": 2, "latent_positions": 4}
    chunks = thinker.post(
        "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert '"latent_passes":1' in chunks.text
    assert "laconic_latent_passes_total 4.0" in thinker.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}, "single questions"),
        ({"messages": [{"role": "system", "content": "1"}]}, "one message with role user"),
        ({"messages": [{"role": "user", "content": "1+1="}], "stop": "a"}, "recipe of tiny"),
        ({"messages": [{"role": "user", "content": "1+1="}], "memory": ["a"]}, "reads no memories"),
    ],
)
def test_question_names_what_is_wrong(thinker: TestClient, body: dict[str, object], text: str) -> None:
    response = thinker.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert text in response.json()["error"]["message"]


def test_question_is_a_text(thinker: TestClient) -> None:
    response = thinker.post("/v1/completions", json={"prompt": [1, 2]})
    assert response.status_code == 400
    assert "give texts, not token ids" in response.json()["error"]["message"]
