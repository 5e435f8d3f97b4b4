"""Runs that think, over HTTP: answers and counts of latents are those of `Reasoner.generate`."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from starlette.testclient import TestClient

import laconic
from laconic.batches import ReasoningExample
from laconic.data.reasoning.dataset import ReasoningDataset
from laconic.experiment.from_recipe.methods import answer_decoding, answer_questions
from laconic.experiment.text_models.reasoner import Reasoner
from laconic.generation.config import GenerationConfig
from tests.conftest import call_cli
from tests.runs import train_tiny_run
from tests.serving.answers_only import AnswersOnly
from tests.serving.conftest import StartServer, start_client

pytestmark = pytest.mark.usefixtures("unchecked")
QUESTIONS = ["1+2*3=", "4*5-6="]
USER = {"role": "user", "content": "1+1="}


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


@pytest.mark.medium
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
    refused = thinker.post("/tokenize", json={"messages": body["messages"], "add_special_tokens": True})
    assert (refused.status_code, "answers questions" in refused.text) == (400, True)
    tokens = thinker.post("/tokenize", json={"messages": body["messages"]}).json()["count"]
    assert tokens == reply["usage"]["prompt_tokens"], "the format of the recipe, not the chat template"
    stop = answers[0].text[2:4]
    stopped = thinker.post("/v1/chat/completions", json=body | {"stop": ["never", stop]}).json()
    text = answers[0].text[: answers[0].text.index(stop)]
    assert stopped["choices"][0]["message"]["content"] == text
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens_details"] == latents
    assert "laconic_latent_passes_total 5.0" in thinker.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "2"}]}, "role assistant; end with the question"),
        ({"messages": [USER] * 2}, 'single questions (data.format = "digits")'),
        ({"messages": [{"role": "system", "content": "1"}]}, "the last one has role system"),
        ({"messages": [USER], "memory": ["a"]}, "reads no memories"),
        ({"prompt": [1, 2]}, "give texts, not token ids"),
    ],
)
def test_question_names_what_is_wrong(thinker: TestClient, body: dict[str, object], text: str) -> None:
    response = thinker.post(f"/v1/{'chat/' if 'messages' in body else ''}completions", json=body)
    assert response.status_code == 400, response.text
    assert text in response.json()["error"]["message"]


CHAT_RECIPE = """method = "kava"
[model]
name = "{folder}"
[latents]
num_latents = 2
jacobi_iterations = 1
[data]
path = "rows.jsonl"
format = "chat"
chain_steps = "all"
[train]
steps = 1
batch_size = 2
"""
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": "The answer is: 3"},
    {"role": "user", "content": "And twice that?"},
]


@pytest.fixture(scope="module")
def chat_reasoner(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reasoner:
    """A run that thinks, trained on conversations."""
    folder = tmp_path_factory.mktemp("chat-kava")
    reply = {"role": "assistant", "content": "<think>3+3=6</think>6"}
    rows = [{"messages": [*HISTORY, reply]}, {"messages": [HISTORY[1], reply]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.toml").write_text(CHAT_RECIPE.format(folder=chat_folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call_cli("train", "chat.toml", "--out", "run") == 0
        return cast(Reasoner, laconic.load("run"))


def test_question_of_a_conversation_is_answered_as_in_training(
    chat_reasoner: Reasoner, start_server: StartServer
) -> None:
    """The history stands in the run's chat template before the question, and only that is thought about."""
    run = chat_reasoner.run
    examples = [ReasoningExample("row", "And twice that?", (), "6", {"messages": HISTORY})]
    examples.append(ReasoningExample("row", "1+2=", (), "6"))
    server = start_server(chat_reasoner)
    for example, messages in zip(examples, (HISTORY, HISTORY[1:2]), strict=True):
        batch = ReasoningDataset([example], run.parts.tokenizer, run.recipe.data).batch([0], 0, 0)
        decoding = answer_decoding(run.parts.tokenizer, run.recipe.data, 8)
        expected = answer_questions(run.method, batch, decoding)
        answer = server.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8}).json()
        assert answer["choices"][0]["message"]["content"] == expected.texts[0]
        prompt = run.parts.tokenizer.apply_chat_template(messages)
        num_tokens = len(run.parts.tokenizer.encode(prompt, add_special_tokens=False))
        assert answer["usage"]["prompt_tokens"] == num_tokens
        assert answer["usage"]["completion_tokens_details"] == {"latent_passes": 1, "latent_positions": 2}
    both = server.post("/v1/completions", json={"prompt": ["1+2=", "1+1="], "max_tokens": 8}).json()
    assert both["choices"][0]["text"] == expected.texts[0]


def test_question_of_a_conversation_names_what_is_wrong(chat_reasoner: Reasoner, start_server: StartServer) -> None:
    server = start_server(chat_reasoner)
    body: dict[str, object] = {"messages": HISTORY}
    for path in ("/v1/chat/completions", "/tokenize"):
        neutral = {"chat_template_kwargs": {"enable_thinking": False}}  # no variable of this template
        assert server.post(path, json=body | neutral).status_code == 200
        refused = server.post(path, json=body | {"chat_template_kwargs": {"note": "Be brief."}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
    for messages, text in (
        (HISTORY[:3], "the last one has role assistant"),
        ([{"role": "user", "content": "a" * 600}], "this model's maximum context length is"),
        ([{"role": "user", "content": "1<eos>2"}], "special token"),
    ):
        response = server.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (text in error["message"], error["param"]) == (True, "messages"), error


def test_question_leaves_room_for_thoughts_before_a_position_table(tmp_path: Path, start_server: StartServer) -> None:
    """Clients leave max_tokens out, or send a large number: the answer is shortened to what fits after the thoughts."""
    keys = ("model.family=gpt2", "model.max_position_embeddings=40")
    reasoner = cast(Reasoner, laconic.load(train_tiny_run("kava", tmp_path, *keys)))
    server = start_server(reasoner)
    for length in ({}, {"max_tokens": 10_000}):
        body = {"prompt": QUESTIONS[0], "temperature": 0} | length
        response = server.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text


def test_method_that_only_answers_reports_no_log_probabilities(start_server: StartServer, reasoner: Reasoner) -> None:
    client = start_server(Reasoner(replace(reasoner.run, method=AnswersOnly(reasoner.method))))
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 6}
    expected = reasoner.generate(QUESTIONS[:1], GenerationConfig(max_tokens=6))[0].text
    assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == expected
    refused = client.post("/v1/chat/completions", json=body | {"logprobs": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    completion = client.post("/v1/completions", json={"prompt": QUESTIONS[0], "max_tokens": 6, "logprobs": 0}).json()
    assert set(completion["choices"][0]["logprobs"]["token_logprobs"]) == {None}
