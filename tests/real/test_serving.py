"""`laconic serve` with SmolLM2: replies, memories and lm-eval's scores are those of the model without a server."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import laconic
from laconic.compression.kv.config import KVCompressionConfig
from laconic.experiment.text_models.chat_session import ChatPrefix, ChatSession
from laconic.experiment.text_models.kv_compressor import MARK, compress_text, split_template
from laconic.experiment.text_models.language_model import LanguageModel
from laconic.generation.config import GenerationConfig
from tests.serving.test_http_lm_eval import check_against_model
from tests.serving.test_http_process import open_client, run_server

pytestmark = [pytest.mark.real, pytest.mark.loopback]
LETTER = (
    "Dear Anna, the meeting has been moved to Thursday at noon in the red room on the third floor. Please bring the "
    "blue folder with the contracts and ask Tom for the key. Yours, Maria"
)
QUESTIONS = ("What is the capital of France?", "What colour is the folder?")
NUM_REQUESTS = 1000
MEMORIES = {
    "letter": LETTER,
    "recipe": "Bake the bread for forty minutes at two hundred degrees. It needs flour, water, salt and yeast.",
    "trip": "On Monday we take the night train to Vienna, where Paul waits at the station with two tickets.",
}
PROMPTS = ("The blue folder", "You need", "Paul waits", "Where is it?")
TEXTS = ["The dog saw", "Berlin is the capital of", "Once upon a time, there was"]


class Case(NamedTuple):
    """A prompt, or a message of a chat, after memories."""

    prompt: str
    memories: tuple[str, ...]
    is_chat: bool
    max_tokens: int


@pytest.fixture(scope="module")
def model(smollm2: Path) -> LanguageModel:
    loaded = laconic.load(smollm2)
    assert isinstance(loaded, LanguageModel)
    return loaded


def test_serve_smollm2_replies_as_chat_does(model: LanguageModel, smollm2: Path) -> None:
    config = GenerationConfig(max_tokens=24)
    result = compress_text(model.decoder, model.tokenizer, LETTER, KVCompressionConfig("snapkv", keep=0.5), chat=True)
    opening = split_template(model.tokenizer, MARK)[0]
    prefix = ChatPrefix(result.memory.to_cache(), int(result.memory.num_tokens[0]), opening)
    expected = [
        ChatSession(model.decoder, model.tokenizer).reply(QUESTIONS[0], config).text,
        ChatSession(model.decoder, model.tokenizer, prefix=prefix).reply(QUESTIONS[1], config).text,
    ]
    assert "Paris" in expected[0]
    with run_server(smollm2) as server:
        client = open_client(server)
        body: dict[str, Any] = {"text": LETTER, "method": "snapkv", "keep": 0.5, "chat": True}
        memory = client.post("/memories", body=body, cast_to=dict)
        for question, text, extra in zip(QUESTIONS, expected, ({}, {"memory": [memory["id"]]}), strict=True):
            options: dict[str, Any] = {"model": smollm2.name, "temperature": 0, "max_tokens": 24, "extra_body": extra}
            options["messages"] = [{"role": "user", "content": question}]
            assert client.chat.completions.create(**options).choices[0].message.content == text
            chunks = client.chat.completions.create(**options, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def ask(client: Any, case: Case, stream: bool) -> str:
    """Return the greedy answer to a prompt or message after memories."""
    options: dict[str, Any] = {"model": "smollm2-135m-instruct", "temperature": 0, "stream": stream}
    options |= {"max_tokens": case.max_tokens, "extra_body": {"memory": list(case.memories)}}
    if case.is_chat:
        reply = client.chat.completions.create(messages=[{"role": "user", "content": case.prompt}], **options)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        return reply.choices[0].message.content
    reply = client.completions.create(prompt=case.prompt, **options)
    return "".join(chunk.choices[0].text for chunk in reply) if stream else reply.choices[0].text


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_serve_smollm2_answers_interleaved_requests_as_alone(smollm2: Path) -> None:
    """From 24 clients at a time: with memories or without, chats or completions, streamed or whole."""
    choose = random.Random(0)
    with run_server(smollm2) as server:
        client, ids = open_client(server), list[str]()
        for name, text in MEMORIES.items():
            body: dict[str, Any] = {"name": name, "text": text, "method": "snapkv", "keep": 0.6}
            ids.append(client.post("/memories", body=body, cast_to=dict)["id"])
        prefixes = [(), *((id,) for id in ids), (ids[0], ids[1]), (ids[1], ids[0])]
        cases = [
            Case(prompt, memories, is_chat, choose.randint(1, 4))
            for prompt in PROMPTS
            for memories in prefixes
            for is_chat in (False, True)
        ]
        alone = {case: ask(client, case, stream=False) for case in cases}
        assert len({alone[case] for case in cases}) > len(cases) // 3
        requests = [(choose.choice(cases), choose.random() < 0.5) for _ in range(NUM_REQUESTS)]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda request: ask(client, *request), requests))
        different = [
            (case, alone[case], text) for (case, _), text in zip(requests, answers, strict=True) if text != alone[case]
        ]
        assert not different, different[:3]
        assert server.metric("laconic_queue_length") == server.metric("laconic_kv_cache_bytes") == 0


def test_lm_eval_scores_smollm2_as_the_model(model: LanguageModel, smollm2: Path, tmp_path: Path) -> None:
    check_against_model(model, tmp_path, smollm2, TEXTS, 1e-3)
